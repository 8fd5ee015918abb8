//! The keeper: the one task of a client that renews its leases and releases what was dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::attempt::{Attempt, QueueEntry, SentRequest};
use super::close::Closing;
use super::lease::{LONGEST_SLEEP, Lease, LeaseEnd};
use super::renewal_tally::{LeaseState, RenewalTally};
use super::schedule::{Batch, BatchLimits, PendingRelease, Schedule};
use crate::clock::Moment;
use crate::event::{Report, event};
use crate::options::Renewal;
use crate::wire::{Call, NodeSet, Nodes, Reply, Vote};

/// How many batches are in flight at a time.
const MAX_BATCHES: usize = 16;
/// How soon a lease is renewed that not all nodes granted.
const FIRST_REPAIR: Duration = Duration::from_millis(100);
/// The pause before a request without a reply is sent again: the shortest and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Renews leases, the soonest first, and releases what was dropped.
///
/// A lease is in the schedule, or in one batch, or has ended. All three change under the schedule's
/// lock, so a lease that was released is never renewed afterwards.
pub(super) struct Keeper {
    pub(super) nodes: Arc<Nodes>,
    schedule: Mutex<Schedule>,
    notify: Notify,
    /// Notified when everything that was dropped has been released.
    pub(super) settled: Notify,
    pub(super) closing: Closing,
    /// Its task has ended with its runtime: nothing is renewed or released any more. Written under
    /// the schedule's lock.
    ended: AtomicBool,
}

impl Keeper {
    /// Starts the task on the current runtime. It ends once the keeper is closed and has nothing to
    /// do.
    pub(super) fn start(nodes: Arc<Nodes>) -> Arc<Keeper> {
        let keeper = Arc::new(Keeper {
            nodes,
            schedule: Mutex::default(),
            notify: Notify::new(),
            settled: Notify::new(),
            closing: Closing::default(),
            ended: AtomicBool::new(false),
        });
        tokio::spawn(Arc::clone(&keeper).run());
        keeper
    }

    /// No more leases will come; what was dropped is still released.
    pub(super) fn close(&self) {
        self.schedule().closed = true;
        self.notify.notify_one();
    }

    /// Adds the lease of a guard, and renews it from now on if its options say so: soon if not all
    /// nodes granted it, since they may by now.
    pub(super) fn keep(&self, lease: &Lease, unanimous: bool, entry: Option<QueueEntry>) {
        let third = lease.until().since(lease.counts_from()) / 3;
        let soon = if unanimous { third } else { third.min(FIRST_REPAIR) };
        let due = match lease.options().renewal {
            Renewal::Automatic => Some(lease.counts_from() + soon),
            // Not renewed, but polled if another hold of its owner turns out to be lost.
            Renewal::Never => lease.attempt().kind.may_reenter.then(|| lease.until()),
        };
        let mut schedule = self.schedule();
        schedule.held.insert(lease.attempt().id, (lease.clone(), entry));
        if let Some(due) = due {
            schedule.insert(lease, due, &self.notify);
        }
    }

    /// Never renews the lease again, and ends it. Returns how it ended: it may have ended before.
    pub(super) fn forget(&self, lease: &Lease, how: LeaseEnd) -> LeaseEnd {
        let end = self.schedule().remove(lease, how);
        lease.announce().into_iter().for_each(|report| report());
        end
    }

    /// Releases what a dropped attempt has, or is granted later, on some nodes.
    pub(super) fn abandon(
        &self,
        attempt: Arc<Attempt>,
        for_good: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
    ) {
        let given_up = self.abandon_in(&mut self.schedule(), attempt, for_good, entry, nodes);
        self.notify.notify_one();
        super::trace::given_up(given_up);
    }

