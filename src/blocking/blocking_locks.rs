//! [`Mutex`], [`ReentrantLock`], [`RwLock`] and [`All`] for programs without async code.
//!
//! A call of each waits for the async one of the same name. What the locks have in common is
//! written once, in macros, since it differs only in names and types.

use std::sync::Arc;
use std::time::Duration;

use super::blocking_guard::{AllGuard, Guard, MutexGuard, ReentrantGuard, RwLockReadGuard, RwLockWriteGuard};
use super::client_thread::ClientThread;
use crate::all::{self, Leases, Member};
use crate::error::Error;
use crate::inspection::{Inspection, RwInspection};
use crate::lease::Lease;
use crate::name::Name;
use crate::owner::Owner;
use crate::queries::HolderId;
use crate::ticket::Ticket;
use crate::{mutex, reentrant, rwlock};

/// Where `[its twin]` leads: to the async method of the same name.
macro_rules! its_twin {
    ($lock:ident $method:ident) => {
        concat!("[its twin]: crate::", stringify!($lock), "::", stringify!($method))
    };
}

/// A line about another method of the same lock.
macro_rules! about {
    ($before:literal $method:ident $after:literal) => {
        concat!($before, "[`", stringify!($method), "`](Self::", stringify!($method), ")", $after)
    };
}

