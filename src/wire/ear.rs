//! Where to listen for wake-ups, which may be elsewhere the next time.

#[cfg(feature = "cluster")]
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError};

#[cfg(feature = "cluster")]
use super::cluster::Seeds;
#[cfg(feature = "sentinel")]
use super::sentinel::Watched;

/// One place to subscribe at.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are no more of them than servers")]
pub(crate) enum Ear {
    Server(Client),
    #[cfg(feature = "sentinel")]
    Sentinel(std::sync::Arc<Watched>),
    /// Any server hears what is published on any.
    #[cfg(feature = "cluster")]
    Cluster(Arc<Seeds>),
}

impl Ear {
    pub(super) async fn client(&self) -> Result<Client, RedisError> {
        match self {
            Ear::Server(client) => Ok(client.clone()),
            #[cfg(feature = "sentinel")]
            Ear::Sentinel(watched) => watched.master().await,
            #[cfg(feature = "cluster")]
            Ear::Cluster(seeds) => seeds.next(),
        }
    }

    /// For people, as [`Dial::label`](super::Dial::label) has it.
    pub(super) fn label(&self) -> String {
        match self {
            Ear::Server(client) => client.get_connection_info().addr().to_string(),
            #[cfg(feature = "sentinel")]
            Ear::Sentinel(watched) => watched.name().to_owned(),
            #[cfg(feature = "cluster")]
            Ear::Cluster(_) => "cluster".to_owned(),
        }
    }

    /// To be called on a new connection.
    pub(super) async fn connected(&self, client: &Client, connection: &mut MultiplexedConnection) {
        match self {
            #[cfg(feature = "cluster")]
            Ear::Cluster(seeds) => seeds.learn(connection, client).await,
            _ => {
                let _ = (client, connection);
            }
        }
    }

    /// Returns once a request has found that another server is the one to listen to.
    pub(super) async fn moves_from(&self, client: &Client) {
        match self {
            #[cfg(feature = "sentinel")]
            Ear::Sentinel(watched) => watched.moves_from(client).await,
            _ => {
                let _ = client;
                std::future::pending().await
            }
        }
    }
}
