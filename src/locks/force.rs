//! [`Locks::force_release_from`]: revoking a lock of any kind from one holder.

use super::Locks;
use crate::error::Error;
use crate::lease::{LockRequest, WITHOUT_TTL};
use crate::mutex::MUTEX;
use crate::owner::Owner;
use crate::reentrant::REENTRANT;
use crate::rwlock::{READ, WRITE};

impl Locks {
    /// Revokes a lock of any kind from one holder, as [`Holder`](crate::Holder) names it, and
    /// grants it to the next waiter if there is one. Returns false if this holder does not have it.
    ///
    /// Between a look at the lock and its `force_release`, the lock may have gone to another
    /// holder, and this one would lose it. This call revokes it from the named holder only. Tasks
    /// that [pass or share a hold](crate::Options::local_turn) are one holder: it revokes the hold
    /// from the one that has it by then.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), Box<dyn std::error::Error>> {
    /// use redlatch::Owner;
    /// let lock = locks.mutex("nightly")?;
    /// for stuck in lock.inspect().await?.holders {
    ///     locks.force_release_from("nightly", &Owner::from_word(&stuck.owner)?).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// The former holder learns of it from its release or its next renewal, at most a third of its
    /// TTL later, with [`Renewal::Never`](crate::Renewal::Never) at its deadline. Of a read-write
    /// lock, the holds of the owner on both sides are revoked.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is refused; no request is sent.
    /// - [`Error::Redis`]: the server fails.
    /// - [`Error::NoQuorum`]: on a quorum, a majority of the nodes fails.
    /// - [`Error::WrongType`]: the key holds something that is no lock of this crate.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Not cancel safe: after a drop, the lock may have been revoked or not.
    pub async fn force_release_from(&self, name: impl AsRef<str>, holder: &Owner) -> Result<bool, Error> {
        let (lock, holder) = (self.lock(&MUTEX, name.as_ref())?, holder.to_string());
        let of = |kind| LockRequest { kind, ..lock.clone() };
        for kind in [&MUTEX, &REENTRANT] {
            match of(kind).force_release(Some(&holder)).await {
                Err(Error::WrongType { found, .. }) if found != WITHOUT_TTL => {} // it changed nothing
                outcome => return outcome,
            }
        }
        let wrote = of(&WRITE).force_release(Some(&holder)).await?;
        Ok(of(&READ).force_release(Some(&holder)).await? || wrote)
    }
}
