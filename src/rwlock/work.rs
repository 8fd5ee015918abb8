//! Work under a read-write lock: [`RwLock::run_read`] and [`RwLock::run_write`].

use std::time::Duration;

use super::RwLock;
use crate::error::Error;
use crate::lease::Lease;

impl RwLock {
    /// Acquires the lock to read, runs `work` while the lease is valid, and releases it, also if
    /// the work fails or panics.
    ///
    /// **What it promises**: `Ok` means that the lease was valid when the work ended, and that the
    /// lock was released, or is in the background while the server fails. If the lease ends first,
    /// the work is dropped at its current await.
    ///
    /// **What it does not**: undo what the work did before it was dropped. Give the resource the
    /// [fencing token](crate::Lease::fencing_token) of the lease.
    ///
    /// Its error may be any that an [`Error`] converts into. If nothing else names it, the work
    /// ends with `Ok::<_, Error>(…)`.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let price = locks.rwlock("prices")?.run_read(async |_| Ok::<_, redlatch::Error>(42)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - That of the work, if it ended before its lease: a failed release is only logged.
    /// - Those of [`read`](RwLock::read): the work has not begun.
    /// - [`Error::Closed`] of [`Operation::Hold`](crate::Operation::Hold): the client was closed,
    ///   and the work dropped.
    /// - [`Error::Lost`]: the lease ended before the work did.
    /// - Those of [`release`](crate::RwLockReadGuard::release) that do not pass: the work is done.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, and the lock is released in the background.
    pub async fn run_read<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.read().await?.hold.run(work).await
    }

    /// Runs `work` like [`run_read`](RwLock::run_read), if the lock is acquired within `limit`,
    /// which does not limit the work. Zero is one try: with [`Error::TimedOut`] it was not free,
    /// and the work has not begun.
    ///
    /// # Errors
    /// - Those of [`read_timeout`](RwLock::read_timeout) and [`run_read`](RwLock::run_read).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`run_read`](RwLock::run_read).
    pub async fn run_read_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.read_timeout(limit).await?.hold.run(work).await
    }

    /// Acquires the lock to write, runs `work` while the lease is valid, and releases it, also if
    /// the work fails or panics.
    ///
    /// **What it promises**: `Ok` means that the lease was valid when the work ended, and that the
    /// lock was released, or is in the background while the server fails. If the lease ends first,
    /// the work is dropped at its current await.
    ///
    /// **What it does not**: undo what the work did before it was dropped. Give the resource the
    /// [fencing token](crate::Lease::fencing_token) of the lease.
    ///
    /// Its error may be any that an [`Error`] converts into. If nothing else names it, the work
    /// ends with `Ok::<_, Error>(…)`.
    ///
    /// ```no_run
    /// # use redlatch::{Error, FencingToken};
    /// # async fn store(price: u64, token: Option<FencingToken>) -> Result<(), Error> { Ok(()) }
    /// # async fn run(locks: redlatch::Locks) -> Result<(), Error> {
    /// let prices = locks.rwlock("prices")?;
    /// prices.run_write(async |lease| store(42, lease.fencing_token()).await).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - That of the work, if it ended before its lease: a failed release is only logged.
    /// - Those of [`write`](RwLock::write): the work has not begun.
    /// - [`Error::Closed`] of [`Operation::Hold`](crate::Operation::Hold): the client was closed,
    ///   and the work dropped.
    /// - [`Error::Lost`]: the lease ended before the work did.
    /// - Those of [`release`](crate::RwLockWriteGuard::release) that do not pass: the work is done.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, and the lock is released in the background.
    pub async fn run_write<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.write().await?.hold.run(work).await
    }

    /// Runs `work` like [`run_write`](RwLock::run_write), if the lock is acquired within `limit`,
    /// which does not limit the work. Zero is one try: with [`Error::TimedOut`] it was not free,
    /// and the work has not begun.
    ///
    /// # Errors
    /// - Those of [`write_timeout`](RwLock::write_timeout) and [`run_write`](RwLock::run_write).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`run_write`](RwLock::run_write).
    pub async fn run_write_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.write_timeout(limit).await?.hold.run(work).await
    }
}
