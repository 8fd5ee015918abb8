//! [`ReentrantLock`]: one owner at a time, as often as the owner likes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::Inspection;
use crate::lease::{
    Kind, Lease, LockRequest, OwnedLease, Queue, ScriptSet, SharedHold, TOO_DEEP, acquire, acquire_within,
    try_acquire,
};
use crate::lock::{HolderId, Lock};
use crate::name::Name;
use crate::options::Nesting;
use crate::owner::Owner;
use crate::wire::Script;

static REENTRANT: Kind = Kind {
    name: "reentrant",
    found: "something that is not a re-entrant lock",
    reenters: true,
    has_owner: true,
    queue: Queue::Inside,
    refusals: &[TOO_DEEP],
    capacity: None,
    acquire: ScriptSet {
        server: Script::new("reentrant/acquire", include_str!("../lua/reentrant/acquire.lua")),
        quorum: Script::new("quorum/reentrant_acquire", include_str!("../lua/quorum/reentrant_acquire.lua")),
    },
    renew: Script::new("reentrant/renew", include_str!("../lua/reentrant/renew.lua")),
    release: Script::new("reentrant/release", include_str!("../lua/reentrant/release.lua")),
    force: Script::new("reentrant/force", include_str!("../lua/reentrant/force.lua")),
    inspect: Script::new("reentrant/inspect", include_str!("../lua/reentrant/inspect.lua")),
};

/// A lock with one owner at a time, who may hold it many times over.
///
/// In Redis it is a hash from the owner to the number of its holds, which is the layout of Redisson's
/// `RLock`: under the same key the two exclude each other.
///
/// **What it promises**: holds of two owners are never both [valid](Lease::is_lost). A further hold of
/// the same owner is granted at once, past everybody who waits; it has the same fencing token, and
/// neither shortens the lease nor lengthens it beyond `max(remaining, ttl)`. The lock is free once every
/// hold has been released.
///
/// **What it does not**: keep the holds of one owner apart. Two tasks with one owner are both inside.
/// And see [`Lease`] for a holder that goes on after its lease was lost.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// use redlatch::{Error, Locks, Owner};
///
/// async fn ship(locks: &Locks, owner: &Owner) -> Result<(), Error> {
///     let guard = locks.reentrant("orders:42")?.with_owner(owner).lock().await?;
///     bill(locks, owner).await?; // takes the same lock again
///     guard.release().await
/// }
///
/// async fn bill(locks: &Locks, owner: &Owner) -> Result<(), Error> {
///     let guard = locks.reentrant("orders:42")?.with_owner(owner).lock().await?;
///     guard.release().await
/// }
///
/// ship(&locks, &Owner::new()).await
/// # }
/// ```
#[derive(Clone)]
pub struct ReentrantLock {
    lock: Lock,
    owner: Option<Owner>,
}

impl ReentrantLock {
    pub(crate) fn new(lock: Lock) -> ReentrantLock {
        ReentrantLock { lock, owner: None }
    }

    /// The same lock for `owner`: what is acquired through it are holds of this owner.
    ///
    /// Without an owner, each hold gets a new one, which [`ReentrantGuard::owner`] returns: such a
    /// call waits for all others, also for those of the same task. Calls that nest must all use one
    /// owner.
    #[must_use = "it returns the lock for the owner, and leaves this one as it is"]
    pub fn with_owner(&self, owner: &Owner) -> ReentrantLock {
        ReentrantLock { owner: Some(owner.clone()), ..self.clone() }
    }

