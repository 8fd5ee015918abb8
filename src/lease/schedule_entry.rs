//! [`ScheduleEntry`]: what the keeper's schedule notes of a lease, inside the lease.

use crate::clock::Moment;
use crate::deployment::NodeSet;

/// The time at which a lease is due, and a number that no other entry has.
pub(super) type Key = (Moment, u64);

/// A lease's position in the schedule. All but `without` change only under the schedule's lock.
#[derive(Default)]
pub(super) struct ScheduleEntry {
    /// Where it is in the queue, while it is due at some time.
    pub(super) due: Option<Key>,
    /// Its place among the holds.
    pub(super) place: usize,
    pub(super) has_ended: bool,
    /// The nodes that have answered that they do not have it, since a majority last confirmed it.
    /// Only the batch that renews it reads and writes this.
    pub(super) without: NodeSet,
}
