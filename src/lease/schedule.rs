//! [`Schedule`]: the next batch: the leases that are due, and what must be released.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::attempt::{Attempt, QueueEntry};
use super::kept_leases::{KeptLease, KeptLeases};
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::MAX_NAMES;
use crate::name::Name;

/// How many requests one batch has at most.
const BATCH_SIZE: usize = 128;
/// How often a lease is renewed within its TTL: each time that a third of it has passed.
pub(super) const RENEWALS_PER_TTL: u32 = 3;
/// How many attempts without a lease are remembered to be released. One more is left to its TTL:
/// while a server is down for long, memory must not grow with every caller that gives up. Leases
/// have no such limit: there are no more than there were guards, each of which needed more memory.
const MAX_LEASELESS: usize = 65_536;

/// How long beyond its TTL the release of a dropped attempt is retried once its client was dropped.
const RELEASE_GRACE: Duration = Duration::from_secs(10);

/// How often a release is sent again after error replies that may or may not last, such as those of
/// a proxy while its server restarts: every half second. A script may fail like this for good.
const RELEASE_RETRIES: u32 = 6;

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

/// The leases that are due, and what must be released.
#[derive(Default)]
pub(super) struct Schedule {
    pub(super) pending_releases: BTreeMap<(Moment, u64), PendingRelease>,
    /// Releases that concern only a minority of the nodes: they block no other attempt, and must
    /// not delay other releases.
    pub(super) cleanups: BTreeMap<(Moment, u64), PendingRelease>,
    /// How many of both have no lease.
    leaseless: usize,
    /// Dropped attempts that are not released yet, by number, with the names of their locks: what
    /// `settled` and `close` wait for.
    pub(super) open_releases: BTreeMap<u64, Name>,
    pub(super) leases: KeptLeases,
    /// Once the client is being closed: what could not be released.
    pub(super) unreleased: Option<UnreleasedHolds>,
    last_number: u64,
    /// The newest connection of each node, once it is not the first one.
    connections: BTreeMap<usize, (u64, u64)>,
    /// When a new connection was last noticed.
    asked_at: Option<Moment>,
    /// Since then, not all leases were made due.
    must_ask: bool,
    /// Until when the task sleeps, unless it is woken. A lease that is due later need not wake it:
    /// a lock that is soon released costs no task switch.
    pub(super) sleeps_until: Option<Moment>,
    pub(super) is_closed: bool,
}

/// An attempt that has ended, and of which the nodes may have something, or may get it later.
pub(super) struct Abandoned {
    pub(super) attempt: Arc<Attempt>,
    /// It has a lease that no majority has released.
    pub(super) has_lease: bool,
    /// Requests of it that arrive later must be refused.
    pub(super) is_final: bool,
    pub(super) entry: Option<QueueEntry>,
    /// Those that may still have it.
    pub(super) nodes: NodeSet,
}

pub(super) struct PendingRelease {
    pub(super) abandoned: Abandoned,
    pub(super) give_up: Moment,
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
    /// Leases that were left to their deadline, which has passed.
    pub(super) over: Vec<Lease>,
}

impl Batch {
    /// The requests in parts that may wait about as long for their replies, to within a factor of
    /// two. The replies take 150 ms, and one of two leases is for half a second: with one limit for
    /// both, no renewal of the other one was ever confirmed, and after 30 s it was lost.
    pub(super) fn by_patience(self, longest: Duration) -> Vec<Batch> {
        let size = |limit: Duration| limit.min(longest).as_micros().checked_ilog2();
        let mut parts = BTreeMap::<_, Batch>::new();
        for (lease, ttl) in self.renewals {
            parts.entry(size(patience(&lease))).or_default().renewals.push((lease, ttl));
        }
        if !self.releases.is_empty() {
            let part = parts.entry(size(longest)).or_default();
            (part.releases, part.is_cleanup) = (self.releases, self.is_cleanup);
        }
        parts.into_values().collect()
    }
}

/// For how long a renewal waits for its reply: a silent connection must leave time for another one
/// before the lease expires.
pub(super) fn patience(lease: &Lease) -> Duration {
    lease.span() / 4
}

impl Schedule {
    /// Makes a lease due then; or now, if it was confirmed by a request that was `sent` before a
    /// new connection made all leases due: the server may have lost it since.
    pub(super) fn insert(&mut self, lease: &Lease, due: Moment, sent: Moment, notify: &Notify) {
        let due = if self.has_asked_since(sent) { due.min(Moment::now()) } else { due };
        if self.leases.make_due(lease, Some(due)) && self.sleeps_until.is_some_and(|until| due < until) {
            notify.notify_one();
        }
    }

    /// Removes a lease for good, and returns what was noted of it, unless another task was first:
    /// that one decides how it ended. [`Lease::announce`] follows once the lock is released.
    pub(super) fn remove(&mut self, lease: &Lease, how: LeaseEnd) -> Option<KeptLease> {
        let kept = self.leases.remove(lease);
        lease.end_as(how);
        kept
    }

    /// Adds the release of what an attempt has, or is granted later, on some nodes. It `must_await`
    /// if it concerns more than a minority. Returns the attempt if it is left to its TTL instead.
    pub(super) fn abandon(&mut self, abandoned: Abandoned, must_await: bool) -> Option<Arc<Attempt>> {
        let now = Moment::now();
        let give_up = now + abandoned.attempt.options.ttl + RELEASE_GRACE;
        let number = must_await.then(|| self.number_release(&abandoned.attempt));
        let (retries_left, failures) = (RELEASE_RETRIES, 0);
        self.schedule_release(PendingRelease { abandoned, give_up, number, retries_left, failures }, now)
    }

