//! [`Keeper`]: renews the leases of a client and releases what was dropped, batch after batch. Here
//! is its task, and what a close asks of it; `schedule.rs` makes the next batch, and `renewal.rs`
//! sends it. [`OpenCall`]: a call that a close waits for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use slab::Slab;
use tokio::sync::{Notify, SetOnce};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::attempt::{Attempt, QueueEntry};
use super::lease::{LONGEST_SLEEP, Lease};
use super::lease_end::LeaseEnd;
use super::schedule::{Abandoned, Batch, RENEWALS_PER_TTL, Schedule, UnreleasedHolds};
use super::turn::Caller;
use crate::clock::Moment;
use crate::guarded::{Gate, Guarded};
use crate::name::Name;
use crate::options::Renewal;
use crate::traces::{Report, event};
use crate::wire::Nodes;

/// How many batches with releases are in flight at a time. They may wait for a node that hangs, and
/// very many releases may be pending.
const MAX_RELEASING: usize = 64;

/// How many leases are looked at for one that the caller holds itself.
const MAX_LOOKED_AT: usize = 10_000;

/// How soon a lease is renewed that not all nodes granted.
const FIRST_REPAIR: Duration = Duration::from_millis(100);

/// Renews leases, the soonest first, and releases what was dropped.
///
/// A lease is in the schedule, in one batch, or left to its deadline until it is removed. That
/// changes under the lock of the schedule, so one that was released is never renewed afterwards.
pub(super) struct Keeper {
    pub(super) nodes: Arc<Nodes>,
    schedule: Guarded<Schedule>,
    /// Wakes its task.
    pub(super) notify: Notify,
    /// Notified when `until` has to check again.
    pub(super) settled: Notify,
    pub(super) closing: Closing,
    /// Its task has ended with its runtime: nothing is renewed or released any more. Written under
    /// the schedule's lock.
    pub(super) has_ended: AtomicBool,
    /// Read while a thread without a runtime polls with that of the client. Tasks end before timers
    /// do, so the end of the keeper's task waits for these polls, which never block: none of them
    /// finds a timer that has ended.
    pub(super) polls: Gate,
}

impl Keeper {
    /// Starts the task on the current runtime. It ends once the keeper is closed and has nothing to
    /// do.
    pub(super) fn start(nodes: Arc<Nodes>) -> Arc<Keeper> {
        let keeper = Arc::new(Keeper {
            nodes,
            schedule: Guarded::default(),
            notify: Notify::new(),
            settled: Notify::new(),
            closing: Closing::default(),
            has_ended: AtomicBool::new(false),
            polls: Gate::default(),
        });
        tokio::spawn(Arc::clone(&keeper).run());
        keeper
    }

    /// No more leases will come; dropped attempts are still released.
    pub(super) fn close(&self) {
        self.schedule().is_closed = true;
        self.notify.notify_one();
    }

    /// Adds the lease of a guard, and renews it from now on if its options say so: soon if not all
    /// nodes granted it, since they may by now.
    pub(super) fn keep(&self, lease: &Lease, is_unanimous: bool, entry: Option<QueueEntry>) {
        let pause = lease.span() / RENEWALS_PER_TTL;
        let soon = if is_unanimous { pause } else { pause.min(FIRST_REPAIR) };
        let due = match lease.options().renewal {
            Renewal::Automatic => lease.counts_from() + soon,
            Renewal::Never => lease.until(), // only asked about
        };
        lease.attempt().note_granted(lease.counts_from());
        // Of a hold that is passed on, earlier: while it was, it was none of those asked about.
        let sent = lease.attempt().confirmed();
        let mut schedule = self.schedule();
        schedule.leases.insert(lease, entry);
        if schedule.shows_a_loss(lease) {
            schedule.expedite_siblings(std::slice::from_ref(lease));
            self.notify.notify_one();
        }
        schedule.insert(lease, due, sent, &self.notify);
    }

    /// Never renews the lease again, and ends it. Returns how it ended: it may have ended before.
    pub(super) fn forget(&self, lease: &Lease, how: LeaseEnd) -> LeaseEnd {
        self.schedule().remove(lease, how);
        let end = lease.end_as(how);
        lease.announce().into_iter().for_each(|report| report());
        lease.measure_end(end);
        end
    }

