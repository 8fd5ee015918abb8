//! The keeper: renews the leases of a client and releases what was dropped. Here is what it knows:
//! which lease is due when, what must be released, and which calls are open; `renewal.rs` has its
//! task.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::sync::Notify;

use super::attempt::{Attempt, QueueEntry};
use super::lease::{Key, Lease, LeaseEnd};
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::MAX_NAMES;
use crate::event::event;
use crate::name::Name;
use crate::options::Renewal;
use crate::wire::Nodes;

/// How soon a lease is renewed that not all nodes granted.
const FIRST_REPAIR: Duration = Duration::from_millis(100);

/// How many requests one batch has at most.
const BATCH_SIZE: usize = 128;
/// The part of its TTL by which a lease may be renewed earlier than it is due.
const EARLIEST: u32 = 30;
/// How many dropped attempts each of two queues remembers. Beyond that, one is left to its TTL:
/// while a server is down for long, memory must not grow with every caller that gives up.
const MAX_PENDING_RELEASES: usize = 65_536;

/// How long beyond its TTL the release of a dropped attempt is retried once its client was dropped.
const RELEASE_GRACE: Duration = Duration::from_secs(10);

/// How often a release is sent again after error replies that may or may not last, such as those of
/// a proxy while its server restarts: every half second. A script may fail like this for good.
const RETRIES: u32 = 6;

/// Renews leases, the soonest first, and releases what was dropped.
///
/// A lease is in the schedule or in one batch until it is removed. That changes under the lock of
/// the schedule, so a lease that was released is never renewed afterwards.
pub(super) struct Keeper {
    pub(super) nodes: Arc<Nodes>,
    schedule: Mutex<Schedule>,
    /// Wakes its task.
    pub(super) notify: Notify,
    /// Notified when `settled` or `close` has to check again.
    pub(super) settled: Notify,
    pub(super) closing: Closing,
    /// Its task has ended with its runtime: nothing is renewed or released any more. Written under
    /// the schedule's lock.
    pub(super) has_ended: AtomicBool,
}

impl Keeper {
    pub(super) fn new(nodes: Arc<Nodes>) -> Keeper {
        Keeper {
            nodes,
            schedule: Mutex::default(),
            notify: Notify::new(),
            settled: Notify::new(),
            closing: Closing::default(),
            has_ended: AtomicBool::new(false),
        }
    }

    /// No more leases will come; dropped attempts are still released.
    pub(super) fn close(&self) {
        self.schedule().is_closed = true;
        self.notify.notify_one();
    }

    /// Adds the lease of a guard, and renews it from now on if its options say so: soon if not all
    /// nodes granted it, since they may by now.
    pub(super) fn keep(&self, lease: &Lease, is_unanimous: bool, entry: Option<QueueEntry>) {
        let third = lease.until().since(lease.counts_from()) / 3;
        let soon = if is_unanimous { third } else { third.min(FIRST_REPAIR) };
        let due = match lease.options().renewal {
            Renewal::Automatic => Some(lease.counts_from() + soon),
            // Not renewed, but polled if another hold of its owner turns out to be lost.
            Renewal::Never => lease.attempt().kind.may_reenter.then(|| lease.until()),
        };
        let mut schedule = self.schedule();
        let hold = schedule.holds.insert((lease.clone(), entry));
        lease.entry().hold.store(u32::try_from(hold).unwrap_or(u32::MAX), Ordering::Relaxed);
        if let Some(due) = due {
            schedule.insert(lease, due, &self.notify);
        }
    }

    /// Never renews the lease again, and ends it. Returns how it ended: it may have ended before.
    pub(super) fn forget(&self, lease: &Lease, how: LeaseEnd) -> LeaseEnd {
        let end = self.schedule().remove(lease, how);
        lease.announce().into_iter().for_each(|report| report());
        lease.measure_end(end);
        end
    }

