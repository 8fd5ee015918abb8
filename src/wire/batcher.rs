//! A connection for a crowd: requests that would wait for each other travel together.
//!
//! One pipeline of many requests costs a client half of what the same requests cost one by one. A
//! request that meets few others leaves at once, since to gather costs it time.
//!
//! Requests that do not leave at once queue here, in the order in which they came. A queued request
//! is a future of its caller: the queue takes no memory of its own, and a caller that gives up
//! leaves it. The time in the queue is not the server's: a server counts as silent once a request
//! was written and the connection has delivered nothing for a node timeout. Then all that are
//! queued fail together.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{Connection, UNLIMITED, is_broken, too_slow};
use crate::clock::Moment;

/// How many requests may be under way one by one: with fewer than that, waiting for a pipeline costs more than it saves.
const MAX_UNBATCHED: usize = 64;
/// How many requests travel together at most.
const MAX_BATCH_SIZE: usize = 64;
/// How many pipelines are under way at a time: while some are answered, the next one gathers.
const MAX_BATCHES: usize = 4;

/// How often the other tasks of a busy runtime are run before a timer that went off is believed:
/// one of them reads from the connection.
const YIELDS: u32 = 3;

/// One connection, used by many.
#[derive(Clone, Debug)]
pub(super) struct Batcher {
    connection: Connection,
    limit: Duration,
    callers: Arc<AtomicUsize>,
    last_reply: Arc<LastReply>,
    /// Each caller waits for its own request, so there are never more of them than callers.
    queue: mpsc::Sender<QueuedRequest>,
}

#[derive(Debug)]
struct QueuedRequest {
    request: Cmd,
    /// One of the constants below: it leaves [`QUEUED`] once.
    state: Arc<AtomicU8>,
    answer: oneshot::Sender<Result<TimedReply, RedisError>>,
}

/// Its request waits for its turn.
const QUEUED: u8 = 0;
/// Its request is written, or is about to be.
const WRITTEN: u8 = 1;
/// Its caller has gone before: it is never written.
const WITHDRAWN: u8 = 2;

/// An answer, and a time before the request for it was written.
#[derive(Debug)]
pub(super) struct TimedReply {
    pub(super) value: Value,
    pub(super) sent: Moment,
}

/// Whether a request of a call was written to a connection, where it may have an effect.
#[derive(Debug, Default)]
pub(super) struct SentFlag(AtomicBool);

