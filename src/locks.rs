//! [`Locks`]: where locks come from.

#[cfg(test)]
mod cancellation;
mod nodes;
mod rejoin;
mod topologies;

use std::fmt;
use std::sync::Arc;

use crate::error::{ConfigError, Error};
use crate::lease::Client;
use crate::lock::Lock;
use crate::mutex::Mutex;
use crate::name::{Name, NameError};
use crate::options::Options;
use crate::reentrant::ReentrantLock;
use crate::rwlock::RwLock;
use crate::wire::{self, Dial, Ear};

pub use nodes::{NodeState, NodeStatus};

/// A client of one Redis server, cluster, Sentinel group or quorum, and the source of locks on it. Cheap to clone; clones
/// share everything.
///
/// It has one connection for requests, made with `TCP_NODELAY`, keepalive and timeouts, and, from the first
/// time that somebody has to wait, one for wake-ups. One task renews all leases. Keep one for the whole
/// application. The last clone, lock and guard to be dropped closes it.
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
    /// Connects to a server: `redis://[user:password@]host[:port][/database]`, `rediss://` with a TLS
    /// feature of the `redis` crate, `unix://path`. With `?protocol=resp3` requests speak RESP3.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let locks = redlatch::Locks::open("redis://127.0.0.1/").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for a URL that cannot be read, before anything is sent; [`Error::Redis`] if the
    /// server does not answer within the [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    pub async fn open(url: &str) -> Result<Locks, Error> {
        Locks::open_with(url, Options::default()).await
    }

    /// [`open`](Locks::open) with options of one's own.
    ///
    /// # Errors
    /// Those of [`open`](Locks::open), and [`Error::Config`] for options out of their bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    pub async fn open_with(url: &str, options: Options) -> Result<Locks, Error> {
        options.check()?;
        let client = client(url, &options)?;
        Locks::start(Dial::Server(client.clone()), Some(Ear::Server(client)), options).await
    }

    /// Connects as an application's pool does: with its address, credentials and protocol.
    ///
    /// The connection is made beside the pool and takes no place in it, so a pool that is exhausted
    /// keeps no lease from being renewed. Its socket settings are the pool's; give the pool's URL to
    /// [`open`](Locks::open) to have the better ones.
    ///
    /// A pool cannot subscribe: without [`with_subscriber`](Locks::with_subscriber), whoever waits looks
    /// every 100 ms instead of being told.
    ///
    /// # Errors
    /// [`Error::Redis`] if the server does not answer within the [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "pool")]
    pub async fn from_pool(pool: deadpool_redis::Pool) -> Result<Locks, Error> {
        Locks::from_pool_with(pool, Options::default()).await
    }

    /// [`from_pool`](Locks::from_pool) with options of one's own.
    ///
    /// # Errors
    /// Those of [`from_pool`](Locks::from_pool), and [`Error::Config`] for options out of their bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "pool")]
    pub async fn from_pool_with(pool: deadpool_redis::Pool, options: Options) -> Result<Locks, Error> {
        options.check()?;
        Locks::start(Dial::Pool(pool), None, options).await
    }

    async fn start(dial: Dial, ear: Option<Ear>, options: Options) -> Result<Locks, Error> {
        options.check_for_one_node()?;
        if dial.is_cluster() {
            options.check_for_cluster()?;
        }
        let client = Client::start(dial, ear, &options).await?;
        Ok(Locks { client, options: Arc::new(options) })
    }

    /// Gives a client that came from a pool the URL to subscribe with: the same server as the pool's.
    /// It connects when somebody first has to wait. A client that can subscribe already stays as it is.
    ///
    /// # Errors
    /// [`ConfigError::Url`] for a URL that cannot be read.
    pub fn with_subscriber(self, url: &str) -> Result<Locks, ConfigError> {
        let ear = Ear::Server(client(url, &self.options)?);
        if self.client.nodes.single().is_some() {
            self.client.wakeups.subscribe_with(ear);
        }
        Ok(self)
    }

    /// The same client with other options, for the locks made from what this returns.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn run(locks: redlatch::Locks) -> Result<(), redlatch::Error> {
    /// let slow = locks.with_options(locks.options().clone().ttl(Duration::from_secs(300)))?;
    /// let guard = slow.mutex("nightly-report")?.lock().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] for options out of their bounds.
    pub fn with_options(&self, mut options: Options) -> Result<Locks, ConfigError> {
        options.check()?;
        if self.client.nodes.resend() {
            options.check_for_cluster()?;
        }
        if self.client.nodes.single().is_some() {
            options.check_for_one_node()?;
        }
        options.restart_guard = self.options.restart_guard;
        Ok(Locks { client: Arc::clone(&self.client), options: Arc::new(options) })
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

fn client(url: &str, options: &Options) -> Result<redis::Client, ConfigError> {
    wire::client(url, options.node_timeout).map_err(|cause| ConfigError::Url { cause })
}
