//! Handing a hold over: `into_ticket` of each guard, and `adopt` of each kind of lock.

use crate::error::{Error, Operation};
use crate::lease::{LockRequest, adopt};
use crate::mutex::{Mutex, MutexGuard};
use crate::reentrant::{ReentrantGuard, ReentrantLock};
use crate::rwlock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::ticket::{IntoTicketError, Ticket};

impl Mutex {
    /// Continues the hold of a ticket, under the same fencing token, and renews it from now on.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let nightly = locks.mutex("nightly")?;
    /// let ticket = nightly.lock().await?.into_ticket()?;
    /// // Send it to another process, which continues; the lock is never free in between.
    /// let guard = nightly.adopt(&ticket).await?;
    /// assert_eq!(guard.lease().fencing_token(), ticket.fencing_token());
    /// # Ok(()) }
    /// ```
    ///
    /// **What it promises**: of several calls with one ticket, at most one succeeds. The others
    /// fail with [`Error::Lost`].
    ///
    /// **What it does not**: wait, or acquire a lock that is free again. The TTL and the other
    /// options are those of this lock, and [`max_hold`](crate::Options::max_hold) and
    /// [`hold_at_least`](crate::Options::hold_at_least) count from here.
    ///
    /// # Errors
    /// - [`Error::WrongTicket`]: the ticket is for another name or kind. No request is sent.
    /// - [`Error::Lost`]: the hold has ended, or another task has adopted it.
    /// - [`Error::Redis`]: the server fails. If it [may have run](Error::is_indeterminate) the
    ///   request, the hold is released in the background; if not, the ticket is as good as before.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes; or several tasks
    ///   adopt the hold at once, and none gets a majority.
    /// - [`Error::TooFewReplicas`]: too few replicas confirm it; the hold is released.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background if a request was sent.
    pub async fn adopt(&self, ticket: &Ticket) -> Result<MutexGuard, Error> {
        adopt(&request(&self.lock, ticket)?, ticket).await.map(|hold| MutexGuard { hold })
    }
}

impl MutexGuard {
    /// Ends this guard without releasing its hold, which a mutex of the same name continues from
    /// the ticket: in another task, process or service.
    ///
    /// From here on, no task renews the hold: it ends with its TTL unless it is
    /// [adopted](Mutex::adopt) before. To give the next holder a whole TTL, call
    /// [`renew`](crate::Lease::renew) first. The old lease has ended as
    /// [leaked](crate::LeaseEnd::Leaked).
    ///
    /// # Errors
    /// - [`IntoTicketError`], with this guard: the lease has ended.
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<MutexGuard>> {
        self.hold.into_ticket().map_err(|kept| kept.map(|hold| MutexGuard { hold }))
    }
}

impl ReentrantLock {
    /// Continues the hold of a ticket, with its owner and its fencing token, and renews it from now
    /// on; as [`Mutex::adopt`] does. It is the owner of the ticket, whatever owner this lock is
    /// for. Other holds of that owner stay where they are.
    ///
    /// # Errors
    /// - [`Error::WrongTicket`]: the ticket is for another name or kind. No request is sent.
    /// - [`Error::Lost`]: the hold has ended, or another task has adopted it.
    /// - [`Error::Redis`]: the server fails. If it [may have run](Error::is_indeterminate) the
    ///   request, the hold is released in the background; if not, the ticket is as good as before.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes; or several tasks
    ///   adopt the hold at once, and none gets a majority.
    /// - [`Error::TooFewReplicas`]: too few replicas confirm it; the hold is released.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background if a request was sent.
    pub async fn adopt(&self, ticket: &Ticket) -> Result<ReentrantGuard, Error> {
        let hold = adopt(&request(&self.lock, ticket)?, ticket).await?;
        // A ticket of this kind has an owner.
        let owner = ticket.owner().unwrap_or(self.owner()).clone();
        Ok(ReentrantGuard { owner, hold })
    }
}

