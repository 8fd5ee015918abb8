//! The keeper's schedule: which lease is due when, and what must be released.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use uuid::Uuid;

use super::attempt::{Attempt, QueueEntry};
use super::close::Unreleased;
use super::lease::{Lease, LeaseEnd};
use crate::clock::Moment;
use crate::name::Name;
use crate::wire::NodeSet;

/// How many requests one batch has at most.
const BATCH_SIZE: usize = 128;
/// How many dropped attempts are remembered. Beyond that, one is left to its TTL: while a server is
/// down for long, memory must not grow with every caller that gives up.
const MAX_PENDING_RELEASES: usize = 65_536;

/// How long beyond its TTL the release of a dropped attempt is retried once its client was dropped.
const RELEASE_GRACE: Duration = Duration::from_secs(10);

/// How often a release is sent again after error replies that may or may not last, such as those of
/// a proxy while its server restarts: every half second. A script may fail like this for good.
const RETRIES: u32 = 6;

#[derive(Default)]
pub(super) struct Schedule {
    pub(super) due: DueQueue,
    pub(super) pending_releases: BTreeMap<(Moment, u64), PendingRelease>,
    /// Releases that concern only a minority of the nodes: they block no other attempt, and must
    /// not delay other releases.
    pub(super) cleanups: BTreeMap<(Moment, u64), PendingRelease>,
    /// Dropped attempts that are not released yet, by number, with the names of their locks: what
    /// `settled` and `close` wait for.
    pub(super) awaited: BTreeMap<u64, Name>,
    /// The leases of all guards by attempt, renewed or not, and how each attempt was queued.
    pub(super) held: HashMap<Uuid, (Lease, Option<QueueEntry>)>,
    /// Once the client is being closed: what could not be released.
    pub(super) unreleased: Option<Unreleased>,
    entries: u64,
    /// Until when the task sleeps, unless it is woken. A lease that is due later need not wake it:
    /// a lock that is soon released costs no task switch.
    pub(super) sleeps_until: Option<Moment>,
    pub(super) closed: bool,
}

/// A lease's position in the schedule. Read and written only under the schedule's lock.
#[derive(Default)]
pub(super) struct ScheduleEntry {
    pub(super) place: DuePlace,
    pub(super) over: AtomicBool,
}

pub(super) struct PendingRelease {
    pub(super) attempt: Arc<Attempt>,
    pub(super) for_good: bool,
    pub(super) entry: Option<QueueEntry>,
    pub(super) give_up: Moment,
    /// The nodes that may still hold it.
    pub(super) nodes: NodeSet,
    /// Its number in `awaited`, while more than a minority of the nodes may hold it.
    pub(super) awaited: Option<u64>,
    /// How often it is sent again after an error reply that may or may not last.
    retries_left: u32,
    /// On how many nodes its release has failed for good.
    pub(super) failed: usize,
}

impl PendingRelease {
    /// Whether it is sent once more after such a reply.
    pub(super) fn spend_retry(&mut self) -> bool {
        let may_retry = self.retries_left > 0;
        self.retries_left = self.retries_left.saturating_sub(1);
        may_retry
    }
}

/// The requests of one batch.
#[derive(Default)]
pub(super) struct Batch {
    /// The leases, and for how long to extend them; `None` only asks about the lease.
    pub(super) renewals: Vec<(Lease, Option<Duration>)>,
    pub(super) releases: Vec<PendingRelease>,
    /// Its releases are those of a minority of the nodes.
    pub(super) is_cleanup: bool,
}

/// What the next batch may do beside renewals: releases may have to wait for a node that hangs.
#[derive(Clone, Copy)]
pub(super) struct BatchLimits {
    pub(super) release: bool,
    pub(super) clean_up: bool,
}

