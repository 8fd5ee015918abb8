//! [`ScheduleEntry`]: what the keeper's schedule notes of a lease, inside the lease.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::clock::Moment;
use crate::deployment::AtomicNodeSet;

/// A lease's position in the schedule. Read and written only under the schedule's lock.
#[derive(Default)]
pub(super) struct ScheduleEntry {
    pub(super) place: DuePlace,
    /// Its place among the holds. A client has memory for fewer than 2^32.
    pub(super) hold: AtomicU32,
    pub(super) has_ended: AtomicBool,
    /// The nodes that have answered that they do not have it, since a majority last confirmed it.
    /// Only the batch that renews it reads and writes this.
    pub(super) without: AtomicNodeSet,
}

/// The time at which a lease is due, and a number that no other entry has.
pub(super) type Key = (Moment, u64);

/// A lease's key in the queue. Read and written only under the schedule's lock.
#[derive(Default)]
pub(super) struct DuePlace {
    due: AtomicU64,
    number: AtomicU64,
}

impl DuePlace {
    pub(super) fn key(&self) -> Key {
        (Moment::from_nanos(self.due.load(Ordering::Relaxed)), self.number.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, (due, number): Key) {
        self.due.store(due.as_nanos(), Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
    }
}
