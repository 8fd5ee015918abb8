//! [`ReentrantLock`]: one owner at a time, which may hold it repeatedly.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::Inspection;
use crate::lease::{Hold, Kind, Lease, LockRequest, Queue, TOO_DEEP, Verbs, acquire, try_acquire};
use crate::name::Name;
use crate::owner::Owner;
use crate::queries::HolderId;
use crate::wire::Script;

pub(crate) static REENTRANT: Kind = Kind {
    name: "reentrant",
    found: "something that is not a re-entrant lock",
    has_owner: true,
    queue: Queue::Inside,
    refusals: &[TOO_DEEP],
    capacity: None,
    script: &SCRIPT,
    verbs: Verbs {
        acquire: "reentrant/acquire",
        wait: None,
        renew: "reentrant/renew",
        release: "reentrant/release",
        inspect: "reentrant/inspect",
    },
    force: "1",
};

static SCRIPT: Script = Script::new(include_str!("../lua/reentrant.lua"));

/// A lock with one owner at a time, which may acquire it repeatedly.
///
/// In Redis it is a hash from the owner to the number of its holds, the layout of Redisson's
/// `RLock`: under the same key the two exclude each other.
///
/// **What it promises**: holds of two owners are never both [valid](Lease::is_lost). A further hold
/// of the same owner is granted at once, ahead of all waiters. It has the same fencing token, and
/// neither shortens the lease nor extends it beyond `max(remaining, ttl)`.
///
/// The lock is free once every hold has been released.
///
/// **What it does not**:
/// - Separate the holds of one owner: two tasks with one owner hold the lock together.
/// - Stop a holder that continues after its lease was lost; see [`Lease`].
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// use redlatch::{Error, Locks, Owner};
///
/// async fn ship(locks: &Locks, owner: &Owner) -> Result<(), Error> {
///     let guard = locks.reentrant("orders:42", owner)?.lock().await?;
///     bill(locks, owner).await?; // acquires the same lock again
///     guard.release().await
/// }
///
/// async fn bill(locks: &Locks, owner: &Owner) -> Result<(), Error> {
///     let guard = locks.reentrant("orders:42", owner)?.lock().await?;
///     guard.release().await
/// }
///
/// ship(&locks, &Owner::new()).await
/// # }
/// ```
#[derive(Clone)]
pub struct ReentrantLock {
    pub(crate) lock: LockRequest,
    owner: Owner,
}

impl ReentrantLock {
    pub(crate) fn new(lock: LockRequest, owner: &Owner) -> ReentrantLock {
        ReentrantLock { lock: lock.of(owner), owner: owner.clone() }
    }

    /// Returns the same lock for another owner.
    #[must_use = "it returns the lock for the owner, and leaves this one as it is"]
    pub fn with_owner(&self, owner: &Owner) -> ReentrantLock {
        ReentrantLock::new(self.lock.clone(), owner)
    }

