//! [`Mutex`] and [`ReentrantLock`]: one holder at a time, for programs without async code.

use std::sync::Arc;
use std::time::Duration;

use super::blocking_guard::{Guard, MutexGuard, ReentrantGuard};
use super::client_thread::ClientThread;
use crate::error::Error;
use crate::inspection::Inspection;
use crate::lease::Lease;
use crate::name::Name;
use crate::owner::Owner;
use crate::queries::HolderId;
use crate::{mutex, reentrant};

/// A lock with one holder at a time.
///
/// It is the twin of [`Mutex`](crate::Mutex), which says what it promises.
///
/// On a tokio runtime, each call that returns an [`Error`] returns
/// [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime) in an [`Error::Config`], and
/// has sent nothing.
#[derive(Clone, Debug)]
pub struct Mutex {
    lock: mutex::Mutex,
    thread: Arc<ClientThread>,
}

impl Mutex {
    pub(super) fn new(lock: mutex::Mutex, thread: &Arc<ClientThread>) -> Mutex {
        Mutex { lock, thread: Arc::clone(thread) }
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        self.lock.name()
    }

    /// Returns the holder and the number of waiters, as the server reports them at this moment.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::Mutex::inspect).
    pub fn inspect(&self) -> Result<Inspection, Error> {
        self.thread.call(self.lock.inspect())
    }

    /// Returns whether the lock is held now.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::Mutex::inspect).
    pub fn is_locked(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.is_locked())
    }

    /// Returns whether the server still has the hold of this lease. See
    /// [`is_held_by`](crate::Mutex::is_held_by).
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::Mutex::inspect).
    pub fn is_held_by(&self, lease: &Lease) -> Result<bool, Error> {
        self.thread.call(self.lock.is_held_by(lease))
    }

    /// Acquires the mutex, waiting until it is free. See [`lock`](crate::Mutex::lock).
    ///
    /// # Errors
    /// - Those of [`lock`](crate::Mutex::lock).
    pub fn lock(&self) -> Result<MutexGuard, Error> {
        Guard::acquire(&self.thread, self.lock.lock())
    }

    /// Acquires the mutex like [`lock`](Mutex::lock), within `limit`; zero means one try. See
    /// [`lock_timeout`](crate::Mutex::lock_timeout).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed.
    /// - Those of [`lock`](crate::Mutex::lock).
    pub fn lock_timeout(&self, limit: Duration) -> Result<MutexGuard, Error> {
        Guard::acquire(&self.thread, self.lock.lock_timeout(limit))
    }

    /// Acquires the mutex if that needs no wait; returns `None` otherwise. See
    /// [`try_lock`](crate::Mutex::try_lock).
    ///
    /// # Errors
    /// - Those of [`try_lock`](crate::Mutex::try_lock).
    pub fn try_lock(&self) -> Result<Option<MutexGuard>, Error> {
        Guard::try_acquire(&self.thread, self.lock.try_lock())
    }

    /// Acquires the mutex, runs `work`, and releases it, also if the work fails or panics.
    ///
    /// **What it promises**: `Ok` means that the lease was valid when the work ended, and that the
    /// lock was released.
    ///
    /// **What it does not**: stop the work if the lease is lost. Call [`Lease::check`] before each
    /// step, and send its token with each write.
    ///
    /// # Errors
    /// - That of the work, which then comes first: a failed release is only logged.
    /// - Those of [`lock`](Mutex::lock): the work has not begun.
    /// - Those of [`release`](Guard::release): the work is done, and its result is dropped.
    pub fn run<T, E: From<Error>>(&self, work: impl FnOnce(Lease) -> Result<T, E>) -> Result<T, E> {
        self.lock()?.run(work)
    }

    /// Runs `work` like [`run`](Mutex::run), if the lock is acquired within `limit`, which does not
    /// limit the work.
    ///
    /// # Errors
    /// - Those of [`lock_timeout`](Mutex::lock_timeout) and [`run`](Mutex::run).
    pub fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl FnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock_timeout(limit)?.run(work)
    }

    /// Revokes the mutex from its holder. Returns false if it was free. See
    /// [`force_release`](crate::Mutex::force_release).
    ///
    /// # Errors
    /// - Those of [`force_release`](crate::Mutex::force_release).
    pub fn force_release(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.force_release())
    }
}

