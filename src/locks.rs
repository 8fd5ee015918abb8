//! [`Locks`]: the client, which creates locks.

mod builder;
mod doctor;
mod election;
mod force;
mod node_status;
mod rejoin;
mod source;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::all::{All, Member};
use crate::error::Error;
use crate::events::Events;
use crate::lease::{Client, Kind, LockRequest};
use crate::mutex::{MUTEX, Mutex};
use crate::name::{Name, NameError};
use crate::options::Options;
use crate::owner::Owner;
use crate::reentrant::{REENTRANT, ReentrantLock};
use crate::rwlock::{READ, RwLock};

pub use builder::LocksBuilder;
pub use node_status::{NodeState, NodeStatus};
pub use source::Source;

/// A client of one Redis server, cluster, Sentinel group or quorum, and the source of locks on it.
/// Cheap to clone; clones share everything.
///
/// It has one connection for requests, with `TCP_NODELAY`, keepalive and timeouts. Once a task has
/// to wait, it opens a second one for wake-ups. One task renews all leases.
///
/// Keep one client for the whole application. Dropping the last clone, lock and guard closes it.
///
/// A call needs only its task's memory: 3.5 kB for its future, 6 kB with the task and the lock.
/// While 960 requests are in flight, further calls wait inside the client for as long as their time
/// limits allow; that time does not count as silence of the server. To acquire and release 200,000
/// locks at the same time took 3.8 s and 1.15 GB (two cores, Redis 7.0.15, release build).
///
/// **What it does not**: keep a runtime alive. Its task runs on the runtime in which the client was
/// made. Once that runtime has shut down, leases end when their TTL expires, and calls return
/// [`Error::RuntimeEnded`].
///
/// Tests that each have their own runtime need a client each.
#[derive(Clone)]
pub struct Locks {
    client: Arc<Client>,
    options: Arc<Options>,
}

impl Locks {
    /// Connects to one server, with all defaults: `redis://[user:password@]host[:port][/database]`.
    /// [`builder`](Locks::builder) offers everything else.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let locks = redlatch::Locks::open("redis://127.0.0.1/").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Config`]: the URL is invalid; nothing was sent.
    /// - [`Error::Redis`]: the server does not reply within the [node
    ///   timeout](Options::node_timeout), or refuses the connection.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, nothing remains.
    pub async fn open(url: &str) -> Result<Locks, Error> {
        Locks::builder().server(url).connect().await
    }

    /// Returns a builder of clients, for every topology, with options, certificates and names.
    pub fn builder() -> LocksBuilder {
        LocksBuilder::default()
    }

    /// Returns the same client with other options for the locks made from it. Options that are not
    /// set keep this client's values: a section of a configuration file overrides only the options
    /// that it names.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use redlatch::Options;
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let slow = locks.with_options(Options::new().ttl(Duration::from_secs(300)))?;
    /// let guard = slow.mutex("nightly-report")?.lock().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Config`] with [`ConnectionOption`](crate::ConfigError::ConnectionOption):
    ///   `node_timeout`, `wakeups` or `restart_guard` is set to another value than the client was
    ///   made with.
    /// - [`Error::Config`] with another [`ConfigError`](crate::ConfigError): an option is out of
    ///   its bounds.
    pub fn with_options(&self, options: Options) -> Result<Locks, Error> {
        let options = options.with_defaults(&self.options);
        options.check()?;
        let nodes = &self.client.nodes;
        options.check_for(nodes.deployment.decides_alone(), nodes.has_cluster())?;
        options.check_connections(&self.options)?;
        Ok(Locks { client: Arc::clone(&self.client), options: Arc::new(options) })
    }

    /// Returns whether this client holds no lock, acquires none and has none to release. It sends
    /// no request.
    ///
    /// It does not prevent other tasks from beginning a call: stop them first.
    ///
    /// ```no_run
    /// # fn run(locks: redlatch::Locks) {
    /// assert!(locks.is_idle(), "a task still works under a lock");
    /// # }
    /// ```
    pub fn is_idle(&self) -> bool {
        self.client.is_idle()
    }