    /// Releases what a dropped attempt has, or is granted later, on some nodes.
    pub(super) fn abandon(&self, abandoned: Abandoned) {
        let given_up = self.abandon_in(&mut self.schedule(), abandoned);
        self.notify.notify_one();
        log_given_up(given_up);
    }

    pub(super) fn abandon_in(&self, schedule: &mut Schedule, abandoned: Abandoned) -> Option<Arc<Attempt>> {
        if self.has_ended() {
            return None; // its TTL ends it
        }
        // A hold on a minority of the nodes blocks no other attempt.
        let must_await = self.nodes.deployment.is_blocked_by(abandoned.nodes);
        schedule.abandon(abandoned, must_await)
    }

    /// Waits until what was dropped of this lock before has been released or abandoned.
    pub(super) async fn released(&self, name: &Name) {
        let newest = self.schedule().open_releases.last_key_value().map(|(number, _)| *number);
        let Some(newest) = newest else { return };
        self.until(|schedule| !schedule.open_releases.range(..=newest).any(|(_, open)| open == name)).await;
    }

    /// Waits until this is so: that may change with each release, and while the client is closed,
    /// with each call that ends.
    pub(super) async fn until(&self, is_done: impl Fn(&Schedule) -> bool) {
        loop {
            let notified = self.settled.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if is_done(&self.schedule()) {
                return;
            }
            notified.await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// Its task.
    async fn run(self: Arc<Keeper>) {
        let _end_guard = EndGuard(Arc::clone(&self));
        let (mut batches, mut watches) = (JoinSet::new(), JoinSet::new());
        for place in 0..self.nodes.deployment.nodes {
            watches.spawn(Arc::clone(&self).watch_connections(place));
        }
        // The number of batches with renewals is not limited, except by that of the leases: each of
        // them waits for its slowest node. One of three masters hangs, and with a limit of 16 its
        // requests are in all 16 batches; no lease of the two other masters is renewed any more.
        // At most one batch has what only a minority may still have.
        let (mut releasing, mut cleaning_up) = (0, 0);
        loop {
            // Not in the match: its lock would be held in the arms.
            let (taken, is_closed) = self.take(releasing < MAX_RELEASING, cleaning_up == 0);
            let next = match taken {
                Ok(mut batch) => {
                    let over = std::mem::take(&mut batch.over);
                    say(over.iter().filter_map(Lease::announce).collect());
                    for part in batch.by_patience(self.nodes.limit()) {
                        let is_cleanup = usize::from(part.is_cleanup);
                        let releases = usize::from(!part.is_cleanup && !part.releases.is_empty());
                        (releasing, cleaning_up) = (releasing + releases, cleaning_up + is_cleanup);
                        let executed = Arc::clone(&self).execute(part);
                        batches.spawn(async move {
                            executed.await;
                            (releases, is_cleanup)
                        });
                    }
                    continue;
                }
                Err(Some(next)) => next.since(Moment::now()).min(LONGEST_SLEEP),
                Err(None) if batches.is_empty() && is_closed => return,
                Err(None) => LONGEST_SLEEP,
            };
            tokio::select! {
                () = self.notify.notified() => {}
                Some(done) = batches.join_next() => {
                    let (released, cleaned_up) = done.unwrap_or_default();
                    (releasing, cleaning_up) = (releasing - released, cleaning_up - cleaned_up);
                }
                () = sleep(next) => {}
            }
        }
    }

    fn take(&self, may_release: bool, may_clean_up: bool) -> (Result<Batch, Option<Moment>>, bool) {
        let now = Moment::now();
        let mut schedule = self.schedule();
        let taken = schedule.take(now, may_release, may_clean_up);
        schedule.sleeps_until = match taken {
            Ok(_) => None,
            Err(next) => Some(next.map_or(now + LONGEST_SLEEP, |next| next.min(now + LONGEST_SLEEP))),
        };
        (taken, schedule.is_closed)
    }

    pub(super) fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock()
    }

    /// Whether this task or thread holds the lock, as far as few enough leases are held to look.
    pub(super) fn is_held_by_caller(&self, name: &Name) -> bool {
        let (caller, schedule) = (Caller::current(), self.schedule());
        let mut leases = schedule.leases.iter().take(MAX_LOOKED_AT);
        leases.any(|lease| lease.is_of(caller) && lease.name() == name)
    }

    /// How many leases, open calls and pending releases there are.
    pub(super) fn entries(&self) -> usize {
        let open_calls = self.closing.open_calls.lock().len();
        let schedule = self.schedule();
        // Open, not pending: a release that is being sent is not done.
        open_calls + schedule.leases.len() + schedule.open_releases.len() + schedule.cleanups.len()
    }
}

impl Keeper {
    pub(super) fn end_all(&self) {
        self.schedule().unreleased.get_or_insert_default();
        // Before the holds are taken: a lease that comes later finds it.
        let _again = self.closing.begun.set(());
        let leases: Vec<Lease> = {
            let mut schedule = self.schedule();
            let leases: Vec<_> = schedule.leases.iter().cloned().collect();
            for lease in &leases {
                // The lease is not trusted any more: only now may its release be sent. Under the
                // lock: another close, at the same time, must find one or the other.
                let entry = schedule.remove(lease, LeaseEnd::Closed).and_then(|kept| kept.entry);
                if lease.is_leaked() {
                    continue; // others still read under it
                }
                let is_final = lease.attempt().in_flight.is_indeterminate();
                let (attempt, nodes) = (Arc::clone(lease.attempt()), self.nodes.all_nodes());
                let has_lease = true;
                self.abandon_in(&mut schedule, Abandoned { attempt, has_lease, is_final, entry, nodes });
            }
            leases
        };
        self.notify.notify_one();
        let reports: Vec<_> = leases.iter().filter_map(Lease::announce).collect();
        reports.into_iter().for_each(|report| report());
    }

