//! [`ClusterClient`]: requests to a cluster, which follow their slots from server to server.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::failure::{too_slow, was_redirected};
use super::masters::Masters;
#[cfg(feature = "pool")]
use super::pooled_cluster::PooledCluster;
use super::script::is_unknown_script;
use crate::measure;

/// The first and the longest pause before a request follows its slot once more.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// A connection to a cluster. Cheap to clone; clones share everything.
#[derive(Clone)]
pub(super) enum ClusterClient {
    Masters(Arc<Masters>),
    /// That of an application's pool.
    #[cfg(feature = "pool")]
    Pooled(PooledCluster),
}

impl ClusterClient {
    /// Sends a request, and follows its slot from server to server until one of them runs it.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run.
    pub(super) async fn send(&self, request: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        let deadline = Instant::now() + limit;
        let mut pause = Duration::ZERO;
        loop {
            let error = match self.send_once(request, deadline).await {
                Err(error) if was_redirected(&error) => error,
                outcome => return outcome,
            };
            match self {
                ClusterClient::Masters(masters) => {
                    if let Some(target) = target(&error, ServerErrorKind::Moved) {
                        masters.moved(request, target);
                    }
                }
                // The library has learned where the slot is.
                #[cfg(feature = "pool")]
                ClusterClient::Pooled(_) => {}
            }
            if Instant::now() + pause >= deadline {
                return Err(error);
            }
            // The first time at once: it is known where the slot is now.
            sleep(pause).await;
            pause = (pause * 2).clamp(PAUSES.0, PAUSES.1);
        }
    }

    /// Sends a request to the server of its slot, and to the one that this server names while the
    /// slot moves.
    async fn send_once(&self, request: &Cmd, deadline: Instant) -> Result<Value, RedisError> {
        let outcome = match self {
            ClusterClient::Masters(masters) => masters.send(request, deadline).await,
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled) => pooled.send(request, deadline).await,
        };
        match outcome.as_ref().err().and_then(|error| target(error, ServerErrorKind::Ask)) {
            None => outcome,
            Some(target) => match self {
                ClusterClient::Masters(masters) => masters.ask(request, target, deadline).await,
                #[cfg(feature = "pool")]
                ClusterClient::Pooled(pooled) => pooled.ask(request, target, deadline).await,
            },
        }
    }

    /// Sends each request on its own way, so that no reply waits for another server. A server that
    /// does not know a script gets its source at once: after the replies of all servers, one that
    /// hangs would delay the first renewals of all.
    pub(super) async fn send_each(
        &self,
        requests: Vec<Cmd>,
        limit: Duration,
        by_source: impl Fn(usize) -> Option<Cmd>,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers: Vec<_> = requests.iter().map(|_| Err(too_slow())).collect();
        let mut sent = JoinSet::new();
        let send = |sent: &mut JoinSet<_>, place: usize, request: Cmd, is_source: bool| {
            measure::sent(1);
            let this = self.clone();
            sent.spawn(async move { (place, is_source, this.send(&request, limit).await) });
        };
        requests.into_iter().enumerate().for_each(|(place, request)| send(&mut sent, place, request, false));
        while let Some(answered) = sent.join_next().await {
            // A join fails only if the runtime shuts down.
            let Ok((place, is_source, answer)) = answered else { continue };
            let is_unknown = !is_source && answer.as_ref().is_err_and(is_unknown_script);
            match is_unknown.then(|| by_source(place)).flatten() {
                Some(request) => send(&mut sent, place, request, true),
                None => answers[place] = answer,
            }
        }
        answers
    }

    /// Sends a request to every master and returns each one's reply, by address.
    pub(super) async fn send_to_all(
        &self,
        request: &Cmd,
        limit: Duration,
    ) -> Result<Vec<(Option<String>, Value)>, RedisError> {
        let deadline = Instant::now() + limit;
        match self {
            ClusterClient::Masters(masters) => masters.send_to_all(request, deadline).await,
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled) => pooled.send_to_all(request, deadline).await,
        }
    }

    /// Whether this connection need not be replaced: it is ours, and replaces its parts, or all
    /// masters reply through it.
    pub(super) async fn is_whole(&self, limit: Duration) -> bool {
        match self {
            ClusterClient::Masters(_) => {
                let _ = limit;
                true
            }
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled) => pooled.is_whole(limit).await,
        }
    }
}

/// Where an error of this kind says that the slot is.
fn target(error: &RedisError, kind: ServerErrorKind) -> Option<(&str, u16)> {
    let (address, _slot) = error.redirect_node().filter(|_| error.kind() == ErrorKind::Server(kind))?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port.parse().ok()?))
}