    fn abandon_in(
        &self,
        schedule: &mut Schedule,
        attempt: Arc<Attempt>,
        for_good: bool,
        entry: Option<QueueEntry>,
        nodes: NodeSet,
    ) -> Option<Arc<Attempt>> {
        if self.has_ended() {
            return None; // its TTL ends it
        }
        // A hold on a minority of the nodes blocks no other attempt.
        let is_awaited = nodes.len() > self.nodes.deployment.max_failures();
        schedule.abandon(attempt, for_good, entry, nodes, is_awaited)
    }

    /// Waits until everything that was dropped has been released or abandoned.
    pub(super) async fn settled(&self) {
        loop {
            let notified = self.settled.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.schedule().awaited.is_empty() {
                return;
            }
            notified.await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    async fn run(self: Arc<Keeper>) {
        let _end_guard = EndGuard(Arc::clone(&self));
        let mut batches = JoinSet::new();
        // Batches of releases may wait for a node that hangs: never so many that renewals wait for
        // them, and at most one with what only a minority may still have.
        let (mut releasing, mut cleaning_up) = (0, 0);
        loop {
            let next = loop {
                if batches.len() == MAX_BATCHES {
                    break LONGEST_SLEEP;
                }
                // Not in the match: its lock would be held in the arms.
                let (taken, closed) = self
                    .take(BatchLimits { release: releasing < MAX_BATCHES / 2, clean_up: cleaning_up == 0 });
                match taken {
                    Ok(batch) => {
                        let is_cleanup = usize::from(batch.is_cleanup);
                        let releases = usize::from(!batch.is_cleanup && !batch.releases.is_empty());
                        (releasing, cleaning_up) = (releasing + releases, cleaning_up + is_cleanup);
                        let executed = Arc::clone(&self).execute(batch);
                        batches.spawn(async move {
                            executed.await;
                            (releases, is_cleanup)
                        })
                    }
                    Err(Some(next)) => break next.since(Moment::now()).min(LONGEST_SLEEP),
                    Err(None) if batches.is_empty() && closed => return,
                    Err(None) => break LONGEST_SLEEP,
                };
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

    fn take(&self, limits: BatchLimits) -> (Result<Batch, Option<Moment>>, bool) {
        let now = Moment::now();
        let mut schedule = self.schedule();
        let taken = schedule.take(now, limits);
        schedule.sleeps_until = match taken {
            Ok(_) => None,
            Err(next) => Some(next.map_or(now + LONGEST_SLEEP, |next| next.min(now + LONGEST_SLEEP))),
        };
        (taken, schedule.closed)
    }

    async fn execute(self: Arc<Keeper>, batch: Batch) {
        let all_nodes = self.nodes.all_nodes();
        let renewals = batch.renewals.iter().map(|(lease, ttl)| (lease.attempt().renew(*ttl), all_nodes));
        let releases = batch.releases.iter().map(|pending| {
            (pending.attempt.release(pending.for_good, pending.entry.as_ref()), pending.nodes)
        });
        let calls: Vec<(Call<'_>, NodeSet)> = renewals.chain(releases).collect();
        // A silent connection must leave time for another one before the shortest lease expires.
        let shortest = batch.renewals.iter().map(|(lease, _)| lease.options().ttl).min();
        let limit = shortest.map_or(self.nodes.limit(), |ttl| ttl / 4);
        let sent = Moment::now();
        let mut answers = self.nodes.call_all(calls, limit).await.into_iter();
        let renewed: Vec<_> = answers.by_ref().take(batch.renewals.len()).collect();
        let released: Vec<_> = answers.collect();
        let (mut gone, mut degraded) = (Vec::new(), Vec::new());
        let mut reports = Vec::new();
        for ((lease, ttl), votes) in batch.renewals.into_iter().zip(renewed) {
            let tally = RenewalTally::count(&self.nodes, &votes);
            let is_degraded = tally.state(&self.nodes) != LeaseState::Lost && !tally.without.is_empty();
            if self.conclude_renewal(&lease, ttl, sent, &tally, votes, &mut reports) {
                gone.push(lease);
            } else if let Some(ttl) = ttl.filter(|_| is_degraded) {
                degraded.push((lease, ttl, tally.without));
            }
        }
        for (pending, votes) in batch.releases.into_iter().zip(released) {
            self.conclude_release(pending, &votes, &mut reports);
        }
        self.schedule().expedite_siblings(&gone);
        self.notify.notify_one();
        self.repair(degraded, limit).await;
        reports.extend(self.nodes.take_reports());
        if !reports.is_empty() {
            // In a task of its own: a subscriber that blocks would keep the thread on which the
            // keeper was just notified, and no other thread takes over a task that is next on its
            // own.
            tokio::spawn(async move { reports.into_iter().for_each(|report| report()) });
        }
    }

    /// Acquires the lock of a valid lease again on nodes that have lost it. A node was away and is
    /// back with its data lost; if the next one fails, no majority would hold the lease.
    async fn repair(&self, degraded: Vec<(Lease, Duration, NodeSet)>, limit: Duration) {
        let degraded: Vec<_> = {
            let _schedule = self.schedule();
            let held = |lease: &Lease| !lease.entry().over.load(Ordering::Relaxed) && !lease.is_lost();
            degraded
                .into_iter()
                .filter(|(lease, ..)| held(lease))
                // From here on, a release waits for this request, or has it refused.
                .map(|(lease, ttl, nodes)| (SentRequest::new(lease.attempt()), lease, ttl, nodes))
                .collect()
        };
        if degraded.is_empty() {
            return;
        }
        let calls = degraded
            .iter()
            .map(|(_, lease, ttl, nodes)| (lease.attempt().repair(*ttl, lease.fencing_token()), *nodes));
        let votes = self.nodes.call_all(calls.collect(), limit).await;
        for ((sent_request, ..), votes) in degraded.into_iter().zip(votes) {
            if votes.iter().all(|(_, outcome)| outcome.is_ok()) {
                sent_request.answered();
            }
        }
    }

    /// True if the nodes say that the lease has ended.
    fn conclude_renewal(
        &self,
        lease: &Lease,
        ttl: Option<Duration>,
        sent: Moment,
        tally: &RenewalTally,
        votes: Vec<Vote>,
        reports: &mut Vec<Report>,
    ) -> bool {
        let mut schedule = self.schedule();
        if lease.entry().over.load(Ordering::Relaxed) {
            return false; // it was released meanwhile
        }
        match tally.state(&self.nodes) {
            LeaseState::Held => {
                match ttl {
                    Some(ttl) if lease.extend(sent, ttl) => {
                        schedule.insert(lease, sent + ttl / 3, &self.notify);
                        reports.extend(super::trace::renewed(lease));
                    }
                    None if !lease.is_lost() => schedule.insert(lease, lease.until(), &self.notify),
                    _ => self.lose_late(schedule, lease, reports),
                }
                false
            }
            LeaseState::Lost => {
                schedule.remove(lease, LeaseEnd::Revoked);
                if !self.nodes.deployment.decides_alone() {
                    // A minority may still hold it.
                    self.abandon_everywhere(&mut schedule, lease, reports);
                }
                drop(schedule);
                self.notify.notify_one();
                reports.extend(lease.announce());
                true
            }
            // The deadline stays, and ends the retries.
            LeaseState::Unknown if lease.is_lost() => {
                self.lose_late(schedule, lease, reports);
                false
            }
            LeaseState::Unknown => {
                // Several tries must fit in before the deadline of a short lease.
                let pause = (lease.options().ttl / 30).min(PAUSES.1);
                schedule.insert(lease, Moment::now() + pause, &self.notify);
                let (_lease, _nodes) = (lease.clone(), self.nodes.deployment.nodes);
                let (_held, _lost) = (tally.held, tally.without.len());
                reports.push(Box::new(move || {
                    let _votes = votes;
                    event!(
                        debug,
                        lock = %_lease.name(),
                        held = _held,
                        lost = _lost,
                        unknown = _nodes - _held - _lost,
                        nodes = _nodes,
                        error = super::trace::first_failure(&_votes).map(::tracing::field::display),
                        "no majority renewed a lease: retrying"
                    );
                }));
                false
            }
        }
    }

    /// The deadline has passed here, but the server may still hold the lock: the replies may have
    /// been lost.
    fn lose_late(&self, mut schedule: MutexGuard<'_, Schedule>, lease: &Lease, reports: &mut Vec<Report>) {
        schedule.remove(lease, LeaseEnd::Lost);
        self.abandon_everywhere(&mut schedule, lease, reports);
        drop(schedule);
        self.notify.notify_one();
        reports.extend(lease.announce());
    }

    /// Under the lock under which the lease was removed: a close must find one or the other.
    fn abandon_everywhere(&self, schedule: &mut Schedule, lease: &Lease, reports: &mut Vec<Report>) {
        let (attempt, all_nodes) = (Arc::clone(lease.attempt()), self.nodes.all_nodes());
        let given_up = self.abandon_in(schedule, attempt, true, None, all_nodes);
        reports.push(Box::new(move || super::trace::given_up(given_up)));
    }

    fn conclude_release(&self, mut pending: PendingRelease, votes: &[Vote], reports: &mut Vec<Report>) {
        let now = Moment::now();
        let mut schedule = self.schedule();
        let (mut left, mut lasting) = (NodeSet::of([]), Vec::new());
        for (node, outcome) in votes {
            // Any number means that nothing of the attempt is left to release, also -2: the key
            // holds something else.
            let Err(failure) = outcome.as_ref().map_err(Clone::clone).and_then(Reply::answer) else {
                continue;
            };
            // While the server cannot be reached, it may still have the attempt in its queue. After
            // the client is dropped, no release is retried for that long, nor one of a minority
            // that does not come back.
            let for_long = !schedule.closed && pending.nodes.len() > self.nodes.deployment.max_failures();
            let may_pass = failure.is_transient() || failure.is_unlisted() && pending.spend_retry();
            if may_pass && (for_long || now < pending.give_up) {
                pending.for_good |= failure.is_indeterminate();
                left = left.with(*node);
            } else {
                lasting.push((self.nodes.label(*node).to_owned(), failure));
            }
        }
        pending.failed += lasting.len();
        let failed = pending.failed > self.nodes.deployment.max_failures();
        let ended = pending.awaited.take_if(|_| left.len() <= self.nodes.deployment.max_failures());
        let _attempt = Arc::clone(&pending.attempt);
        let mut given_up = None;
        let is_released = left.is_empty() && lasting.is_empty();
        if !left.is_empty() {
            pending.nodes = left;
            given_up = schedule.schedule_release(pending, now + PAUSES.1 / 2);
        }
        if let Some(number) = ended {
            schedule.end_awaited(number, failed);
            if schedule.awaited.is_empty() {
                self.settled.notify_waiters();
            }
        }
        drop(schedule);
        reports.push(Box::new(move || {
            super::trace::given_up(given_up);
            if is_released {
                super::trace::released_in_background(&_attempt);
            }
            for (_server, _failure) in lasting {
                event!(
                    error, lock = %_attempt.name, holder = _attempt.holder(),
                    server = %_server, error = %_failure,
                    "release failed: the lock stays held until its TTL expires"
                );
            }
        }));
    }

    /// Poisoning does not matter: nothing under this lock panics.
    pub(super) fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many leases and pending releases are in the schedule.
    pub(super) fn entries(&self) -> usize {
        let schedule = self.schedule();
        schedule.due.len() + schedule.pending_releases.len() + schedule.cleanups.len()
    }
}

/// Wakes the callers that wait for the keeper when its task ends.
struct EndGuard(Arc<Keeper>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        let left = {
            let mut schedule = self.0.schedule();
            self.0.ended.store(true, Ordering::Relaxed);
            std::mem::take(&mut *schedule)
        };
        drop(left);
        self.0.settled.notify_waiters();
    }
}
