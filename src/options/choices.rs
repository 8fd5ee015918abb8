//! The options that are one of a few words.

use serde::{Deserialize, Serialize};

/// Whether leases are extended before they expire.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Renewal {
    /// Extended in the background, every third of the TTL, while the guard lives.
    #[default]
    Automatic,
    /// Never extended in the background: the lease ends one TTL after it was granted, or after the
    /// application has [renewed](crate::Lease::renew) it.
    Never,
}

/// Whether a lease has a [`FencingToken`](crate::FencingToken).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fencing {
    /// One token for every lease.
    #[default]
    On,
    /// No token, for about a tenth less work on the server. For maximum speed where a rare double
    /// execution is acceptable. All clients of a lock should use the same setting.
    Off,
}

/// Where a further hold of an owner is counted.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nesting {
    /// In Redis, where other processes see it: one round trip for each hold.
    #[default]
    Counted,
    /// In this process, if it already holds the lock for the same owner: no round trip. The count
    /// in Redis does not grow, and the inner guard shares the outer one's lease, TTL and options.
    /// Only for a re-entrant lock: holds of a read-write lock are always counted in Redis.
    Local,
}

/// How a waiting client learns that a lock is free.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wakeups {
    /// The client is notified on a subscription of its own, and also polls now and then: see
    /// [`Options::poll_cap`](crate::Options::poll_cap).
    #[default]
    Push,
    /// The client is notified, and polls before it treats the lock as its own: a message alone
    /// grants nothing.
    ///
    /// With [`Push`](Wakeups::Push), a message from one server is trusted, which saves each
    /// hand-over the round trip of a poll. So a user that may publish to the clients' channels and
    /// read the queues can make a waiter believe that it holds the lock, until its first renewal:
    /// for up to a third of the TTL, and at most a second. A user without both rights cannot.
    ///
    /// In a cluster, behind Sentinel and in a quorum, no message is trusted anyway.
    Verify,
    /// The client polls every 100 ms, or every [`poll_cap`](crate::Options::poll_cap) if that is
    /// shorter.
    Poll,
}

/// Whether a node of a [quorum](crate::LocksBuilder::quorum) that restarts may vote at once.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestartGuard {
    /// It may vote at once. Safe if no node loses a write that it has acknowledged: `appendonly
    /// yes` and `appendfsync always`.
    #[default]
    Off,
    /// It may not vote until [`Locks::rejoin`](crate::Locks::rejoin) has admitted it: for nodes
    /// that may lose data.
    On,
}
