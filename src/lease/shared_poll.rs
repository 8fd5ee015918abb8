//! [`SharedPolls`]: one poll for many tasks of a client that wait for the same lock.
//!
//! Each task that waits to read has a place of its own in Redis, and loses it if nothing is sent
//! for it within its claim. If each of a thousand tasks polled, a server would run 21,000 commands
//! a second while nothing changes. Therefore one task polls for all: the one whose poll is due
//! first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::attempt::{Attempt, QueueEntry};
use crate::guarded::Guarded;
use crate::name::Name;
use crate::wire::{Nodes, WaitFor, WakeupSubscription};

/// How many waiters one call keeps alive.
const MAX_WAITERS: usize = 1024;

/// How many of the other waiters look after a pause whether the last poll was sent, and after how
/// many pauses the rest look. If all of a thousand tasks looked after each pause, their timers
/// would be most of what waiting costs the client.
///
/// If all that look give up at the same moment, one of the rest is woken: without a poll, the
/// places of the rest last for one claim.
const DEPUTIES: usize = 16;
const REST: u32 = 3;

/// After how many rounds of polling for all waiters of a lock the one that polls then also asks for
/// itself alone: that removes dead waiters and expired marks, while no release does. About once a
/// minute.
const SHARED_POLLS: u32 = 32;

/// The waiters of a client that share polls, by lock. A lock without waiters has no entry.
#[derive(Default)]
pub(super) struct SharedPolls(Guarded<HashMap<Terms, Waiters>>);

/// A lock, and what else must be the same for all waiters of a call: the claim in milliseconds, and
/// the depth.
type Terms = (Name, u128, u32);

#[derive(Default)]
struct Waiters {
    by_id: HashMap<Uuid, Waiter>,
    /// How many rounds for all there were since one of them asked for itself alone.
    rounds: u32,
}

struct Waiter {
    attempt: Arc<Attempt>,
    /// When its next poll is due.
    due: Instant,
    /// Its longest pause between two polls.
    pause: Duration,
    /// It looks only after several pauses, unless this wakes it.
    rests: bool,
    woken: Arc<Notify>,
    /// By when its timer has woken its task. A future that is not polled any more must not be kept
    /// alive: it would be granted the lock, and keep writers waiting for a claim.
    runs_by: Instant,
}

/// A waiter that shares polls, until it is dropped.
pub(super) struct SharedPoll<'a> {
    polls: &'a SharedPolls,
    nodes: &'a Nodes,
    wakeups: &'a WakeupSubscription,
    attempt: &'a Arc<Attempt>,
    entry: &'a QueueEntry,
    terms: Terms,
    woken: Arc<Notify>,
}

/// A poll for several waiters.
struct PollRound {
    /// The first of them polls.
    waiting: Vec<Arc<Attempt>>,
    /// Whether they are all waiters of the lock.
    are_all: bool,
    /// Whether the first one then asks for itself alone. Not in place of the poll for all: if the
    /// next tasks that poll were dropped, places would be lost.
    asks_alone: bool,
}

impl<'a> SharedPoll<'a> {
    /// Waits until this waiter is to poll although it rests.
    ///
    /// # Cancel safety
    /// Cancel safe: it can be dropped and called again.
    pub(super) async fn woken(&self) {
        self.woken.notified().await;
    }

