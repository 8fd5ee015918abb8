//! [`OutageDeadline`]: how long a call outlasts a server that fails.

use std::time::Duration;

use super::lock_request::LockRequest;
use crate::clock::Moment;
use crate::error::Error;
use crate::wire::LONGEST_PAUSE;

/// The pauses between tries on a server that fails: the first, and the longest.
const OUTAGE_PAUSES: (Duration, Duration) = (Duration::from_millis(50), LONGEST_PAUSE);

/// How long a server may fail before a call returns its error: two node timeouts for an attempt
/// that is not queued, one TTL for a queued one: a lease with the same TTL has expired by then.
pub(super) struct OutageDeadline<'a> {
    request: &'a LockRequest,
    unqueued: Duration,
    queued: Duration,
    pub(super) has_queued: bool,
    failing_since: Option<Moment>,
    pause: Duration,
    /// When the call began, if the option limits how long it outlasts an outage. A call that may
    /// wait ten minutes must not fail at once because the outage is an hour old.
    start: Option<Moment>,
}

impl OutageDeadline<'_> {
    /// `begun`: when the call did, once a part of it has a deadline.
    pub(super) fn new<'a>(request: &'a LockRequest, begun: &mut Option<Moment>) -> OutageDeadline<'a> {
        let unqueued = 2 * request.client.nodes.limit();
        let queued = unqueued.max(request.options.ttl);
        let limit = request.options.outage_limit;
        OutageDeadline {
            request,
            unqueued: limit.unwrap_or(unqueued),
            queued: limit.unwrap_or(queued),
            has_queued: false,
            failing_since: None,
            pause: OUTAGE_PAUSES.0,
            start: limit.map(|_| *begun.get_or_insert_with(Moment::now)),
        }
    }

    pub(super) fn restore(&mut self, is_queued: bool) {
        self.has_queued |= is_queued;
        self.failing_since = None;
        self.pause = OUTAGE_PAUSES.0;
    }

    /// How long to pause before the next try, or the error once the deadline has passed.
    pub(super) fn fails(&mut self, error: impl FnOnce() -> Error) -> Result<Duration, Error> {
        let now = Moment::now();
        let since = *self.failing_since.get_or_insert(now);
        // Other tasks may have noticed the outage earlier.
        let since = self.request.outage().map_or(since, |(earlier, _)| self.counts_from(earlier).min(since));
        let limit = if self.has_queued { self.queued } else { self.unqueued };
        if now.since(since) >= limit {
            return Err(error());
        }
        let pause = self.pause;
        self.pause = (self.pause * 2).min(OUTAGE_PAUSES.1);
        Ok(pause)
    }

    /// From when an outage counts that began at `outage`.
    fn counts_from(&self, outage: Moment) -> Moment {
        self.start.map_or(outage, |start| outage.max(start))
    }

    /// The failure of other tasks, once it has lasted for as long as an unqueued attempt waits.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.request.outage() {
            Some((since, failure)) if Moment::now().since(self.counts_from(since)) >= self.unqueued => {
                Err(self.request.error(failure.of_other_request()))
            }
            _ => Ok(()),
        }
    }
}
