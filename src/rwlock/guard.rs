//! [`RwLockReadGuard`] and [`RwLockWriteGuard`]: the guards of the two sides.

use std::fmt;
use std::sync::Arc;

use super::READ;
use crate::error::Error;
use crate::lease::{Hold, Lease};
use crate::options::Options;
use crate::owner::Owner;

/// Holds the lock to read, and renews its lease while it lives.
///
/// # Release on drop is not immediate
/// Dropping the guard releases this hold in a background task, soon, and failures are only logged.
/// Call [`release`](RwLockReadGuard::release) to learn the outcome. If the process ends first, the
/// lock stays held until the TTL expires.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct RwLockReadGuard {
    pub(crate) hold: Hold,
}

impl RwLockReadGuard {
    /// Returns the lease, which says whether it is valid, until when, and with which [fencing
    /// token](crate::FencingToken).
    pub fn lease(&self) -> &Lease {
        self.hold.lease()
    }

    /// Returns the owner that the lock was [made for](crate::RwLock::with_owner), if there is one.
    pub fn owner(&self) -> Option<&Owner> {
        self.hold.owner()
    }

    /// Releases this hold and waits until that is done. It returns at once while other tasks of
    /// this client [share the hold](crate::Options::local_turn), or are about to join it.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; another client may have written meanwhile.
    /// - [`Error::NotHeld`]: the server had ended the hold before the client noticed; another
    ///   client may have written meanwhile.
    /// - [`Error::Unconfirmed`]: a reply was lost, and the lock has had another holder since.
    /// - [`Error::Redis`]: the server failed three times in a row. Each try takes at most a [node
    ///   timeout](crate::Options::node_timeout) for connecting, and one of silence. The release
    ///   continues in the background, or [has taken effect](Error::is_indeterminate).
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended; the lock stays held until its TTL
    ///   expires.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.hold.release(None).await
    }

    /// Ends the renewal without releasing: the hold stays until its TTL expires. If other tasks
    /// [share it](crate::Options::local_turn), that begins once they have released it.
    pub fn leak(self) {
        self.hold.leak();
    }
}

impl fmt::Debug for RwLockReadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.describe("RwLockReadGuard", f)
    }
}

/// Holds the lock to write, and renews its lease while it lives.
///
/// # Release on drop is not immediate
/// Dropping the guard releases this hold in a background task, soon, and failures are only logged.
/// Call [`release`](RwLockWriteGuard::release) to learn the outcome. If the process ends first, the
/// lock stays held until the TTL expires.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct RwLockWriteGuard {
    pub(crate) hold: Hold,
    /// Those of the read side, for a downgrade.
    pub(crate) read_options: Arc<Options>,
}

impl RwLockWriteGuard {
    /// Returns the lease, which says whether it is valid, until when, and with which fencing token.
    pub fn lease(&self) -> &Lease {
        self.hold.lease()
    }

    /// Converts the hold to write into a hold to read, in one step: no other owner writes in
    /// between, and waiting readers are admitted, unless the owner has other holds to write.
    ///
    /// The token stays. The lease is a new one, for the [`read_ttl`](crate::Options::read_ttl); the
    /// old one has [ended as released](crate::LeaseEnd::Released).
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; the work may not have been exclusive.
    /// - [`Error::Redis`]: the server fails. The hold is released in the background, whether it
    ///   [was converted](Error::is_indeterminate) or not.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background, converted or not.
    pub async fn downgrade(self) -> Result<RwLockReadGuard, Error> {
        let RwLockWriteGuard { hold, read_options } = self;
        let hold = hold.convert("rwlock/downgrade", &READ, read_options).await?;
        Ok(RwLockReadGuard { hold })
    }

    /// Returns the owner that the lock was [made for](crate::RwLock::with_owner), if there is one.
    pub fn owner(&self) -> Option<&Owner> {
        self.hold.owner()
    }

    /// Releases this hold and waits until that is done.
    ///
    /// If another task of this client has the [turn](crate::Options::local_turn), it gets the hold
    /// without a request, and the call returns at once. It then confirms only that the lease was
    /// valid as far as this client knows.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; the work may not have been exclusive.
    /// - [`Error::NotHeld`]: the server had ended the hold before the client noticed; the same.
    /// - The others of [`RwLockReadGuard::release`].
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub async fn release(self) -> Result<(), Error> {
        self.hold.release(None).await
    }

    /// Ends the renewal without releasing: the hold stays until its TTL expires.
    pub fn leak(self) {
        self.hold.leak();
    }
}

impl fmt::Debug for RwLockWriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.describe("RwLockWriteGuard", f)
    }
}
