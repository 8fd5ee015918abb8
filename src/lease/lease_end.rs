//! [`LeaseEnd`]: how a lease ended.

/// How a [`Lease`](crate::Lease) ended. It is decided once: what happens later does not change it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseEnd {
    /// Its guard was released, dropped or downgraded. What the server answered to the release is
    /// what `release()` returns; the lease ends before that request is sent.
    Released,
    /// It was not renewed before its deadline, or reached its [longest
    /// hold](crate::Options::max_hold): another client may have the lock by now.
    Lost,
    /// Before the deadline, the server answered that it has no such hold: it was force-released,
    /// its key was deleted, or the server has lost data. Another client may have the lock by now.
    Revoked,
    /// Its guard was leaked: the server has the lock until the TTL expires, and it is not renewed.
    Leaked,
    /// [`Locks::close`](crate::Locks::close) released it while its guard was alive.
    Closed,
}

impl LeaseEnd {
    /// Another client may have the lock, although its guard was alive and not given up.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, LeaseEnd::Lost | LeaseEnd::Revoked)
    }
}
