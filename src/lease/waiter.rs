//! How an attempt waits, and what a notification means to it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::QueueEntry;
use super::deadline::ClockSample;
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::owned_lease::AttemptGuard;
use crate::clock::Moment;
use crate::options::{Renewal, Wakeups};
use crate::wire::Mailbox;

/// How many unverified notifications make a waiter poll at once, and how soon another one may:
/// fewer than ten polls a second, however many messages are published.
const POLLS: u32 = 4;
const NEXT_POLL: Duration = Duration::from_millis(200);

/// How an attempt waits: queued or not, notified or polling.
pub(super) struct Waiter {
    pub(super) guard: AttemptGuard,
    /// How it is queued, if it is.
    pub(super) entry: Option<QueueEntry>,
    pub(super) poll: Duration,
    pub(super) mailbox: Option<Mailbox>,
    pub(super) grant_clock: Option<GrantClock>,
}

/// Why a waiter wakes up.
pub(super) enum WakeEvent {
    Granted(Lease),
    /// By an unverified notification, or because one may have been missed.
    Notified,
    /// Its next poll is due.
    PollDue,
}

/// How often notifications may make a waiter poll: every user with the right to publish can send
/// very many.
pub(super) struct PollBudget {
    left: u32,
    /// From when the next poll accrues.
    since: Instant,
}

impl PollBudget {
    pub(super) fn new() -> PollBudget {
        PollBudget { left: POLLS, since: Instant::now() }
    }

    /// Spends one poll, or returns when the next one accrues.
    fn take(&mut self) -> Result<(), Instant> {
        let now = Instant::now();
        if self.left == POLLS {
            self.since = now;
        }
        while self.left < POLLS && now - self.since >= NEXT_POLL {
            self.left += 1;
            self.since += NEXT_POLL;
        }
        if self.left == 0 {
            return Err(self.since + NEXT_POLL);
        }
        self.left -= 1;
        Ok(())
    }
}

/// A sample of the server's clock and the connections that it came through: another connection may
/// lead to another server.
pub(super) struct GrantClock {
    pub(super) sample: ClockSample,
    pub(super) generation: u64,
    pub(super) subscription: u64,
}

impl Waiter {
    pub(super) fn unqueued(request: &LockRequest) -> Waiter {
        let guard = request.begin_attempt();
        let poll = request.poll(&guard.attempt, false);
        Waiter { guard, entry: None, poll, mailbox: None, grant_clock: None }
    }

    pub(super) fn notified(request: &LockRequest) -> Waiter {
        let mut waiter = Waiter::unqueued(request);
        waiter.poll = request.poll(&waiter.guard.attempt, true);
        waiter.mailbox = Some(request.client.wakeups.mailbox(waiter.guard.attempt.id));
        let channel = request.client.wakeups.channel();
        waiter.entry = Some(waiter.guard.attempt.queue_entry(Some(channel)));
        waiter
    }

    pub(super) fn new(request: &LockRequest, notified: bool) -> Waiter {
        if notified { Waiter::notified(request) } else { Waiter::polling(request) }
    }

    pub(super) fn polling(request: &LockRequest) -> Waiter {
        let mut waiter = Waiter::unqueued(request);
        waiter.entry = Some(waiter.guard.attempt.queue_entry(None));
        waiter
    }

    /// Sleeps until a notification grants a lease, or until the next poll is due. An unverified
    /// notification makes it poll at once, as often as the budget allows.
    pub(super) async fn sleep(&self, pause: Duration, budget: &mut PollBudget) -> WakeEvent {
        let Some(mailbox) = &self.mailbox else {
            sleep(pause).await;
            return WakeEvent::PollDue;
        };
        let (mut until, mut is_notified) = (Instant::now() + pause, false);
        while let Ok(message) = timeout_at(until, mailbox.wait()).await {
            if let Some(lease) = message.and_then(|message| self.granted_lease(&message)) {
                return WakeEvent::Granted(lease);
            }
            match budget.take() {
                Ok(()) => return WakeEvent::Notified,
                Err(at) if at < until => (until, is_notified) = (at, true),
                Err(_) => {}
            }
        }
        if is_notified && budget.take().is_ok() { WakeEvent::Notified } else { WakeEvent::PollDue }
    }

    /// The lease that a notification grants: `token time key`. `None` unless most of the claim is
    /// certainly left; the next poll then finds the lock granted to this attempt, and gets the
    /// whole TTL.
    pub(super) fn granted_lease(&self, message: &str) -> Option<Lease> {
        let attempt = &self.guard.attempt;
        if attempt.options.wakeups == Wakeups::Verify {
            return None;
        }
        let GrantClock { sample, generation, subscription } = self.grant_clock.as_ref()?;
        let client = &self.guard.client;
        if Some(*generation) != client.nodes.clock_generation()
            || Some(*subscription) != client.wakeups.subscription()
        {
            return None;
        }
        // A lease that is never renewed needs its whole TTL from the start, and replicas must have
        // the grant.
        if attempt.options.renewal == Renewal::Never || attempt.options.wants_replicas().is_some() {
            return None;
        }
        let mut words = message.splitn(3, ' ');
        let token = words.next()?.parse().ok()?;
        let time = words.next()?.parse().ok()?;
        if words.next()? != attempt.name.key() {
            return None;
        }
        let now = Moment::now();
        let granted = sample.earliest(time, attempt.options.drift, now)?;
        let trusted = attempt.trusted(self.entry.as_ref()?.claim);
        if now.since(granted) > trusted / 2 {
            return None;
        }
        Some(Lease::new(Arc::clone(attempt), attempt.token(token), granted, granted + trusted))
    }
}
