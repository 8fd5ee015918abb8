//! How requests are written to one connection, in one pipeline. [`SentFlag`]: whether one was
//! written. [`LastReply`]: whether a server is silent, or a request only waits behind others.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};
use tokio::sync::SetOnce;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::error_replies::too_slow;
use super::super::request::{Batch, PreparedCall, TimedReply};
use crate::measure;

/// How often a busy runtime's other tasks run before an expired timer is believed: one of those
/// tasks reads from the connection.
const YIELDS: u32 = 3;

/// Whether a request of a call was written to a connection, and may have an effect.
#[derive(Debug, Default)]
pub(in crate::wire) struct SentFlag(AtomicBool);

impl SentFlag {
    pub(in crate::wire) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(in crate::wire) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// When a connection last delivered a reply. Requests on one connection are answered in order, so
/// each reply says that the server works on the requests before the others.
pub(super) struct LastReply {
    start: Instant,
    /// In nanoseconds since `start`; 0 before the first reply.
    after: AtomicU64,
    /// Why no further request is written to the connection.
    pub(super) failure: SetOnce<RedisError>,
}

impl LastReply {
    pub(super) fn new() -> LastReply {
        LastReply { start: Instant::now(), after: AtomicU64::new(0), failure: SetOnce::new() }
    }

    pub(super) fn note(&self) {
        let after = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.after.fetch_max(after, Ordering::Relaxed);
    }

    pub(super) fn at(&self) -> Instant {
        self.start + Duration::from_nanos(self.after.load(Ordering::Relaxed))
    }

    pub(super) fn is_within(&self, limit: Duration) -> bool {
        self.after.load(Ordering::Relaxed) > 0 && self.at().elapsed() < limit && self.failure.get().is_none()
    }

    /// Writes a request and waits for its reply. `None`: no request was answered for `limit`, so
    /// the server is silent.
    pub(super) async fn unless_silent<T>(
        &self,
        limit: Duration,
        mut request: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let mut since = Instant::now();
        loop {
            if let Ok(answer) = timeout_at(since + limit, request.as_mut()).await {
                self.note();
                return Some(answer);
            }
            // With very many tasks, the task that reads from the connection may itself be late.
            for _ in 0..YIELDS {
                yield_now().await;
            }
            if self.at() <= since {
                return timeout(Duration::ZERO, request.as_mut()).await.ok().inspect(|_| self.note());
            }
            since = self.at();
        }
    }
}

/// Sends requests together, combined where they may be, until each is answered. Those that a server
/// did not serve go out in a further round; each round shows that the server is not silent.
pub(super) async fn send_calls(
    connection: &MultiplexedConnection,
    requests: &[PreparedCall],
    last_reply: &LastReply,
) -> Vec<Result<TimedReply, RedisError>> {
    let mut batch = Batch::new(requests);
    loop {
        let commands = batch.commands();
        if commands.is_empty() {
            return batch.replies;
        }
        let replies = pipeline(connection.clone(), commands).await;
        if replies.iter().any(Result::is_ok) {
            last_reply.note();
        }
        batch.record(replies);
    }
}

/// The reply to the last of some requests, or to the only one.
pub(super) fn last<T>(mut replies: Vec<Result<T, RedisError>>) -> Result<T, RedisError> {
    replies.pop().unwrap_or_else(|| Err(too_slow()))
}

/// Sends commands together, at least one, and returns a reply for each, even if the pipeline fails
/// as a whole.
pub(super) async fn pipeline(
    mut connection: MultiplexedConnection,
    requests: Vec<Cmd>,
) -> Vec<Result<Value, RedisError>> {
    if let [request] = requests.as_slice() {
        measure::sent(1);
        return vec![request.query_async(&mut connection).await];
    }
    let mut pipeline = Pipeline::with_capacity(requests.len());
    for request in requests {
        pipeline.add_command(request);
    }
    let count = pipeline.len();
    measure::sent(count);
    match pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(&mut connection).await {
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
