//! [`Endpoint`]: how to connect to a server, to a pool's server, to the master that sentinels name,
//! or to a cluster, and where to subscribe to its wake-ups.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, RedisError};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::super::error_replies::{is_error_reply, is_unserved};
use super::batcher::Batcher;
#[cfg(feature = "pool")]
use super::batcher::UNLIMITED;
use super::connection::Connection;
use super::masters::Masters;
use super::refused_connection::explain;
use super::seeds::Seeds;
use super::sentinel::SentinelMaster;
use super::transport::{connect, set_name, unlimited};

/// A way to connect. What the client may trust depends on whether another server may take over
/// unseen, which is answered for every variant: a new one that counted as one server would let a
/// demoted master's messages grant leases.
#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "there are no more of them than servers")]
pub(crate) enum Endpoint {
    Server(Client),
    /// A pool's settings, not its slots: the connection is made beside the pool, so that an
    /// exhausted pool does not keep a lease from being renewed.
    #[cfg(feature = "pool")]
    Pool(deadpool_redis::Pool),
    Sentinel(Arc<SentinelMaster>),
    Cluster(Arc<Seeds>),
}

impl Endpoint {
    /// Connects, and sets `name` in `CLIENT LIST` if there is one. Must be called on the client's
    /// runtime. The caller ends it after `limit`.
    async fn connect(&self, limit: Duration, name: Option<&str>) -> Result<Connection, RedisError> {
        let connection = match self {
            Endpoint::Server(_) | Endpoint::Sentinel(_) => {
                connect(&self.client().await?, &unlimited(limit)).await?
            }
            #[cfg(feature = "pool")]
            Endpoint::Pool(pool) => {
                let mut connection = deadpool::managed::Manager::create(pool.manager()).await?;
                connection.set_response_timeout(UNLIMITED); // its default cannot be removed
                connection
            }
            Endpoint::Cluster(seeds) => {
                let masters = Masters::open(Arc::clone(seeds), limit, name).await?;
                return Ok(Connection::Cluster(masters));
            }
        };
        let connection = Connection::Server(Arc::new(Batcher::new(connection, limit, &Handle::current())));
        if let Some(name) = name {
            set_name(name, async |naming| connection.query(&naming, limit).await).await?;
        }
        Ok(connection)
    }

    /// Connects once, or twice to the same server, so that a failover between the two does not
    /// separate them. The caller ends it after `limit`.
    pub(in crate::wire) async fn connect_pair(
        &self,
        limit: Duration,
        has_second: bool,
        name: Option<&str>,
    ) -> Result<(Connection, Option<Connection>), RedisError> {
        let (server, epoch) = match self {
            Endpoint::Sentinel(sentinel) => {
                let (master, epoch) = sentinel.find().await?;
                (Endpoint::Server(master), epoch)
            }
            server => ((*server).clone(), 0),
        };
        let one = server.connect(limit, name);
        let two = async { if has_second { server.connect(limit, name).await.map(Some) } else { Ok(None) } };
        let connected = tokio::try_join!(one, two)?;
        if let (Endpoint::Sentinel(sentinel), Endpoint::Server(master)) = (self, &server) {
            sentinel.record_master(master, epoch);
        }
        Ok(connected)
    }

    /// The server's reason for the failure of a new connection, if it gives one.
    pub(in crate::wire) async fn explain(&self, failure: RedisError, limit: Duration) -> RedisError {
        // A pool does not name its server; masters that others name have explained it themselves.
        let Endpoint::Server(client) = self else { return failure };
        explain(client.get_connection_info(), failure, limit).await
    }

    /// A human-readable label: the address, as far as a permanent one is known.
    pub(crate) fn label(&self) -> String {
        match self {
            Endpoint::Server(client) => client.get_connection_info().addr().to_string(),
            #[cfg(feature = "pool")]
            Endpoint::Pool(_) => "pool".to_owned(),
            Endpoint::Sentinel(sentinel) => sentinel.name.clone(),
            Endpoint::Cluster(_) => "cluster".to_owned(),
        }
    }

    /// Whether all connections lead to one server. Behind sentinels, one may lead to a master and
    /// another to its predecessor.
    pub(in crate::wire) fn is_one_server(&self) -> bool {
        match self {
            Endpoint::Server(_) => true,
            #[cfg(feature = "pool")]
            Endpoint::Pool(_) => true,
            Endpoint::Sentinel(_) | Endpoint::Cluster(_) => false,
        }
    }

    /// Whether one connection reaches many servers.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Endpoint::Cluster(_))
    }

    /// The server to subscribe at.
    pub(in crate::wire) async fn client(&self) -> Result<Client, RedisError> {
        match self {
            Endpoint::Server(client) => Ok(client.clone()),
            Endpoint::Sentinel(sentinel) => sentinel.master().await,
            // Any server: each one receives messages that are published on any other.
            Endpoint::Cluster(seeds) => seeds.next(),
            #[cfg(feature = "pool")]
            Endpoint::Pool(_) => {
                Err((redis::ErrorKind::InvalidClientConfig, "a pool cannot subscribe").into())
            }
        }
    }

    /// Fails if the server does not reply, or is no node of its cluster: such a one receives no
    /// messages of the others.
    pub(in crate::wire) async fn check(
        &self,
        at: &Client,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), RedisError> {
        let checked = match self {
            Endpoint::Cluster(seeds) => seeds.refresh(connection, at).await,
            _ => redis::cmd("PING").query_async(connection).await,
        };
        // A refusal is a reply, too.
        checked
            .or_else(|error| if is_error_reply(&error) && !is_unserved(&error) { Ok(()) } else { Err(error) })
    }

    /// Where requests are sent, if that may change. To be taken before [`client`](Self::client), so
    /// that no change is missed while the subscription is made.
    pub(in crate::wire) fn place(&self) -> Option<watch::Receiver<Option<ConnectionAddr>>> {
        match self {
            Endpoint::Sentinel(sentinel) => Some(sentinel.place()),
            _ => None,
        }
    }
}
