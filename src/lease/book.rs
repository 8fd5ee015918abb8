//! The keeper's book: which lease is due when, and what must be given back.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::attempt::QueueEntry;
use super::{Attempt, Lease};
use crate::clock::Moment;
use crate::event::event;
use crate::wire::NodeSet;

/// How many requests travel in one pipeline.
const ROUND: usize = 128;
/// How many dropped attempts are remembered. Beyond it one is left to its ttl: with a server that is
/// down for long, memory must not grow with every caller that gives up.
const ABANDONED: usize = 65_536;

#[derive(Default)]
pub(super) struct Book {
    pub(super) due: BTreeMap<(Moment, u64), Lease>,
    pub(super) abandoned: BTreeMap<(Moment, u64), Abandoned>,
    /// What only a minority of the nodes may still have: in nobody's way, and never in the way of the rest.
    pub(super) leftovers: BTreeMap<(Moment, u64), Abandoned>,
    /// How many dropped attempts have not been given back yet, in the book or in a round.
    pub(super) returning: usize,
    entries: u64,
    /// Until when the task sleeps, unless it is woken. What is due later need not wake it, which is what
    /// keeps a lock that is soon released from costing a switch of tasks.
    pub(super) sleeps_until: Option<Moment>,
    pub(super) closed: bool,
}

/// Where a lease stands in the book. Read and written only under the book's lock.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) number: AtomicU64,
    pub(super) due: AtomicU64,
    pub(super) over: AtomicBool,
}

pub(super) struct Abandoned {
    pub(super) attempt: Arc<Attempt>,
    pub(super) for_good: bool,
    pub(super) entry: Option<QueueEntry>,
    pub(super) give_up: Moment,
    /// Who may still have it.
    pub(super) nodes: NodeSet,
    /// So many of them that it is in somebody's way.
    pub(super) counts: bool,
}

/// What one pipeline does.
#[derive(Default)]
pub(super) struct Round {
    /// With what to extend them; those that are not extended are only asked about.
    pub(super) renewals: Vec<(Lease, Option<Duration>)>,
    pub(super) releases: Vec<Abandoned>,
    /// These are leftovers.
    pub(super) tidies: bool,
}

/// What a further round may do beside renewals: it may have to wait for a node that hangs.
#[derive(Clone, Copy)]
pub(super) struct May {
    pub(super) give_back: bool,
    pub(super) tidy: bool,
}

impl Book {
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment, bell: &Notify) {
        let entry = &lease.0.entry;
        if entry.over.load(Ordering::Relaxed) {
            return;
        }
        self.entries += 1;
        entry.number.store(self.entries, Ordering::Relaxed);
        entry.due.store(due.as_nanos(), Ordering::Relaxed);
        self.due.insert((due, self.entries), lease.clone());
        if self.sleeps_until.is_some_and(|until| due < until) {
            bell.notify_one();
        }
    }

    pub(super) fn strike(&mut self, lease: &Lease) {
        let entry = &lease.0.entry;
        entry.over.store(true, Ordering::Relaxed);
        let due = Moment::from_nanos(entry.due.load(Ordering::Relaxed));
        self.due.remove(&(due, entry.number.load(Ordering::Relaxed)));
    }

    pub(super) fn pursue(&mut self, abandoned: Abandoned, due: Moment) {
        let counts = abandoned.counts;
        let pursued = if counts { &mut self.abandoned } else { &mut self.leftovers };
        if pursued.len() == ABANDONED
            && let Some((_, _it)) = pursued.pop_first()
        {
            event!(error, lock = %_it.attempt.name, "too many locks to give back: the ttl will");
            self.returning -= usize::from(counts);
        }
        self.entries += 1;
        pursued.insert((due, self.entries), abandoned);
    }

    /// What is due, or when something will be.
    pub(super) fn take(&mut self, now: Moment, may: May) -> Result<Round, Option<Moment>> {
        let mut round = Round::default();
        while round.renewals.len() < ROUND
            && let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            let lease = first.remove();
            let ttl = lease.next_ttl(now);
            // Held for as long as it may be: it is left to its deadline.
            if ttl.is_some() || (lease.0.attempt.kind.reenters && !lease.is_lost()) {
                round.renewals.push((lease, ttl));
            }
        }
        while may.give_back
            && round.renewals.len() + round.releases.len() < ROUND
            && let Some(first) = self.abandoned.first_entry()
            && first.key().0 <= now
        {
            round.releases.push(first.remove());
        }
        round.tidies = may.tidy && round.renewals.is_empty() && round.releases.is_empty();
        while round.tidies
            && round.releases.len() < ROUND
            && let Some(first) = self.leftovers.first_entry()
            && first.key().0 <= now
        {
            round.releases.push(first.remove());
        }
        if round.renewals.is_empty() && round.releases.is_empty() {
            let due = self.due.first_key_value().map(|((due, _), _)| *due);
            let first = |some: &BTreeMap<(Moment, u64), Abandoned>, may: bool| {
                some.first_key_value().filter(|_| may).map(|((due, _), _)| *due)
            };
            let abandoned = first(&self.abandoned, may.give_back);
            let leftovers = first(&self.leftovers, may.tidy);
            return Err(due.into_iter().chain(abandoned).chain(leftovers).min());
        }
        Ok(round)
    }

    /// Where one hold of an owner was lost, its other holds are asked about at once.
    pub(super) fn hurry(&mut self, lost: &[Lease]) {
        let lost: Vec<_> = lost.iter().filter(|lease| lease.0.attempt.kind.reenters).collect();
        if lost.is_empty() {
            return;
        }
        let owners: HashSet<_> =
            lost.iter().map(|lease| (lease.name(), lease.0.attempt.owner.as_str())).collect();
        let siblings: Vec<_> = self
            .due
            .iter()
            .filter(|(_, lease)| owners.contains(&(lease.name(), lease.0.attempt.owner.as_str())))
            .map(|(key, _)| *key)
            .collect();
        for key in siblings {
            if let Some(lease) = self.due.remove(&key) {
                let now = Moment::now();
                lease.0.entry.due.store(now.as_nanos(), Ordering::Relaxed);
                self.due.insert((now, key.1), lease);
            }
        }
    }
}