    /// Releases what a dropped attempt has, or is granted later, on some nodes.
    pub(super) fn abandon(
        &self,
        attempt: Arc<Attempt>,
        is_final: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
    ) {
        let given_up = self.abandon_in(&mut self.schedule(), attempt, is_final, entry, nodes);
        self.notify.notify_one();
        log_given_up(given_up);
    }

    pub(super) fn abandon_in(
        &self,
        schedule: &mut Schedule,
        attempt: Arc<Attempt>,
        is_final: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
    ) -> Option<Arc<Attempt>> {
        if self.has_ended() {
            return None; // its TTL ends it
        }
        // A hold on a minority of the nodes blocks no other attempt.
        let must_await = nodes.len() > self.nodes.deployment.max_failures();
        schedule.abandon(attempt, is_final, entry, nodes, must_await)
    }

    /// Waits until everything that was dropped has been released or abandoned.
    pub(super) async fn settled(&self) {
        loop {
            let notified = self.settled.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.schedule().open_releases.is_empty() {
                return;
            }
            notified.await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Its task has ended: drops what is left, and wakes the callers that wait for it.
    pub(super) fn end(&self) {
        let left = {
            let mut schedule = self.schedule();
            self.has_ended.store(true, Ordering::Relaxed);
            std::mem::take(&mut *schedule)
        };
        drop(left);
        self.settled.notify_waiters();
    }

    /// Poisoning does not matter: nothing under this lock panics.
    pub(super) fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many leases, open calls and pending releases there are.
    pub(super) fn entries(&self) -> usize {
        let open_calls = self.closing.open_calls().len();
        let schedule = self.schedule();
        open_calls + schedule.holds.len() + schedule.pending_releases.len() + schedule.cleanups.len()
    }
}

/// Logs an attempt that had to leave the full schedule of releases.
pub(super) fn log_given_up(given_up: Option<Arc<Attempt>>) {
    if let Some(_attempt) = given_up {
        event!(error, lock = %_attempt.name, holder = _attempt.holder(),
            "too many pending releases: the lock stays held until its TTL expires");
    }
}

/// Whether a client is being closed, and the calls that may yet acquire or release something.
#[derive(Default)]
pub(super) struct Closing {
    pub(super) has_begun: AtomicBool,
    pub(super) notify: Notify,
    open_calls: Mutex<Slab<Name>>,
}

impl Closing {
    pub(super) fn open_calls(&self) -> MutexGuard<'_, Slab<Name>> {
        self.open_calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::SeqCst)
    }

    /// Waits until the client is being closed.
    pub(super) async fn wait_until_begun(&self) {
        let notify = self.notify.notified();
        tokio::pin!(notify);
        notify.as_mut().enable();
        if !self.has_begun() {
            notify.await;
        }
    }
}

/// A call that may acquire or release something until this is dropped. What it leaves to the keeper
/// must be there by then: closing waits for both, and a gap between them would hide a hold.
pub(super) struct OpenCall {
    keeper: Arc<Keeper>,
    place: usize,
}

impl OpenCall {
    pub(super) fn new(keeper: &Arc<Keeper>, name: &Name) -> OpenCall {
        let place = keeper.closing.open_calls().insert(name.clone());
        OpenCall { keeper: Arc::clone(keeper), place }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let closing = &self.keeper.closing;
        let name = closing.open_calls().try_remove(self.place);
        drop(name);
        if closing.has_begun() {
            self.keeper.settled.notify_waiters();
        }
    }
}

/// What a close could not release.
#[derive(Default)]
pub(super) struct UnreleasedHolds {
    pub(super) count: usize,
    pub(super) names: Vec<Name>,
}

impl UnreleasedHolds {
    pub(super) fn add(&mut self, name: &Name) {
        self.count += 1;
        if self.names.len() < MAX_NAMES && !self.names.contains(name) {
            self.names.push(name.clone());
        }
    }
}

