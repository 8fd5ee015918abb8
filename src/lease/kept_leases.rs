//! [`KeptLeases`]: the leases of all guards of a client, and what the keeper notes of each.

use slab::Slab;

use super::attempt::QueueEntry;
use super::lease::Lease;
use crate::clock::Moment;
use crate::deployment::NodeSet;

/// The time at which a lease is due, and a number that no other one has.
pub(super) type Key = (Moment, u64);

/// A lease that a guard has, renewed or not.
pub(super) struct KeptLease {
    pub(super) lease: Lease,
    /// How its attempt was queued.
    pub(super) entry: Option<QueueEntry>,
    /// Where it is in the queue, while it is due at some time.
    pub(super) due: Option<Key>,
    /// The nodes that have answered that they do not have it, since a majority last confirmed it.
    pub(super) without: NodeSet,
}

/// Found by their lease, which has its place among them. Only used under the schedule's lock.
#[derive(Default)]
pub(super) struct KeptLeases(Slab<KeptLease>);

impl KeptLeases {
    pub(super) fn insert(&mut self, lease: &Lease, entry: Option<QueueEntry>) {
        let (lease, without) = (lease.clone(), NodeSet::default());
        let vacant = self.0.vacant_entry();
        lease.note_place(vacant.key());
        vacant.insert(KeptLease { lease, entry, due: None, without });
    }

    /// `None` once it has ended for the keeper: it was released, lost, or passed on. Another lease
    /// may have its place by then.
    pub(super) fn get(&self, lease: &Lease) -> Option<&KeptLease> {
        self.0.get(lease.place()).filter(|kept| kept.lease.is_same(lease))
    }

    pub(super) fn get_mut(&mut self, lease: &Lease) -> Option<&mut KeptLease> {
        self.0.get_mut(lease.place()).filter(|kept| kept.lease.is_same(lease))
    }

    pub(super) fn remove(&mut self, lease: &Lease) -> Option<KeptLease> {
        self.get(lease)?;
        self.0.try_remove(lease.place())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.0.iter().map(|(_, kept)| &kept.lease)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
