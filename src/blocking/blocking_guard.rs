//! [`Guard`]: holds a lock of any kind for a program without async code.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::client_thread::ClientThread;
use crate::all::{self, Leases};
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::lease::{Lease, conclude};
use crate::owner::Owner;
use crate::ticket::{IntoTicketError, Ticket};
use crate::{mutex, reentrant, rwlock};

/// A guard of the async client.
pub trait AsyncGuard {
    /// What work under the guard gets.
    type Lease: Clone;
    fn lease(&self) -> &Self::Lease;
    fn release(self) -> impl Future<Output = Result<(), Error>>;
}

/// A guard of one lock.
pub trait SoleGuard: AsyncGuard<Lease = Lease> + Sized {
    fn leak(self);
    fn into_ticket(self) -> Result<Ticket, IntoTicketError<Self>>;
}

/// Holds a lock. The client's thread renews its lease while it lives, whatever the program does.
///
/// Dropping the guard releases the lock in the background, soon, and failures are only logged: see
/// [`Locks`](super::Locks#the-end) for the end of the program. A drop never blocks, unless it is
/// the client's last.
#[must_use = "if unused, the lock is released at once"]
#[clippy::has_significant_drop]
pub struct Guard<G: AsyncGuard> {
    /// Dropped before the thread, which releases it.
    guard: G,
    thread: Arc<ClientThread>,
}

/// Holds a [`Mutex`](super::Mutex): the twin of [`MutexGuard`](crate::MutexGuard).
pub type MutexGuard = Guard<mutex::MutexGuard>;
/// Holds a [`ReentrantLock`](super::ReentrantLock) once: the twin of
/// [`ReentrantGuard`](crate::ReentrantGuard).
pub type ReentrantGuard = Guard<reentrant::ReentrantGuard>;
/// Holds a [`RwLock`](super::RwLock) to read: the twin of
/// [`RwLockReadGuard`](crate::RwLockReadGuard).
pub type RwLockReadGuard = Guard<rwlock::RwLockReadGuard>;
/// Holds a [`RwLock`](super::RwLock) to write: the twin of
/// [`RwLockWriteGuard`](crate::RwLockWriteGuard).
pub type RwLockWriteGuard = Guard<rwlock::RwLockWriteGuard>;
/// Holds the locks of an [`All`](super::All): the twin of [`AllGuard`](crate::AllGuard).
pub type AllGuard = Guard<all::AllGuard>;

impl<G: AsyncGuard> Guard<G> {
    /// Waits until the lock is acquired.
    pub(super) fn acquire(
        thread: &Arc<ClientThread>,
        call: impl Future<Output = Result<G, Error>>,
    ) -> Result<Guard<G>, Error> {
        thread.call(call).map(|guard| Guard { guard, thread: Arc::clone(thread) })
    }

    /// Waits for one try.
    pub(super) fn try_acquire(
        thread: &Arc<ClientThread>,
        call: impl Future<Output = Result<Option<G>, Error>>,
    ) -> Result<Option<Guard<G>>, Error> {
        Ok(thread.call(call)?.map(|guard| Guard { guard, thread: Arc::clone(thread) }))
    }

    /// Runs the work and releases the lock, whatever the outcome; a panic drops this guard.
    pub(super) fn run<T, E: From<Error>>(self, work: impl FnOnce(G::Lease) -> Result<T, E>) -> Result<T, E> {
        let outcome = work(self.guard.lease().clone());
        conclude(outcome, self.release())
    }

    /// Releases the lock and waits until that is done.
    ///
    /// # Errors
    /// - [`Error::Config`] with [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime):
    ///   the thread is on a tokio runtime. The lock is released in the background.
    /// - Those of [`release`](crate::MutexGuard::release) of the async guard.
    pub fn release(self) -> Result<(), Error> {
        let Guard { guard, thread } = self;
        thread.call(guard.release())
    }
}

impl<G: SoleGuard> Guard<G> {
    /// Returns the lease, which says whether it is valid, until when, and with which fencing token.
    pub fn lease(&self) -> &Lease {
        self.guard.lease()
    }

