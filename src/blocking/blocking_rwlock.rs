//! [`RwLock`]: many readers or one writer at a time, for programs without async code.

use std::sync::Arc;
use std::time::Duration;

use super::blocking_guard::{Guard, RwLockReadGuard, RwLockWriteGuard};
use super::client_thread::ClientThread;
use crate::error::Error;
use crate::inspection::RwInspection;
use crate::lease::Lease;
use crate::name::Name;
use crate::owner::Owner;
use crate::queries::HolderId;
use crate::rwlock;

/// A lock with many readers or one writer at a time.
///
/// It is the twin of [`RwLock`](crate::RwLock), which says what it promises.
///
/// On a tokio runtime, each call that returns an [`Error`] returns
/// [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime) in an [`Error::Config`], and
/// has sent nothing.
#[derive(Clone, Debug)]
pub struct RwLock {
    lock: rwlock::RwLock,
    thread: Arc<ClientThread>,
}

impl RwLock {
    pub(super) fn new(lock: rwlock::RwLock, thread: &Arc<ClientThread>) -> RwLock {
        RwLock { lock, thread: Arc::clone(thread) }
    }

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

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        self.lock.name()
    }

    /// Returns the holders and the waiters of both sides, as the server reports them at this
    /// moment.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::RwLock::inspect).
    pub fn inspect(&self) -> Result<RwInspection, Error> {
        self.thread.call(self.lock.inspect())
    }

    /// Returns whether the lock is held now.
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::RwLock::inspect).
    pub fn is_locked(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.is_locked())
    }

    /// Returns whether the server still has a hold of this holder. See
    /// [`is_held_by`](crate::RwLock::is_held_by).
    ///
    /// # Errors
    /// - Those of [`inspect`](crate::RwLock::inspect).
    pub fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        self.thread.call(self.lock.is_held_by(holder))
    }

    /// Acquires the lock to read, waiting until no other owner writes. See
    /// [`read`](crate::RwLock::read).
    ///
    /// # Errors
    /// - Those of [`read`](crate::RwLock::read).
    pub fn read(&self) -> Result<RwLockReadGuard, Error> {
        Guard::acquire(&self.thread, self.lock.read())
    }

    /// Acquires the lock to read like [`read`](RwLock::read), within `limit`; zero means one try.
    /// See [`read_timeout`](crate::RwLock::read_timeout).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed.
    /// - Those of [`read`](crate::RwLock::read).
    pub fn read_timeout(&self, limit: Duration) -> Result<RwLockReadGuard, Error> {
        Guard::acquire(&self.thread, self.lock.read_timeout(limit))
    }

    /// Acquires the lock to read if that needs no wait; returns `None` otherwise. See
    /// [`try_read`](crate::RwLock::try_read).
    ///
    /// # Errors
    /// - Those of [`try_read`](crate::RwLock::try_read).
    pub fn try_read(&self) -> Result<Option<RwLockReadGuard>, Error> {
        Guard::try_acquire(&self.thread, self.lock.try_read())
    }

    /// Acquires the lock to read, runs `work`, and releases it, also if the work fails or panics.
    /// See [`Mutex::run`](super::Mutex::run) for what it promises.
    ///
    /// # Errors
    /// - That of the work, which then comes first: a failed release is only logged.
    /// - Those of [`read`](RwLock::read): the work has not begun.
    /// - Those of [`release`](Guard::release): the work is done, and its result is dropped.
    pub fn run_read<T, E: From<Error>>(&self, work: impl FnOnce(Lease) -> Result<T, E>) -> Result<T, E> {
        self.read()?.run(work)
    }

    /// Runs `work` like [`run_read`](RwLock::run_read), if the lock is acquired within `limit`,
    /// which does not limit the work.
    ///
    /// # Errors
    /// - Those of [`read_timeout`](RwLock::read_timeout) and [`run_read`](RwLock::run_read).
    pub fn run_read_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl FnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.read_timeout(limit)?.run(work)
    }

    /// Acquires the lock to write, waiting until no other owner holds it. See
    /// [`write`](crate::RwLock::write).
    ///
    /// # Errors
    /// - Those of [`write`](crate::RwLock::write).
    pub fn write(&self) -> Result<RwLockWriteGuard, Error> {
        Guard::acquire(&self.thread, self.lock.write())
    }

    /// Acquires the lock to write like [`write`](RwLock::write), within `limit`; zero means one
    /// try. See [`write_timeout`](crate::RwLock::write_timeout).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed.
    /// - Those of [`write`](crate::RwLock::write).
    pub fn write_timeout(&self, limit: Duration) -> Result<RwLockWriteGuard, Error> {
        Guard::acquire(&self.thread, self.lock.write_timeout(limit))
    }

    /// Acquires the lock to write if that needs no wait; returns `None` otherwise. See
    /// [`try_write`](crate::RwLock::try_write).
    ///
    /// # Errors
    /// - Those of [`try_write`](crate::RwLock::try_write).
    pub fn try_write(&self) -> Result<Option<RwLockWriteGuard>, Error> {
        Guard::try_acquire(&self.thread, self.lock.try_write())
    }

    /// Acquires the lock to write, runs `work`, and releases it, also if the work fails or panics.
    /// See [`Mutex::run`](super::Mutex::run) for what it promises.
    ///
    /// # Errors
    /// - That of the work, which then comes first: a failed release is only logged.
    /// - Those of [`write`](RwLock::write): the work has not begun.
    /// - Those of [`release`](Guard::release): the work is done, and its result is dropped.
    pub fn run_write<T, E: From<Error>>(&self, work: impl FnOnce(Lease) -> Result<T, E>) -> Result<T, E> {
        self.write()?.run(work)
    }

    /// Runs `work` like [`run_write`](RwLock::run_write), if the lock is acquired within `limit`,
    /// which does not limit the work.
    ///
    /// # Errors
    /// - Those of [`write_timeout`](RwLock::write_timeout) and [`run_write`](RwLock::run_write).
    pub fn run_write_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl FnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.write_timeout(limit)?.run(work)
    }

    /// Revokes the lock from all readers. Returns false if there was none. See
    /// [`force_release_read`](crate::RwLock::force_release_read).
    ///
    /// # Errors
    /// - Those of [`force_release_read`](crate::RwLock::force_release_read).
    pub fn force_release_read(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.force_release_read())
    }

    /// Revokes the lock from the writer. Returns false if there was none. See
    /// [`force_release_write`](crate::RwLock::force_release_write).
    ///
    /// # Errors
    /// - Those of [`force_release_write`](crate::RwLock::force_release_write).
    pub fn force_release_write(&self) -> Result<bool, Error> {
        self.thread.call(self.lock.force_release_write())
    }
}