impl Schedule {
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment, notify: &Notify) {
        let entry = &lease.entry();
        if entry.over.load(Ordering::Relaxed) {
            return;
        }
        self.due.insert(lease, due);
        if self.sleeps_until.is_some_and(|until| due < until) {
            notify.notify_one();
        }
    }

    /// Removes a lease for good, and returns how it ended: the first of two tasks that end it
    /// decides. [`Lease::announce`] follows once the lock is released.
    pub(super) fn remove(&mut self, lease: &Lease, how: LeaseEnd) -> LeaseEnd {
        lease.entry().over.store(true, Ordering::Relaxed);
        self.due.remove(lease);
        self.held.remove(&lease.attempt().id);
        lease.end(how)
    }

    /// Adds the release of what an attempt has, or is granted later, on some nodes. It `is_awaited`
    /// if it concerns more than a minority. If the schedule is full, it returns the attempt that is
    /// left to its TTL instead.
    pub(super) fn abandon(
        &mut self,
        attempt: Arc<Attempt>,
        for_good: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
        is_awaited: bool,
    ) -> Option<Arc<Attempt>> {
        let now = Moment::now();
        let give_up = now + attempt.options.ttl + RELEASE_GRACE;
        let awaited = is_awaited.then(|| self.number_awaited(&attempt));
        let (retries_left, failed) = (RETRIES, 0);
        let pending =
            PendingRelease { attempt, for_good, entry, give_up, nodes, awaited, retries_left, failed };
        self.schedule_release(pending, now)
    }

    /// Counts one more attempt that is to be released, and returns its number.
    fn number_awaited(&mut self, attempt: &Attempt) -> u64 {
        self.entries += 1;
        self.awaited.insert(self.entries, attempt.name.clone());
        self.entries
    }

    /// The release of an attempt has succeeded or has failed for good.
    pub(super) fn end_awaited(&mut self, number: u64, failed: bool) {
        if let Some(name) = self.awaited.remove(&number)
            && let Some(unreleased) = self.unreleased.as_mut().filter(|_| failed)
        {
            unreleased.add(&name);
        }
    }

    /// If the schedule is full, it returns the attempt that is left to its TTL instead. While the
    /// client is being closed there is no limit: no more come than it had.
    pub(super) fn schedule_release(&mut self, pending: PendingRelease, due: Moment) -> Option<Arc<Attempt>> {
        let queue = if pending.awaited.is_some() { &mut self.pending_releases } else { &mut self.cleanups };
        let is_full = queue.len() >= MAX_PENDING_RELEASES && self.unreleased.is_none();
        let given_up = if is_full { queue.pop_first() } else { None };
        self.entries += 1;
        queue.insert((due, self.entries), pending);
        let (_, given_up) = given_up?;
        if let Some(number) = given_up.awaited {
            self.end_awaited(number, true);
        }
        Some(given_up.attempt)
    }

    /// The next batch, or when something will be due.
    pub(super) fn take(&mut self, now: Moment, limits: BatchLimits) -> Result<Batch, Option<Moment>> {
        let mut batch = Batch::default();
        while batch.renewals.len() < BATCH_SIZE
            && let Some(lease) = self.due.pop(now)
        {
            let ttl = lease.next_ttl(now);
            // A lease that has reached its longest hold is left to its deadline.
            if ttl.is_some() || (lease.attempt().kind.may_reenter && !lease.is_lost()) {
                batch.renewals.push((lease, ttl));
            }
        }
        while limits.release
            && batch.renewals.len() + batch.releases.len() < BATCH_SIZE
            && let Some(first) = self.pending_releases.first_entry()
            && first.key().0 <= now
        {
            batch.releases.push(first.remove());
        }
        batch.is_cleanup = limits.clean_up && batch.renewals.is_empty() && batch.releases.is_empty();
        while batch.is_cleanup
            && batch.releases.len() < BATCH_SIZE
            && let Some(first) = self.cleanups.first_entry()
            && first.key().0 <= now
        {
            batch.releases.push(first.remove());
        }
        if batch.renewals.is_empty() && batch.releases.is_empty() {
            let due = self.due.next();
            let first = |some: &BTreeMap<(Moment, u64), PendingRelease>, may: bool| {
                some.first_key_value().filter(|_| may).map(|((due, _), _)| *due)
            };
            let releases = first(&self.pending_releases, limits.release);
            let cleanups = first(&self.cleanups, limits.clean_up);
            return Err(due.into_iter().chain(releases).chain(cleanups).min());
        }
        Ok(batch)
    }

    /// After one hold of an owner was lost, its other holds are polled at once.
    pub(super) fn expedite_siblings(&mut self, lost: &[Lease]) {
        let now = Moment::now();
        lost.iter().for_each(|lease| self.due.expedite_siblings(lease, now));
    }
}

/// The time at which a lease is due, and a number that no other entry has.
type Key = (Moment, u64);

/// The leases, soonest first, and those of each owner, so that the other holds of an owner are
/// found without searching all.
#[derive(Default)]
pub(super) struct DueQueue {
    soonest: BTreeMap<Key, Lease>,
    owned: HashMap<(Name, String), BTreeSet<Key>>,
    entries: u64,
}

/// A lease's key in the queue. Read and written only under the schedule's lock.
#[derive(Default)]
pub(super) struct DuePlace {
    due: AtomicU64,
    number: AtomicU64,
}

impl DuePlace {
    fn key(&self) -> Key {
        (Moment::from_nanos(self.due.load(Ordering::Relaxed)), self.number.load(Ordering::Relaxed))
    }

    fn set(&self, (due, number): Key) {
        self.due.store(due.as_nanos(), Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
    }
}

impl DueQueue {
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment) {
        self.entries += 1;
        let key = (due, self.entries);
        lease.entry().place.set(key);
        self.soonest.insert(key, lease.clone());
        if let Some(owned) = owned(lease) {
            self.owned.entry(owned).or_default().insert(key);
        }
    }

    pub(super) fn remove(&mut self, lease: &Lease) {
        let key = lease.entry().place.key();
        self.soonest.remove(&key);
        self.forget(lease, key);
    }

    /// The next lease that is due.
    pub(super) fn pop(&mut self, now: Moment) -> Option<Lease> {
        let first = self.soonest.first_entry().filter(|first| first.key().0 <= now)?;
        let (key, lease) = first.remove_entry();
        self.forget(&lease, key);
        Some(lease)
    }

    pub(super) fn next(&self) -> Option<Moment> {
        self.soonest.first_key_value().map(|((due, _), _)| *due)
    }

    pub(super) fn len(&self) -> usize {
        self.soonest.len()
    }

    /// Makes the other holds of this lease's owner due now.
    pub(super) fn expedite_siblings(&mut self, lease: &Lease, now: Moment) {
        let keys = owned(lease).and_then(|owned| self.owned.remove(&owned)).unwrap_or_default();
        for key in keys {
            if let Some(sibling) = self.soonest.remove(&key) {
                self.insert(&sibling, now);
            }
        }
    }

    fn forget(&mut self, lease: &Lease, key: Key) {
        let Some(owned) = owned(lease) else { return };
        if let Some(keys) = self.owned.get_mut(&owned) {
            keys.remove(&key);
            if keys.is_empty() {
                self.owned.remove(&owned);
            }
        }
    }
}

/// The lock and the owner, for kinds that an owner may hold several times.
fn owned(lease: &Lease) -> Option<(Name, String)> {
    let attempt = lease.attempt();
    attempt.kind.may_reenter.then(|| (attempt.name.clone(), attempt.owner().to_owned()))
}