    /// Returns what happens from now on to the locks of this client, as a stream: grants, renewals,
    /// losses, releases and outages. For a program without the features `tracing` and `metrics`.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) {
    /// let mut events = locks.events();
    /// tokio::spawn(async move {
    ///     while let Some(event) = events.next().await {
    ///         if let redlatch::Event::Lost { lock, reason, .. } = event {
    ///             eprintln!("lost {lock}: {reason}");
    ///         }
    ///     }
    /// });
    /// # }
    /// ```
    ///
    /// **What it does not**: stop the work under a lost lease. It may be read late; a
    /// [`Lease`](crate::Lease) knows at once.
    ///
    /// A receiver that falls 1,024 events behind misses the oldest. Until this is called, events
    /// cost nothing.
    pub fn events(&self) -> Events {
        self.client.origin.observer.events()
    }

    /// Waits until all dropped guards and calls have been released; on a quorum, by a majority of
    /// its nodes. If the client's runtime has ended, it returns, and their locks stay held until
    /// the TTLs expire.
    ///
    /// A dropped guard is released by a background task, which ends with its runtime. Call this
    /// before `main` returns, so that the task can finish; otherwise the lock stays held until its
    /// TTL expires. Stop other tasks first, since they may drop more guards meanwhile.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// # async fn work() -> Result<(), redlatch::Error> { Ok(()) }
    /// let guard = locks.mutex("backup")?.lock().await?;
    /// let outcome = work().await; // may fail: the guard is dropped then
    /// drop(guard);
    /// let limit = std::time::Duration::from_secs(5);
    /// let _ = tokio::time::timeout(limit, locks.settled()).await; // the server may be down
    /// outcome
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: it changes nothing.
    pub async fn settled(&self) {
        self.client.settled().await;
    }

    /// Like [`settled`](Locks::settled), but a last clone gives releases up at some time.
    pub(crate) async fn into_settled(self) {
        self.client.into_settled().await;
    }

    /// Releases everything that this client holds, and acquires nothing from now on: the last call
    /// of a program, and of its graceful shutdown.
    ///
    /// - Calls that wait for a lock leave the queue and return [`Error::Closed`], and so does every
    ///   later call that acquires or downgrades.
    /// - Leases of live guards end at once, as [`LeaseEnd::Closed`](crate::LeaseEnd::Closed), and
    ///   are released. A later `release()` of such a guard does nothing and returns no error: this
    ///   call reports the locks that were not released.
    /// - It waits for earlier drops, like [`settled`](Locks::settled).
    ///
    /// It concerns all clones, locks and guards of this client. `inspect` and `force_release` still
    /// work. A second call waits again, and reports the locks that are still unreleased.
    ///
    /// **What it does not**: stop the work that a lock protects. Only work inside
    /// [`while_held`](crate::Lease::while_held) ends with its lease, so stop other work first.
    ///
    /// Leaked holds stay. While no server replies, no release can be confirmed, even after the TTLs
    /// have expired.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let guard = locks.mutex("backup")?.lock().await?;
    /// // At the end, and after a signal:
    /// locks.close(Duration::from_secs(5)).await?;
    /// assert!(guard.lease().is_lost());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Unreleased`]: not everything was released within `limit`. It is returned at the
    ///   limit, even if no server replies. A limit of zero starts the releases without waiting.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended. Its locks stay held until their
    ///   TTLs expire.
    ///
    /// # Cancel safety
    /// Cancel safe: the first poll closes the client and ends all its leases. After a drop, the
    /// releases continue in the background.
    pub async fn close(&self, limit: Duration) -> Result<(), Error> {
        self.client.close(limit).await
    }