    /// Waits until no call is open and every pending release has succeeded or was abandoned.
    pub(super) async fn all_released(&self) {
        // A call that ends has left what it had to the keeper before, under the schedule's lock.
        let is_quiet = |schedule: &Schedule| {
            schedule.open_releases.is_empty() && self.closing.open_calls.lock().is_empty()
        };
        self.until(|schedule| is_quiet(schedule) || self.has_ended()).await;
    }

    /// The releases that failed, and those that are pending unless all are done. A call that begins
    /// later releases nothing: the lease of its guard has ended.
    pub(super) fn unreleased(&self, has_released_all: bool) -> UnreleasedHolds {
        let mut left = UnreleasedHolds::default();
        if !has_released_all {
            self.closing.open_calls.lock().iter().for_each(|(_, name)| left.add(name));
        }
        let schedule = self.schedule();
        if !has_released_all {
            schedule.open_releases.values().for_each(|name| left.add(name));
        }
        if let Some(failed) = &schedule.unreleased {
            failed.names.iter().for_each(|name| left.add(name));
            left.count += failed.count - failed.names.len();
        }
        left
    }
}

/// Says what has happened, in a task of its own: a subscriber that blocks would keep the thread on
/// which the keeper was just notified, and no other thread takes over a task that is next on its
/// own.
pub(super) fn say(reports: Vec<Report>) {
    if !reports.is_empty() {
        tokio::spawn(async move { reports.into_iter().for_each(|report| report()) });
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
    pub(super) begun: SetOnce<()>,
    pub(super) open_calls: Guarded<Slab<Name>>,
}

impl Closing {
    pub(super) fn has_begun(&self) -> bool {
        self.begun.initialized()
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
        let place = keeper.closing.open_calls.lock().insert(name.clone());
        OpenCall { keeper: Arc::clone(keeper), place }
    }

    pub(super) fn keeper(&self) -> &Arc<Keeper> {
        &self.keeper
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let closing = &self.keeper.closing;
        let name = closing.open_calls.lock().try_remove(self.place);
        drop(name);
        if closing.has_begun() {
            self.keeper.settled.notify_waiters();
        }
    }
}

/// Dropped when the keeper's task ends: drops what is left, and wakes the callers that wait for it.
struct EndGuard(Arc<Keeper>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        let left = {
            let mut schedule = self.0.schedule();
            self.0.has_ended.store(true, Ordering::SeqCst);
            std::mem::take(&mut *schedule)
        };
        drop(left);
        self.0.settled.notify_waiters();
        drop(self.0.polls.write());
    }
}