    /// Returns the owner of the holds that are acquired through this value.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.lock.name
    }

    /// Acquires the lock, waiting until no other owner holds it. An owner that already holds it is
    /// granted a further hold at once.
    ///
    /// # Errors
    /// - [`Error::TooDeep`]: the owner has [`max_depth`](crate::Options::max_depth) holds already.
    /// - [`Error::Redis`]: the server fails. A lasting failure is returned at once.
    ///
    ///   A transient one is returned once all requests have failed for two [node
    ///   timeouts](crate::Options::node_timeout), or for one TTL if that is longer and the task was
    ///   queued. During an outage that this client already knows, the first failed request returns
    ///   it: pause before you retry, or set [`outage_limit`](crate::Options::outage_limit).
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes.
    /// - [`Error::TooFewReplicas`]: the same if too few replicas confirm the grant.
    /// - [`Error::Lost`]: the same if each grant came later than its lease lasts.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: in `tokio::time::timeout`, for instance, a dropped call leaves the queue, and a
    /// grant that it received meanwhile is released at once. A call that is polled once and then
    /// neither polled nor dropped keeps its place in the queue, and blocks the tasks of this client
    /// behind it.
    pub async fn lock(&self) -> Result<ReentrantGuard, Error> {
        acquire(&self.lock, None).await.map(|hold| self.guard(hold))
    }

    /// Acquires the lock like [`lock`](ReentrantLock::lock), within `limit`, which covers waiting,
    /// connecting and retrying. A limit of zero means one try, like
    /// [`try_lock`](ReentrantLock::try_lock).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. `was_busy` is false if no server had replied: a limit below the [node
    ///   timeout](crate::Options::node_timeout) ends before that is an error of its own.
    /// - Those of [`lock`](ReentrantLock::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`lock`](ReentrantLock::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<ReentrantGuard, Error> {
        acquire(&self.lock, Some(limit)).await.map(|hold| self.guard(hold))
    }

    /// Acquires the lock, runs `work` while the lease is valid, and releases it, also if the work
    /// fails or panics.
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
    /// # use redlatch::{Error, Locks, Owner};
    /// # async fn run(locks: Locks, owner: Owner) -> Result<(), Error> {
    /// let stock = locks.reentrant("stock", &owner)?;
    /// let outer = stock.run(async |_| {
    ///     stock.run(async |_| Ok::<_, Error>(())).await // the same owner enters again
    /// });
    /// outer.await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - That of the work, if it ended before its lease: a failed release is only logged.
    /// - Those of [`lock`](ReentrantLock::lock): the work has not begun.
    /// - [`Error::Closed`] of [`Operation::Hold`](crate::Operation::Hold): the client was closed,
    ///   and the work dropped.
    /// - [`Error::Lost`]: the lease ended before the work did.
    /// - Those of [`ReentrantGuard::release`] that do not pass: the work is done.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, and the lock is released in the background.
    pub async fn run<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock().await?.hold.run(work).await
    }

    /// Runs `work` like [`run`](ReentrantLock::run), if the lock is acquired within `limit`, which
    /// does not limit the work. Zero is one try: with [`Error::TimedOut`] it was not free, and the
    /// work has not begun.
    ///
    /// # Errors
    /// - Those of [`lock_timeout`](ReentrantLock::lock_timeout) and [`run`](ReentrantLock::run).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`run`](ReentrantLock::run).
    pub async fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock_timeout(limit).await?.hold.run(work).await
    }

    /// Acquires the lock if its owner already holds it, or if it is free and no client waits for
    /// it; returns `None` otherwise.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum), callers that try at the same time may get a
    /// minority of the nodes each. The call then tries up to twice more, after at most 30 ms of
    /// pauses in total.
    ///
    /// # Errors
    /// - [`Error::TooDeep`]: the owner has [`max_depth`](crate::Options::max_depth) holds already.
    /// - [`Error::Redis`]: the server fails. The call does not wait for it.
    /// - [`Error::NoQuorum`]: on a quorum, the same for a majority of the nodes.
    /// - [`Error::TooFewReplicas`]: the same if too few replicas confirm the grant.
    /// - [`Error::Lost`]: the lock was granted, but the reply took longer than the lease lasts.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::Closed`]: the client was closed.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Cancel safe: like [`lock`](ReentrantLock::lock).
    pub async fn try_lock(&self) -> Result<Option<ReentrantGuard>, Error> {
        Ok(try_acquire(&self.lock).await?.map(|hold| self.guard(hold)))
    }

    /// Returns the owner, the number of its holds and the number of waiters, as the server reports
    /// them at this moment.
    ///
    /// # Errors
    /// - [`Error::Redis`]: the server fails.
    /// - [`Error::NoQuorum`]: on a quorum, a majority of the nodes fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    pub async fn inspect(&self) -> Result<Inspection, Error> {
        self.lock.inspect().await
    }

    /// Returns whether any owner holds the lock now.
    ///
    /// # Errors
    /// - Those of [`inspect`](ReentrantLock::inspect).
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(!self.inspect().await?.holders.is_empty())
    }

    /// Returns whether the server still has a hold of this holder: of an [`Owner`], or of a
    /// [`Lease`]'s owner; see [`HolderId`].
    ///
    /// To decide whether to continue, use [`Lease::is_lost`], which sends no request.
    ///
    /// # Errors
    /// - Those of [`inspect`](ReentrantLock::inspect).
    pub async fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        self.lock.is_held_by(&holder.holder_id()).await
    }

    /// Revokes the lock from its owner, with all holds, and grants it to the next waiter if there
    /// is one. Returns false if it was free.
    ///
    /// The former owner learns of it from its releases or its next renewal, at most a third of its
    /// TTL later, with [`Renewal::Never`](crate::Renewal::Never) at its deadline. Until then its
    /// `is_lost()` is false. Let the resource compare fencing tokens: the next one is larger.
    ///
    /// # Errors
    /// - [`Error::Redis`]: the server fails.
    /// - [`Error::NoQuorum`]: on a quorum, a majority of the nodes fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Not cancel safe: after a drop, the lock may have been revoked or not.
    pub async fn force_release(&self) -> Result<bool, Error> {
        self.lock.force_release(None).await
    }

    fn guard(&self, hold: Hold) -> ReentrantGuard {
        ReentrantGuard { owner: self.owner.clone(), hold }
    }
}

impl fmt::Debug for ReentrantLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.describe("ReentrantLock", f)
    }
}

/// Holds the lock once, and renews its lease while it lives.
///
/// # Release on drop is not immediate
/// Dropping the guard releases this hold in a background task, soon, and failures are only logged.
/// Call [`release`](ReentrantGuard::release) to learn the outcome. If the process ends first, the
/// lock stays held until the TTL expires.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct ReentrantGuard {
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
}

impl ReentrantGuard {
    /// Returns the lease, which says whether it is valid, until when, and with which fencing token.
    pub fn lease(&self) -> &Lease {
        self.hold.lease()
    }

    /// Returns the owner of this hold.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Releases this hold and waits until that is done. The lock is free after the owner's last
    /// release.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; the work may not have been exclusive.
    /// - [`Error::NotHeld`]: the server had ended the hold before the client noticed; the work may
    ///   not have been exclusive.
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

    /// Ends the renewal of this hold without releasing it: the owner keeps the lock until the TTL
    /// expires. With [`Nesting::Local`](crate::Nesting::Local), guards of one owner share one hold,
    /// so the lease of all of them ends.
    pub fn leak(self) {
        self.hold.leak();
    }
}

impl fmt::Debug for ReentrantGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.describe("ReentrantGuard", f)
    }
}
