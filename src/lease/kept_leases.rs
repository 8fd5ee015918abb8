//! [`KeptLeases`]: the leases of all guards of a client, what the keeper notes of each, and when
//! each is due.

use std::collections::{BTreeSet, HashMap};
use std::mem;

use slab::Slab;

use super::attempt::QueueEntry;
use super::lease::Lease;
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::name::Name;
use crate::options::Renewal;

/// The part of its TTL by which a lease may be renewed earlier than it is due.
const EARLIEST: u32 = 30;

/// A lease that a guard has, renewed or not.
pub(super) struct KeptLease {
    pub(super) lease: Lease,
    /// How its attempt was queued.
    pub(super) entry: Option<QueueEntry>,
    /// `None`: a batch has it, or it is left to its deadline.
    pub(super) due: Option<Moment>,
    /// The nodes that have answered that they do not have it, since a majority last confirmed it.
    pub(super) without: NodeSet,
}

/// Found by their lease, which has its place among them. Only used under the schedule's lock.
#[derive(Default)]
pub(super) struct KeptLeases {
    all: Slab<KeptLease>,
    /// The places of those that are due at some time, soonest first.
    due: BTreeSet<(Moment, usize)>,
    /// Those of each owner, so that the other holds of an owner are found without searching all.
    by_owner: HashMap<(Name, String), BTreeSet<usize>>,
}

impl KeptLeases {
    pub(super) fn insert(&mut self, lease: &Lease, entry: Option<QueueEntry>) {
        let (lease, without) = (lease.clone(), NodeSet::default());
        let vacant = self.all.vacant_entry();
        lease.note_place(vacant.key());
        if let Some(owner) = owner_of(&lease) {
            self.by_owner.entry(owner).or_default().insert(vacant.key());
        }
        vacant.insert(KeptLease { lease, entry, due: None, without });
    }

    /// `None` once it has ended for the keeper: it was released, lost, or passed on. Another lease
    /// may have its place by then.
    pub(super) fn get(&self, lease: &Lease) -> Option<&KeptLease> {
        self.all.get(lease.place()).filter(|kept| kept.lease.is_same(lease))
    }

    pub(super) fn get_mut(&mut self, lease: &Lease) -> Option<&mut KeptLease> {
        self.all.get_mut(lease.place()).filter(|kept| kept.lease.is_same(lease))
    }

    pub(super) fn remove(&mut self, lease: &Lease) -> Option<KeptLease> {
        self.get(lease)?;
        self.make_due(lease, None);
        if let Some(owner) = owner_of(lease)
            && let Some(places) = self.by_owner.get_mut(&owner)
        {
            places.remove(&lease.place());
            if places.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        self.all.try_remove(lease.place())
    }

    /// Makes a lease due then, or at no time. False if it is not kept any more.
    pub(super) fn make_due(&mut self, lease: &Lease, due: Option<Moment>) -> bool {
        let Some(kept) = self.get_mut(lease) else { return false };
        if let Some(before) = mem::replace(&mut kept.due, due) {
            self.due.remove(&(before, lease.place()));
        }
        self.due.extend(due.map(|due| (due, lease.place())));
        true
    }

    /// Makes all leases due now that are due at some time.
    pub(super) fn expedite_all(&mut self, now: Moment) {
        self.due = mem::take(&mut self.due).into_iter().map(|(_, place)| (now, place)).collect();
        self.all.iter_mut().for_each(|(_, kept)| kept.due = kept.due.and(Some(now)));
    }

    /// The next lease that is due; beside others, also one that is due soon. From then on they are
    /// renewed together, however far apart they were acquired: alone, each one would cost a request
    /// of its own for as long as it lives.
    pub(super) fn pop(&mut self, now: Moment, is_beside_others: bool) -> Option<Lease> {
        let (due, place) = *self.due.first()?;
        let lease = self.all.get(place)?.lease.clone();
        let due_soon = is_beside_others && lease.options().renewal == Renewal::Automatic;
        let latest = if due_soon { now + lease.options().ttl / EARLIEST } else { now };
        if due > latest {
            return None;
        }
        self.make_due(&lease, None);
        Some(lease)
    }

    pub(super) fn next_due(&self) -> Option<Moment> {
        self.due.first().map(|(due, _)| *due)
    }

    /// The leases of the same owner that are due at some time.
    pub(super) fn siblings(&self, lease: &Lease) -> impl Iterator<Item = &Lease> {
        let places = owner_of(lease).and_then(|owner| self.by_owner.get(&owner)).into_iter().flatten();
        let kept = places.filter_map(|place| self.all.get(*place));
        kept.filter(|kept| kept.due.is_some()).map(|kept| &kept.lease)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.all.iter().map(|(_, kept)| &kept.lease)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

/// The lock and the owner, for kinds that an owner may hold several times.
fn owner_of(lease: &Lease) -> Option<(Name, String)> {
    let attempt = lease.attempt();
    attempt.kind.has_owner.then(|| (attempt.name.clone(), attempt.owner().into_owned()))
}
