//! [`LeaseEnd`]: how a lease ended.

/// How a [`Lease`](crate::Lease) ended. It is decided once: later events do not change it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseEnd {
    /// Its guard was released, dropped or downgraded. The lease ends before the request is sent;
    /// `release()` returns what the server answered.
    Released,
    /// It was not renewed before its deadline, or reached its [longest
    /// hold](crate::Options::max_hold): another client may have the lock by now.
    Lost,
    /// Before the deadline, the server answered that it has no such hold: it was force-released,
    /// its key was deleted, or the server has lost data. Another client may have the lock by now,
    /// or had it meanwhile.
    Revoked,
    /// Its guard was leaked, or became a [ticket](crate::Ticket): the server has the hold until the
    /// TTL expires or the ticket is adopted, and no task of this guard's renews it.
    Leaked,
    /// [`Locks::close`](crate::Locks::close) released it while its guard was alive.
    Closed,
}

impl LeaseEnd {
    /// One word, for a label.
    pub(super) fn word(self) -> &'static str {
        match self {
            LeaseEnd::Released => "released",
            LeaseEnd::Lost => "lost",
            LeaseEnd::Revoked => "revoked",
            LeaseEnd::Leaked => "leaked",
            LeaseEnd::Closed => "closed",
        }
    }

    /// Another client may have the lock although the guard was alive.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, LeaseEnd::Lost | LeaseEnd::Revoked)
    }
}