impl ReentrantGuard {
    /// Ends this guard without releasing its hold, which a lock of the same name continues from the
    /// ticket: in another task, process or service.
    ///
    /// From here on, no task renews the hold: it ends with its TTL unless it is
    /// [adopted](ReentrantLock::adopt) before. To give the next holder a whole TTL, call
    /// [`renew`](crate::Lease::renew) first. The old lease has ended as
    /// [leaked](crate::LeaseEnd::Leaked).
    ///
    /// Other guards of the owner keep their holds.
    ///
    /// # Errors
    /// - [`IntoTicketError`], with this guard: the lease has ended, or with
    ///   [`Nesting::Local`](crate::Nesting::Local) other guards share the hold.
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<ReentrantGuard>> {
        let ReentrantGuard { owner, hold } = self;
        hold.into_ticket().map_err(|kept| kept.map(|hold| ReentrantGuard { owner, hold }))
    }
}

impl RwLock {
    /// Continues the hold to read of a ticket, under its fencing token, and renews it from now on;
    /// as [`Mutex::adopt`] does. Its guard has the owner by which the server knows the hold, also
    /// if it was acquired without one.
    ///
    /// # Errors
    /// - [`Error::WrongTicket`]: the ticket is for another name or side. No request is sent.
    /// - [`Error::Lost`]: the hold has ended, or another task has adopted it.
    /// - [`Error::Redis`]: the server fails. If it [may have run](Error::is_indeterminate) the
    ///   request, the hold is released in the background; if not, the ticket is as good as before.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes; or several tasks
    ///   adopt the hold at once, and none gets a majority.
    /// - [`Error::TooFewReplicas`]: too few replicas confirm it; the hold is released.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background if a request was sent.
    pub async fn adopt_read(&self, ticket: &Ticket) -> Result<RwLockReadGuard, Error> {
        adopt(&request(&self.read, ticket)?, ticket).await.map(|hold| RwLockReadGuard { hold })
    }

    /// Continues the hold to write of a ticket, like [`adopt_read`](RwLock::adopt_read).
    ///
    /// # Errors
    /// - Those of [`adopt_read`](RwLock::adopt_read).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`adopt_read`](RwLock::adopt_read).
    pub async fn adopt_write(&self, ticket: &Ticket) -> Result<RwLockWriteGuard, Error> {
        adopt(&request(&self.write, ticket)?, ticket).await.map(|hold| self.write_guard(hold))
    }
}

impl RwLockReadGuard {
    /// Ends this guard without releasing its hold, which a lock of the same name continues from the
    /// ticket: in another task, process or service.
    ///
    /// From here on, no task renews the hold: it ends with its TTL unless it is
    /// [adopted](RwLock::adopt_read) before. To give the next holder a whole TTL, call
    /// [`renew`](crate::Lease::renew) first. The old lease has ended as
    /// [leaked](crate::LeaseEnd::Leaked).
    ///
    /// # Errors
    /// - [`IntoTicketError`], with this guard: the lease has ended, or other tasks of this client
    ///   [share the hold](crate::Options::local_turn), which a lock with an owner excludes.
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<RwLockReadGuard>> {
        self.hold.into_ticket().map_err(|kept| kept.map(|hold| RwLockReadGuard { hold }))
    }
}

impl RwLockWriteGuard {
    /// Ends this guard without releasing its hold, which a lock of the same name continues from the
    /// ticket: in another task, process or service.
    ///
    /// From here on, no task renews the hold: it ends with its TTL unless it is
    /// [adopted](RwLock::adopt_write) before. To give the next holder a whole TTL, call
    /// [`renew`](crate::Lease::renew) first. The old lease has ended as
    /// [leaked](crate::LeaseEnd::Leaked).
    ///
    /// # Errors
    /// - [`IntoTicketError`], with this guard: the lease has ended.
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<RwLockWriteGuard>> {
        let RwLockWriteGuard { hold, read_options } = self;
        hold.into_ticket().map_err(|kept| kept.map(|hold| RwLockWriteGuard { hold, read_options }))
    }
}

/// The request that continues the hold, if the ticket is for this lock.
fn request(lock: &LockRequest, ticket: &Ticket) -> Result<LockRequest, Error> {
    let differs = if ticket.name() != lock.name.as_str() {
        "name"
    } else if ticket.kind() != lock.kind.name {
        "kind"
    } else {
        return Ok(LockRequest { owner: ticket.owner().cloned(), ..lock.clone() });
    };
    Err(Error::WrongTicket { context: lock.client.context(Operation::Adopt, &lock.name), differs })
}
