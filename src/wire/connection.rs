//! A connection, to one server or to a cluster, that sends requests alone or together.

use std::fmt;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};
#[cfg(feature = "cluster")]
use tokio::time::timeout;

/// For a request whose caller sets a timer of its own: a second one would be paid for in vain.
pub(super) const UNLIMITED: Duration = Duration::MAX;

/// Cheap to clone; clones share everything. One to a server has no limit of its own for answers.
#[derive(Clone)]
pub(super) enum Connection {
    Server(MultiplexedConnection),
    #[cfg(feature = "cluster")]
    Cluster(redis::cluster_async::ClusterConnection),
}

impl Connection {
    /// Sends a request and waits for its answer, no longer than `limit`.
    ///
    /// # Cancel safety
    /// Dropped, the request may run all the same.
    pub(super) async fn send(&self, request: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        match self {
            Connection::Server(connection) => {
                let mut connection = connection.clone();
                if limit < UNLIMITED {
                    connection.set_response_timeout(limit);
                }
                request.query_async(&mut connection).await
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let mut connection = connection.clone();
                timeout(limit, request.query_async(&mut connection)).await.unwrap_or_else(|_| Err(too_slow()))
            }
        }
    }

    /// Sends requests together, with an answer for each, whatever happens to the whole. Through a cluster each
    /// goes its own way, so that no server is waited for by those that are sent to another.
    pub(super) async fn send_all(
        &self,
        requests: Vec<Cmd>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        match self {
            Connection::Server(connection) => {
                let mut connection = connection.clone();
                if limit < UNLIMITED {
                    connection.set_response_timeout(limit);
                }
                pipeline(&mut connection, requests).await
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(_) => {
                let count = requests.len();
                let mut sent = tokio::task::JoinSet::new();
                for (index, request) in requests.into_iter().enumerate() {
                    let connection = self.clone();
                    sent.spawn(async move { (index, connection.send(&request, limit).await) });
                }
                let mut answers: Vec<_> = std::iter::repeat_with(|| Err(too_slow())).take(count).collect();
                while let Some(answered) = sent.join_next().await {
                    // It fails only with a runtime that shuts down.
                    if let Ok((index, answer)) = answered {
                        answers[index] = answer;
                    }
                }
                answers
            }
        }
    }

    /// Gives it a name in `CLIENT LIST`; in a cluster, each of the connections that it consists of.
    /// A server that refuses, for want of the right to `CLIENT`, is used without one.
    pub(super) async fn set_name(&self, name: &str, limit: Duration) -> Result<(), RedisError> {
        let mut naming = redis::cmd("CLIENT");
        naming.arg("SETNAME").arg(name);
        match self.send(&naming, limit).await {
            Err(error) if is_broken(&error) => Err(error),
            _named_or_refused => Ok(()),
        }
    }

    /// Whether every master of a cluster answers through it. A connection without one of them has the library look for
    /// that one with every request to it, while all others wait.
    pub(super) async fn is_whole(&self, limit: Duration) -> bool {
        match self {
            Connection::Server(_) => {
                let _ = limit;
                true
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let masters = super::cluster::masters_answer(connection.clone());
                timeout(limit, masters).await.unwrap_or(false)
            }
        }
    }

    /// Whether it pays to gather requests for it.
    pub(super) fn may_batch(&self) -> bool {
        matches!(self, Connection::Server(_))
    }
}

async fn pipeline(
    connection: &mut MultiplexedConnection,
    requests: Vec<Cmd>,
) -> Vec<Result<Value, RedisError>> {
    let mut pipeline = Pipeline::with_capacity(requests.len());
    for request in requests {
        pipeline.add_command(request);
    }
    if pipeline.is_empty() {
        return Vec::new();
    }
    let count = pipeline.len();
    match pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(connection).await {
        Ok(answers) if answers.len() == count => answers,
        Ok(answers) => {
            let detail = format!("{} for {count} requests", answers.len());
            let error =
                RedisError::from((ErrorKind::UnexpectedReturnType, "wrong number of answers", detail));
            vec![Err(error); count]
        }
        Err(error) => vec![Err(error); count],
    }
}

/// Whether there was no answer.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error()
}

pub(super) fn too_slow() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.may_batch() { "Server" } else { "Cluster" })
    }
}