    /// The owner that it was [made for](ReentrantLock::with_owner).
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.lock.name
    }

    /// Waits until no other owner holds the lock and takes it, once more if its owner has it
    /// already.
    ///
    /// # Errors
    /// - [`Error::TooDeep`]: the owner has as many holds as
    ///   [`max_depth`](crate::Options::max_depth) allows.
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
    /// Safe to drop at any await, as in `tokio::time::timeout`: the place in the queue is given up, and
    /// what was granted meanwhile is given back at once. One that was polled and is then neither polled
    /// nor dropped keeps its place, and the tasks of this client behind it waiting.
    pub async fn lock(&self) -> Result<ReentrantGuard, Error> {
        let (owner, request) = self.request();
        match self.nested(&request)? {
            Some(shared) => Ok(guard(owner, shared)),
            None => Ok(self.guard(owner, &request, acquire(&request).await?)),
        }
    }

    /// [`lock`](ReentrantLock::lock), for at most `limit`: that covers waiting, connecting and retrying.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. A limit below the [node timeout](crate::Options::node_timeout) is too
    ///   short to distinguish a silent server from a busy lock; with a limit of zero it is luck:
    ///   use `try_lock`.
    /// - Those of [`lock`](ReentrantLock::lock).
    ///
    /// # Cancel safety
    /// As [`lock`](ReentrantLock::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<ReentrantGuard, Error> {
        let (owner, request) = self.request();
        match self.nested(&request)? {
            Some(shared) => Ok(guard(owner, shared)),
            None => Ok(self.guard(owner, &request, acquire_within(&request, limit).await?)),
        }
    }

    /// Takes the lock if its owner has it already, or if it is free and nobody waits; `None` otherwise.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum) it tries up to twice more, after at most 30 ms of
    /// pauses together, where nodes have
    /// granted it to several at a time.
    ///
    /// # Errors
    /// - [`Error::TooDeep`]: the owner has as many holds as
    ///   [`max_depth`](crate::Options::max_depth) allows.
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
    /// As [`lock`](ReentrantLock::lock).
    pub async fn try_lock(&self) -> Result<Option<ReentrantGuard>, Error> {
        let (owner, request) = self.request();
        match self.nested(&request)? {
            Some(shared) => Ok(Some(guard(owner, shared))),
            None => Ok(try_acquire(&request).await?.map(|held| self.guard(owner, &request, held))),
        }
    }

    /// Who holds the lock, how often, and how many wait, as the server sees it now.
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
        self.lock.inspect(&REENTRANT).await
    }

    /// Whether any owner holds the lock now.
    ///
    /// # Errors
    /// Those of [`inspect`](ReentrantLock::inspect).
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(!self.inspect().await?.holders.is_empty())
    }

    /// Whether the server still has a hold of this holder: of an [`Owner`], or of a [`Lease`]'s
    /// owner; see [`HolderId`].
    ///
    /// [`Lease::is_lost`] answers without asking, and is what to decide by.
    ///
    /// # Errors
    /// Those of [`inspect`](ReentrantLock::inspect).
    pub async fn is_held_by(&self, holder: &impl HolderId) -> Result<bool, Error> {
        self.lock.is_held_by(&REENTRANT, &holder.sought()).await
    }

    /// Takes the lock away from its owner, with all holds, and hands it to the next waiter if there is
    /// one. False if nobody held it.
    ///
    /// The former owner learns of it from the next renewal, a third of its ttl later at most, and from
    /// its releases. Until then it believes that it is alone: let the resource compare fencing tokens,
    /// the next one is larger.
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
        self.lock.force_release(&REENTRANT).await
    }

    /// What is wanted, and for which owner: a new one, unless one is bound.
    fn request(&self) -> (Owner, LockRequest) {
        let owner = self.owner.clone().unwrap_or_else(Owner::new);
        let request = self.lock.request(&REENTRANT, Some(&owner));
        (owner, request)
    }

    /// The hold that this process has for the same owner, where nesting is local.
    fn nested(&self, request: &LockRequest) -> Result<Option<Arc<SharedHold>>, Error> {
        match request.options.nesting {
            Nesting::Local => SharedHold::find(request),
            Nesting::Counted => Ok(None),
        }
    }

    fn guard(&self, owner: Owner, request: &LockRequest, held: OwnedLease) -> ReentrantGuard {
        guard(
            owner,
            match request.options.nesting {
                Nesting::Local => SharedHold::open(request, held),
                Nesting::Counted => SharedHold::unlisted(held),
            },
        )
    }
}

fn guard(owner: Owner, shared: Arc<SharedHold>) -> ReentrantGuard {
    ReentrantGuard { owner, shared }
}

impl fmt::Debug for ReentrantLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.describe("ReentrantLock", self.owner.as_ref(), f)
    }
}

/// One hold on a re-entrant lock. Its lease is renewed for as long as this lives.
///
/// # Release on drop is not immediate
/// Dropped, it is released by a task of the client, soon, and nobody hears of a failure. Call
/// [`release`](ReentrantGuard::release) to be sure. If the process ends first, the ttl frees the lock.
#[must_use = "if unused, the hold is released at once"]
#[clippy::has_significant_drop]
pub struct ReentrantGuard {
    owner: Owner,
    shared: Arc<SharedHold>,
}

impl ReentrantGuard {
    /// The lease: whether it still stands, until when, and its fencing token.
    pub fn lease(&self) -> &Lease {
        self.shared.held().lease()
    }

    /// Whose hold this is.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Releases this hold and waits until that is done. The lock is free after the owner's last one.
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
        self.shared.release().await
    }

    /// Ends the renewal of this hold without releasing it: the owner keeps the lock until the ttl is over.
    /// With [`Nesting::Local`] guards share a hold: it is lost to the others.
    pub fn leak(self) {
        self.shared.held().leak();
    }
}

impl fmt::Debug for ReentrantGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReentrantGuard").field("owner", &self.owner).field("lease", self.lease()).finish()
    }
}