/// Which lease is due when, and what must be released.
#[derive(Default)]
pub(super) struct Schedule {
    pub(super) due: DueQueue,
    pub(super) pending_releases: BTreeMap<(Moment, u64), PendingRelease>,
    /// Releases that concern only a minority of the nodes: they block no other attempt, and must
    /// not delay other releases.
    pub(super) cleanups: BTreeMap<(Moment, u64), PendingRelease>,
    /// Dropped attempts that are not released yet, by number, with the names of their locks: what
    /// `settled` and `close` wait for.
    pub(super) open_releases: BTreeMap<u64, Name>,
    /// The leases of all guards, renewed or not, and how each attempt was queued.
    pub(super) holds: Slab<(Lease, Option<QueueEntry>)>,
    /// Once the client is being closed: what could not be released.
    pub(super) unreleased: Option<UnreleasedHolds>,
    entries: u64,
    /// Until when the task sleeps, unless it is woken. A lease that is due later need not wake it:
    /// a lock that is soon released costs no task switch.
    pub(super) sleeps_until: Option<Moment>,
    pub(super) is_closed: bool,
}

pub(super) struct PendingRelease {
    pub(super) attempt: Arc<Attempt>,
    pub(super) is_final: bool,
    pub(super) entry: Option<QueueEntry>,
    pub(super) give_up: Moment,
    /// The nodes that may still hold it.
    pub(super) nodes: NodeSet,
    /// Its number in `open_releases`, while more than a minority of the nodes may hold it.
    pub(super) number: Option<u64>,
    /// How often it is sent again after an error reply that may or may not last.
    retries_left: u32,
    /// On how many nodes its release has failed for good.
    pub(super) failures: usize,
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
    pub(super) may_release: bool,
    pub(super) may_clean_up: bool,
}

