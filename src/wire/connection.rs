//! [`Connection`]: to one server or to a cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};

#[cfg(feature = "cluster")]
use super::batcher::UNLIMITED;
use super::batcher::{Batcher, SentFlag, TimedReply};
#[cfg(feature = "cluster")]
use super::cluster::ClusterClient;
use super::failure::too_slow;
use super::script::{PreparedCall, Request};

/// Cheap to clone; clones share everything.
#[derive(Clone)]
pub(super) enum Connection {
    Server(Arc<Batcher>),
    #[cfg(feature = "cluster")]
    Cluster(ClusterClient),
}

impl Connection {
    /// Sends a request when its turn comes, and waits for the reply for as long as the server
    /// replies to any request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run if it was written; `sent_flag` says whether it
    /// was.
    pub(super) async fn send(
        &self,
        request: &mut Request,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        match self {
            Connection::Server(batcher) => batcher.send(request, sent_flag).await,
            #[cfg(feature = "cluster")]
            Connection::Cluster(client) => client.send(std::mem::take(request), sent_flag, UNLIMITED).await,
        }
    }

    /// Sends a command beside the other requests, and waits for its reply for at most `limit`.
    ///
    /// # Cancel safety
    /// Not cancel safe: the command may still run.
    pub(super) async fn query(&self, command: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        match self {
            Connection::Server(batcher) => batcher.query(command, limit).await,
            #[cfg(feature = "cluster")]
            Connection::Cluster(client) => {
                let (request, sent_flag) = (Request::urgent(command.clone()), SentFlag::default());
                client.send(request, &sent_flag, limit).await.map(|reply| reply.value)
            }
        }
    }

    /// Sends commands together and returns a reply for each, even if the pipeline fails as a whole.
    /// Through a cluster each one takes its own way, so that no reply waits for another server.
    pub(super) async fn send_all(
        &self,
        commands: Vec<Cmd>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        match self {
            Connection::Server(batcher) => batcher.send_all(commands, limit).await,
            #[cfg(feature = "cluster")]
            Connection::Cluster(client) => {
                let requests = commands.into_iter().map(Request::from).collect();
                client.send_each(requests, limit).await
            }
        }
    }

    /// Sends calls together, by SHA1, combined where they may be. Those that a call for many locks
    /// leaves follow alone.
    pub(super) async fn send_combined(
        &self,
        prepared: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        match self {
            Connection::Server(batcher) => {
                let requests = prepared.iter().map(PreparedCall::request).collect();
                let mut answers = batcher.send_together(requests, limit).await;
                let left: Vec<_> = (0..answers.len()).filter(|place| answers[*place].is_none()).collect();
                let alone = left.iter().map(|place| prepared[*place].by_sha1()).collect();
                for (place, reply) in left.into_iter().zip(batcher.send_all(alone, limit).await) {
                    answers[place] = Some(reply);
                }
                answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(too_slow()))).collect()
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(client) => client.send_combined(prepared, limit).await,
        }
    }

    /// Whether the server has replied to some request within the limit, so that a caller's wait is
    /// time in the queue, not silence of the server.
    pub(super) fn is_answering(&self) -> bool {
        match self {
            Connection::Server(batcher) => batcher.is_answering(),
            #[cfg(feature = "cluster")]
            Connection::Cluster(_) => false,
        }
    }

    /// Whether it leads to one server.
    pub(super) fn is_one_server(&self) -> bool {
        matches!(self, Connection::Server(_))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_one_server() { "Server" } else { "Cluster" })
    }
}
