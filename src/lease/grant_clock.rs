//! [`GrantClock`]: whether a message of a server may be trusted to grant a lease, and from when
//! that lease counts.

use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::client::Client;
use super::lease::Lease;
use super::validity::ClockSample;
use crate::clock::Moment;
use crate::options::{Renewal, Wakeups};
use crate::wire::AnnouncedGrant;

/// A sample of the server's clock and the connections that it came through: another connection may
/// lead to another server.
pub(super) struct GrantClock {
    pub(super) sample: ClockSample,
    pub(super) generation: u64,
    /// `None`: there was no subscription, so no message may be trusted.
    pub(super) subscription: Option<u64>,
}

impl GrantClock {
    /// The lease that a message grants to a queued attempt. `None` unless most of the claim is
    /// certainly left; the next poll then finds the lock granted to this attempt, and gets the
    /// whole TTL.
    pub(super) fn lease(
        &self,
        client: &Client,
        attempt: &Arc<Attempt>,
        claim: Duration,
        grant: &AnnouncedGrant,
    ) -> Option<Lease> {
        if attempt.options.wakeups == Wakeups::Verify {
            return None;
        }
        let GrantClock { sample, generation, subscription } = self;
        if Some(*generation) != client.nodes.clock_generation()
            || subscription.is_none()
            || *subscription != client.wakeups.subscription()
        {
            return None;
        }
        // A lease that is never renewed needs its whole TTL from the start, and replicas must have
        // the grant.
        if attempt.options.renewal == Renewal::Never || attempt.options.wants_replicas().is_some() {
            return None;
        }
        let AnnouncedGrant { token, time, ref key } = *grant;
        if key != attempt.name.key() {
            return None;
        }
        let now = Moment::now();
        let granted = sample.earliest(time, attempt.options.drift, now)?;
        let trusted = attempt.trusted_span(claim);
        if now.since(granted) > trusted / 2 {
            return None;
        }
        Some(Lease::new(Arc::clone(attempt), attempt.token(token), granted, granted + trusted, None))
    }
}