impl Schedule {
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment, notify: &Notify) {
        let entry = &lease.entry();
        if entry.has_ended.load(Ordering::Relaxed) {
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
        lease.entry().has_ended.store(true, Ordering::Relaxed);
        self.due.remove(lease);
        let hold = lease.entry().hold.load(Ordering::Relaxed) as usize;
        // It may have been removed before, and another lease may have its place.
        if self.holds.get(hold).is_some_and(|(held, _)| held.is_same(lease)) {
            self.holds.remove(hold);
        }
        lease.end_as(how)
    }

    /// Adds the release of what an attempt has, or is granted later, on some nodes. It `must_await`
    /// if it concerns more than a minority. If the schedule is full, it returns the attempt that is
    /// left to its TTL instead.
    pub(super) fn abandon(
        &mut self,
        attempt: Arc<Attempt>,
        is_final: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
        must_await: bool,
    ) -> Option<Arc<Attempt>> {
        let now = Moment::now();
        let give_up = now + attempt.options.ttl + RELEASE_GRACE;
        let number = must_await.then(|| self.number_release(&attempt));
        let (retries_left, failures) = (RETRIES, 0);
        let pending =
            PendingRelease { attempt, is_final, entry, give_up, nodes, number, retries_left, failures };
        self.schedule_release(pending, now)
    }

    /// Counts one more attempt that is to be released, and returns its number.
    fn number_release(&mut self, attempt: &Attempt) -> u64 {
        self.entries += 1;
        self.open_releases.insert(self.entries, attempt.name.clone());
        self.entries
    }

    /// The release of an attempt has succeeded or has failed for good.
    pub(super) fn end_release(&mut self, number: u64, has_failed: bool) {
        if let Some(name) = self.open_releases.remove(&number)
            && let Some(unreleased) = self.unreleased.as_mut().filter(|_| has_failed)
        {
            unreleased.add(&name);
        }
    }

    /// If the schedule is full, it returns the attempt that is left to its TTL instead. While the
    /// client is being closed there is no limit: no more come than it had.
    pub(super) fn schedule_release(&mut self, pending: PendingRelease, due: Moment) -> Option<Arc<Attempt>> {
        let queue = if pending.number.is_some() { &mut self.pending_releases } else { &mut self.cleanups };
        let is_full = queue.len() >= MAX_PENDING_RELEASES && self.unreleased.is_none();
        let given_up = if is_full { queue.pop_first() } else { None };
        self.entries += 1;
        queue.insert((due, self.entries), pending);
        let (_, given_up) = given_up?;
        if let Some(number) = given_up.number {
            self.end_release(number, true);
        }
        Some(given_up.attempt)
    }

    /// The next batch, or when something will be due.
    pub(super) fn take(&mut self, now: Moment, limits: BatchLimits) -> Result<Batch, Option<Moment>> {
        let mut batch = Batch::default();
        while batch.renewals.len() < BATCH_SIZE
            && let Some(lease) = self.due.pop(now, !batch.renewals.is_empty())
        {
            let ttl = lease.next_ttl(now);
            // A lease that has reached its longest hold is left to its deadline.
            if ttl.is_some() || (lease.attempt().kind.may_reenter && !lease.is_lost()) {
                batch.renewals.push((lease, ttl));
            }
        }
        while limits.may_release
            && batch.renewals.len() + batch.releases.len() < BATCH_SIZE
            && let Some(first) = self.pending_releases.first_entry()
            && first.key().0 <= now
        {
            batch.releases.push(first.remove());
        }
        batch.is_cleanup = limits.may_clean_up && batch.renewals.is_empty() && batch.releases.is_empty();
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
            let releases = first(&self.pending_releases, limits.may_release);
            let cleanups = first(&self.cleanups, limits.may_clean_up);
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

/// The leases, soonest first, and those of each owner, so that the other holds of an owner are
/// found without searching all.
#[derive(Default)]
pub(super) struct DueQueue {
    soonest: BTreeMap<Key, Lease>,
    by_owner: HashMap<(Name, String), BTreeSet<Key>>,
    entries: u64,
}

impl DueQueue {
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment) {
        self.entries += 1;
        let key = (due, self.entries);
        lease.entry().place.set(key);
        self.soonest.insert(key, lease.clone());
        if let Some(owner) = owner_of(lease) {
            self.by_owner.entry(owner).or_default().insert(key);
        }
    }

    pub(super) fn remove(&mut self, lease: &Lease) {
        let key = lease.entry().place.key();
        self.soonest.remove(&key);
        self.forget(lease, key);
    }

    /// The next lease that is due; beside others, also one that is due soon. From then on they are
    /// renewed together, however far apart they were acquired: alone, each one would cost a request
    /// of its own for as long as it lives.
    pub(super) fn pop(&mut self, now: Moment, is_beside_others: bool) -> Option<Lease> {
        let due_soon = |lease: &Lease| is_beside_others && lease.options().renewal == Renewal::Automatic;
        let latest = |lease: &Lease| if due_soon(lease) { now + lease.options().ttl / EARLIEST } else { now };
        let first = self.soonest.first_entry().filter(|first| first.key().0 <= latest(first.get()))?;
        let (key, lease) = first.remove_entry();
        self.forget(&lease, key);
        Some(lease)
    }

    pub(super) fn next(&self) -> Option<Moment> {
        self.soonest.first_key_value().map(|((due, _), _)| *due)
    }

    /// Makes the other holds of this lease's owner due now.
    pub(super) fn expedite_siblings(&mut self, lease: &Lease, now: Moment) {
        let keys = owner_of(lease).and_then(|owner| self.by_owner.remove(&owner)).unwrap_or_default();
        for key in keys {
            if let Some(sibling) = self.soonest.remove(&key) {
                self.insert(&sibling, now);
            }
        }
    }

    fn forget(&mut self, lease: &Lease, key: Key) {
        let Some(owner) = owner_of(lease) else { return };
        if let Some(keys) = self.by_owner.get_mut(&owner) {
            keys.remove(&key);
            if keys.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
    }
}

/// The lock and the owner, for kinds that an owner may hold several times.
fn owner_of(lease: &Lease) -> Option<(Name, String)> {
    let attempt = lease.attempt();
    attempt.kind.may_reenter.then(|| (attempt.name.clone(), attempt.owner().into_owned()))
}
