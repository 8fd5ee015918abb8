//! [`Locks`]: where locks come from.

mod builder;
mod doctor;
mod nodes;
mod rejoin;
mod source;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{ConfigError, Error};
use crate::lease::Client;
use crate::lock::Lock;
use crate::mutex::Mutex;
use crate::name::{Name, NameError};
use crate::options::Options;
use crate::reentrant::ReentrantLock;
use crate::rwlock::RwLock;

pub use builder::LocksBuilder;
pub use nodes::{NodeState, NodeStatus};
pub use source::Source;

/// A client of one Redis server, cluster, Sentinel group or quorum, and the source of locks on it. Cheap to clone; clones
/// share everything.
///
/// It has one connection for requests, made with `TCP_NODELAY`, keepalive and timeouts, and, from the first
/// time that somebody has to wait, one for wake-ups. One task renews all leases. Keep one for the whole
/// application. The last clone, lock and guard to be dropped closes it.
///
/// A call takes memory of its task only: about 4 kB for its future, and 6 kB with the task and the
/// lock. Calls wait inside the client while 256 others are at the server, for as long as their time
/// limits allow, and that time does not count as silence of the server. 200,000 locks that were
/// acquired and released at once took 3.8 s and 1.15 GB (two cores, Redis 7.0.15, release build).
///
/// **What it does not do**: keep a runtime alive. The task lives on the runtime in which the client was
/// opened; once that has shut down, leases end with their ttl, and who asks for more is told
/// [`Error::RuntimeEnded`]. Tests that have a runtime each need a client each.
#[derive(Clone)]
pub struct Locks {
    client: Arc<Client>,
    options: Arc<Options>,
}

impl Locks {
    /// Connects to one server, with all defaults: `redis://[user:password@]host[:port][/database]`.
    /// Everything else is [`builder`](Locks::builder).
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let locks = redlatch::Locks::open("redis://127.0.0.1/").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Config`]: the URL cannot be read; found before anything is sent.
    /// - [`Error::Redis`]: the server does not answer within the [node
    ///   timeout](Options::node_timeout), or refuses.
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, nothing remains.
    pub async fn open(url: &str) -> Result<Locks, Error> {
        Locks::builder().server(url).connect().await
    }

    /// The way to a client of every topology, with options, certificates and names.
    pub fn builder() -> LocksBuilder {
        LocksBuilder::default()
    }

    /// The same client with other options, for the locks made from what this returns. What
    /// `options` does not set is as it is here: a section of a configuration file overrides only
    /// what it names.
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
    /// - [`ConfigError::ConnectionOption`]: `node_timeout`, `wakeups` or `restart_guard` is set to
    ///   another value than the client was made with.
    /// - Other [`ConfigError`]s: an option is out of its bounds.
    pub fn with_options(&self, options: Options) -> Result<Locks, ConfigError> {
        let options = options.over(&self.options);
        options.check()?;
        if self.client.nodes.deployment.may_resend {
            options.check_for_cluster()?;
        }
        if self.client.nodes.deployment.decides_alone() {
            options.check_for_one_node()?;
        }
        options.check_connections(&self.options)?;
        Ok(Locks { client: Arc::clone(&self.client), options: Arc::new(options) })
    }

    /// For the crate's own tests, which must not read the text of `Debug`: whether this client
    /// holds nothing, waits for nothing and has nothing to release.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn is_idle(&self) -> bool {
        self.client.is_idle()
    }

    /// Waits until everything that was dropped has been given back to the server, of a quorum to so many of its nodes that the
    /// rest are in nobody's way; or left to its ttl, since the runtime of the client has ended.
    ///
    /// A dropped guard is released by a task in the background, which ends with its runtime: to be sure of
    /// it, wait here before `main` returns. Without it, the ttl frees the lock. Dropping goes on meanwhile
    /// elsewhere, so stop what takes locks first.
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// # async fn work() -> Result<(), redlatch::Error> { Ok(()) }
    /// let guard = locks.mutex("backup")?.lock().await?;
    /// let outcome = work().await; // may fail: the guard is dropped then
    /// drop(guard);
    /// let limit = std::time::Duration::from_secs(5);
    /// let _ = tokio::time::timeout(limit, locks.settled()).await; // not for ever, if the server is down
    /// outcome
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// It changes nothing.
    pub async fn settled(&self) {
        self.client.settled().await;
    }

    /// Releases everything that this client has, and acquires nothing from now on. The last call of
    /// a program, and of its graceful shutdown.
    ///
    /// - Calls that wait for a lock fail with [`Error::Closed`] and leave the queue, and so does
    ///   every later call that acquires or downgrades.
    /// - Leases of guards that are alive end at once, as
    ///   [`LeaseEnd::Closed`](crate::LeaseEnd::Closed), and are released. A later `release()` of
    ///   such a guard is no error and does nothing.
    /// - What was dropped before is waited for, as by [`settled`](Locks::settled).
    ///
    /// It concerns all clones, all locks and all guards of this client. `inspect` and
    /// `force_release` still work. Calling it again waits again, and reports what is still left.
    ///
    /// **What it does not**: stop the work that a lock protects. It ends with its lease only inside
    /// [`while_held`](crate::Lease::while_held); so stop the work first. What was leaked stays.
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
    /// - [`Error::Unreleased`]: not everything was released within `limit`. It returns at the
    ///   limit, also if no server answers; a limit of zero starts the releases and waits for none.
    /// - [`Error::RuntimeEnded`]: the client's runtime has ended. Its locks stay until their TTLs
    ///   expire.
    ///
    /// # Cancel safety
    /// Once polled, the client is closed and all of its leases have ended. Dropped after that, the
    /// releases go on in the background.
    pub async fn close(&self, limit: Duration) -> Result<(), Error> {
        self.client.close(limit).await
    }

    /// The options of the locks made from this.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The mutex of this name. Asks nobody: a lock is a description, its guard is what holds.
    ///
    /// # Errors
    /// [`NameError`] for a name that cannot be a key with companions; see [`NameProblem`](crate::NameProblem).
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Mutex, NameError> {
        Ok(Mutex::new(self.lock(name.as_ref())?))
    }

    /// The re-entrant lock of this name. Asks nobody: a lock is a description, its guard is what holds.
    ///
    /// # Errors
    /// [`NameError`] for a name that cannot be a key with companions; see [`NameProblem`](crate::NameProblem).
    pub fn reentrant(&self, name: impl AsRef<str>) -> Result<ReentrantLock, NameError> {
        Ok(ReentrantLock::new(self.lock(name.as_ref())?))
    }

    /// The read-write lock of this name. Asks nobody: a lock is a description, its guards are what holds.
    ///
    /// # Errors
    /// [`NameError`] for a name that cannot be a key with companions; see [`NameProblem`](crate::NameProblem).
    pub fn rwlock(&self, name: impl AsRef<str>) -> Result<RwLock, NameError> {
        Ok(RwLock::new(self.lock(name.as_ref())?))
    }

    fn lock(&self, name: &str) -> Result<Lock, NameError> {
        let name = Name::new(&self.options.prefix, name)?;
        Ok(Lock { client: Arc::clone(&self.client), options: Arc::clone(&self.options), name })
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("client", &self.client).field("options", &self.options).finish()
    }
}
