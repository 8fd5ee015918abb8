//! [`All`]: several locks that are acquired together. [`Member`]: one of them, and its side.

mod leases;

use std::collections::HashSet;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Context, Error, MembersError};
use crate::lease::{Client, Hold, LockRequest, acquire, out_of_time, release_after, send_together, try_all};
use crate::mutex::Mutex;
use crate::name::Name;
use crate::reentrant::ReentrantLock;
use crate::rwlock::RwLock;
use crate::wire::Together;

pub use leases::Leases;

/// How many locks may be acquired together: as many as one call of a script may have.
const MOST: usize = 128;

/// A lock that is acquired together with others, and for a read-write lock its side.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Member {
    /// A mutex.
    Mutex(Mutex),
    /// A re-entrant lock: its owner may hold it already.
    Reentrant(ReentrantLock),
    /// A read-write lock, to read.
    Read(RwLock),
    /// A read-write lock, to write.
    Write(RwLock),
}

impl From<Mutex> for Member {
    fn from(lock: Mutex) -> Member {
        Member::Mutex(lock)
    }
}

impl From<ReentrantLock> for Member {
    fn from(lock: ReentrantLock) -> Member {
        Member::Reentrant(lock)
    }
}

impl Member {
    fn lock(&self) -> &LockRequest {
        match self {
            Member::Mutex(lock) => &lock.lock,
            Member::Reentrant(lock) => &lock.lock,
            Member::Read(lock) => &lock.read,
            Member::Write(lock) => &lock.write,
        }
    }

    fn name(&self) -> &Name {
        &self.lock().name
    }
}

/// Several locks of any kinds that are acquired together: see [`Locks::all`](crate::Locks::all).
///
/// **What it promises**: a call holds all of the locks or none of them when it returns. Calls never
/// wait for each other in a circle, in whatever order their locks were named, since each acquires
/// them in the order of their keys.
///
/// **What it does not**:
/// - Wait for all at once: while it waits for one, it holds those before it in the order, and other
///   clients wait for these. With many names of which one is contended, all become slow.
/// - Know what else the task holds. A task that already has a lock which comes later in the order
///   may wait for another one in a circle: acquire all together, or the others before.
/// - Enter again: a mutex that the task holds is waited for, for ever.
///
/// ```no_run
/// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
/// let accounts = [locks.mutex("account:1")?, locks.mutex("account:2")?];
/// let guard = locks.all(accounts)?.lock().await?;
/// // Both are held; `guard.leases()` has their leases and tokens.
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct All {
    /// In the order of their keys.
    members: Arc<[Member]>,
}

impl All {
    pub(crate) fn new(client: &Arc<Client>, mut members: Vec<Member>) -> Result<All, MembersError> {
        if members.is_empty() {
            return Err(MembersError::None);
        }
        if members.len() > MOST {
            return Err(MembersError::TooMany(members.len()));
        }
        if let Some(other) = members.iter().find(|member| !Arc::ptr_eq(&member.lock().client, client)) {
            return Err(MembersError::OtherClient(other.name().clone()));
        }
        // One that was acquired in vain could not be given back.
        if let Some(kept) = members.iter().find(|member| member.lock().options.minimum_hold().is_some()) {
            return Err(MembersError::HoldAtLeast(kept.name().clone()));
        }
        members.sort_by(|one, other| one.name().key().cmp(other.name().key()));
        // Leases are found by name, also if prefixes differ. Two names may have one key.
        let (mut names, mut keys) = (HashSet::new(), HashSet::new());
        for name in members.iter().map(Member::name) {
            if !names.insert(name.as_str()) || !keys.insert(name.key()) {
                return Err(MembersError::Twice(name.clone()));
            }
        }
        Ok(All { members: members.into() })
    }

