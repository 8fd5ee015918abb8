//! A connection for a crowd: requests that would wait for each other travel together.
//!
//! One pipeline of many requests costs a client half of what the same requests cost one by one. A request that
//! meets few others leaves at once, since to gather costs it time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::connection::{Connection, too_slow};

/// How many requests may be under way one by one: with fewer than that, waiting for a pipeline costs more than it saves.
const FEW: usize = 64;
/// How many requests travel together at most.
const TOGETHER: usize = 64;
/// How many pipelines are under way at a time: while some are answered, the next one gathers.
const PIPELINES: usize = 4;

/// One connection, used by many.
#[derive(Clone, Debug)]
pub(super) struct Crowd {
    connection: Connection,
    limit: Duration,
    under_way: Arc<AtomicUsize>,
    /// Each caller waits for its own request, so there are never more of them than callers.
    gathering: mpsc::Sender<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    request: Cmd,
    answer: oneshot::Sender<Result<Value, RedisError>>,
}

impl Crowd {
    /// What sends the pipelines lives on `runtime`, until the connection is not used any more.
    pub(super) fn new(connection: Connection, limit: Duration, runtime: &Handle) -> Crowd {
        let (gathering, gathered) = mpsc::channel(TOGETHER);
        runtime.spawn(set_out(connection.clone(), limit, gathered));
        Crowd { connection, limit, under_way: Arc::default(), gathering }
    }

    /// The connection itself, for what is not sent often.
    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Sends a request, and waits for its answer no longer than the limit.
    ///
    /// # Cancel safety
    /// Dropped, the request may run all the same.
    pub(super) async fn send(&self, request: Cmd) -> Result<Value, RedisError> {
        let underway = UnderWay::new(&self.under_way);
        if underway.others < FEW || !self.connection.gathers() {
            return self.connection.send(&request, self.limit).await;
        }
        let (answer, answered) = oneshot::channel();
        let together = async {
            self.gathering.send(Waiting { request, answer }).await.ok()?;
            answered.await.ok()
        };
        match timeout(self.limit, together).await {
            Ok(Some(answer)) => answer,
            // Its runtime has shut down.
            Ok(None) => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
            Err(_) => Err(too_slow()),
        }
    }

    /// The same alone, and no longer than `limit`: for a request that is meant to take its time.
    pub(super) async fn send_within(&self, request: Cmd, limit: Duration) -> Result<Value, RedisError> {
        self.connection.send(&request, limit).await
    }

    /// Names its connection again.
    pub(super) async fn set_name(&self, name: &str, limit: Duration) -> Result<(), RedisError> {
        self.connection.set_name(name, limit).await
    }

    /// Sends requests together, with an answer for each, whatever happens to the whole.
    pub(super) async fn send_all(
        &self,
        requests: Vec<Cmd>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        self.connection.send_all(requests, limit.min(self.limit)).await
    }
}

/// Counts a request for as long as its caller waits.
struct UnderWay<'a> {
    count: &'a AtomicUsize,
    others: usize,
}

impl UnderWay<'_> {
    fn new(count: &AtomicUsize) -> UnderWay<'_> {
        UnderWay { count, others: count.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends off what has gathered, again and again.
async fn set_out(connection: Connection, limit: Duration, mut gathered: mpsc::Receiver<Waiting>) {
    let mut pipelines = JoinSet::new();
    let mut waiting = Vec::new();
    loop {
        while pipelines.len() >= PIPELINES {
            pipelines.join_next().await;
        }
        if gathered.recv_many(&mut waiting, TOGETHER).await == 0 {
            break;
        }
        pipelines.spawn(travel(connection.clone(), limit, std::mem::take(&mut waiting)));
    }
    // The last callers still wait for their answers.
    while pipelines.join_next().await.is_some() {}
}

async fn travel(connection: Connection, limit: Duration, mut waiting: Vec<Waiting>) {
    // Whoever has given up needs no request: it would have to be undone.
    waiting.retain(|waiting| !waiting.answer.is_closed());
    let (requests, callers): (Vec<_>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.request, waiting.answer)).unzip();
    let answers = connection.send_all(requests, limit).await;
    for (caller, answer) in callers.into_iter().zip(answers) {
        let _gone = caller.send(answer); // then the answer is undone by whoever dropped the caller
    }
}
