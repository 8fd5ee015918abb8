//! [`Waiter`]: how an attempt waits, and what wakes it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::QueueTerms;
use super::attempt_guard::AttemptGuard;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::poll_budget::PollBudget;
use crate::wire::Mailbox;

/// The pause before the first poll of a waiter; each later one is twice as long.
pub(super) const FIRST_POLL: Duration = Duration::from_millis(250);

/// How an attempt waits: queued or not, notified or polling.
pub(super) struct Waiter {
    pub(super) guard: AttemptGuard,
    /// The longest pause between two polls.
    pub(super) longest_pause: Duration,
    /// How often it asked and the lock was busy.
    pub(super) polls: u32,
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

impl Waiter {
    /// Reserves `tokens`, if its hold may be passed on.
    pub(super) fn unqueued(request: &LockRequest, tokens: u32) -> Waiter {
        let guard = AttemptGuard::new(request, tokens);
        let longest_pause = request.longest_pause(&guard.attempt, false);
        Waiter { guard, longest_pause, polls: 0, mailbox: None, grant_clock: None }
    }

    pub(super) fn queued(request: &LockRequest, tokens: u32, is_notified: bool) -> Waiter {
        let mut waiter = Waiter::unqueued(request, tokens);
        let (wakeups, attempt) = (&request.client.wakeups, &waiter.guard.attempt);
        waiter.longest_pause = request.longest_pause(attempt, is_notified);
        waiter.mailbox = is_notified.then(|| Mailbox::new(&wakeups.mailboxes, attempt.id));
        let channel = is_notified.then(|| Arc::clone(wakeups.channel()));
        waiter.guard.entry = Some(Arc::new(QueueTerms { claim: attempt.claim(), channel }));
        waiter
    }

    /// How long to pause before this poll: longer each time. A holder that does not notify, as
    /// other libraries do, is then waited for little longer than it held the lock.
    pub(super) fn pause(&self, polls: u32) -> Duration {
        (FIRST_POLL * (1 << (polls - 1).min(5))).min(self.longest_pause)
    }

    /// Sleeps until a notification grants a lease, or until the next poll is due. An unverified
    /// notification makes it poll at once, as often as the budget allows. While the lock is busy,
    /// another task may poll for this one.
    pub(super) async fn sleep(&self, pause: Duration, is_busy: bool, budget: &mut PollBudget) -> WakeEvent {
        let Some(mailbox) = &self.mailbox else {
            sleep(pause).await;
            return WakeEvent::PollDue;
        };
        let (mut until, mut is_notified, mut polls) = (Instant::now() + pause, false, self.polls);
        let AttemptGuard { client, attempt, entry, .. } = &self.guard;
        let join = |entry| {
            let (servers, pauses) = ((&*client.nodes, &client.wakeups), (until, self.longest_pause));
            client.shared_polls.join(servers, (attempt, entry), pauses)
        };
        let shared_poll = entry.as_ref().filter(|_| is_busy).and_then(join);
        loop {
            let Ok(message) = timeout_at(until, mailbox.wait()).await else {
                if is_notified {
                    return if budget.take().is_ok() { WakeEvent::Notified } else { WakeEvent::PollDue };
                }
                let Some(shared_poll) = &shared_poll else { return WakeEvent::PollDue };
                polls += 1;
                match shared_poll.poll(self.pause(polls)).await {
                    Some(at) => until = at,
                    None => return WakeEvent::PollDue,
                }
                continue;
            };
            let granted = |grant| self.grant_clock.as_ref()?.lease(&self.guard, &grant);
            if let Some(lease) = message.and_then(granted) {
                return WakeEvent::Granted(lease);
            }
            match budget.take() {
                Ok(()) => return WakeEvent::Notified,
                Err(at) if at < until => (until, is_notified) = (at, true),
                Err(_) => {}
            }
        }
    }
}
