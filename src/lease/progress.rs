//! [`Progress`]: how far a call has come that waits for a lock. [`OutageDeadline`]: how long it
//! outlasts a server that fails.
//!
//! [`Waiter`]: how its attempt waits for the next round, and what wakes it. [`PollBudget`]: how
//! often notifications make it poll. [`ContentionBackoff`]: how it gives way to other attempts.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::QueueTerms;
use super::attempt_guard::AttemptGuard;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::lock_request::LockRequest;
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::traces::WaitSpan;
use crate::wire::{Failure, InFlight, LONGEST_PAUSE, Mailbox};

/// The pauses between tries on a server that fails: the first, and the longest.
const OUTAGE_PAUSES: (Duration, Duration) = (Duration::from_millis(50), LONGEST_PAUSE);

/// The pause before the first poll of a waiter; each later one is twice as long.
pub(super) const FIRST_POLL: Duration = Duration::from_millis(250);

/// How many unverified notifications make a waiter poll at once, and how soon another one may:
/// fewer than ten polls a second, however many messages are published.
const POLLS: u32 = 4;
const NEXT_POLL: Duration = Duration::from_millis(200);

/// Half of the longest first pause after nodes granted a lock to several attempts at a time. The
/// longest pause doubles with each one, up to 40 ms.
const CONTENTION_PAUSE: Duration = Duration::from_millis(5);

/// What a call has found last.
#[derive(Default)]
pub(super) enum Found {
    #[default]
    Nothing,
    /// The lock was in use, or another task of this client was at the front.
    Busy,
    /// Its request failed.
    Failed(Failure),
}

/// What is known of a wait, also after it was dropped.
#[derive(Default)]
pub(crate) struct Progress {
    pub(super) found: Found,
    /// What caused the latest request.
    pub(super) woken: WakeReason,
    /// The requests of the latest attempt.
    pub(super) in_flight: Option<Arc<InFlight>>,
    /// Begun once the lock is busy.
    pub(super) wait: WaitSpan,
    /// When the call began, if it has an `outage_limit`.
    pub(super) begun: Option<Moment>,
}

impl Progress {
    /// The error of a wait that was dropped. What it is granted is released.
    ///
    /// If the server failed, or its replicas did, the lock was free as far as is known, unless this
    /// call has found it in use. Many requests that found an outage were those of other tasks;
    /// whether this call sent one is known now.
    pub(super) fn out_of_time(&self, request: &LockRequest, limit: Duration) -> Error {
        let has_sent = self.in_flight.as_ref().is_some_and(|sent| sent.is_indeterminate());
        let others =
            |outage: Option<(Moment, Failure)>| outage.map(|(_, failure)| failure.of_other_request());
        let failure = match &self.found {
            Found::Nothing => others(request.outage()),
            Found::Busy => others(request.silence()),
            Found::Failed(failure) => Some(failure.clone()),
        };
        match failure {
            Some(failure) => request.error(failure.with_effect_if(has_sent)),
            None => request.timed_out(limit, self.wait.has_begun()),
        }
    }
}

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
        let channel = is_notified.then(|| Arc::clone(&wakeups.channel));
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
            let granted =
                |grant| self.grant_clock.as_ref()?.lease(client, attempt, entry.as_ref()?.claim, &grant);
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
    pub(super) fn take(&mut self) -> Result<(), Instant> {
        let now = Instant::now();
        while self.left < POLLS && now - self.since >= NEXT_POLL {
            self.left += 1;
            self.since += NEXT_POLL;
        }
        if self.left == POLLS {
            self.since = now; // no more accrue
        }
        if self.left == 0 {
            return Err(self.since + NEXT_POLL);
        }
        self.left -= 1;
        Ok(())
    }
}

/// Back-off of an attempt that some nodes granted the lock but not a majority, since other attempts
/// have the rest.
#[derive(Default)]
pub(super) struct ContentionBackoff {
    rounds: usize,
    pub(super) pauses: u32,
}

impl ContentionBackoff {
    /// Whether to release the partial grant, so that those nodes grant the lock to their next
    /// waiter. The more nodes an attempt has, the longer it keeps them. A has two of four nodes, B
    /// and C have one each: if all three released at the same moment, they could take turns for
    /// ever, each node at another point of its queue.
    pub(super) fn releases_partial_grant(&mut self, by: NodeSet) -> bool {
        self.rounds += 1;
        let is_due = !by.is_empty() && self.rounds >= by.len().pow(2) * 2 - 1;
        if is_due {
            self.rounds = 0;
        }
        is_due
    }

    /// A random pause, so that the same attempts do not collide again.
    pub(super) fn pause(&mut self) -> Duration {
        self.pauses += 1;
        let longest = CONTENTION_PAUSE * (1 << self.pauses.min(3));
        longest.mul_f64(f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 256.0)
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_minute_without_messages_saves_up_no_polls() {
        let mut budget = PollBudget::new();
        for _ in 0..2 {
            tokio::time::advance(Duration::from_secs(60)).await;
            assert_eq!(iter::repeat_with(|| budget.take()).take_while(Result::is_ok).count(), 4);
        }
    }
}
