//! Connections: how to make one, and one that is shared and replaced when it breaks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, IntoConnectionInfo, RedisError};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::crowd::{Crowd, too_slow};

/// Where connections come from.
#[derive(Clone, Debug)]
pub(crate) enum Dial {
    Client(Client),
    #[cfg(feature = "pool")]
    /// The settings of an application's pool, not its places: a connection is made beside them, so that
    /// nobody who empties the pool keeps a lease from being renewed.
    Pool(deadpool_redis::Pool),
}

impl Dial {
    pub(super) async fn connect(self, limit: Duration) -> Result<MultiplexedConnection, RedisError> {
        let dialled = async {
            match &self {
                Dial::Client(client) => {
                    client.get_multiplexed_async_connection_with_config(&config(limit)).await
                }
                #[cfg(feature = "pool")]
                Dial::Pool(pool) => deadpool::managed::Manager::create(pool.manager()).await,
            }
        };
        let mut connection = timeout(limit, dialled).await.map_err(|_| too_slow())??;
        connection.set_response_timeout(limit);
        Ok(connection)
    }
}

pub(super) fn config(limit: Duration) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(Some(limit))
}

/// A client for a server's URL, with the socket settings that a lock needs and the library leaves off.
pub(crate) fn client(url: &str, limit: Duration) -> Result<Client, RedisError> {
    let info = url.into_connection_info()?;
    let keepalive = redis::io::tcp::socket2::TcpKeepalive::new().with_time(Duration::from_secs(10));
    let tcp = info.tcp_settings().clone().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    let tcp = tcp.set_user_timeout(limit.max(Duration::from_secs(1)) * 5);
    Client::open(info.set_tcp_settings(tcp))
}

/// One connection that all requests share. Whoever finds it broken drops it; the next request makes another.
#[derive(Debug)]
pub(super) struct Link {
    dial: Dial,
    limit: Duration,
    runtime: Handle,
    current: RwLock<Option<Connected>>,
    /// Held by the one that connects, while the others wait for what comes of it.
    connecting: tokio::sync::Mutex<()>,
    tries: AtomicU64,
    last_failure: Mutex<Option<(u64, RedisError)>>,
}

/// A connection and which one it is.
#[derive(Clone, Debug)]
pub(super) struct Connected {
    pub(super) crowd: Crowd,
    pub(super) generation: u64,
}

impl Link {
    /// To be called on the runtime that the client lives on.
    pub(super) fn new(dial: Dial, limit: Duration) -> Link {
        Link {
            dial,
            limit,
            runtime: Handle::current(),
            current: RwLock::new(None),
            connecting: tokio::sync::Mutex::new(()),
            tries: AtomicU64::new(0),
            last_failure: Mutex::new(None),
        }
    }

    /// The connection that is there. Poisoning does not matter: nothing in here panics half-way.
    pub(super) fn current(&self) -> Option<Connected> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn generation(&self) -> u64 {
        self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, |link| link.generation)
    }

    /// The connection, made if there is none. `greet` is run on a new one before anybody else gets it.
    ///
    /// Takes at most twice the limit: for a try that is under way, and for one of its own. A crowd that
    /// waits for one try shares its failure, so a dead server costs the last of them no more.
    pub(super) async fn get<F>(&self, greet: F) -> Result<Connected, RedisError>
    where
        F: AsyncFnOnce(&mut MultiplexedConnection) -> Result<(), RedisError>,
    {
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let seen = self.tries.load(Ordering::SeqCst);
        let _turn = self.connecting.lock().await;
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let failed = self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((number, error)) = failed
            && number > seen
        {
            return Err(error);
        }
        let generation = self.tries.fetch_add(1, Ordering::SeqCst) + 1;
        let connected = async {
            // On the client's runtime, where what drives the connection outlives the caller.
            let dialled = self.runtime.spawn(self.dial.clone().connect(self.limit)).await;
            let mut connection =
                dialled.map_err(|error| RedisError::from(std::io::Error::other(error)))??;
            greet(&mut connection).await?;
            Ok(connection)
        };
        match timeout(self.limit, connected).await.unwrap_or_else(|_| Err(too_slow())) {
            Ok(connection) => {
                let link = Connected { crowd: Crowd::new(connection, self.limit, &self.runtime), generation };
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(link.clone());
                Ok(link)
            }
            Err(error) => {
                let failure = Some((generation, error.clone()));
                *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
                Err(error)
            }
        }
    }

    /// Forgets the connection, unless it is a newer one already.
    pub(super) fn drop_generation(&self, generation: u64) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|link| link.generation == generation) {
            *current = None;
        }
    }
}

/// Whether a connection that failed like this is of no more use: broken, silent, or to a server that has
/// been demoted. The client library replaces a connection only in the first case.
pub(super) fn is_spent(error: &RedisError) -> bool {
    error.is_timeout()
        || error.is_unrecoverable_error()
        || error.kind() == ErrorKind::Server(redis::ServerErrorKind::ReadOnly)
}
