//! [`ClusterClient`]: requests to a cluster, which follow their slots from server to server.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::batcher::{SentFlag, TimedReply, UNLIMITED};
use super::failure::{too_slow, was_redirected};
use super::masters::{Masters, WaitsFor};
#[cfg(feature = "pool")]
use super::pooled_cluster::PooledCluster;
use super::script::{PreparedCall, Request, is_unknown_script};
use super::transport::RepliesByServer;
#[cfg(feature = "pool")]
use crate::clock::Moment;
#[cfg(feature = "pool")]
use crate::measure;

/// The first and the longest pause before a request follows its slot once more.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// A connection to a cluster. Cheap to clone; clones share everything.
#[derive(Clone)]
pub(super) enum ClusterClient {
    Masters(Arc<Masters>),
    /// That of an application's pool, with the limit for its replies.
    #[cfg(feature = "pool")]
    Pooled(PooledCluster, Duration),
}

impl ClusterClient {
    /// Sends a request, and follows its slot from server to server until one of them runs it. Waits
    /// for the reply for at most `limit`; [`UNLIMITED`]: for as long as the server replies to any
    /// request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run if it was written; `sent_flag` says whether it
    /// was.
    //
    // Boxed: otherwise each request to a single server would have room for this future.
    pub(super) fn send<'a>(
        &'a self,
        request: Request,
        sent_flag: &'a SentFlag,
        limit: Duration,
    ) -> Pin<Box<dyn Future<Output = Result<TimedReply, RedisError>> + Send + 'a>> {
        Box::pin(self.follow(request, sent_flag, limit))
    }

    async fn follow(
        &self,
        mut request: Request,
        sent_flag: &SentFlag,
        limit: Duration,
    ) -> Result<TimedReply, RedisError> {
        let waits_for = if limit < UNLIMITED { WaitsFor::Deadline } else { WaitsFor::Silence };
        let deadline = Instant::now() + limit.min(self.limit());
        let mut pause = Duration::ZERO;
        loop {
            let error = match self.send_once(request.clone(), sent_flag, (deadline, waits_for)).await {
                Err(error) if was_redirected(&error) => error,
                outcome => return outcome,
            };
            // While a slot moves, a call for many locks is refused for as long as one server has
            // some of their keys and another one the rest.
            request.many = None;
            match self {
                ClusterClient::Masters(masters) => {
                    if let Some(target) = target(&error, ServerErrorKind::Moved) {
                        masters.moved(&request.cmd, target);
                    }
                }
                // The library has learned where the slot is.
                #[cfg(feature = "pool")]
                ClusterClient::Pooled(..) => {}
            }
            if Instant::now() + pause >= deadline {
                return Err(error);
            }
            // The first time at once: it is known where the slot is now.
            sleep(pause).await;
            pause = (pause * 2).clamp(PAUSES.0, PAUSES.1);
        }
    }

    fn limit(&self) -> Duration {
        match self {
            ClusterClient::Masters(masters) => masters.limit(),
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(_, limit) => *limit,
        }
    }

    /// Sends a request to the server of its slot, and to the one that this server names while the
    /// slot moves.
    async fn send_once(
        &self,
        request: Request,
        sent_flag: &SentFlag,
        (deadline, waits_for): (Instant, WaitsFor),
    ) -> Result<TimedReply, RedisError> {
        match self {
            ClusterClient::Masters(masters) => {
                let cmd = request.cmd.clone();
                let outcome = masters.send(request, sent_flag, (deadline, waits_for)).await;
                match outcome.as_ref().err().and_then(|error| target(error, ServerErrorKind::Ask)) {
                    Some(target) => masters.ask(&cmd, target, deadline).await,
                    None => outcome,
                }
            }
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled, _) => {
                measure::sent(1);
                sent_flag.set();
                let sent = Moment::now();
                let outcome = pooled.send(&request.cmd, deadline).await;
                let reply = match outcome.as_ref().err().and_then(|error| target(error, ServerErrorKind::Ask))
                {
                    Some(target) => pooled.ask(&request.cmd, target, deadline).await,
                    None => outcome,
                };
                reply.map(|value| TimedReply { value, sent })
            }
        }
    }

    /// Sends each request on its own way, so that no reply waits for another server.
    pub(super) async fn send_each(
        &self,
        requests: Vec<Request>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers: Vec<_> = requests.iter().map(|_| Err(too_slow())).collect();
        let mut sent = JoinSet::new();
        for (place, request) in requests.into_iter().enumerate() {
            sent.spawn(self.clone().send_alone(place, request, limit));
        }
        while let Some(answered) = sent.join_next().await {
            // A join fails only if the runtime shuts down.
            let Ok((place, answer)) = answered else { continue };
            answers[place] = answer;
        }
        answers
    }

    async fn send_alone(
        self,
        place: usize,
        request: Request,
        limit: Duration,
    ) -> (usize, Result<Value, RedisError>) {
        let sent_flag = SentFlag::default();
        (place, self.send(request, &sent_flag, limit).await.map(|reply| reply.value))
    }

    /// Sends calls by SHA1: those for each master together, ahead of other requests to it. What a
    /// busy client asks of a master must not delay the renewals there.
    ///
    /// What a master refuses or leaves is sent again alone. A master that does not know a script
    /// gets its source. Both at once: if they waited for all masters, one that hangs would delay
    /// the first renewals of all.
    pub(super) async fn send_combined(
        &self,
        prepared: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let requests: Vec<_> = prepared.iter().map(PreparedCall::request).enumerate().collect();
        let mut answers: Vec<_> = prepared.iter().map(|_| Err(too_slow())).collect();
        let (mut together, mut alone) = (JoinSet::new(), JoinSet::new());
        match self {
            ClusterClient::Masters(masters) => {
                for group in masters.by_master(requests) {
                    let (masters, limit) = (Arc::clone(masters), limit.min(self.limit()));
                    together.spawn(async move { masters.send_together(group, limit).await });
                }
            }
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(..) => {
                for (place, request) in requests {
                    alone.spawn(self.clone().send_alone(place, request, limit));
                }
            }
        }
        let mut by_source = HashSet::new();
        loop {
            // A join fails only if the runtime shuts down.
            let (replies, were_together) = tokio::select! {
                Some(replied) = together.join_next() => (replied.unwrap_or_default(), true),
                Some(replied) = alone.join_next() => {
                    (replied.map(|(place, reply)| vec![(place, Some(reply))]).unwrap_or_default(), false)
                }
                else => return answers,
            };
            for (place, reply) in replies {
                let request = match reply {
                    Some(Err(error)) if is_unknown_script(&error) && by_source.insert(place) => {
                        Request::urgent(prepared[place].by_source())
                    }
                    Some(Err(error)) if were_together && was_redirected(&error) => {
                        Request::urgent(prepared[place].by_sha1())
                    }
                    None => Request::urgent(prepared[place].by_sha1()),
                    Some(answer) => {
                        answers[place] = answer;
                        continue;
                    }
                };
                alone.spawn(self.clone().send_alone(place, request, limit));
            }
        }
    }

    /// Sends a request to every master and returns each one's reply, by address.
    pub(super) async fn send_to_all(
        &self,
        request: &Cmd,
        limit: Duration,
    ) -> Result<RepliesByServer, RedisError> {
        let deadline = Instant::now() + limit;
        match self {
            ClusterClient::Masters(masters) => Ok(masters.send_to_all(request, deadline).await),
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled, _) => pooled.send_to_all(request, deadline).await,
        }
    }

    /// Whether every master replies. That of a pool is replaced if not; ours replaces its parts.
    pub(super) async fn is_whole(&self, limit: Duration) -> bool {
        match self {
            ClusterClient::Masters(_) => {
                let _ = limit;
                true
            }
            #[cfg(feature = "pool")]
            ClusterClient::Pooled(pooled, _) => pooled.is_whole(limit).await,
        }
    }
}

/// Where an error of this kind says that the slot is.
fn target(error: &RedisError, kind: ServerErrorKind) -> Option<(&str, u16)> {
    let (address, _slot) = error.redirect_node().filter(|_| error.kind() == ErrorKind::Server(kind))?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port.parse().ok()?))
}
