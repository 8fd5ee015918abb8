//! [`RwLock`]: many readers or one writer, and nobody starves.

mod guard;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::{Mode, RwInspection};
use crate::lease::{Kind, Lease, Queue, ScriptSet, Target, acquire, acquire_within, try_acquire};
use crate::lock::Lock;
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
    crowd: Some(|options| options.max_readers),
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
    crowd: None,
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

const FOUND: &str = "something that is not a read-write lock";
const RENEW: &str = include_str!("../lua/rwlock/renew.lua");
const RELEASE: &str = include_str!("../lua/rwlock/release.lua");
const INSPECT: &str = include_str!("../lua/rwlock/inspect.lua");

/// A lock that many may hold to read, or one to write.
///
/// In Redis it is one hash, in which each holder has an end of its own: a reader that has crashed is in the
/// way until its own ttl is over, whatever the other readers do.
///
/// **What it promises**: a lease to write and a lease of anybody else are never both [valid](Lease::is_lost).
/// Nobody starves: a writer who waits keeps new readers out, and when a writer leaves, all readers who waited
/// by then go before the next writer. A lease to write has a new [fencing token](Lease::fencing_token), one to
/// read has that of the last writer, or a larger one: what is read under it is at least as new.
///
/// **Holds of one owner** (`read_as`, `write_as`) nest, past everybody who waits:
///
/// | he holds | and wants to read | and wants to write |
/// |---|---|---|
/// | nothing | while nobody writes, or waits to write | while nobody writes or reads, in turn |
/// | to read | granted | once he is the only reader; new readers stay out meanwhile. While another reader waits for the same: [`Error::WouldDeadlock`], at once |
/// | to write | granted | granted, under the same token |
///
/// **What it does not**: know that two calls without an owner belong together. Who reads and then wants to write waits
/// for himself; who reads and wants to read again waits for the writer who has come in between, who waits for him. Calls
/// that nest must all pass an [`Owner`]. Nor does it undo what a writer did who died: readers see what he left.
/// Holds of one owner that overlap without an end keep writers out for as long: who reads may read again.
/// And see [`Lease`] for a holder that goes on after its lease was lost.
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
/// To look first and write only if need be. Of two who do so at a time one is refused, and must let go of *all* his
/// holds: if the caller reads as well, the error is for the caller.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks, owner: redlatch::Owner) -> Result<(), redlatch::Error> {
/// # fn is_stale() -> bool { true }
/// use redlatch::Error;
/// let prices = locks.rwlock("prices")?;
/// let reading = prices.read_as(&owner).await?;
/// if is_stale() {
///     let writing = match prices.write_as(&owner).await {
///         Err(Error::WouldDeadlock { .. }) => {
///             reading.release().await?; // the other one goes first
///             prices.write_as(&owner).await?
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
}

impl RwLock {
    pub(crate) fn new(lock: Lock) -> RwLock {
        let with = |options| Lock { options: Arc::new(options), ..lock.clone() };
        RwLock { read: with(reading(&lock.options)), write: with(writing(&lock.options)) }
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.read.name
    }

    /// Waits until nobody writes or waits to write, and reads.
    ///
    /// # Errors
    /// [`Error::Crowded`], at once, if as many read or wait as [`max_readers`](Options::max_readers) allows: try again
    /// later. [`Error::Redis`], of a quorum [`Error::NoQuorum`], with replicas [`Error::TooFewReplicas`], if the server fails: at once for lasting failures, after two
    /// [node timeouts](Options::node_timeout) for one that may pass, or after a ttl for who was already queued. [`Error::WrongType`] if the key holds something else.
    ///
    /// # Cancel safety
    /// Safe to drop at any await, as in `tokio::time::timeout`: the place in the queue is given up, and
    /// what was granted meanwhile is given back at once.
    pub async fn read(&self) -> Result<RwLockReadGuard, Error> {
        acquire(&self.to_read(None)).await.map(RwLockReadGuard::new)
    }