    /// Returns the names of the locks, in the order in which they are acquired.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.members.iter().map(Member::name)
    }

    /// Acquires all locks, waiting for one after the other. If all are free, that is one request
    /// for the locks of each kind and slot; on a [quorum](crate::LocksBuilder::quorum), one for
    /// each lock.
    ///
    /// # Errors
    /// - Those of `lock`, `read` or `write` of each lock, which they name. The others are released
    ///   in the background.
    /// - [`Error::Lost`]: a lease ended while the call waited for a later lock.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, everything that was granted is released in the background, and no
    /// place in a queue is left.
    pub async fn lock(&self) -> Result<AllGuard, Error> {
        self.acquire(None).await
    }

    /// Acquires all locks like [`lock`](All::lock), within `limit`, which covers all of them. A
    /// limit of zero means one try, like [`try_lock`](All::try_lock).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the limit elapsed; it names the lock that was waited for.
    /// - Those of [`lock`](All::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`lock`](All::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<AllGuard, Error> {
        self.acquire(Some(limit)).await
    }

    /// Acquires all locks if each of them could be acquired at once, as `try_lock` of its kind
    /// would; returns `None` otherwise, and holds none of them then.
    ///
    /// Locks of one kind with the same options are one request, in which the server grants all or
    /// none; in a cluster, those of one slot. Of others, and on a quorum, those that were granted
    /// first are released before this returns.
    ///
    /// # Errors
    /// - Those of `try_lock`, `try_read` or `try_write` of each lock, which they name. What was
    ///   granted before is released in the background.
    ///
    /// # Cancel safety
    /// Cancel safe: like [`lock`](All::lock).
    pub async fn try_lock(&self) -> Result<Option<AllGuard>, Error> {
        let requests: Vec<_> = self.members.iter().map(Member::lock).collect();
        Ok(try_all(&requests).await?.map(|holds| self.guard(holds)))
    }

    /// Acquires all locks, runs `work` while all their leases are valid, and releases them, also if
    /// the work fails or panics.
    ///
    /// **What it promises**: `Ok` means that all leases were valid when the work ended, and that
    /// the locks were released, or are in the background while the server fails. If one lease ends
    /// first, the work is dropped at its current await.
    ///
    /// **What it does not**: undo what the work did before it was dropped. Give each resource the
    /// [fencing token](crate::Lease::fencing_token) of its lock.
    ///
    /// Its error may be any that an [`Error`] converts into. If nothing else names it, the work
    /// ends with `Ok::<_, Error>(…)`.
    ///
    /// ```no_run
    /// # use redlatch::{Error, Locks, Member};
    /// # async fn run(locks: Locks) -> Result<(), Error> {
    /// let (stock, prices) = (locks.mutex("stock")?, locks.rwlock("prices")?);
    /// let both = locks.all([stock.into(), Member::Read(prices)])?;
    /// both.run(async |leases| {
    ///     let token = leases.get("stock").and_then(|lease| lease.fencing_token());
    ///     Ok::<_, Error>(()) // change the stock, at prices that stay
    /// }).await
    /// # }
    /// ```
    ///
    /// # Errors
    /// - That of the work, if it ended before its lease: a failed release is only logged.
    /// - Those of [`lock`](All::lock): the work has not begun.
    /// - [`Error::Closed`] of [`Operation::Hold`](crate::Operation::Hold): the client was closed,
    ///   and the work dropped.
    /// - [`Error::Lost`]: a lease ended before the work did; it names the lock.
    /// - Those of [`AllGuard::release`] that do not pass: the work is done.
    ///
    /// # Cancel safety
    /// Cancel safe: a dropped call drops the work, and the locks are released in the background.
    pub async fn run<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Leases) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock().await?.run(work).await
    }

    /// Runs `work` like [`run`](All::run), if the locks are acquired within `limit`, which does not
    /// limit the work. Zero is one try: with [`Error::TimedOut`] one of them was not free, and the
    /// work has not begun.
    ///
    /// # Errors
    /// - Those of [`lock_timeout`](All::lock_timeout) and [`run`](All::run).
    ///
    /// # Cancel safety
    /// Cancel safe: like [`run`](All::run).
    pub async fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Leases) -> Result<T, E>,
    ) -> Result<T, E> {
        self.lock_timeout(limit).await?.run(work).await
    }

    /// One try for all, and then one after the other: a task holds only locks before the one that
    /// it waits for.
    async fn acquire(&self, limit: Option<Duration>) -> Result<AllGuard, Error> {
        let first = self.members[0].lock(); // there is at least one
        first.client.run(pin!(self.acquire_in_order(limit)), || first.context()).await
    }

    async fn acquire_in_order(&self, limit: Option<Duration>) -> Result<AllGuard, Error> {
        let until = limit.map(|limit| Moment::now() + limit);
        let trying = self.try_lock();
        let tried = match limit {
            None | Some(Duration::ZERO) => trying.await,
            Some(limit) => match tokio::time::timeout(limit, trying).await {
                Ok(tried) => tried,
                // One more try could wait for a silent server for longer than the limit.
                Err(_elapsed) => {
                    let requests: Vec<_> = self.members.iter().map(Member::lock).collect();
                    return Err(out_of_time(&requests, limit));
                }
            },
        };
        let was_busy = matches!(tried, Ok(None));
        match tried {
            Ok(Some(guard)) => return Ok(guard),
            Ok(None) => {}
            // A call that waits outlasts it.
            Err(error) if error.is_transient() && limit != Some(Duration::ZERO) => {}
            Err(error) => return Err(error),
        }
        let mut holds = Vec::with_capacity(self.members.len());
        for request in self.members.iter().map(Member::lock) {
            let left = until.map(|until| until.since(Moment::now()));
            if let (Some(Duration::ZERO), Some(limit)) = (left, limit) {
                return Err(request.timed_out(limit, was_busy));
            }
            // A lease that is lost meanwhile is not waited with. Large, so not stored twice.
            let acquiring = Leases::of(&holds).while_held(Box::pin(acquire(request, left))).await;
            let acquired = acquiring.map_err(|ended| lost_meanwhile(&self.members, ended))?;
            holds.push(acquired.map_err(|error| within(limit, error))?);
        }
        Ok(self.guard(holds))
    }

    fn guard(&self, holds: Vec<Hold>) -> AllGuard {
        let leases = Leases::of(&holds);
        AllGuard { holds, leases, client: Arc::clone(&self.members[0].lock().client) }
    }
}