impl SentFlag {
    fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Batcher {
    /// What sends the pipelines lives on `runtime`, until the connection is not used any more.
    pub(super) fn new(connection: Connection, limit: Duration, runtime: &Handle) -> Batcher {
        let (queue, queued) = mpsc::channel(MAX_BATCH_SIZE);
        let last_reply = Arc::new(LastReply::new());
        runtime.spawn(run_batches(connection.clone(), limit, Arc::clone(&last_reply), queued));
        Batcher { connection, limit, callers: Arc::default(), last_reply, queue }
    }

    /// The connection itself, for what is not sent often.
    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether requests wait for a turn, or the server has answered one within the limit: what a
    /// caller waits for is then no silence of the server.
    pub(super) fn is_answering(&self) -> bool {
        self.connection.may_batch() && self.last_reply.is_within(self.limit)
    }

    /// Sends a request once it is its turn, and waits for its answer for as long as the server
    /// answers anything.
    ///
    /// # Cancel safety
    /// Dropped, the request may run all the same if it was written by then: `sent` says whether.
    pub(super) async fn send(&self, request: Cmd, sent: &SentFlag) -> Result<TimedReply, RedisError> {
        let caller = CallerCount::new(&self.callers);
        if caller.others < MAX_UNBATCHED || !self.connection.may_batch() {
            return self.send_at_once(request, sent).await;
        }
        let (answer, answered) = oneshot::channel();
        let state = Arc::new(AtomicU8::new(QUEUED));
        let mut queued = QueueTicket { answered, state: Arc::clone(&state), sent };
        let outcome = match self.queue.send(QueuedRequest { request, state, answer }).await {
            Ok(()) => (&mut queued.answered).await.ok(),
            Err(_) => None,
        };
        match outcome {
            Some(answer) => answer,
            // The server is silent, or the connection is broken: so those that were sent have
            // found.
            None if self.last_reply.has_failed() => Err(self.last_reply.failure()),
            // Its runtime has shut down.
            None => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
        }
    }

    /// Sends a request ahead of those that are queued.
    ///
    /// # Cancel safety
    /// Dropped, the request may run all the same.
    pub(super) async fn send_at_once(&self, request: Cmd, flag: &SentFlag) -> Result<TimedReply, RedisError> {
        flag.set();
        let sent = Moment::now();
        let answer = if self.connection.may_batch() {
            let sending = self.connection.send(&request, UNLIMITED);
            self.last_reply.unless_silent(self.limit, sending).await.unwrap_or_else(|| Err(too_slow()))
        } else {
            self.connection.send(&request, self.limit).await
        };
        answer.map(|value| TimedReply { value, sent })
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

/// A request in the queue. Dropped, it is withdrawn, unless it was written before.
struct QueueTicket<'a> {
    answered: oneshot::Receiver<Result<TimedReply, RedisError>>,
    state: Arc<AtomicU8>,
    sent: &'a SentFlag,
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        if !leaves_queue(&self.state, WITHDRAWN) {
            self.sent.set();
        }
    }
}

/// Whether a request was still queued, and is `next` from now on.
fn leaves_queue(state: &AtomicU8, next: u8) -> bool {
    state.compare_exchange(QUEUED, next, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Counts a request for as long as its caller waits.
struct CallerCount<'a> {
    count: &'a AtomicUsize,
    others: usize,
}

impl CallerCount<'_> {
    fn new(count: &AtomicUsize) -> CallerCount<'_> {
        CallerCount { count, others: count.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Drop for CallerCount<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// When a connection has delivered an answer last: those that are sent on one connection are
/// answered in order, so each answer says that the server works on what is before the others.
#[derive(Debug)]
struct LastReply {
    begun: Instant,
    /// In nanoseconds since it began; 0 if there was none.
    after: AtomicU64,
    /// Why no request is written to it any more.
    failure: OnceLock<RedisError>,
}

impl LastReply {
    fn new() -> LastReply {
        LastReply { begun: Instant::now(), after: AtomicU64::new(0), failure: OnceLock::new() }
    }

    fn note(&self) {
        let after = u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.after.fetch_max(after, Ordering::Relaxed);
    }

    fn at(&self) -> Instant {
        self.begun + Duration::from_nanos(self.after.load(Ordering::Relaxed))
    }

    fn is_within(&self, limit: Duration) -> bool {
        self.after.load(Ordering::Relaxed) > 0 && self.at().elapsed() < limit && !self.has_failed()
    }

    fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    fn failure(&self) -> RedisError {
        self.failure.get().cloned().unwrap_or_else(too_slow)
    }

    /// Waits for the answer to a request that is written now, until there was none to any request
    /// for `limit`. `None`: the server is silent.
    async fn unless_silent<T>(&self, limit: Duration, request: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(request);
        let mut since = Instant::now();
        loop {
            if let Ok(answer) = timeout_at(since + limit, request.as_mut()).await {
                self.note();
                return Some(answer);
            }
            // With very many tasks, what reads from the connection may be late itself.
            for _ in 0..YIELDS {
                yield_now().await;
            }
            if self.at() <= since {
                let answer = timeout(Duration::ZERO, request.as_mut()).await.ok();
                if answer.is_some() {
                    self.note();
                }
                return answer;
            }
            since = self.at();
        }
    }
}

/// Sends off what has gathered, again and again, until the connection is found to be of no use.
async fn run_batches(
    connection: Connection,
    limit: Duration,
    last_reply: Arc<LastReply>,
    mut queued: mpsc::Receiver<QueuedRequest>,
) {
    let mut batches = JoinSet::new();
    let mut waiting = Vec::new();
    let failure = loop {
        let room = batches.len() < MAX_BATCHES;
        tokio::select! {
            biased;
            Some(finished) = batches.join_next() => {
                if let Ok(Some(error)) = finished {
                    break Some(error);
                }
            }
            count = queued.recv_many(&mut waiting, MAX_BATCH_SIZE), if room => {
                if count == 0 {
                    break None;
                }
                let sending = send_batch(
                    connection.clone(),
                    limit,
                    Arc::clone(&last_reply),
                    std::mem::take(&mut waiting),
                );
                batches.spawn(sending);
            }
        }
    };
    if let Some(error) = failure {
        // None of them was written: they fail together, as those before them did.
        let _first = last_reply.failure.set(error.clone());
        queued.close();
        while let Some(waiting) = queued.recv().await {
            let _gone = waiting.answer.send(Err(error.clone()));
        }
    }
    // The last callers still wait for their answers.
    while batches.join_next().await.is_some() {}
}

/// Sends requests together. Returns why the connection is of no use any more, if it is found to be.
async fn send_batch(
    connection: Connection,
    limit: Duration,
    last_reply: Arc<LastReply>,
    mut waiting: Vec<QueuedRequest>,
) -> Option<RedisError> {
    // Whoever has given up needs no request: it would have to be undone.
    waiting.retain(|waiting| leaves_queue(&waiting.state, WRITTEN));
    if waiting.is_empty() {
        return None;
    }
    let (requests, callers): (Vec<_>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.request, waiting.answer)).unzip();
    let (sent, count) = (Moment::now(), requests.len());
    let sending = connection.send_all(requests, UNLIMITED);
    let answers = match last_reply.unless_silent(limit, sending).await {
        Some(answers) => answers,
        None => vec![Err(too_slow()); count],
    };
    let failure =
        answers.iter().find_map(|answer| answer.as_ref().err()).filter(|error| is_broken(error)).cloned();
    for (caller, answer) in callers.into_iter().zip(answers) {
        // A caller that is gone has the answer undone.
        let _gone = caller.send(answer.map(|value| TimedReply { value, sent }));
    }
    failure
}
