//! [`RwLock`]: many readers or one writer, without starvation.

mod guard;
mod work;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::{Mode, RwInspection};
use crate::lease::{Hold, Kind, LockRequest, Queue, Refusal, TOO_DEEP, Verbs, acquire, try_acquire};
use crate::name::Name;
use crate::owner::Owner;
use crate::queries::HolderId;
use crate::wire::{Script, answers};

pub use guard::{RwLockReadGuard, RwLockWriteGuard};

pub(crate) static READ: Kind = Kind {
    name: "read",
    found: FOUND,
    has_owner: true,
    queue: Queue::Shared,
    refusals: &[TOO_DEEP, FULL],
    capacity: Some(|options| Some(options.max_readers).filter(|readers| *readers != 10_000)),
    script: &SCRIPT,
    verbs: Verbs {
        acquire: "rwlock/read",
        wait: Some("rwlock/wait"),
        renew: "rwlock/renew",
        release: "rwlock/release",
        inspect: "rwlock/inspect",
    },
    force: "read",
};

pub(crate) static WRITE: Kind = Kind {
    name: "write",
    found: FOUND,
    has_owner: true,
    queue: Queue::InsideUnlessOwned,
    refusals: &[TOO_DEEP, WOULD_DEADLOCK],
    capacity: None,
    script: &SCRIPT,
    verbs: Verbs {
        acquire: "rwlock/write",
        wait: None,
        renew: "rwlock/renew",
        release: "rwlock/release",
        inspect: "rwlock/inspect",
    },
    force: "write",
};

static SCRIPT: Script = Script::new(include_str!("../lua/rwlock.lua"));

const WOULD_DEADLOCK: Refusal = (answers::WOULD_DEADLOCK, |_, context| Error::WouldDeadlock { context });
const FULL: Refusal =
    (answers::FULL, |options, context| Error::TooManyReaders { context, limit: options.max_readers });

const FOUND: &str = "something that is not a read-write lock";

/// A lock that many readers may hold, or one writer.
///
/// In Redis it is one hash in which each holder has its own expiry: a crashed reader delays writers
/// until its own TTL expires, whatever other readers do.
///
/// **What it promises**: a lease to write and a lease of another owner are never both
/// [valid](crate::Lease::is_lost). Neither side starves: a waiting writer keeps new readers out,
/// and when a writer releases, all readers that wait by then are admitted before the next writer.
///
/// A lease to write has a new [fencing token](crate::Lease::fencing_token). A lease to read has the
/// token of the last writer or a larger one: the data read under it is at least that new.
///
/// **Holds of one owner** ([`with_owner`](RwLock::with_owner)) nest, ahead of all waiters:
///
/// | the owner holds | and wants to read | and wants to write |
/// |---|---|---|
/// | nothing | granted while no other owner writes or waits to write | granted while no other owner holds the lock, in turn |
/// | to read | granted | granted once it is the only reader; new readers stay out meanwhile. If another reader already waits for the same: [`Error::WouldDeadlock`], at once |
/// | to write | granted | granted, under the same token |
///
/// **What it does not**:
/// - Recognize that two calls without an owner belong together. A task that holds the lock to read
///   and then calls `write` deadlocks.
///
///   A task that reads twice deadlocks if a writer queued in between: the second read waits for the
///   writer, and the writer waits for the first read. Calls that nest must all use one [`Owner`].
/// - Undo what a writer wrote before it crashed: the next readers see it.
/// - Protect writers from an owner whose holds to read overlap without end: an owner that reads may
///   always read again.
/// - Stop a holder that continues after its lease was lost; see [`Lease`](crate::Lease).
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// let prices = locks.rwlock("prices")?;
/// let reading = prices.read().await?; // beside other readers
/// reading.release().await?;
///
/// let writing = prices.write().await?; // alone
/// let reading = writing.downgrade().await?; // no other write came in between
/// reading.release().await?;
/// # Ok(()) }
/// ```
///
/// The next example checks first, and writes only if needed. If two owners do so at the same time,
/// one is refused and must release *all* its holds. If the caller of your function has one of them,
/// return the error to that caller.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks, owner: redlatch::Owner) -> Result<(), redlatch::Error> {
/// # fn is_stale() -> bool { true }
/// use redlatch::Error;
/// let prices = locks.rwlock("prices")?.with_owner(&owner);
/// let reading = prices.read().await?;
/// if is_stale() {
///     let writing = match prices.write().await {
///         Err(Error::WouldDeadlock { .. }) => {
///             reading.release().await?; // the other reader goes first
///             prices.write().await?
///         }
///         outcome => {
///             let writing = outcome?;
///             reading.release().await?; // it would show an older token
///             writing
///         }
///     };
///     if is_stale() {} // check again: the other owner may have written
///     writing.release().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RwLock {
    pub(crate) read: LockRequest,
    pub(crate) write: LockRequest,
}