/// A lock that was acquired for nothing: the call may succeed later.
fn lost_meanwhile(members: &[Member], ended: Error) -> Error {
    let is_of = |member: &&Member| ended.context().and_then(Context::lock) == Some(member.name());
    match (&ended, members.iter().find(is_of)) {
        (Error::Lost { reason, .. }, Some(lost)) => {
            Error::Lost { context: lost.lock().context(), reason: *reason }
        }
        _ => ended,
    }
}

/// Of the time that a call had left for one lock, the caller knows only the whole.
fn within(whole: Option<Duration>, error: Error) -> Error {
    match (error, whole) {
        (Error::TimedOut { context, was_busy, holds_itself, .. }, Some(limit)) => {
            Error::TimedOut { context, limit, was_busy, holds_itself }
        }
        (error, _) => error,
    }
}

/// Holds several locks, and renews their leases while it lives.
///
/// # Release on drop is not immediate
/// Dropping the guard releases the locks in a background task, soon, and failures are only logged.
/// Call [`release`](AllGuard::release) to learn the outcome. If the process ends first, the locks
/// stay held until their TTLs expire.
#[must_use = "if unused, the locks are released at once"]
#[clippy::has_significant_drop]
pub struct AllGuard {
    /// In the order of their keys.
    holds: Vec<Hold>,
    leases: Leases,
    client: Arc<Client>,
}

impl AllGuard {
    /// Returns the leases, which say until when each lock is held, and with which fencing token.
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Releases all locks, the last one in the order first, and waits until that is done. On one
    /// server, and in one slot of a cluster, that is one request for the locks of each kind; no
    /// lock waits for another one's answer.
    ///
    /// # Errors
    /// - The first one of those of the guards' `release`, which names the lock. The others are
    ///   released all the same.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the releases continue in the background.
    pub async fn release(self) -> Result<(), Error> {
        let together = Together::new();
        let releases = self.holds.into_iter().rev().map(|hold| hold.release(Some(&together)));
        all_of(releases, pin!(send_together(&self.client, &together))).await
    }

    async fn run<T, E: From<Error>>(self, work: impl AsyncFnOnce(Leases) -> Result<T, E>) -> Result<T, E> {
        let leases = self.leases.clone();
        release_after(leases.while_held(Box::pin(work(leases.clone()))), self.release()).await
    }
}

/// Awaits all of these at the same time, begun in this order, and what sends the requests with
/// which they begin. Returns the first error in it.
async fn all_of<F: Future<Output = Result<(), Error>>>(
    futures: impl Iterator<Item = F>,
    mut sending: Pin<&mut impl Future<Output = ()>>,
) -> F::Output {
    let mut is_sending = true;
    let mut running: Vec<(_, Option<F::Output>)> = futures.map(|future| (Box::pin(future), None)).collect();
    poll_fn(|context| {
        for (future, outcome) in running.iter_mut().filter(|(_, outcome)| outcome.is_none()) {
            if let Poll::Ready(ended) = future.as_mut().poll(context) {
                *outcome = Some(ended);
            }
        }
        is_sending = is_sending && sending.as_mut().poll(context).is_pending();
        if running.iter().all(|(_, outcome)| outcome.is_some()) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    running.into_iter().filter_map(|(_, outcome)| outcome).collect()
}

impl fmt::Debug for All {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("All").field(&self.members).finish()
    }
}

impl fmt::Debug for AllGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AllGuard").field(&self.leases.0).finish()
    }
}
