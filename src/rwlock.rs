//! [`RwLock`]: many readers or one writer, and nobody starves.

mod guard;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::{Mode, RwInspection};
use crate::lease::{
    Kind, LockRequest, OwnedLease, Queue, Refusal, ScriptSet, TOO_DEEP, acquire, acquire_within, try_acquire,
};
use crate::lock::{HolderId, Lock};
use crate::name::Name;
use crate::options::Options;
use crate::owner::Owner;
use crate::wire::Script;

pub use guard::{RwLockReadGuard, RwLockWriteGuard};

static READ: Kind = Kind {
    name: "read",
    found: FOUND,
    reenters: true,
    has_owner: true,
    queue: Queue::InRedis,
    refusals: &[TOO_DEEP, CROWDED],
    capacity: Some(|options| options.max_readers),
    acquire: ScriptSet {
        server: Script::new("rwlock/read_acquire", include_str!("../lua/rwlock/read_acquire.lua")),
        quorum: Script::new("quorum/read_acquire", include_str!("../lua/quorum/read_acquire.lua")),
    },
    renew: Script::new("rwlock/renew", RENEW),
    release: Script::new("rwlock/release", RELEASE),
    force: Script::new("rwlock/read_force", include_str!("../lua/rwlock/read_force.lua")),
    inspect: Script::new("rwlock/inspect", INSPECT),
};

static WRITE: Kind = Kind {
    name: "write",
    found: FOUND,
    reenters: true,
    has_owner: true,
    queue: Queue::InsideUnlessOwned,
    refusals: &[TOO_DEEP, WOULD_DEADLOCK],
    capacity: None,
    acquire: ScriptSet {
        server: Script::new("rwlock/write_acquire", include_str!("../lua/rwlock/write_acquire.lua")),
        quorum: Script::new("quorum/write_acquire", include_str!("../lua/quorum/write_acquire.lua")),
    },
    renew: Script::new("rwlock/renew", RENEW),
    release: Script::new("rwlock/release", RELEASE),
    force: Script::new("rwlock/write_force", include_str!("../lua/rwlock/write_force.lua")),
    inspect: Script::new("rwlock/inspect", INSPECT),
};

static DOWNGRADE: ScriptSet = ScriptSet {
    server: Script::new("rwlock/downgrade", include_str!("../lua/rwlock/downgrade.lua")),
    quorum: Script::new("quorum/downgrade", include_str!("../lua/quorum/downgrade.lua")),
};

const WOULD_DEADLOCK: Refusal = (-6, |_, context| Error::WouldDeadlock { context });
const CROWDED: Refusal = (-7, |options, context| Error::Crowded { context, limit: options.max_readers });

const FOUND: &str = "something that is not a read-write lock";
const RENEW: &str = include_str!("../lua/rwlock/renew.lua");
const RELEASE: &str = include_str!("../lua/rwlock/release.lua");
const INSPECT: &str = include_str!("../lua/rwlock/inspect.lua");

/// A lock that many may hold to read, or one to write.
///
/// In Redis it is one hash, in which each holder has an end of its own: a reader that has crashed
/// is in the way until its own ttl is over, whatever the other readers do.
///
/// **What it promises**: a lease to write and a lease of anybody else are never both
/// [valid](crate::Lease::is_lost). Nobody starves: a writer who waits keeps new readers out, and
/// when a writer leaves, all readers who waited by then go before the next writer. A lease to write
/// has a new [fencing token](crate::Lease::fencing_token), one to read has that of the last writer,
/// or a larger one: what is read under it is at least as new.
///
/// **Holds of one owner** ([`with_owner`](RwLock::with_owner)) nest, past all waiters:
///
/// | he holds | and wants to read | and wants to write |
/// |---|---|---|
/// | nothing | while nobody writes, or waits to write | while nobody writes or reads, in turn |
/// | to read | granted | once he is the only reader; new readers stay out meanwhile. While another reader waits for the same: [`Error::WouldDeadlock`], at once |
/// | to write | granted | granted, under the same token |
///
/// **What it does not**: know that two calls without an owner belong together. Who reads and then
/// wants to write waits for himself; who reads and wants to read again waits for the writer who has
/// come in between, who waits for him. Calls that nest must all use one [`Owner`]. Nor does it undo
/// what a writer did who died: readers see what he left. Holds of one owner that overlap without an
/// end keep writers out for as long: who reads may read again. And see [`Lease`](crate::Lease) for
/// a holder that goes on after its lease was lost.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// let prices = locks.rwlock("prices")?;
/// let reading = prices.read().await?; // beside other readers
/// reading.release().await?;
///
/// let writing = prices.write().await?; // alone
/// let reading = writing.downgrade().await?; // nobody has written in between
/// reading.release().await?;
/// # Ok(()) }
/// ```
///
/// To look first and write only if need be. Of two who do so at a time one is refused, and must let
/// go of *all* his holds: if the caller reads as well, the error is for the caller.
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
///             reading.release().await?; // the other one goes first
///             prices.write().await?
///         }
///         outcome => {
///             let writing = outcome?;
///             reading.release().await?; // it would show an older token
///             writing
///         }
///     };
///     if is_stale() {} // look again: the other one may have written
///     writing.release().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RwLock {
    read: Lock,
    write: Lock,
    owner: Option<Owner>,
}