/// A lock with one owner at a time, which may acquire it repeatedly.
///
/// It is the twin of [`ReentrantLock`](crate::ReentrantLock), which says what it promises.
///
/// On a tokio runtime, each call that returns an [`Error`] returns
/// [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime) in an [`Error::Config`], and
/// has sent nothing.
#[derive(Clone, Debug)]
pub struct ReentrantLock {
    lock: reentrant::ReentrantLock,
    thread: Arc<ClientThread>,
}

impl ReentrantLock {
    pub(super) fn new(lock: reentrant::ReentrantLock, thread: &Arc<ClientThread>) -> ReentrantLock {
        ReentrantLock { lock, thread: Arc::clone(thread) }
    }

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

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        self.lock.name()
    }

    /// Returns the owner, its holds and the number of waiters, as the server reports them at this
    /// moment.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::ReentrantLock::inspect).
    pub fn inspect(&self) -> Result<Inspection, Error> {
        self.thread.call(self.lock.inspect())
    }

    /// Returns whether the lock is held now.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::ReentrantLock::inspect).
    pub fn is_locked(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.is_locked())
    }

    /// Returns whether the server still has a hold of this holder. See
    /// [`is_held_by`](crate::ReentrantLock::is_held_by).
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::ReentrantLock::inspect).
    pub fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        self.thread.call(self.lock.is_held_by(holder))
    }

    /// Acquires the lock, waiting until no other owner holds it. See
    /// [`lock`](crate::ReentrantLock::lock).
    ///
    /// # Errors
    /// - Those of [`lock`](crate::ReentrantLock::lock).
    pub fn lock(&self) -> Result<ReentrantGuard, Error> {
        Guard::acquire(&self.thread, self.lock.lock())
    }

    /// Acquires the lock like [`lock`](ReentrantLock::lock), within `limit`; zero means one try.
    /// See [`lock_timeout`](crate::ReentrantLock::lock_timeout).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed.
    /// - Those of [`lock`](crate::ReentrantLock::lock).
    pub fn lock_timeout(&self, limit: Duration) -> Result<ReentrantGuard, Error> {
        Guard::acquire(&self.thread, self.lock.lock_timeout(limit))
    }

    /// Acquires the lock if that needs no wait; returns `None` otherwise. See
    /// [`try_lock`](crate::ReentrantLock::try_lock).
    ///
    /// # Errors
    /// - Those of [`try_lock`](crate::ReentrantLock::try_lock).
    pub fn try_lock(&self) -> Result<Option<ReentrantGuard>, Error> {
        Guard::try_acquire(&self.thread, self.lock.try_lock())
    }

    /// Acquires the lock, runs `work`, and releases it, also if the work fails or panics. See
    /// [`Mutex::run`](super::Mutex::run) for what it promises.
    ///
    /// # Errors
    /// - That of the work, which then comes first: a failed release is only logged.
    /// - Those of [`lock`](ReentrantLock::lock): the work has not begun.
    /// - Those of [`release`](Guard::release): the work is done, and its result is dropped.
    pub fn run<T, E: From<Error>>(&self, work: impl FnOnce(Lease) -> Result<T, E>) -> Result<T, E> {
        self.lock()?.run(work)
    }

    /// Runs `work` like [`run`](ReentrantLock::run), if the lock is acquired within `limit`, which
    /// does not limit the work.
    ///
    /// # Errors
    /// - Those of [`lock_timeout`](ReentrantLock::lock_timeout) and [`run`](ReentrantLock::run).
    pub fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl FnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock_timeout(limit)?.run(work)
    }

    /// Revokes the lock from its owner, with all holds. Returns false if it was free. See
    /// [`force_release`](crate::ReentrantLock::force_release).
    ///
    /// # Errors
    /// - Those of [`force_release`](crate::ReentrantLock::force_release).
    pub fn force_release(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.force_release())
    }
}