    /// Called when the poll of this waiter is due. Returns when the next one is. `None`: it must
    /// poll by itself, since it has no place, or may have the lock.
    ///
    /// # Cancel safety
    /// Cancel safe: another waiter polls after a quarter of `pause`.
    pub(super) async fn poll(&self, pause: Duration) -> Option<Instant> {
        let PollRound { waiting, are_all, asks_alone } = match self.take_round(pause / 4) {
            Ok(round) => round,
            Err(at) => return Some(at),
        };
        let nodes = self.nodes;
        let call = Attempt::wait_all(self.entry, &waiting)?;
        // The call grants nothing, so nothing depends on whether it was answered.
        let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::All).await;
        let reply = votes.received.into_iter().next().and_then(|(_, outcome)| outcome.ok());
        let numbers = reply.and_then(|reply| reply.numbers());
        let Some([busy_ms, time, alone @ ..]) = numbers.as_deref() else {
            // The lock may be free, or the request failed: each waiter must ask, to get what there
            // is for it, or to notice an outage.
            waiting.iter().skip(1).for_each(|other| self.wakeups.mailboxes.notify(other.id));
            return None;
        };
        nodes.node(0).observe(time.unsigned_abs());
        let free_in = Duration::from_millis(busy_ms.unsigned_abs() + 1);
        // If this waiter is gone by then, others poll a tenth of the pause later.
        self.postpone(&waiting, are_all, pause.min(free_in + pause / 10));
        let without_place = |number: &i64| waiting.get(usize::try_from(*number).ok()?.checked_sub(1)?);
        let (own, others): (Vec<_>, Vec<_>) =
            alone.iter().filter_map(without_place).partition(|waiter| waiter.id == self.attempt.id);
        others.into_iter().for_each(|waiter| self.wakeups.mailboxes.notify(waiter.id));
        (own.is_empty() && !asks_alone).then(|| Instant::now() + free_in.min(pause - pause / 10))
    }

    /// Takes the round, unless another waiter has: then returns when the next poll is due.
    /// The polls of others are `later` then, so that only one of them polls.
    fn take_round(&self, later: Duration) -> Result<PollRound, Instant> {
        let now = Instant::now();
        let mut polls = self.polls.0.lock();
        let mut waiting = vec![Arc::clone(self.attempt)];
        let Some(waiters) = polls.get_mut(&self.terms) else {
            return Ok(PollRound { waiting, are_all: true, asks_alone: false });
        };
        if let Some(own) = waiters.by_id.get_mut(&self.attempt.id) {
            own.runs_by = own.due.max(now + own.pause) + own.pause / 2;
            own.rests = false;
            if own.due > now {
                return Err(own.due);
            }
        }
        waiters.rounds = (waiters.rounds + 1) % SHARED_POLLS;
        let asks_alone = waiters.rounds == 0;
        let is_other = |other: &&mut Waiter| other.attempt.id != self.attempt.id && now < other.runs_by;
        let mut others: Vec<_> = waiters.by_id.values_mut().filter(is_other).collect();
        let are_all = others.len() < MAX_WAITERS;
        if !are_all {
            others.sort_by_key(|other| other.due);
        }
        for other in others.into_iter().take(MAX_WAITERS - 1) {
            other.due = now + later.min(other.pause);
            waiting.push(Arc::clone(&other.attempt));
        }
        Ok(PollRound { waiting, are_all, asks_alone })
    }

    /// The next polls of these waiters, but that of this one, are due after this pause, or after
    /// their own longest one; those of most of them later, if each poll is for all.
    fn postpone(&self, waiting: &[Arc<Attempt>], are_all: bool, pause: Duration) {
        let now = Instant::now();
        let mut polls = self.polls.0.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return };
        for (number, other) in waiting.iter().enumerate().skip(1) {
            let rests = are_all && number > DEPUTIES;
            if let Some(other) = waiters.by_id.get_mut(&other.id) {
                other.rests = rests;
                other.due = now + pause.min(other.pause) * if rests { REST } else { 1 };
            }
        }
    }
}

impl Drop for SharedPoll<'_> {
    fn drop(&mut self) {
        let mut polls = self.polls.0.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return };
        waiters.by_id.remove(&self.attempt.id);
        let waiters = &mut waiters.by_id;
        // If nothing looks any more, the first of the rest does.
        let next =
            if waiters.values().all(|waiter| waiter.rests) { waiters.values_mut().next() } else { None };
        let next = next.map(|waiter| {
            (waiter.rests, waiter.due) = (false, Instant::now());
            Arc::clone(&waiter.woken)
        });
        if waiters.is_empty() {
            polls.remove(&self.terms);
        }
        drop(polls);
        next.into_iter().for_each(|woken| woken.notify_one());
    }
}

impl SharedPolls {
    /// Lets others poll for this waiter. `None`: it polls by itself. So do all waiters of a quorum:
    /// what a place on one node means depends on the other nodes.
    pub(super) fn join<'a>(
        &'a self,
        (nodes, wakeups): (&'a Nodes, &'a WakeupSubscription),
        (attempt, entry): (&'a Arc<Attempt>, &'a QueueEntry),
        (due, pause): (Instant, Duration),
    ) -> Option<SharedPoll<'a>> {
        if attempt.kind.verbs.wait.is_none() || !nodes.deployment.decides_alone() {
            return None;
        }
        let terms = (attempt.name.clone(), entry.claim.as_millis(), attempt.options.max_depth);
        let runs_by = due.max(Instant::now() + pause) + pause / 2;
        let woken: Arc<Notify> = Arc::default();
        let waiter = Waiter {
            attempt: Arc::clone(attempt),
            due,
            pause,
            rests: false,
            woken: Arc::clone(&woken),
            runs_by,
        };
        self.0.lock().entry(terms.clone()).or_default().by_id.insert(attempt.id, waiter);
        Some(SharedPoll { polls: self, nodes, wakeups, attempt, entry, terms, woken })
    }
}
