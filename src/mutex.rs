//! [`Mutex`]: one holder at a time.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::Inspection;
use crate::lease::{Kind, Lease, OwnedLease, Queue, ScriptSet, acquire, acquire_within, try_acquire};
use crate::lock::{Lock, Sealed};
use crate::name::Name;
use crate::wire::Script;

static MUTEX: Kind = Kind {
    name: "mutex",
    found: "something that is not a mutex",
    reenters: false,
    has_owner: false,
    queue: Queue::Inside,
    refusals: &[],
    capacity: None,
    acquire: ScriptSet {
        server: Script::new("mutex/acquire", include_str!("../lua/mutex/acquire.lua")),
        quorum: Script::new("quorum/mutex_acquire", include_str!("../lua/quorum/mutex_acquire.lua")),
    },
    renew: Script::new("mutex/renew", include_str!("../lua/mutex/renew.lua")),
    release: Script::new("mutex/release", include_str!("../lua/mutex/release.lua")),
    force: Script::new("mutex/force", include_str!("../lua/mutex/force.lua")),
    inspect: Script::new("mutex/inspect", include_str!("../lua/mutex/inspect.lua")),
};

/// A lock with one holder at a time, among all processes that use the same server.
///
/// In Redis it is a string with a ttl, as `SET key token NX PX ttl` makes it: libraries that do the
/// same under the same key exclude us, and we exclude them.
///
/// **What it promises**: two guards are never both [valid](Lease::is_lost). Clients take turns; a
/// client that waits costs the server one request a second.
///
/// **What it does not**: exclude a holder that goes on after its lease was lost; see [`Lease`]. It
/// is not re-entrant: who holds it and locks it again waits for himself, until the ttl if need be;
/// see [`ReentrantLock`](crate::ReentrantLock).
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// let guard = locks.mutex("backup")?.lock().await?;
/// // Alone here. `guard.lease().fencing_token()` goes with every write.
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Mutex {
    lock: Lock,
}

impl Mutex {
    pub(crate) fn new(lock: Lock) -> Mutex {
        Mutex { lock }
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.lock.name
    }

    /// Waits until the mutex is free and takes it.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`], with replicas
    ///   [`Error::TooFewReplicas`]: the server fails. Lasting failures are returned at once. A
    ///   transient one is returned by the first request that fails after all have failed for two
    ///   [node timeouts](crate::Options::node_timeout), which is up to four of them after the call
    ///   if the server is silent; or after a TTL if the task was queued.
    /// - [`Error::Lost`]: it was granted, but the answer took longer than the lease lasts.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::Closed`], [`Error::RuntimeEnded`]: the client was closed, or its runtime has
    ///   ended.
    ///
    /// # Cancel safety
    /// Safe to drop at any await, as in `tokio::time::timeout`: the place in the queue is given up,
    /// and what was granted meanwhile is given back at once. One that was polled and is then
    /// neither polled nor dropped keeps its place, and the tasks of this client behind it waiting.
    pub async fn lock(&self) -> Result<MutexGuard, Error> {
        acquire(&self.lock.request(&MUTEX, None)).await.map(|held| MutexGuard { held })
    }

    /// [`lock`](Mutex::lock), for at most `limit`: that covers waiting, connecting and retrying. A
    /// limit of zero is one try, as [`try_lock`](Mutex::try_lock), which takes as long as a request
    /// takes.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. A limit below the [node timeout](crate::Options::node_timeout) is too
    ///   short to distinguish a silent server from a busy lock; with a limit of zero it is luck:
    ///   use `try_lock`.
    /// - Those of [`lock`](Mutex::lock).
    ///
    /// # Cancel safety
    /// As [`lock`](Mutex::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<MutexGuard, Error> {
        acquire_within(&self.lock.request(&MUTEX, None), limit).await.map(|held| MutexGuard { held })
    }

    /// Takes the mutex if it is free and nobody waits for it; `None` otherwise.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum) it tries up to twice more, after at most 30 ms of
    /// pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`], with replicas
    ///   [`Error::TooFewReplicas`]: the server fails. It is not waited for.
    /// - [`Error::Lost`]: it was granted, but the answer took longer than the lease lasts.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Corrupt`]: a companion key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::Closed`], [`Error::RuntimeEnded`]: the client was closed, or its runtime has
    ///   ended.
    ///
    /// # Cancel safety
    /// As [`lock`](Mutex::lock).
    pub async fn try_lock(&self) -> Result<Option<MutexGuard>, Error> {
        Ok(try_acquire(&self.lock.request(&MUTEX, None)).await?.map(|held| MutexGuard { held }))
    }

    /// Who holds the mutex and how many wait, as the server sees it now.
    ///
    /// # Errors
    /// - [`Error::Redis`], on a quorum [`Error::NoQuorum`]: the server fails.
    /// - [`Error::WrongType`]: the key holds something else.
    /// - [`Error::Reply`]: the server answered what the script never answers.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended.
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn inspect(&self) -> Result<Inspection, Error> {
        self.lock.inspect(&MUTEX).await
    }

    /// Whether anybody holds the mutex now.
    ///
    /// # Errors
    /// Those of [`inspect`](Mutex::inspect).
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(!self.inspect().await?.holders.is_empty())
    }

    /// Whether the server still has the hold of this lease, as on the other kinds. A hold on a
    /// mutex has no owner, so it takes nothing but a lease:
    ///
    /// ```compile_fail,E0308
    /// # async fn run(locks: redlatch::Locks, owner: redlatch::Owner) -> Result<(),
    /// redlatch::Error> { locks.mutex("backup")?.is_held_by(&owner).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// [`Lease::is_lost`] answers without asking, and is what to decide by; this notices earlier
    /// that a lock was force-released.
    ///
    /// # Errors
    /// Those of [`inspect`](Mutex::inspect).
    pub async fn is_held_by(&self, lease: &Lease) -> Result<bool, Error> {
        self.lock.is_held_by(&MUTEX, &lease.sought()).await
    }

    /// Takes the mutex away from whoever holds it, and hands it to the next waiter if there is one.
    /// False if nobody held it.
    ///
    /// The former holder learns of it from its next renewal, a third of its ttl later at most, and
    /// from its release. Until then it believes that it is alone: let the resource compare fencing
    /// tokens, the next one is larger.
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
    pub async fn force_release(&self) -> Result<bool, Error> {
        self.lock.force_release(&MUTEX).await
    }
}

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.describe("Mutex", None, f)
    }
}

/// The mutex, held. Its lease is renewed for as long as this lives.
///
/// # Release on drop is not immediate
/// Dropped, it is released by a task of the client, soon, and nobody hears of a failure. Call
/// [`release`](MutexGuard::release) to be sure. If the process ends first, the ttl frees the lock.
#[must_use = "if unused, the mutex is released at once"]
#[clippy::has_significant_drop]
pub struct MutexGuard {
    held: OwnedLease,
}

impl MutexGuard {
    /// The lease: whether it still stands, until when, and its fencing token.
    pub fn lease(&self) -> &Lease {
        self.held.lease()
    }

    /// Releases the mutex and waits until that is done.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was lost before; the work may not have been alone.
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

    /// Ends the renewal without releasing: the mutex stays locked until its ttl is over.
    pub fn leak(self) {
        self.held.leak();
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MutexGuard").field(self.lease()).finish()
    }
}
