//! [`Mutex`]: one holder at a time.

use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::inspection::Inspection;
use crate::lease::{Hold, Kind, Lease, LockRequest, Queue, Verbs, acquire, try_acquire};
use crate::name::Name;
use crate::queries::Sealed;
use crate::wire::Script;

pub(crate) static MUTEX: Kind = Kind {
    name: "mutex",
    found: "something that is not a mutex",
    has_owner: false,
    queue: Queue::Inside,
    refusals: &[],
    capacity: None,
    script: &SCRIPT,
    verbs: Verbs {
        acquire: "mutex/acquire",
        wait: None,
        renew: "mutex/renew",
        release: "mutex/release",
        inspect: "mutex/inspect",
    },
    force: "1",
};

static SCRIPT: Script = Script::new(include_str!("../lua/mutex.lua"));

/// A lock with one holder at a time, among all processes that use the same server.
///
/// In Redis it is a string with a TTL, as `SET key token NX PX ttl` creates it. This lock and a
/// library that uses that command on the same key exclude each other.
///
/// **What it promises**: the leases of two guards are never both [valid](Lease::is_lost). Clients
/// take turns. A waiting client is notified; it polls after 250 ms, and later every two seconds.
///
/// **What it does not**: exclude a holder that continues after its lease was lost; see [`Lease`].
/// It is not re-entrant: locking it twice from the same task deadlocks for as long as the first
/// guard lives, since its lease is renewed. [`ReentrantLock`](crate::ReentrantLock) with an owner
/// nests.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// let guard = locks.mutex("backup")?.lock().await?;
/// // No other holder. `guard.lease().fencing_token()` accompanies every write.
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Mutex {
    pub(crate) lock: LockRequest,
}

impl Mutex {
    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.lock.name
    }

    /// Acquires the mutex, waiting until it is free.
    ///
    /// # Errors
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
    /// grant that it received meanwhile is released at once. So in a `select!` in a loop, pin the
    /// call outside the loop: see [waiting](crate::guide::waiting).
    ///
    /// A call that is polled once and then neither polled nor dropped keeps its place in the queue,
    /// and blocks the tasks of this client behind it.
    pub async fn lock(&self) -> Result<MutexGuard, Error> {
        acquire(&self.lock, None).await.map(|hold| MutexGuard { hold })
    }

    /// Acquires the mutex like [`lock`](Mutex::lock), within `limit`, which covers waiting,
    /// connecting and retrying. A limit of zero means one try, like [`try_lock`](Mutex::try_lock),
    /// which takes as long as one request.
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed. If the server was failing by then, its failure is
    ///   returned instead. `was_busy` is false if no server had replied: a limit below the [node
    ///   timeout](crate::Options::node_timeout) ends before that is an error of its own.
    /// - Those of [`lock`](Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`lock`](Mutex::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<MutexGuard, Error> {
        acquire(&self.lock, Some(limit)).await.map(|hold| MutexGuard { hold })
    }

    /// Acquires the mutex, runs `work` while the lease is valid, and releases it, also if the work
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
    /// # use redlatch::{Error, FencingToken};
    /// # async fn charge(id: u64, token: Option<FencingToken>) -> Result<u64, Error> { Ok(id) }
    /// # async fn run(locks: redlatch::Locks) -> Result<(), Error> {
    /// let order = locks.mutex("order:17")?;
    /// let invoice = order.run(async |lease| charge(17, lease.fencing_token()).await).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - That of the work, if it ended before its lease: a failed release is only logged.
    /// - Those of [`lock`](Mutex::lock): the work has not begun.
    /// - [`Error::Closed`] of [`Operation::Hold`](crate::Operation::Hold): the client was closed,
    ///   and the work dropped.
    /// - [`Error::Lost`]: the lease ended before the work did.
    /// - Those of [`MutexGuard::release`] that do not pass: the work is done.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, and the lock is released in the background.
    pub async fn run<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock().await?.hold.run(work).await
    }

    /// Runs `work` like [`run`](Mutex::run), if the lock is acquired within `limit`, which
    /// does not limit the work. Zero is one try: with [`Error::TimedOut`] it was not free, and the
    /// work has not begun.
    ///
    /// # Errors
    /// - Those of [`lock_timeout`](Mutex::lock_timeout) and [`run`](Mutex::run).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`run`](Mutex::run).
    pub async fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock_timeout(limit).await?.hold.run(work).await
    }

    /// Acquires the mutex if it is free and no client waits for it; returns `None` otherwise. It
    /// sends a request, also while another task of this client holds the mutex.
    ///
    /// On a [quorum](crate::LocksBuilder::quorum), callers that try at the same time may get a
    /// minority of the nodes each. The call then tries up to twice more, after at most 30 ms of
    /// pauses in total.
    ///
    /// # Errors
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
    /// Cancel safe: like [`lock`](Mutex::lock).
    pub async fn try_lock(&self) -> Result<Option<MutexGuard>, Error> {
        Ok(try_acquire(&self.lock).await?.map(|hold| MutexGuard { hold }))
    }

    /// Returns the holder and the number of waiters, as the server reports them at this moment.
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

    /// Returns whether the mutex is held now.
    ///
    /// # Errors
    /// - Those of [`inspect`](Mutex::inspect).
    pub async fn is_locked(&self) -> Result<bool, Error> {
        Ok(!self.inspect().await?.holders.is_empty())
    }

    /// Returns whether the server still has the hold of this lease. A hold on a mutex has no owner,
    /// so this method accepts only a lease, unlike that of the other kinds:
    ///
    /// ```compile_fail,E0308
    /// # use redlatch::{Error, Locks, Owner};
    /// # async fn run(locks: Locks, owner: Owner) -> Result<(), Error> {
    /// locks.mutex("backup")?.is_held_by(&owner).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// To decide whether to continue, use [`Lease::is_lost`], which sends no request. This call
    /// notices a forced release earlier.
    ///
    /// # Errors
    /// - Those of [`inspect`](Mutex::inspect).
    pub async fn is_held_by(&self, lease: &Lease) -> Result<bool, Error> {
        self.lock.is_held_by(&lease.holder_id()).await
    }

    /// Revokes the mutex from its holder, and grants it to the next waiter if there is one. Returns
    /// false if it was free.
    ///
    /// The former holder learns of it from its release or its next renewal, at most a third of its
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
}

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.describe("Mutex", f)
    }
}

/// Holds the mutex, and renews its lease while it lives.
///
/// # Release on drop is not immediate
/// Dropping the guard releases the mutex in a background task, soon, and failures are only logged.
/// Call [`release`](MutexGuard::release) to learn the outcome. If the process ends first, the lock
/// stays held until the TTL expires.
#[must_use = "if unused, the mutex is released at once"]
#[clippy::has_significant_drop]
pub struct MutexGuard {
    pub(crate) hold: Hold,
}

impl MutexGuard {
    /// Returns the lease, which says whether it is valid, until when, and with which fencing token.
    pub fn lease(&self) -> &Lease {
        self.hold.lease()
    }

    /// Releases the mutex and waits until that is done.
    ///
    /// If another task of this client has the [turn](crate::Options::local_turn), it gets the hold
    /// without a request, and the call returns at once. It then confirms only that the lease was
    /// valid as far as this client knows.
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

    /// Ends the renewal without releasing: the mutex stays locked until its TTL expires.
    pub fn leak(self) {
        self.hold.leak();
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MutexGuard").field(self.lease()).finish()
    }
}