macro_rules! lock {
    ($(#[$first_line:meta])* $lock:ident of $twin:ty) => {
        $(#[$first_line])*
        ///
        #[doc = concat!("It is the twin of [`", stringify!($lock), "`](crate::", stringify!($lock), "),")]
        /// which says what it promises.
        ///
        /// On a tokio runtime, each call that returns an [`Error`] returns
        /// [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime) in an
        /// [`Error::Config`], and has sent nothing.
        #[derive(Clone, Debug)]
        pub struct $lock {
            lock: $twin,
            thread: Arc<ClientThread>,
        }

        impl $lock {
            pub(super) fn new(lock: $twin, thread: &Arc<ClientThread>) -> $lock {
                $lock { lock, thread: Arc::clone(thread) }
            }
        }

        impl From<$lock> for $twin {
            /// Returns the lock of the async client, whose clones do not keep the thread.
            fn from(lock: $lock) -> $twin {
                lock.lock
            }
        }
    };
}

macro_rules! queries {
    ($lock:ident: $inspection:ty, $holder:ty, $($force:ident)*) => {
        impl $lock {
            /// Returns the name of the lock.
            pub fn name(&self) -> &Name {
                self.lock.name()
            }

            /// Returns the holders and the waiters, as the server reports them at this moment.
            ///
            /// # Errors
            /// - Those of [its twin].
            ///
            #[doc = its_twin!($lock inspect)]
            pub fn inspect(&self) -> Result<$inspection, Error> {
                self.thread.call(self.lock.inspect())
            }

            /// Returns whether the lock is held now.
            ///
            /// # Errors
            /// - Those of [its twin].
            ///
            #[doc = its_twin!($lock is_locked)]
            pub fn is_locked(&self) -> Result<bool, Error> {
                self.thread.call(self.lock.is_locked())
            }

            /// Returns whether the server still has a hold of this holder, as [its twin] does.
            ///
            /// # Errors
            /// - Those of [its twin].
            ///
            #[doc = its_twin!($lock is_held_by)]
            pub fn is_held_by(&self, holder: &$holder) -> Result<bool, Error> {
                self.thread.call(self.lock.is_held_by(holder))
            }

            $(
                /// Revokes the lock as [its twin] does. Returns false if there was no such holder.
                ///
                /// # Errors
                /// - Those of [its twin].
                ///
                #[doc = its_twin!($lock $force)]
                pub fn $force(&self) -> Result<bool, Error> {
                    self.thread.call(self.lock.$force())
                }
            )*
        }
    };
}

/// The ways to a guard of a lock, or of one of its sides.
macro_rules! acquires {
    ($what:literal $lock:ident -> $guard:ident, $lease:ty: $acquire:ident $acquire_timeout:ident
     $try_acquire:ident $run:ident $run_timeout:ident $($adopt:ident)?) => {
        impl $lock {
            #[doc = concat!("Acquires ", $what, ", and waits for as long as that takes, as")]
            /// [its twin] does.
            ///
            /// # Errors
            /// - Those of [its twin].
            ///
            #[doc = its_twin!($lock $acquire)]
            pub fn $acquire(&self) -> Result<$guard, Error> {
                Guard::acquire(&self.thread, self.lock.$acquire())
            }

            #[doc = concat!("Acquires ", $what, ", and waits for at most `limit`, as")]
            /// [its twin] does. A limit of zero means one try.
            ///
            /// # Errors
            /// - [`Error::TimedOut`]: the limit elapsed.
            /// - The others of [its twin].
            ///
            #[doc = its_twin!($lock $acquire_timeout)]
            pub fn $acquire_timeout(&self, limit: Duration) -> Result<$guard, Error> {
                Guard::acquire(&self.thread, self.lock.$acquire_timeout(limit))
            }

            #[doc = concat!("Acquires ", $what, " if that needs no wait, as [its twin] does;")]
            /// returns `None` otherwise.
            ///
            /// # Errors
            /// - Those of [its twin].
            ///
            #[doc = its_twin!($lock $try_acquire)]
            pub fn $try_acquire(&self) -> Result<Option<$guard>, Error> {
                Guard::try_acquire(&self.thread, self.lock.$try_acquire())
            }

            #[doc = concat!("Acquires ", $what, ", runs `work`, and releases what it acquired, also")]
            /// if the work fails or panics.
            ///
            /// **What it promises**: `Ok` means that the lease was valid when the work ended, and
            /// that the lock was released, or is in the background while the server fails.
            ///
            /// **What it does not**: stop the work if the lease is lost. Call `check` of the lease
            /// before each step, and send its token with each write.
            ///
            /// # Errors
            /// - That of the work, if it ended before its lease: a failed release is only logged.
            #[doc = about!("- Those of " $acquire ": the work has not begun.")]
            /// - Those of [`release`](Guard::release) that do not pass: the work is done.
            pub fn $run<T, E: From<Error>>(
                &self,
                work: impl FnOnce($lease) -> Result<T, E>,
            ) -> Result<T, E> {
                self.$acquire()?.run(work)
            }

            #[doc = about!("Runs `work` like " $run ", after waiting for at most `limit`, which does")]
            /// not limit the work.
            ///
            /// # Errors
            #[doc = about!("- Those of " $run ".")]
            #[doc = about!("- Those of " $acquire_timeout ": the work has not begun.")]
            pub fn $run_timeout<T, E: From<Error>>(
                &self,
                limit: Duration,
                work: impl FnOnce($lease) -> Result<T, E>,
            ) -> Result<T, E> {
                self.$acquire_timeout(limit)?.run(work)
            }

            $(
                /// Continues the hold of a ticket, as [its twin] does. The ticket may come from an
                /// async program.
                ///
                /// # Errors
                /// - Those of [its twin].
                ///
                #[doc = its_twin!($lock $adopt)]
                pub fn $adopt(&self, ticket: &Ticket) -> Result<$guard, Error> {
                    Guard::acquire(&self.thread, self.lock.$adopt(ticket))
                }
            )?
        }
    };
}

lock! {
    /// A lock with one holder at a time.
    Mutex of mutex::Mutex
}
queries!(Mutex: Inspection, Lease, force_release);
acquires!("the mutex" Mutex -> MutexGuard, Lease: lock lock_timeout try_lock run run_timeout adopt);

lock! {
    /// A lock with one owner at a time, which may acquire it repeatedly.
    ReentrantLock of reentrant::ReentrantLock
}
queries!(ReentrantLock: Inspection, impl HolderId, force_release);
acquires!("the lock" ReentrantLock -> ReentrantGuard, Lease:
    lock lock_timeout try_lock run run_timeout adopt);

impl ReentrantLock {
    /// Returns the same lock for another owner. See
    /// [`with_owner`](crate::ReentrantLock::with_owner).
    #[must_use = "it returns the lock for the owner, and leaves this one as it is"]
    pub fn with_owner(&self, owner: &Owner) -> ReentrantLock {
        ReentrantLock::new(self.lock.with_owner(owner), &self.thread)
    }

    /// Returns the owner of the holds.
    pub fn owner(&self) -> &Owner {
        self.lock.owner()
    }
}

lock! {
    /// A lock with many readers or one writer at a time.
    RwLock of rwlock::RwLock
}
queries!(RwLock: RwInspection, impl HolderId, force_release_read force_release_write);
acquires!("the lock to read" RwLock -> RwLockReadGuard, Lease:
    read read_timeout try_read run_read run_read_timeout adopt_read);
acquires!("the lock to write" RwLock -> RwLockWriteGuard, Lease:
    write write_timeout try_write run_write run_write_timeout adopt_write);

impl RwLock {
    /// Returns the same lock for `owner`: each hold acquired through it belongs to this owner. See
    /// [`with_owner`](crate::RwLock::with_owner).
    #[must_use = "it returns the lock for the owner, and leaves this one as it is"]
    pub fn with_owner(&self, owner: &Owner) -> RwLock {
        RwLock::new(self.lock.with_owner(owner), &self.thread)
    }

    /// Returns the owner that the lock was [made for](RwLock::with_owner).
    pub fn owner(&self) -> Option<&Owner> {
        self.lock.owner()
    }
}

lock! {
    /// Several locks of any kinds that are acquired together, from
    /// [`Locks::all`](super::Locks::all).
    All of all::All
}
acquires!("all locks" All -> AllGuard, Leases: lock lock_timeout try_lock run run_timeout);

impl All {
    /// Returns the names of the locks, in the order in which they are acquired.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.lock.names()
    }
}

impl From<Mutex> for Member {
    fn from(lock: Mutex) -> Member {
        Member::Mutex(lock.into())
    }
}

impl From<ReentrantLock> for Member {
    fn from(lock: ReentrantLock) -> Member {
        Member::Reentrant(lock.into())
    }
}