    /// Counts one more attempt that is to be released, and returns its number.
    fn number_release(&mut self, attempt: &Attempt) -> u64 {
        self.last_number += 1;
        self.open_releases.insert(self.last_number, attempt.name.clone());
        self.last_number
    }

    /// The release of an attempt has succeeded or has failed for good.
    pub(super) fn end_release(&mut self, number: u64, has_failed: bool) {
        if let Some(name) = self.open_releases.remove(&number)
            && let Some(unreleased) = self.unreleased.as_mut().filter(|_| has_failed)
        {
            unreleased.add(&name);
        }
    }

    /// Returns the attempt if it is left to its TTL: it has no lease, and there are too many such.
    /// While the client is being closed there is no limit: no more come than it had.
    pub(super) fn schedule_release(&mut self, pending: PendingRelease, due: Moment) -> Option<Arc<Attempt>> {
        if !pending.abandoned.has_lease {
            if self.leaseless >= MAX_LEASELESS && self.unreleased.is_none() {
                pending.number.into_iter().for_each(|number| self.end_release(number, true));
                return Some(pending.abandoned.attempt);
            }
            self.leaseless += 1;
        }
        let queue = if pending.number.is_some() { &mut self.pending_releases } else { &mut self.cleanups };
        self.last_number += 1;
        queue.insert((due, self.last_number), pending);
        None
    }

    /// The next batch, or when something will be due. Beside renewals, it has no releases while as
    /// many batches as may be are waiting for a node that hangs.
    pub(super) fn take(
        &mut self,
        now: Moment,
        may_release: bool,
        may_clean_up: bool,
    ) -> Result<Batch, Option<Moment>> {
        let (mut batch, mut waiting) = (Batch::default(), Vec::new());
        while batch.renewals.len() < BATCH_SIZE
            && let Some(lease) = self.leases.pop(now, !batch.renewals.is_empty())
        {
            let ttl = lease.next_ttl(now);
            if ttl.is_some() || (lease.attempt().kind.has_owner && !lease.is_lost()) {
                lease.note_renewing();
                batch.renewals.push((lease, ttl));
            } else if lease.is_lost() {
                batch.over.push(lease);
            } else {
                waiting.push(lease);
            }
        }
        // A lease that has reached its longest hold is left to its deadline.
        for lease in &waiting {
            self.leases.make_due(lease, Some(lease.until()));
        }
        while may_release
            && batch.renewals.len() + batch.releases.len() < BATCH_SIZE
            && let Some(first) = self.pending_releases.first_entry()
            && first.key().0 <= now
        {
            batch.releases.push(first.remove());
        }
        batch.is_cleanup = may_clean_up && batch.renewals.is_empty() && batch.releases.is_empty();
        while batch.is_cleanup
            && batch.releases.len() < BATCH_SIZE
            && let Some(first) = self.cleanups.first_entry()
            && first.key().0 <= now
        {
            batch.releases.push(first.remove());
        }
        self.leaseless -= batch.releases.iter().filter(|pending| !pending.abandoned.has_lease).count();
        if batch.renewals.is_empty() && batch.releases.is_empty() && batch.over.is_empty() {
            let due = self.leases.next_due();
            let first = |some: &BTreeMap<(Moment, u64), PendingRelease>, may: bool| {
                some.first_key_value().filter(|_| may).map(|((due, _), _)| *due)
            };
            let releases = first(&self.pending_releases, may_release);
            let cleanups = first(&self.cleanups, may_clean_up);
            return Err(due.into_iter().chain(releases).chain(cleanups).min());
        }
        Ok(batch)
    }

    /// From now on, what was confirmed before is doubtful, if the connection of this node is a new
    /// one.
    pub(super) fn notice_connection(&mut self, place: usize, connection: Option<(u64, u64)>) {
        // With the first connection, no lease was lost. A lease may be older than that of one node
        // of a quorum: that node does not have it.
        let known = self.connections.get(&place).copied().unwrap_or((1, 0));
        if let Some(connection) = connection.filter(|seen| *seen > known) {
            self.connections.insert(place, connection);
            self.asked_at = Some(Moment::now());
            self.must_ask = true;
        }
    }

    /// Makes all leases due, once a connection was noticed: true. Of one that a batch has, or a
    /// task is still to be told of, [`insert`](Schedule::insert) finds that out.
    pub(super) fn ask_once_new(&mut self) -> bool {
        if self.must_ask {
            self.leases.expedite_all(Moment::now());
        }
        std::mem::take(&mut self.must_ask)
    }

    /// Whether a new connection was noticed after this request was sent.
    pub(super) fn has_asked_since(&self, sent: Moment) -> bool {
        self.asked_at.is_some_and(|asked| sent <= asked)
    }

    /// Whether a new hold has another token than one that its owner has already, of the same kind.
    /// A nested hold has the token of the outer one, so that one is gone: its work would run on,
    /// beside the next holder once the nested hold is released, until its renewal.
    pub(super) fn shows_a_loss(&self, lease: &Lease) -> bool {
        let same_kind = |sibling: &&Lease| sibling.attempt().kind.name == lease.attempt().kind.name;
        let mut siblings = self.leases.siblings(lease).filter(same_kind);
        siblings.any(|sibling| sibling.fencing_token() != lease.fencing_token())
    }

    /// After one hold of an owner was lost, its other holds are polled at once.
    pub(super) fn expedite_siblings(&mut self, lost: &[Lease]) {
        let siblings: Vec<Lease> =
            lost.iter().flat_map(|lease| self.leases.siblings(lease)).cloned().collect();
        siblings.iter().for_each(|sibling| _ = self.leases.make_due(sibling, Some(Moment::now())));
    }
}