impl RwLock {
    pub(crate) fn new(lock: Lock) -> RwLock {
        let with = |options| Lock { options: Arc::new(options), ..lock.clone() };
        RwLock { read: with(reading(&lock.options)), write: with(writing(&lock.options)), owner: None }
    }

    /// The same lock for `owner`: what is acquired through it are holds of this owner, which nest.
    /// Without an owner, each hold has one of its own and excludes the others.
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
        RwLock { owner: Some(owner.clone()), ..self.clone() }
    }

    /// The owner that it was [made for](RwLock::with_owner).
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.read.name
    }

    /// Waits until nobody writes or waits to write, and reads.
    ///
    /// # Errors
    /// - [`Error::Crowded`], at once: as many read or wait as [`max_readers`](Options::max_readers)
    ///   allows.
    /// - [`Error::TooDeep`]: the owner reads as many times as [`max_depth`](Options::max_depth)
    ///   allows.
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`], with replicas
    ///   [`Error::TooFewReplicas`]: the server fails. Lasting failures are returned at once. A
    ///   transient one is returned by the first request that fails after all have failed for two
    ///   [node timeouts](Options::node_timeout), which is up to four of them after the call if the
    ///   server is silent; or after a TTL if the task was queued.
    /// - [`Error::Lost`]: it was granted, but the answer took longer than the lease lasts.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::Closed`], [`Error::RuntimeEnded`]: the client was closed, or its runtime has
    ///   ended.
    ///
    /// # Cancel safety
    /// Safe to drop at any await, as in `tokio::time::timeout`: the place in the queue is given up,
    /// and what was granted meanwhile is given back at once.
    pub async fn read(&self) -> Result<RwLockReadGuard, Error> {
        acquire(&self.to_read()).await.map(|held| self.reading(held))
    }

    /// Waits until nobody writes or reads, and writes.
    ///
    /// # Errors
    /// - [`Error::WouldDeadlock`]: the owner reads while another reader waits to write.
    /// - Those of [`read`](RwLock::read), except [`Error::Crowded`].
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read). One that was polled and is then neither polled nor dropped keeps
    /// its place, and whoever waits behind it waiting.
    pub async fn write(&self) -> Result<RwLockWriteGuard, Error> {
        acquire(&self.to_write()).await.map(|held| self.writing(held))
    }

    /// [`read`](RwLock::read), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. A limit below the [node timeout](Options::node_timeout) is too short to
    ///   distinguish a silent server from a busy lock; with a limit of zero it is luck: use
    ///   `try_read`.
    /// - Those of [`read`](RwLock::read).
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn read_timeout(&self, limit: Duration) -> Result<RwLockReadGuard, Error> {
        acquire_within(&self.to_read(), limit).await.map(|held| self.reading(held))
    }

    /// [`write`](RwLock::write), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: as of [`read_timeout`](RwLock::read_timeout).
    /// - Those of [`write`](RwLock::write).
    ///
    /// # Cancel safety
    /// As [`write`](RwLock::write).
    pub async fn write_timeout(&self, limit: Duration) -> Result<RwLockWriteGuard, Error> {
        acquire_within(&self.to_write(), limit).await.map(|held| self.writing(held))
    }

    /// Reads if nobody writes or waits to write; `None` otherwise.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum) it tries up to twice more, after at most 30 ms of
    /// pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// Those of [`read`](RwLock::read), but a server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn try_read(&self) -> Result<Option<RwLockReadGuard>, Error> {
        Ok(try_acquire(&self.to_read()).await?.map(|held| self.reading(held)))
    }

    /// Writes if nobody else writes or reads, or waits; `None` otherwise, also if its owner reads
    /// beside others.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum) it tries up to twice more, after at most 30 ms of
    /// pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// Those of [`write`](RwLock::write), but for [`Error::WouldDeadlock`]: a try waits for no
    /// other reader. A server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`write`](RwLock::write).
    pub async fn try_write(&self) -> Result<Option<RwLockWriteGuard>, Error> {
        Ok(try_acquire(&self.to_write()).await?.map(|held| self.writing(held)))
    }

    /// Who reads or writes, how often, for how long, and how many wait on each side, as the server
    /// sees it now.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn inspect(&self) -> Result<RwInspection, Error> {
        self.read.look(&READ, None, RwInspection::from_reply, RwInspection::agreed).await
    }

    /// Whether the lock is held now, to read or to write.
    ///
    /// # Errors
    /// Those of [`inspect`](RwLock::inspect).
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(self.inspect().await?.mode != Mode::Free)
    }

    /// Whether the server still has a hold of this holder, see [`HolderId`]. With an [`Owner`], a
    /// hold to read or to write; with a [`Lease`](crate::Lease), one of the lease's side.
    ///
    /// [`Lease::is_lost`](crate::Lease::is_lost) answers without asking, and is what to decide by.
    ///
    /// # Errors
    /// Those of [`inspect`](RwLock::inspect).
    pub async fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        let sought = holder.sought();
        let kinds = [&READ, &WRITE];
        if !kinds.iter().any(|kind| sought.may_hold(self.name(), kind)) {
            return Ok(false);
        }
        // `mode` and `reader_count` are those of all owners.
        let owner = Some(sought.owner());
        let seen = self.read.look(&READ, owner, RwInspection::from_reply, RwInspection::agreed).await?;
        Ok(seen.writer.is_some() && sought.may_hold(self.name(), &WRITE)
            || !seen.readers.is_empty() && sought.may_hold(self.name(), &READ))
    }

    /// Takes the lock away from all readers, and lets in who may enter then. False if nobody read.
    ///
    /// They learn of it from their next renewals, a third of their ttl later at most, and from
    /// their releases. Whoever writes, keeps that.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Dropped, it may have happened or not.
    pub async fn force_release_read(&self) -> Result<bool, Error> {
        self.read.force_release(&READ).await
    }

    /// Takes the lock away from the writer, and lets in who may enter then. False if nobody wrote.
    ///
    /// The writer learns of it from the next renewal, a third of its ttl later at most, and from
    /// its release. Until then it believes that it is alone: let the resource compare fencing
    /// tokens, the next writer's is larger. What it reads besides, it keeps.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// Dropped, it may have happened or not.
    pub async fn force_release_write(&self) -> Result<bool, Error> {
        self.write.force_release(&WRITE).await
    }

    fn reading(&self, held: OwnedLease) -> RwLockReadGuard {
        RwLockReadGuard::new(self.owner.as_ref(), held)
    }

    fn writing(&self, held: OwnedLease) -> RwLockWriteGuard {
        RwLockWriteGuard::new(self.owner.as_ref(), held)
    }

    fn to_read(&self) -> LockRequest {
        self.read.request(&READ, self.owner.as_ref())
    }

    fn to_write(&self) -> LockRequest {
        self.write.request(&WRITE, self.owner.as_ref())
    }
}

fn reading(options: &Options) -> Options {
    options.clone().ttl(options.read_ttl.unwrap_or(options.ttl))
}

/// Keeps what the other side's ttl is.
fn writing(options: &Options) -> Options {
    let (read, write) = (options.read_ttl.unwrap_or(options.ttl), options.write_ttl.unwrap_or(options.ttl));
    options.clone().read_ttl(read).ttl(write)
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write.describe("RwLock", self.owner.as_ref(), f)
    }
}
