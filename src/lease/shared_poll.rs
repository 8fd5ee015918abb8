//! [`SharedPolls`]: one poll for many tasks of a client that wait for the same lock.
//!
//! A thousand tasks that wait to read each have a place of their own in Redis, and each must send
//! something within its claim, or it counts as dead. If each of them polled, a server would run
//! 18,000 commands a second for waiters that have nothing to do. So the task whose poll is due
//! first polls for all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::attempt::{Attempt, QueueEntry};
use crate::name::Name;
use crate::wire::{Nodes, Script, WaitFor, WakeupSubscription};

/// How many waiters one call keeps alive.
const MAX_WAITERS: usize = 1024;

/// The waiters of a client that share polls, by lock. A lock without waiters has no entry.
#[derive(Default)]
pub(super) struct SharedPolls(Mutex<HashMap<Terms, Waiters>>);

/// A lock, and what else must be the same for all waiters of a call: the claim in milliseconds, and
/// the depth.
type Terms = (Name, u128, u32);

/// The waiters of a lock, and when the next poll of each is due.
type Waiters = HashMap<Uuid, (Arc<Attempt>, Instant)>;

/// A waiter that shares polls, until it is dropped.
pub(super) struct SharedPoll<'a> {
    polls: &'a SharedPolls,
    nodes: &'a Nodes,
    wakeups: &'a WakeupSubscription,
    script: &'static Script,
    attempt: &'a Arc<Attempt>,
    entry: &'a QueueEntry,
    terms: Terms,
}

/// What to do when the poll of a waiter is due.
enum Due {
    /// Another task polls for this one.
    At(Instant),
    /// Poll for these, of which this waiter is the first.
    Now(Vec<Arc<Attempt>>),
}

impl<'a> SharedPoll<'a> {
    /// Called when the poll of this waiter is due. Returns when the next one is. `None`: it must
    /// poll by itself, since it has no place, or may have the lock.
    ///
    /// # Cancel safety
    /// Cancel safe: another waiter polls after a quarter of `pause`.
    pub(super) async fn poll(&self, pause: Duration) -> Option<Instant> {
        let waiting = match self.due(pause / 4) {
            Due::At(at) => return Some(at),
            Due::Now(waiting) => waiting,
        };
        let nodes = self.nodes;
        let call = Attempt::wait_many(self.script, self.entry, &waiting)?;
        // The call grants nothing, so nothing depends on whether it was answered.
        let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::All).await;
        let reply = votes.received.into_iter().next().map(|(_, outcome)| outcome);
        let others = || waiting.iter().skip(1);
        let Some(Ok(reply)) = reply else {
            // Each waiter reports an outage that lasts, so each must notice it.
            others().for_each(|other| self.wakeups.notify(other.id));
            return None;
        };
        let numbers = reply.numbers();
        let Some([busy_ms, time, alone @ ..]) = numbers.as_deref() else { return None };
        nodes.node(0).observe(time.unsigned_abs());
        let is_alone = |number: usize| alone.iter().any(|one| usize::try_from(*one) == Ok(number));
        self.postpone(&waiting, Instant::now() + pause + pause / 4);
        for number in alone.iter().filter_map(|number| usize::try_from(*number).ok()?.checked_sub(1)) {
            if let Some(other) = waiting.get(number).filter(|other| other.id != self.attempt.id) {
                self.wakeups.notify(other.id);
            }
        }
        let free_in = Duration::from_millis(busy_ms.unsigned_abs() + 1);
        (!is_alone(1)).then(|| Instant::now() + free_in.min(pause))
    }

    /// Takes the turn, unless another waiter has taken it: the polls of others are due later then,
    /// so that only one of them polls.
    fn due(&self, later: Duration) -> Due {
        let now = Instant::now();
        let mut polls = self.polls.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return Due::Now(Vec::new()) };
        match waiters.get(&self.attempt.id) {
            Some((_, at)) if *at > now => return Due::At(*at),
            _ => {}
        }
        let mut others: Vec<_> =
            waiters.values_mut().filter(|(other, _)| other.id != self.attempt.id).collect();
        if others.len() >= MAX_WAITERS {
            others.sort_by_key(|(_, at)| *at);
        }
        let mut waiting = vec![Arc::clone(self.attempt)];
        for (other, at) in others.into_iter().take(MAX_WAITERS - 1) {
            *at = now + later;
            waiting.push(Arc::clone(other));
        }
        Due::Now(waiting)
    }

    /// The next polls of these waiters, but that of this one, are due at a later time.
    fn postpone(&self, waiting: &[Arc<Attempt>], until: Instant) {
        let mut polls = self.polls.lock();
        let Some(waiters) = polls.get_mut(&self.terms) else { return };
        for other in waiting.iter().skip(1) {
            if let Some((_, at)) = waiters.get_mut(&other.id) {
                *at = until;
            }
        }
    }
}

impl Drop for SharedPoll<'_> {
    fn drop(&mut self) {
        let mut polls = self.polls.lock();
        if let Some(waiters) = polls.get_mut(&self.terms) {
            waiters.remove(&self.attempt.id);
            if waiters.is_empty() {
                polls.remove(&self.terms);
            }
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
        due: Instant,
    ) -> Option<SharedPoll<'a>> {
        let script = attempt.kind.wait_many.as_ref().filter(|_| nodes.deployment.decides_alone())?;
        let terms = (attempt.name.clone(), entry.claim().as_millis(), attempt.options.max_depth);
        self.lock().entry(terms.clone()).or_default().insert(attempt.id, (Arc::clone(attempt), due));
        Some(SharedPoll { polls: self, nodes, wakeups, script, attempt, entry, terms })
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn lock(&self) -> MutexGuard<'_, HashMap<Terms, Waiters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
