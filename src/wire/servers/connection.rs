//! [`Connection`]: to one server or to a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, Value};
use tokio::time::Instant;

use super::super::error_replies::is_broken;
use super::super::request::{PreparedCall, Shard, Slot, TimedReply};
use super::batcher::Batcher;
use super::masters::Masters;
use super::sending::{SentFlag, last};
use super::transport::{RepliesByServer, introduction};
use crate::clock::Moment;

/// Cheap to clone; clones share everything.
#[derive(Clone)]
pub(in crate::wire) enum Connection {
    Server(Arc<Batcher>),
    Cluster(Arc<Masters>),
}

impl Connection {
    /// Those of a cluster.
    fn masters(&self) -> Option<&Arc<Masters>> {
        match self {
            Connection::Server(_) => None,
            Connection::Cluster(masters) => Some(masters),
        }
    }

    /// The part of the node that has a key.
    pub(in crate::wire) fn shard(&self, key: Option<&str>) -> Shard {
        self.masters().zip(key).map_or(Shard::All, |(masters, key)| masters.shard(Slot::for_key(key)))
    }

    /// Whether this is a part of the node now, and a request that was begun then may have gone to
    /// it: of a master that has replaced another one since, it shows nothing.
    pub(in crate::wire) fn knew_shard(&self, shard: &Shard, begun: Moment) -> bool {
        self.masters().is_none_or(|masters| masters.knew_shard(shard, begun))
    }

    /// Sends a request when its turn comes, and waits for the reply for as long as the server
    /// replies to any request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run if it was written; `sent_flag` says whether it
    /// was.
    pub(in crate::wire) async fn send(
        &self,
        request: &PreparedCall,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        match self {
            Connection::Server(batcher) => batcher.send(request, sent_flag).await,
            Connection::Cluster(masters) => masters.send(request, sent_flag).await,
        }
    }

    /// Sends a command beside the other requests, and waits for its reply for at most `limit`.
    ///
    /// # Cancel safety
    /// Not cancel safe: the command may still run.
    pub(in crate::wire) async fn query(&self, command: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        match self {
            Connection::Server(batcher) => batcher.query(command, limit).await,
            Connection::Cluster(masters) => masters.query(command, limit).await,
        }
    }

    /// As [`query`](Connection::query), but one server is waited for as long as it replies to any
    /// request.
    pub(in crate::wire) async fn query_in_turn(
        &self,
        command: &Cmd,
        limit: Duration,
    ) -> Result<Value, RedisError> {
        match self {
            Connection::Server(batcher) => batcher.query_in_turn(command, limit).await,
            Connection::Cluster(masters) => masters.query(command, limit).await,
        }
    }

    /// The server's clock. To one server, the name of this library travels with the query.
    pub(in crate::wire) async fn time(&self, limit: Duration) -> Result<Value, RedisError> {
        let time = redis::cmd("TIME");
        match self {
            Connection::Server(batcher) => {
                last(batcher.send_all(introduction().chain([time]).collect(), limit).await)
            }
            Connection::Cluster(masters) => masters.query(&time, limit).await,
        }
    }

    /// Sends requests together, ahead of those that wait, combined where they may be.
    pub(in crate::wire) async fn send_ahead(
        &self,
        requests: Vec<PreparedCall>,
        limit: Duration,
    ) -> Vec<Result<TimedReply, RedisError>> {
        match self {
            Connection::Server(batcher) => batcher.send_ahead(&requests, limit).await,
            Connection::Cluster(masters) => masters.send_ahead(requests, limit).await,
        }
    }

    /// Sends a request to every server that grants locks: to the one, or to each master of a
    /// cluster, by address. Fails if the one gives no reply; a refusal is one.
    pub(in crate::wire) async fn send_to_masters(
        &self,
        request: &Cmd,
        limit: Duration,
    ) -> Result<RepliesByServer, RedisError> {
        match self {
            Connection::Server(server) => match server.query(request, limit).await {
                Err(error) if !matches!(error.kind(), ErrorKind::Server(_)) => Err(error),
                reply => Ok(vec![(None, reply)]),
            },
            Connection::Cluster(masters) => Ok(masters.send_to_all(request, limit).await),
        }
    }

    /// Fails if the connection is closed, or silent for `limit`. One to a cluster replaces what is
    /// broken of it by itself.
    pub(in crate::wire) async fn check(&self, limit: Duration) -> Result<(), RedisError> {
        match self {
            Connection::Server(batcher) => batcher.check(limit).await,
            Connection::Cluster(masters) => {
                let ping = redis::cmd("PING");
                let replies = masters.send_to_all(&ping, limit).await;
                // Connects where a connection was closed, perhaps to another master.
                if replies.iter().any(|(_, reply)| reply.as_ref().is_err_and(is_broken)) {
                    masters.send_to_all(&ping, limit).await;
                }
                Ok(())
            }
        }
    }

    /// Whether the masters of a cluster are known as they were at `start` or later, or cannot be
    /// asked for.
    pub(in crate::wire) fn has_asked_since(&self, start: Moment) -> bool {
        self.masters().is_none_or(|masters| masters.has_asked_since(start))
    }

    /// The number of its newest connection to a master of a cluster.
    pub(in crate::wire) fn newest(&self) -> u64 {
        self.masters().map_or(0, |masters| masters.newest())
    }

    /// Whether the server has replied to some request within the limit, so that a caller's wait is
    /// time in the queue, not silence of the server.
    pub(in crate::wire) fn is_answering(&self) -> bool {
        match self {
            Connection::Server(batcher) => batcher.is_answering(),
            Connection::Cluster(_) => false,
        }
    }

    /// Whether the server has replied to any request since then. (A cluster replaces its
    /// connections by itself.)
    pub(in crate::wire) fn has_replied_since(&self, start: Instant) -> bool {
        match self {
            Connection::Server(batcher) => batcher.has_replied_since(start),
            Connection::Cluster(_) => false,
        }
    }
}