    /// Returns the options of the locks made from this client.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the mutex of this name, without a request: the value only describes the lock, and
    /// its guard holds it.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Mutex, Error> {
        Ok(Mutex { lock: self.lock(&MUTEX, name.as_ref())? })
    }

    /// Returns the re-entrant lock of this name for `owner`, without a request: the value only
    /// describes the lock, and its guard holds it. Calls that nest need the same owner.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn reentrant(&self, name: impl AsRef<str>, owner: &Owner) -> Result<ReentrantLock, Error> {
        Ok(ReentrantLock::new(self.lock(&REENTRANT, name.as_ref())?, owner))
    }

    /// Returns the re-entrant lock of this name for the owner in whose [`scope`](Owner::scope) the
    /// caller is, without a request.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// use redlatch::{Error, Locks, Owner};
    ///
    /// async fn bill(locks: &Locks) -> Result<(), Error> {
    ///     locks.reentrant_in_scope("orders:42")?.run(async |_| Ok(())).await
    /// }
    ///
    /// let ship = async {
    ///     let order = locks.reentrant_in_scope("orders:42")?;
    ///     order.run(async |_| bill(&locks).await).await // enters the same lock
    /// };
    /// Owner::new().scope(ship).await
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::NoOwner`]: there is no scope around the caller.
    /// - [`Error::Name`]: the name is not allowed.
    pub fn reentrant_in_scope(&self, name: impl AsRef<str>) -> Result<ReentrantLock, Error> {
        let lock = self.lock(&REENTRANT, name.as_ref())?;
        let owner = owner_in_scope(&lock.name)?;
        Ok(ReentrantLock::new(lock, &owner))
    }

    /// Returns the read-write lock of this name, without a request: the value only describes the
    /// lock, and its guards hold it.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn rwlock(&self, name: impl AsRef<str>) -> Result<RwLock, Error> {
        Ok(RwLock::new(self.lock(&READ, name.as_ref())?))
    }

    /// Returns the read-write lock of this name for the owner in whose [`scope`](Owner::scope) the
    /// caller is, without a request: its calls nest.
    ///
    /// A lock of [`rwlock`](Locks::rwlock) has no owner inside of a scope either, since tasks share
    /// only holds without one: many readers of one client then cost no request each.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// use redlatch::{Error, Locks, Owner};
    ///
    /// async fn refresh(locks: &Locks) -> Result<(), Error> {
    ///     locks.rwlock_in_scope("prices")?.run_write(async |_| Ok(())).await
    /// }
    ///
    /// let read = async {
    ///     let prices = locks.rwlock_in_scope("prices")?;
    ///     prices.run_read(async |_| refresh(&locks).await).await // becomes the writer
    /// };
    /// Owner::new().scope(read).await
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::NoOwner`]: there is no scope around the caller.
    /// - [`Error::Name`]: the name is not allowed.
    pub fn rwlock_in_scope(&self, name: impl AsRef<str>) -> Result<RwLock, Error> {
        let lock = self.lock(&READ, name.as_ref())?;
        let owner = owner_in_scope(&lock.name)?;
        Ok(RwLock::new(lock).with_owner(&owner))
    }

    /// Returns several locks of this client that are acquired together, without a request: mutexes,
    /// re-entrant locks, and sides of read-write locks in any mix.
    ///
    /// ```no_run
    /// # use redlatch::{Error, Locks, Member, Owner};
    /// # async fn run(locks: Locks, owner: Owner) -> Result<(), Error> {
    /// let all = locks.all([
    ///     locks.mutex("report")?.into(),
    ///     locks.reentrant("orders:42", &owner)?.into(),
    ///     Member::Read(locks.rwlock("prices")?),
    /// ])?;
    /// let Some(guard) = all.try_lock().await? else { return Ok(()) };
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Members`]: there are none or more than 128, one is of another client or has
    ///   [`hold_at_least`](Options::hold_at_least), or a name stands twice.
    ///   [`MembersError`](crate::MembersError) says which.
    pub fn all<M: Into<Member>>(&self, members: impl IntoIterator<Item = M>) -> Result<All, Error> {
        Ok(All::new(&self.client, members.into_iter().map(Into::into).collect())?)
    }

    fn lock(&self, kind: &'static Kind, name: &str) -> Result<LockRequest, NameError> {
        let name = Name::new(&self.options.prefix, name)?;
        let (client, options) = (Arc::clone(&self.client), Arc::clone(&self.options));
        Ok(LockRequest { client, kind, name, options, owner: None })
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("client", &self.client).field("options", &self.options).finish()
    }
}

fn owner_in_scope(name: &Name) -> Result<Owner, Error> {
    Owner::current().ok_or_else(|| Error::NoOwner { name: name.clone() })
}
