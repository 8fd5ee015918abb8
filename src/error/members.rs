//! [`MembersError`]: locks that cannot be acquired together.

use crate::name::Name;

/// Why [`Locks::all`](crate::Locks::all) cannot have these locks together.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// There is no lock.
    #[error("there is no lock to acquire")]
    None,
    /// There are more than 128 locks.
    #[error("{0} locks are too many to acquire together; at most 128 are allowed")]
    TooMany(usize),
    /// A name stands twice: the second hold would wait for the first one, or its lease could not be
    /// found by its name if the prefixes differ.
    #[error("{:?} stands twice among the locks to acquire together", .0.as_str())]
    Twice(Name),
    /// The lock has [`hold_at_least`](crate::Options::hold_at_least): acquired in vain, since
    /// another one is busy, it could not be given back.
    #[error("{:?} has hold_at_least, and is acquired alone", .0.as_str())]
    HoldAtLeast(Name),
    /// The lock is of another client.
    #[error("{:?} is a lock of another client than the one that is to acquire it", .0.as_str())]
    OtherClient(Name),
}