    /// Waits until nobody writes or reads, and writes.
    ///
    /// # Errors
    /// Those of [`read`](RwLock::read), but for [`Error::Crowded`].
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read). One that was polled and is then neither polled nor dropped keeps its place, and
    /// whoever waits behind it waiting.
    pub async fn write(&self) -> Result<RwLockWriteGuard, Error> {
        acquire(&self.to_write(None)).await.map(RwLockWriteGuard::new)
    }

    /// [`read`](RwLock::read), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// [`Error::TimedOut`] once the limit is over, or, if the server was failing by then, the failure. A
    /// limit below the [node timeout](Options::node_timeout) is too short to tell a silent server
    /// from a busy lock, and with one of zero it is luck: use `try_read`; else those of [`read`](RwLock::read).
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn read_timeout(&self, limit: Duration) -> Result<RwLockReadGuard, Error> {
        acquire_within(&self.to_read(None), limit).await.map(RwLockReadGuard::new)
    }

    /// [`write`](RwLock::write), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// [`Error::TimedOut`] as of [`read_timeout`](RwLock::read_timeout), else those of [`write`](RwLock::write).
    ///
    /// # Cancel safety
    /// As [`write`](RwLock::write).
    pub async fn write_timeout(&self, limit: Duration) -> Result<RwLockWriteGuard, Error> {
        acquire_within(&self.to_write(None), limit).await.map(RwLockWriteGuard::new)
    }

    /// Reads if nobody writes or waits to write; `None` otherwise.
    ///
    /// On a [quorum](crate::Locks::quorum) it tries up to twice more, after at most 30 ms of pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// Those of [`read`](RwLock::read), but a server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn try_read(&self) -> Result<Option<RwLockReadGuard>, Error> {
        Ok(try_acquire(&self.to_read(None)).await?.map(RwLockReadGuard::new))
    }

    /// Writes if nobody writes or reads, or waits; `None` otherwise.
    ///
    /// On a [quorum](crate::Locks::quorum) it tries up to twice more, after at most 30 ms of pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// Those of [`write`](RwLock::write), but a server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`write`](RwLock::write).
    pub async fn try_write(&self) -> Result<Option<RwLockWriteGuard>, Error> {
        Ok(try_acquire(&self.to_write(None)).await?.map(RwLockWriteGuard::new))
    }

    /// [`read`](RwLock::read) for an owner, who may hold the lock already.
    ///
    /// # Errors
    /// Those of [`read`](RwLock::read), and [`Error::TooDeep`] if the owner reads as many times as
    /// [`max_depth`](Options::max_depth) allows.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn read_as(&self, owner: &Owner) -> Result<RwLockReadGuard, Error> {
        acquire(&self.to_read(Some(owner))).await.map(RwLockReadGuard::new)
    }

    /// [`write`](RwLock::write) for an owner, who may hold the lock already.
    ///
    /// # Errors
    /// Those of [`write`](RwLock::write), [`Error::TooDeep`] if the owner writes as many times as
    /// [`max_depth`](Options::max_depth) allows, and [`Error::WouldDeadlock`] if he reads while another reader
    /// waits to write.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn write_as(&self, owner: &Owner) -> Result<RwLockWriteGuard, Error> {
        acquire(&self.to_write(Some(owner))).await.map(RwLockWriteGuard::new)
    }

    /// [`read_as`](RwLock::read_as), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// [`Error::TimedOut`] as of [`read_timeout`](RwLock::read_timeout), else those of [`read_as`](RwLock::read_as).
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn read_as_timeout(&self, owner: &Owner, limit: Duration) -> Result<RwLockReadGuard, Error> {
        acquire_within(&self.to_read(Some(owner)), limit).await.map(RwLockReadGuard::new)
    }

    /// [`write_as`](RwLock::write_as), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// [`Error::TimedOut`] as of [`read_timeout`](RwLock::read_timeout), else those of
    /// [`write_as`](RwLock::write_as).
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn write_as_timeout(&self, owner: &Owner, limit: Duration) -> Result<RwLockWriteGuard, Error> {
        acquire_within(&self.to_write(Some(owner)), limit).await.map(RwLockWriteGuard::new)
    }

    /// [`try_read`](RwLock::try_read) for an owner, who may hold the lock already.
    ///
    /// # Errors
    /// Those of [`read_as`](RwLock::read_as), but a server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn try_read_as(&self, owner: &Owner) -> Result<Option<RwLockReadGuard>, Error> {
        Ok(try_acquire(&self.to_read(Some(owner))).await?.map(RwLockReadGuard::new))
    }

    /// [`try_write`](RwLock::try_write) for an owner, who may hold the lock already. `None` also if he reads
    /// beside others.
    ///
    /// # Errors
    /// Those of [`write_as`](RwLock::write_as) but for [`Error::WouldDeadlock`]: who tries waits for nobody. A
    /// server that fails is not waited for.
    ///
    /// # Cancel safety
    /// As [`read`](RwLock::read).
    pub async fn try_write_as(&self, owner: &Owner) -> Result<Option<RwLockWriteGuard>, Error> {
        Ok(try_acquire(&self.to_write(Some(owner))).await?.map(RwLockWriteGuard::new))
    }

    /// Who reads or writes, how often, for how long, and how many wait on each side, as the server sees it now.
    ///
    /// # Errors
    /// [`Error::Redis`], of a quorum [`Error::NoQuorum`], if the server fails, [`Error::WrongType`] if the key holds something else.
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn inspect(&self) -> Result<RwInspection, Error> {
        self.read.look(&READ, None, RwInspection::from_reply, RwInspection::agreed).await
    }

    /// Whether `owner` reads or writes now, as the server sees it.
    ///
    /// # Errors
    /// Those of [`inspect`](RwLock::inspect).
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn is_held_by(&self, owner: &Owner) -> Result<bool, Error> {
        self.holds(&owner.to_string()).await
    }

    /// Whether the server still keeps the lock for the owner of this lease, or for the lease if it has none.
    /// [`Lease::is_lost`] answers without asking, and is what to decide by.
    ///
    /// # Errors
    /// Those of [`inspect`](RwLock::inspect).
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn is_held_by_lease(&self, lease: &Lease) -> Result<bool, Error> {
        Ok(lease.name() == self.name() && self.holds(lease.owner()).await?)
    }

    async fn holds(&self, owner: &str) -> Result<bool, Error> {
        let seen = self.read.look(&READ, Some(owner), RwInspection::from_reply, RwInspection::agreed).await?;
        Ok(seen.mode != Mode::Free)
    }

    /// Takes the lock away from all readers, and lets in who may enter then. False if nobody read.
    ///
    /// They learn of it from their next renewals, a third of their ttl later at most, and from their releases.
    /// Whoever writes, keeps that.
    ///
    /// # Errors
    /// [`Error::Redis`], of a quorum [`Error::NoQuorum`], if the server fails, [`Error::WrongType`] if the key holds something else.
    ///
    /// # Cancel safety
    /// Dropped, it may have happened or not.
    pub async fn force_release_read(&self) -> Result<bool, Error> {
        self.read.force_release(&READ).await
    }

    /// Takes the lock away from the writer, and lets in who may enter then. False if nobody wrote.
    ///
    /// The writer learns of it from the next renewal, a third of its ttl later at most, and from its release.
    /// Until then it believes that it is alone: let the resource compare fencing tokens, the next writer's is
    /// larger. What it reads besides, it keeps.
    ///
    /// # Errors
    /// [`Error::Redis`], of a quorum [`Error::NoQuorum`], if the server fails, [`Error::WrongType`] if the key holds something else.
    ///
    /// # Cancel safety
    /// Dropped, it may have happened or not.
    pub async fn force_release_write(&self) -> Result<bool, Error> {
        self.write.force_release(&WRITE).await
    }

    fn to_read(&self, owner: Option<&Owner>) -> Target {
        self.read.target(&READ, owner)
    }

    fn to_write(&self, owner: Option<&Owner>) -> Target {
        self.write.target(&WRITE, owner)
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
        self.write.describe("RwLock", f)
    }
}
