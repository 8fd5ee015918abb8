//! What reading and writing are held by.

use std::fmt;

use super::{DOWNGRADE, READ, reading};
use crate::error::Error;
use crate::lease::{Lease, OwnedLease};
use crate::owner::Owner;

/// A hold to read. Its lease is renewed for as long as this lives.
///
/// # Release on drop is not immediate
/// Dropped, it is released by a task of the client, soon, and nobody hears of a failure. Call
/// [`release`](RwLockReadGuard::release) to be sure. If the process ends first, the ttl ends the hold.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct RwLockReadGuard {
    owner: Option<Owner>,
    held: OwnedLease,
}

impl RwLockReadGuard {
    pub(super) fn new(owner: Option<&Owner>, held: OwnedLease) -> RwLockReadGuard {
        RwLockReadGuard { owner: owner.cloned(), held }
    }

    /// The lease: whether it still stands, until when, and its [fencing token](crate::FencingToken).
    pub fn lease(&self) -> &Lease {
        self.held.lease()
    }

    /// The owner that the lock was [bound to](crate::RwLock::with_owner); `None` if it was not.
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Releases this hold and waits until that is done.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; another client may have written meanwhile.
    /// - [`Error::NotHeld`]: the server had ended the hold before the client noticed; likewise.
    /// - [`Error::Unconfirmed`]: an answer was lost, and the lock has had another holder since.
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server failed three times in a row,
    ///   for a [node timeout](crate::Options::node_timeout) each at most. The release continues in
    ///   the background, or [took effect](Error::is_indeterminate) already.
    /// - [`Error::WrongType`], [`Error::Corrupt`], [`Error::Reply`]: the lock's keys hold something
    ///   else, or the server answered what the script never answers.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended; the lock stays held until its TTL
    ///   expires.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.held.release().await
    }

    /// Ends the renewal without releasing: the hold stays until its ttl is over.
    pub fn leak(self) {
        self.held.leak();
    }
}

impl fmt::Debug for RwLockReadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("RwLockReadGuard");
        if let Some(owner) = &self.owner {
            text.field("owner", owner);
        }
        text.field("lease", self.lease()).finish()
    }
}

/// A hold to write. Its lease is renewed for as long as this lives.
///
/// # Release on drop is not immediate
/// Dropped, it is released by a task of the client, soon, and nobody hears of a failure. Call
/// [`release`](RwLockWriteGuard::release) to be sure. If the process ends first, the ttl frees the lock.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct RwLockWriteGuard {
    owner: Option<Owner>,
    held: OwnedLease,
}

impl RwLockWriteGuard {
    pub(super) fn new(owner: Option<&Owner>, held: OwnedLease) -> RwLockWriteGuard {
        RwLockWriteGuard { owner: owner.cloned(), held }
    }

    /// The lease: whether it still stands, until when, and its fencing token.
    pub fn lease(&self) -> &Lease {
        self.held.lease()
    }

    /// Goes from writing to reading without an instant between: nobody writes in between, and readers who wait
    /// are let in, unless the owner has other holds to write. The token stays; the lease is another one, for the
    /// [`read_ttl`](crate::Options::read_ttl). The old one says "lost" from now on.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; the work may not have been alone.
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server fails. The hold is released
    ///   in the background, whether it [was changed](Error::is_indeterminate) or not.
    /// - [`Error::WrongType`], [`Error::Corrupt`], [`Error::Reply`]: the lock's keys hold something
    ///   else, or the server answered what the script never answers.
    /// - [`Error::Closed`], [`Error::RuntimeEnded`]: the client was closed, or its runtime has
    ///   ended.
    ///
    /// # Cancel safety
    /// Dropped, the hold is given back in the background, whether it was changed or not.
    pub async fn downgrade(self) -> Result<RwLockReadGuard, Error> {
        let options = reading(self.held.options());
        let held = self.held.convert(&DOWNGRADE, &READ, options).await?;
        Ok(RwLockReadGuard { owner: self.owner, held })
    }

    /// The owner that the lock was [bound to](crate::RwLock::with_owner); `None` if it was not.
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Releases this hold and waits until that is done.
    ///
    /// # Errors
    /// As [`RwLockReadGuard::release`]; after [`Error::Lost`] or [`Error::NotHeld`] the work may not have been alone.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.held.release().await
    }

    /// Ends the renewal without releasing: the hold stays until its ttl is over.
    pub fn leak(self) {
        self.held.leak();
    }
}

impl fmt::Debug for RwLockWriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("RwLockWriteGuard");
        if let Some(owner) = &self.owner {
            text.field("owner", owner);
        }
        text.field("lease", self.lease()).finish()
    }
}
