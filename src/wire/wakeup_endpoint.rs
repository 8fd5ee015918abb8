//! Where to listen for wake-ups, which may be elsewhere the next time.

#[cfg(feature = "cluster")]
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError};

#[cfg(feature = "cluster")]
use super::cluster::Seeds;
#[cfg(feature = "sentinel")]
use super::sentinel::SentinelMaster;

/// One place to subscribe at.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are no more of them than servers")]
pub(crate) enum WakeupEndpoint {
    Server(Client),
    #[cfg(feature = "sentinel")]
    Sentinel(std::sync::Arc<SentinelMaster>),
    /// Any server hears what is published on any.
    #[cfg(feature = "cluster")]
    Cluster(Arc<Seeds>),
}

impl WakeupEndpoint {
    pub(super) async fn client(&self) -> Result<Client, RedisError> {
        match self {
            WakeupEndpoint::Server(client) => Ok(client.clone()),
            #[cfg(feature = "sentinel")]
            WakeupEndpoint::Sentinel(sentinel) => sentinel.master().await,
            #[cfg(feature = "cluster")]
            WakeupEndpoint::Cluster(seeds) => seeds.next(),
        }
    }

    /// For people, as [`Endpoint::label`](super::Endpoint::label) has it.
    pub(super) fn label(&self) -> String {
        match self {
            WakeupEndpoint::Server(client) => client.get_connection_info().addr().to_string(),
            #[cfg(feature = "sentinel")]
            WakeupEndpoint::Sentinel(sentinel) => sentinel.name().to_owned(),
            #[cfg(feature = "cluster")]
            WakeupEndpoint::Cluster(_) => "cluster".to_owned(),
        }
    }

    /// To be called on a new connection.
    pub(super) async fn connected(&self, client: &Client, connection: &mut MultiplexedConnection) {
        match self {
            #[cfg(feature = "cluster")]
            WakeupEndpoint::Cluster(seeds) => seeds.learn(connection, client).await,
            _ => {
                let _ = (client, connection);
            }
        }
    }

    /// Returns once a request has found that another server is the one to listen to.
    pub(super) async fn moves_from(&self, client: &Client) {
        match self {
            #[cfg(feature = "sentinel")]
            WakeupEndpoint::Sentinel(sentinel) => sentinel.moves_from(client).await,
            _ => {
                let _ = client;
                std::future::pending().await
            }
        }
    }
}