    /// Returns the fencing token while the lease is valid. Call it before each step of the work,
    /// and send the token with each write. See [`Lease::check`].
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease ended: another client may hold the lock.
    /// - [`Error::Closed`]: the client was [closed](super::Locks::close).
    pub fn check(&self) -> Result<Option<FencingToken>, Error> {
        self.lease().check()
    }

    /// Extends the lease to one TTL from now, and returns until when it is valid then: for
    /// [`Renewal::Never`](crate::Renewal::Never), or before [`into_ticket`](Guard::into_ticket).
    ///
    /// # Errors
    /// - Those of [`Lease::renew`].
    pub fn renew(&self) -> Result<Instant, Error> {
        self.thread.call(self.lease().renew())
    }

    /// Ends this guard without releasing its hold, which a lock of the same name continues from the
    /// ticket, in this program or another. See [`into_ticket`](crate::MutexGuard::into_ticket). It
    /// sends no request.
    ///
    /// # Errors
    /// - [`IntoTicketError`], with this guard: the lease has ended, or other guards or tasks share
    ///   the hold.
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<Guard<G>>> {
        let Guard { guard, thread } = self;
        guard.into_ticket().map_err(|error| error.map(|guard| Guard { guard, thread }))
    }

    /// Ends the renewal without releasing: the lock stays held until its TTL expires.
    pub fn leak(self) {
        self.guard.leak();
    }
}

impl AllGuard {
    /// Returns the leases, which say until when each lock is held, and with which fencing token.
    pub fn leases(&self) -> &Leases {
        self.guard.leases()
    }

    /// Returns an error once one of the leases has ended. See [`Leases::check`].
    ///
    /// # Errors
    /// - Those of [`Leases::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.leases().check()
    }
}

impl ReentrantGuard {
    /// Returns the owner of this hold.
    pub fn owner(&self) -> &Owner {
        self.guard.owner()
    }
}

impl RwLockReadGuard {
    /// Returns the owner that the lock was made for, if there is one.
    pub fn owner(&self) -> Option<&Owner> {
        self.guard.owner()
    }
}

impl RwLockWriteGuard {
    /// Returns the owner that the lock was made for, if there is one.
    pub fn owner(&self) -> Option<&Owner> {
        self.guard.owner()
    }

    /// Converts the hold to write into a hold to read, in one step. See
    /// [`downgrade`](crate::RwLockWriteGuard::downgrade).
    ///
    /// # Errors
    /// - [`Error::Config`] with [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime):
    ///   the thread is on a tokio runtime. The lock is released in the background.
    /// - Those of [`downgrade`](crate::RwLockWriteGuard::downgrade) of the async guard.
    pub fn downgrade(self) -> Result<RwLockReadGuard, Error> {
        let Guard { guard, thread } = self;
        Guard::acquire(&thread, guard.downgrade())
    }
}

impl<G: AsyncGuard + fmt::Debug> fmt::Debug for Guard<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}

/// Forwards to the guards' own methods of the same names.
macro_rules! async_guard {
    ($guard:ty, $lease:ident() -> $leases:ty) => {
        impl AsyncGuard for $guard {
            type Lease = $leases;

            fn lease(&self) -> &$leases {
                self.$lease()
            }

            fn release(self) -> impl Future<Output = Result<(), Error>> {
                self.release()
            }
        }
    };
}

macro_rules! sole_guards {
    ($($guard:ty),*) => {$(
        async_guard!($guard, lease() -> Lease);

        impl SoleGuard for $guard {
            fn leak(self) {
                self.leak();
            }

            fn into_ticket(self) -> Result<Ticket, IntoTicketError<$guard>> {
                self.into_ticket()
            }
        }
    )*};
}

async_guard!(all::AllGuard, leases() -> Leases);
sole_guards!(mutex::MutexGuard, reentrant::ReentrantGuard, rwlock::RwLockReadGuard, rwlock::RwLockWriteGuard);