impl RwLock {
    pub(crate) fn new(lock: LockRequest) -> RwLock {
        let side = |kind, ttl: Option<Duration>| {
            let own = |ttl| Arc::new((*lock.options).clone().ttl(ttl));
            let options = ttl.map_or_else(|| Arc::clone(&lock.options), own);
            LockRequest { kind, options, ..lock.clone() }
        };
        RwLock { read: side(&READ, lock.options.read_ttl), write: side(&WRITE, lock.options.write_ttl) }
    }

    /// Returns the same lock for `owner`: each hold acquired through it belongs to this owner, and
    /// they nest. Without an owner, each hold counts as that of another owner.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let owner = redlatch::Owner::new();
    /// let prices = locks.rwlock("prices")?.with_owner(&owner);
    /// let writing = prices.write().await?;
    /// let reading = prices.read().await?; // of the same owner: granted at once
    /// # Ok(()) }
    /// ```
    #[must_use = "it returns the lock for the owner, and leaves this one as it is"]
    pub fn with_owner(&self, owner: &Owner) -> RwLock {
        RwLock { read: self.read.clone().of(owner), write: self.write.clone().of(owner) }
    }

    /// Returns the owner that the lock was [made for](RwLock::with_owner).
    pub fn owner(&self) -> Option<&Owner> {
        self.read.owner.as_ref()
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.read.name
    }

    /// Acquires the lock to read, waiting until no other owner writes or waits to write.
    ///
    /// Without an owner it may share a hold with other tasks of this client, for a [short
    /// time](crate::Options::local_turn) after the server granted it, also while a writer waits:
    /// then it sends no request.
    ///
    /// # Errors
    /// - [`Error::TooManyReaders`]: [`max_readers`](crate::Options::max_readers) readers hold the
    ///   lock or wait for it. It is returned at once.
    /// - [`Error::TooDeep`]: the owner has [`max_depth`](crate::Options::max_depth) holds to read.
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
    pub async fn read(&self) -> Result<RwLockReadGuard, Error> {
        acquire(&self.read, None).await.map(|hold| RwLockReadGuard { hold })
    }

    /// Acquires the lock to write, waiting until no other owner holds it.
    ///
    /// # Errors
    /// - [`Error::WouldDeadlock`]: the owner reads while another reader waits to write.
    /// - Those of [`read`](RwLock::read), except [`Error::TooManyReaders`].
    ///
    /// # Cancel safety
    /// Cancel safe: like [`read`](RwLock::read).
    pub async fn write(&self) -> Result<RwLockWriteGuard, Error> {
        acquire(&self.write, None).await.map(|hold| self.write_guard(hold))
    }

    /// Acquires the lock to read like [`read`](RwLock::read), within `limit`, which covers waiting,
    /// connecting and retrying. A limit of zero means one try, like [`try_read`](RwLock::try_read).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. `was_busy` is false if no server had replied: a limit below the [node
    ///   timeout](crate::Options::node_timeout) ends before that is an error of its own.
    /// - Those of [`read`](RwLock::read).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`read`](RwLock::read).
    pub async fn read_timeout(&self, limit: Duration) -> Result<RwLockReadGuard, Error> {
        acquire(&self.read, Some(limit)).await.map(|hold| RwLockReadGuard { hold })
    }

    /// Acquires the lock to write like [`write`](RwLock::write), within `limit`, which covers
    /// waiting, connecting and retrying. A limit of zero means one try, like
    /// [`try_write`](RwLock::try_write).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed; as for [`read_timeout`](RwLock::read_timeout).
    /// - Those of [`write`](RwLock::write).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`write`](RwLock::write).
    pub async fn write_timeout(&self, limit: Duration) -> Result<RwLockWriteGuard, Error> {
        acquire(&self.write, Some(limit)).await.map(|hold| self.write_guard(hold))
    }

