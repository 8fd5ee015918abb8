//! When each lease is due for its next renewal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Lease;
use crate::clock::Moment;
use crate::name::Name;

/// The time at which a lease is due, and a number that no other entry has.
type Key = (Moment, u64);

/// The leases, soonest first, and those of each owner, so that the other holds of one are found
/// without a look at all.
#[derive(Default)]
pub(super) struct DueQueue {
    soonest: BTreeMap<Key, Lease>,
    owned: HashMap<(Name, String), BTreeSet<Key>>,
    entries: u64,
}

/// Where a lease stands. Read and written only under the book's lock.
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
        lease.0.entry.place.set(key);
        self.soonest.insert(key, lease.clone());
        if let Some(owned) = owned(lease) {
            self.owned.entry(owned).or_default().insert(key);
        }
    }

    pub(super) fn remove(&mut self, lease: &Lease) {
        let key = lease.0.entry.place.key();
        self.soonest.remove(&key);
        self.forget(lease, key);
    }

    /// The next one that is due.
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

/// Whose hold on what it is, of a kind that an owner may hold several times.
fn owned(lease: &Lease) -> Option<(Name, String)> {
    let attempt = &lease.0.attempt;
    attempt.kind.reenters.then(|| (attempt.name.clone(), attempt.owner.clone()))
}
