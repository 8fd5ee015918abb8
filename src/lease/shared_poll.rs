//! [`SharedPolls`]: one poll for many tasks of a client that wait for the same lock.
//!
//! Each task that waits to read has a place of its own in Redis, and loses it if nothing is sent
//! for it within its claim. If each of a thousand tasks polled, a server would run 21,000 commands
//! a second while nothing changes. Therefore one task polls for all: the one whose poll is due
//! first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::attempt::{Attempt, QueueEntry};
use crate::guarded::Guarded;
use crate::name::Name;
use crate::wire::{Nodes, WaitFor, WakeupSubscription};

/// How many waiters one call keeps alive.
const MAX_WAITERS: usize = 1024;

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
}

/// The waiters that a poll is for, of which the first one polls, and whether that one then asks for
/// itself alone. Not in place of the poll for all: if the next tasks that poll were dropped, places
/// would be lost.
type PollRound = (Vec<Arc<Attempt>>, bool);

impl SharedPoll<'_> {
    /// Called when the poll of this waiter is due. Returns when the next one is. `None`: it must
    /// poll by itself, since it has no place, or may have the lock.
    ///
    /// # Cancel safety
    /// Cancel safe: another waiter polls after a quarter of `pause`.
    pub(super) async fn poll(&self, pause: Duration) -> Option<Instant> {
        let (waiting, asks_alone) = match self.take_round(pause / 4) {
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
        self.postpone(&waiting, pause.min(free_in + pause / 10));
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
            return Ok((waiting, false));
        };
        if let Some(own) = waiters.by_id.get_mut(&self.attempt.id) {
            own.runs_by = own.due.max(now + own.pause) + own.pause / 2;
            if own.due > now {
                return Err(own.due);
            }
        }
        waiters.rounds = (waiters.rounds + 1) % SHARED_POLLS;
        let asks_alone = waiters.rounds == 0;
        let is_other = |other: &&mut Waiter| other.attempt.id != self.attempt.id && now < other.runs_by;
        let mut others: Vec<_> = waiters.by_id.values_mut().filter(is_other).collect();
        if others.len() >= MAX_WAITERS {
            others.sort_by_key(|other| other.due);
        }
        for other in others.into_iter().take(MAX_WAITERS - 1) {
            other.due = now + later.min(other.pause);
            waiting.push(Arc::clone(&other.attempt));
        }
        Ok((waiting, asks_alone))
    }

    /// The next polls of these waiters, but that of this one, are due after this pause, or after
    /// their own longest one.
    fn postpone(&self, waiting: &[Arc<Attempt>], pause: Duration) {
        let now = Instant::now();
        let mut polls = self.polls.0.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return };
        for other in waiting.iter().skip(1) {
            if let Some(other) = waiters.by_id.get_mut(&other.id) {
                other.due = now + pause.min(other.pause);
            }
        }
    }
}

impl Drop for SharedPoll<'_> {
    fn drop(&mut self) {
        let mut polls = self.polls.0.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return };
        waiters.by_id.remove(&self.attempt.id);
        if waiters.by_id.is_empty() {
            polls.remove(&self.terms);
        }
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
        let waiter = Waiter { attempt: Arc::clone(attempt), due, pause, runs_by };
        self.0.lock().entry(terms.clone()).or_default().by_id.insert(attempt.id, waiter);
        Some(SharedPoll { polls: self, nodes, wakeups, attempt, entry, terms })
    }
}