    /// Acquires the lock to read if no other owner writes or waits to write, or if it may
    /// [join](crate::Options::local_turn) the newest hold of this client; returns `None` otherwise.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum), callers that try at the same time may get a
    /// minority of the nodes each. The call then tries up to twice more, after at most 30 ms of
    /// pauses in total.
    ///
    /// # Errors
    /// - Those of [`read`](RwLock::read); a failing server is not waited for.
    ///
    /// # Cancel safety
    /// Cancel safe: like [`read`](RwLock::read).
    pub async fn try_read(&self) -> Result<Option<RwLockReadGuard>, Error> {
        Ok(try_acquire(&self.read).await?.map(|hold| RwLockReadGuard { hold }))
    }

    /// Acquires the lock to write if no other owner holds it or waits for it; returns `None`
    /// otherwise, even if its own owner is one of several readers.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum), callers that try at the same time may get a
    /// minority of the nodes each. The call then tries up to twice more, after at most 30 ms of
    /// pauses in total.
    ///
    /// # Errors
    /// - Those of [`write`](RwLock::write), except [`Error::WouldDeadlock`]; a failing server is
    ///   not waited for.
    ///
    /// # Cancel safety
    /// Cancel safe: like [`write`](RwLock::write).
    pub async fn try_write(&self) -> Result<Option<RwLockWriteGuard>, Error> {
        Ok(try_acquire(&self.write).await?.map(|hold| self.write_guard(hold)))
    }

    /// Returns the holders, each with its number of holds and the time left, and the number of
    /// waiters on each side, as the server reports them at this moment.
    ///
    /// # Errors
    /// - [`Error::Redis`]: the server fails.
    /// - [`Error::NoQuorum`]: on a quorum, a majority of the nodes fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Reply`]: the server's reply is outside the script's contract.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    pub async fn inspect(&self) -> Result<RwInspection, Error> {
        self.read.query(None, RwInspection::from_reply, RwInspection::merge).await
    }

    /// Returns whether the lock is held now, to read or to write.
    ///
    /// # Errors
    /// - Those of [`inspect`](RwLock::inspect).
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(self.inspect().await?.mode != Mode::Free)
    }

    /// Returns whether the server still has a hold of this holder; see [`HolderId`]. For an
    /// [`Owner`]: a hold to read or to write. For a [`Lease`](crate::Lease): one on the lease's
    /// side.
    ///
    /// To decide whether to continue, use [`Lease::is_lost`](crate::Lease::is_lost), which sends no
    /// request.
    ///
    /// # Errors
    /// - Those of [`inspect`](RwLock::inspect).
    pub async fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        let holder_id = holder.holder_id();
        let kinds = [&READ, &WRITE];
        if !kinds.iter().any(|kind| holder_id.may_hold(self.name(), kind)) {
            return Ok(false);
        }
        // The reply lists only this owner's holds, but its `mode` and `reader_count` are those of
        // all owners.
        let owner = Some(holder_id.owner());
        let seen = self.read.query(owner, RwInspection::from_reply, RwInspection::merge).await?;
        Ok(seen.writer.is_some() && holder_id.may_hold(self.name(), &WRITE)
            || !seen.readers.is_empty() && holder_id.may_hold(self.name(), &READ))
    }

    /// Revokes the holds of all readers, and admits waiters that may then enter. Returns false if
    /// there was no reader. A writer keeps its hold.
    ///
    /// The readers learn of it from their releases or their next renewals, at most a third of their
    /// TTL later, with [`Renewal::Never`](crate::Renewal::Never) at their deadlines.
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
    pub async fn force_release_read(&self) -> Result<bool, Error> {
        self.read.force_release(None).await
    }

    /// Revokes the holds of the writer, and admits waiters that may then enter. Returns false if
    /// there was no writer. The writer's owner keeps its holds to read.
    ///
    /// The writer learns of it from its release or its next renewal, at most a third of its TTL
    /// later, with [`Renewal::Never`](crate::Renewal::Never) at its deadline. Until then its
    /// `is_lost()` is false. Let the resource compare fencing tokens: the next writer's is larger.
    ///
    /// # Errors
    /// - Those of [`force_release_read`](RwLock::force_release_read).
    ///
    /// # Cancel safety
    /// Not cancel safe: after a drop, the lock may have been revoked or not.
    pub async fn force_release_write(&self) -> Result<bool, Error> {
        self.write.force_release(None).await
    }

    pub(crate) fn write_guard(&self, hold: Hold) -> RwLockWriteGuard {
        RwLockWriteGuard { hold, read_options: Arc::clone(&self.read.options) }
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write.describe("RwLock", f)
    }
}
