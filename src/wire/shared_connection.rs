//! [`SharedConnection`]: one connection for all requests of a node, replaced when it breaks.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::RedisError;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio::time::timeout;

use super::error_replies::{is_spent, lacks_replicas, too_slow};
use super::handshake::Handshake;
use super::server_clock::ServerClock;
use super::servers::SentinelMaster;
use super::servers::{Connecting, Connection, EXPLAINING, Endpoint};

/// How often a connection is checked for still leading to the master.
const MASTER_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// One connection shared by all requests. A request that finds it broken drops it; the next one
/// connects again.
///
/// Requests that wait for replicas use a second connection, because requests behind them on the
/// same connection would wait as well. Both are made together and dropped together, so that a grant
/// is never on another server than its renewals.
pub(super) struct SharedConnection {
    pub(super) endpoint: Endpoint,
    pub(super) handshake: Handshake,
    /// The connections' name in `CLIENT LIST`.
    name: Option<Arc<str>>,
    runtime: Handle,
    current: RwLock<Option<ConnectionPair>>,
    connecting: Connecting,
    /// How many pairs of connections were made.
    made: AtomicU64,
    pub(super) server_clock: Arc<ServerClock>,
    /// Whether requests wait for replicas.
    is_confirming: AtomicBool,
}

/// A connection and its generation: how many were made until then.
pub(super) struct LiveConnection {
    pub(super) connection: Connection,
    pub(super) generation: u64,
    /// The run id of its server, where that was queried.
    pub(super) run: Option<Arc<str>>,
}

/// Connections that were made together, under one generation.
struct ConnectionPair {
    shared: Arc<LiveConnection>,
    /// For requests that wait for replicas, if there are any.
    second: Option<Arc<LiveConnection>>,
    /// The tasks that look after the connections. They are aborted when the pair is dropped.
    _tasks: JoinSet<()>,
}

impl SharedConnection {
    /// Must be called on the client's runtime. If `is_confirming` is true, both connections are
    /// made from the start.
    pub(super) fn new(
        endpoint: Endpoint,
        handshake: Handshake,
        is_confirming: bool,
        name: Option<Arc<str>>,
    ) -> SharedConnection {
        let server_clock = Arc::new(ServerClock::new(endpoint.is_one_server()));
        SharedConnection {
            endpoint,
            handshake,
            name,
            runtime: Handle::current(),
            current: RwLock::default(),
            connecting: Connecting::default(),
            made: AtomicU64::new(0),
            server_clock,
            is_confirming: AtomicBool::new(is_confirming),
        }
    }

    /// The present connection, for requests that wait for replicas or for others. Poisoning does
    /// not matter: no code under this lock panics half-way.
    pub(super) fn current(&self, is_confirming: bool) -> Option<Arc<LiveConnection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let pair = current.as_ref()?;
        if is_confirming { pair.second.clone() } else { Some(Arc::clone(&pair.shared)) }
    }

    /// The generation of the connection, and the number of the newest one to a master of a cluster:
    /// larger once another connection was made. `None` while there is none.
    pub(super) fn state(&self) -> Option<(u64, u64)> {
        self.current(false).map(|live| (live.generation, live.connection.newest()))
    }

    /// Returns the connection, connecting if there is none. A new connection passes the handshake
    /// before any request uses it.
    ///
    /// Takes at most twice the limit, for an attempt that is under way and for one of its own, and
    /// a quarter after each, to learn [why it failed](Endpoint::explain). Callers that wait for one
    /// attempt share its failure, so a dead server costs the last of them no more.
    pub(super) async fn get(
        self: &Arc<SharedConnection>,
        is_confirming: bool,
    ) -> Result<Arc<LiveConnection>, RedisError> {
        if let Some(live) = self.current(is_confirming) {
            return Ok(live);
        }
        let (this, seen) = (Arc::clone(self), self.connecting.latest());
        // Connects on the client's runtime, where the task that drives the connection outlives the
        // caller. A caller that is not polled for long must not hold the turn: all other requests,
        // and the renewals, would wait for it.
        let connecting = self.runtime.spawn(async move {
            this.connecting.connect(seen, || this.current(is_confirming), this.open(is_confirming)).await
        });
        connecting.await.map_err(std::io::Error::other)?
    }

    async fn open(
        self: &Arc<SharedConnection>,
        is_confirming: bool,
    ) -> Result<Arc<LiveConnection>, RedisError> {
        let limit = self.handshake.limit;
        let has_second = self.is_confirming.fetch_or(is_confirming, Ordering::Relaxed) || is_confirming;
        let connected = async {
            let name = self.name.as_deref();
            let (connection, second) = self.endpoint.connect_pair(limit, has_second, name).await?;
            // For both connections: neither outlives the run of the server that it was made to.
            let (run, time) = self.handshake.run(&connection).await?;
            time.into_iter().for_each(|time| self.server_clock.raise(time));
            Ok((connection, second, run))
        };
        let (connection, second, run) =
            match timeout(limit, connected).await.unwrap_or_else(|_| Err(too_slow())) {
                Ok(connected) => connected,
                Err(failure) => return Err(self.endpoint.explain(failure, limit / EXPLAINING).await),
            };
        let generation = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        let made = |connection| Arc::new(LiveConnection { connection, generation, run: run.clone() });
        let _tasks = self.look_after(generation);
        let pair = ConnectionPair { shared: made(connection), second: second.map(made), _tasks };
        let live = pair.second.as_ref().filter(|_| is_confirming).unwrap_or(&pair.shared).clone();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(pair);
        Ok(live)
    }

    /// Starts the tasks that look after connections of this generation.
    fn look_after(self: &Arc<SharedConnection>, generation: u64) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Endpoint::Sentinel(sentinel) = &self.endpoint {
            // It must not own what owns it.
            let this = Arc::downgrade(self);
            tasks.spawn_on(follow_master(Arc::clone(sentinel), this, generation), &self.runtime);
        }
        tasks
    }

    /// Drops the connection that an error came through, if it is of no further use and a newer one
    /// is not in place. One to a cluster replaces what is broken of it by itself.
    pub(super) fn drop_if_spent(&self, generation: u64, error: &RedisError) {
        // The server's replicas may have moved to another master.
        let is_spent =
            is_spent(error) || (matches!(self.endpoint, Endpoint::Sentinel(_)) && lacks_replicas(error));
        if is_spent && !self.endpoint.is_cluster() {
            self.forget(generation);
        }
    }

    fn forget(&self, generation: u64) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|pair| pair.shared.generation == generation) {
            *current = None;
        }
    }
}

/// Checks periodically whether the connection still leads to the master, and drops it if not. A
/// replaced master may reply for some time, or for ever if it is cut off from the sentinels.
async fn follow_master(sentinel: Arc<SentinelMaster>, shared: Weak<SharedConnection>, generation: u64) {
    loop {
        sleep(MASTER_CHECK_INTERVAL).await;
        if sentinel.has_moved().await {
            return shared.upgrade().iter().for_each(|shared| shared.forget(generation));
        }
    }
}
