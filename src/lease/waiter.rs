//! How an attempt waits, and what it makes of a message.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::QueueEntry;
use super::attempt_guard::AttemptGuard;
use super::deadline::ClockSample;
use super::lease::Lease;
use super::lock_request::LockRequest;
use crate::clock::Moment;
use crate::options::{Renewal, Wakeups};
use crate::wire::Mailbox;

/// How many notifications that are not trusted have a waiter poll at once, and how soon another
/// one may: fewer than ten polls a second, whoever publishes whatever.
const POLLS: u32 = 4;
const NEXT_POLL: Duration = Duration::from_millis(200);

/// How an attempt waits: in the queue or not, told or looking.
pub(super) struct Waiter {
    pub(super) guard: AttemptGuard,
    /// How it is queued, if it is.
    pub(super) entry: Option<QueueEntry>,
    pub(super) poll: Duration,
    pub(super) mailbox: Option<Mailbox>,
    pub(super) grant_clock: Option<GrantClock>,
}

/// Why a waiter does not sleep any more.
pub(super) enum WakeEvent {
    Granted(Lease),
    /// By a message that is not trusted, or that may have been missed.
    Notified,
    /// It is time to.
    PollDue,
}

/// How often notifications may have a waiter poll: anybody who may publish can send very many.
pub(super) struct PollBudget {
    left: u32,
    /// Since when the next one accrues.
    since: Instant,
}

impl PollBudget {
    pub(super) fn new() -> PollBudget {
        PollBudget { left: POLLS, since: Instant::now() }
    }

    /// Takes one poll, or returns when there is one again.
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

/// The server's clock, and through which connections it was seen: behind others there may be another server.
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

    /// Sleeps until a message hands over a lease, or until it is time to look. A message that is
    /// not trusted makes it look at once, as often as the budget allows.
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

    /// The lease that a message hands over: `token time key`. `None` if it is not certain that most of the
    /// claim is left; then a look finds the lock in this attempt's name, and takes the whole ttl.
    pub(super) fn granted_lease(&self, message: &str) -> Option<Lease> {
        let attempt = &self.guard.attempt;
        if attempt.options.wakeups == Wakeups::Verify {
            return None;
        }
        let GrantClock { sample, generation, subscription } = self.grant_clock.as_ref()?;
        let client = &self.guard.client;
        if *generation != client.nodes.server()?.generation()
            || Some(*subscription) != client.wakeups.subscription()
        {
            return None;
        }
        // A lease that is never renewed is worth its whole ttl from the start, and replicas must have what is granted.
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
