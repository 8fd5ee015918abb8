//! Requests of many callers, sent together over one connection.
//!
//! While few requests are in flight, each one is sent at once, alone: gathering takes time. Other
//! requests queue here in the order of their arrival, and the next free batch takes them. In a
//! batch, requests for many locks become one script call (`script.rs`), and the calls of a batch
//! travel in one pipeline.
//!
//! A queued request is a future of its caller: a caller that gives up leaves the queue.
//!
//! Time spent in the queue is not silence of the server: a server counts as silent once a request
//! was written and the connection has delivered no reply for a node timeout. Then all queued
//! requests fail together.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, Notify, SetOnce, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{Connection, UNLIMITED, is_broken, too_slow};
use super::script::{Combined, ContendedLocks, PreparedCall, Request, combine, is_unknown_script};
use crate::clock::Moment;

/// With fewer requests than this in flight, waiting for a batch costs more than it saves: for
/// requests that may become one call with others, and for those that only share a pipeline.
const MAX_UNCOMBINED: usize = 32;
const MAX_UNBATCHED: usize = 64;
/// The maximum number of requests in one batch.
const MAX_BATCH_SIZE: usize = 64;
/// The maximum number of batches in flight: while they are answered, the next one gathers.
const MAX_BATCHES: usize = 3;
/// The maximum number of requests that are queued; more callers wait for a place. Each request
/// takes about 1 KB.
const MAX_QUEUED: usize = 1024;

/// How often a busy runtime's other tasks run before an expired timer is believed: one of those
/// tasks reads from the connection.
const YIELDS: u32 = 3;

/// One connection, shared by many callers.
#[derive(Debug)]
pub(super) struct Batcher {
    connection: Connection,
    limit: Duration,
    callers: AtomicUsize,
    last_reply: Arc<LastReply>,
    queue: mpsc::Sender<QueuedRequest>,
    contended: ContendedLocks,
}

#[derive(Debug)]
struct QueuedRequest {
    request: Request,
    /// One of the constants below. It changes once, from [`QUEUED`].
    state: Arc<AtomicU8>,
    outcome: oneshot::Sender<Outcome>,
}

/// What became of a queued request.
#[derive(Debug)]
enum Outcome {
    Answered(Result<TimedReply, RedisError>),
    /// A call for many locks has changed nothing: the request is to be sent alone.
    SendAlone(Request),
}

/// The request waits for its turn.
const QUEUED: u8 = 0;
/// The request is written, or is about to be.
const WRITTEN: u8 = 1;
/// The caller gave up before the request was written, so it is never written.
const WITHDRAWN: u8 = 2;

/// A reply, and a time before its request was written.
#[derive(Debug)]
pub(super) struct TimedReply {
    pub(super) value: Value,
    pub(super) sent: Moment,
}

/// Whether a request of a call was written to a connection, and may have an effect.
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
    /// The tasks that send pipelines run on `runtime` until the connection is no longer used.
    pub(super) fn new(connection: Connection, limit: Duration, runtime: &Handle) -> Batcher {
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        let last_reply = Arc::new(LastReply::new());
        let queued = Arc::new(Mutex::new(queued));
        for _ in 0..MAX_BATCHES {
            let (connection, queued) = (connection.clone(), Arc::clone(&queued));
            runtime.spawn(run_batches(connection, limit, Arc::clone(&last_reply), queued));
        }
        let contended = ContendedLocks::new();
        Batcher { connection, limit, callers: AtomicUsize::new(0), last_reply, queue, contended }
    }

    /// The connection itself, for requests that are sent rarely.
    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether the server has replied to some request within the limit, so that a caller's wait is
    /// time in the queue, not silence of the server.
    pub(super) fn is_answering(&self) -> bool {
        self.connection.may_batch() && self.last_reply.is_within(self.limit)
    }

    /// Sends a request when its turn comes, and waits for the reply for as long as the server
    /// replies to any request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run if it was written; `sent` says whether it was.
    pub(super) async fn send(&self, mut request: Request, sent: &SentFlag) -> Result<TimedReply, RedisError> {
        let caller = CallerCount::new(&self.callers);
        if request.many.is_some() && caller.others >= MAX_UNCOMBINED && self.contended.contain(&request) {
            request.many = None;
        }
        let max_at_once = if request.many.is_some() { MAX_UNCOMBINED } else { MAX_UNBATCHED };
        if caller.others < max_at_once || !self.connection.may_batch() {
            return self.send_at_once(request.cmd, sent).await;
        }
        let (outcome, delivered) = oneshot::channel();
        let state = Arc::new(AtomicU8::new(QUEUED));
        let mut ticket = QueueTicket { delivered, state: Arc::clone(&state), sent };
        let outcome = match self.queue.send(QueuedRequest { request, state, outcome }).await {
            Ok(()) => (&mut ticket.delivered).await.ok(),
            Err(_) => None,
        };
        match outcome {
            Some(Outcome::Answered(answer)) => answer,
            Some(Outcome::SendAlone(request)) => {
                self.contended.note(&request);
                self.send_at_once(request.cmd, sent).await
            }
            // The requests before this one found that the server is silent or the connection
            // broken.
            None if self.last_reply.has_failed() => Err(self.last_reply.failure()),
            // The batcher's runtime has shut down.
            None => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
        }
    }

    /// Sends a request ahead of the queued ones.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run.
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

    /// Sends a request alone and waits for at most `limit`: for a request that is meant to take
    /// long.
    pub(super) async fn send_within(&self, request: Cmd, limit: Duration) -> Result<Value, RedisError> {
        self.connection.send(&request, limit).await
    }

    /// Sets the connection's name again.
    pub(super) async fn set_name(&self, name: &str, limit: Duration) -> Result<(), RedisError> {
        self.connection.set_name(name, limit).await
    }

    /// Sends commands together and returns a reply for each, even if the pipeline fails as a whole.
    async fn send_all(&self, commands: Vec<Cmd>, limit: Duration) -> Vec<Result<Value, RedisError>> {
        self.connection.send_all(commands, limit.min(self.limit)).await
    }

    /// Sends calls together, by SHA1, combined where they may be. Those that a call for many locks
    /// leaves follow alone.
    async fn send_combined(
        &self,
        prepared: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut requests: Vec<_> = prepared.iter().map(PreparedCall::request).collect();
        if !self.connection.may_batch() {
            requests.iter_mut().for_each(|request| request.many = None);
        }
        let (calls, commands): (Vec<_>, Vec<_>) = combine(&mut requests).into_iter().unzip();
        let replies = send_calls(&self.connection, &calls, commands, &requests, limit.min(self.limit)).await;
        let mut answers: Vec<_> = prepared.iter().map(|_| Err(too_slow())).collect();
        let mut left = Vec::new();
        for (call, reply) in calls.iter().zip(replies) {
            for (place, reply) in call.members.iter().zip(call.replies(reply)) {
                match reply {
                    Some(reply) => answers[*place] = reply,
                    None => left.push(*place),
                }
            }
        }
        let alone = left.iter().map(|place| prepared[*place].by_sha1()).collect();
        for (place, reply) in left.into_iter().zip(self.send_all(alone, limit).await) {
            answers[place] = reply;
        }
        answers
    }
}

/// A request in the queue. Dropping the ticket withdraws the request, unless it was written before.
struct QueueTicket<'a> {
    delivered: oneshot::Receiver<Outcome>,
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

/// Moves a request from [`QUEUED`] to `next`. False if it had left the queue before.
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

/// When a connection last delivered a reply. Requests on one connection are answered in order, so
/// each reply says that the server works on the requests before the others.
#[derive(Debug)]
struct LastReply {
    start: Instant,
    /// In nanoseconds since `start`; 0 before the first reply.
    after: AtomicU64,
    /// Why no further request is written to the connection.
    failure: SetOnce<RedisError>,
}

impl LastReply {
    fn new() -> LastReply {
        LastReply { start: Instant::now(), after: AtomicU64::new(0), failure: SetOnce::new() }
    }

    fn note(&self) {
        let after = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.after.fetch_max(after, Ordering::Relaxed);
    }

    fn at(&self) -> Instant {
        self.start + Duration::from_nanos(self.after.load(Ordering::Relaxed))
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

    /// Writes a request and waits for its reply. `None`: no request was answered for `limit`, so
    /// the server is silent.
    async fn unless_silent<T>(&self, limit: Duration, request: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(request);
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

/// Sends the gathered requests, batch after batch, until the connection fails. [`MAX_BATCHES`] of
/// these tasks take turns at the queue.
async fn run_batches(
    connection: Connection,
    limit: Duration,
    last_reply: Arc<LastReply>,
    queue: Arc<Mutex<mpsc::Receiver<QueuedRequest>>>,
) {
    loop {
        let mut waiting = Vec::new();
        {
            let mut queue = queue.lock().await;
            tokio::select! {
                biased;
                error = last_reply.failure.wait() => {
                    // None of these requests was written: they fail with the error of those before.
                    queue.close();
                    while let Some(unwritten) = queue.recv().await {
                        let _disconnected = unwritten.outcome.send(Outcome::Answered(Err(error.clone())));
                    }
                    return;
                }
                first = queue.recv() => match first {
                    Some(first) => waiting.push(first),
                    None => return,
                },
            }
            // The tasks that were just answered ask again within one turn of the runtime.
            yield_now().await;
            while waiting.len() < MAX_BATCH_SIZE
                && let Ok(next) = queue.try_recv()
            {
                waiting.push(next);
            }
        }
        if let Some(error) = send_batch(&connection, limit, &last_reply, waiting).await {
            let _of_an_earlier_batch = last_reply.failure.set(error);
        }
    }
}

/// Sends requests together. Returns the connection's error, if it failed.
async fn send_batch(
    connection: &Connection,
    limit: Duration,
    last_reply: &LastReply,
    mut waiting: Vec<QueuedRequest>,
) -> Option<RedisError> {
    // A caller that gave up needs no request: its effect would have to be undone.
    waiting.retain(|waiting| leaves_queue(&waiting.state, WRITTEN));
    if waiting.is_empty() {
        return None;
    }
    let (mut requests, callers): (Vec<_>, Vec<_>) =
        waiting.into_iter().map(|waiting| (waiting.request, waiting.outcome)).unzip();
    let (calls, commands): (Vec<_>, Vec<_>) = combine(&mut requests).into_iter().unzip();
    let (sent, count) = (Moment::now(), calls.len());
    let sending = send_calls(connection, &calls, commands, &requests, UNLIMITED);
    let replies = match last_reply.unless_silent(limit, sending).await {
        Some(replies) => replies,
        None => vec![Err(too_slow()); count],
    };
    let failure =
        replies.iter().find_map(|reply| reply.as_ref().err()).filter(|error| is_broken(error)).cloned();
    let mut callers: Vec<_> = requests.into_iter().zip(callers).map(Some).collect();
    for (call, reply) in calls.iter().zip(replies) {
        for (place, reply) in call.members.iter().zip(call.replies(reply)) {
            let Some((request, caller)) = callers[*place].take() else { continue };
            let outcome = match reply {
                Some(reply) => Outcome::Answered(reply.map(|value| TimedReply { value, sent })),
                None => Outcome::SendAlone(request),
            };
            // If the caller disconnected, its attempt is undone elsewhere.
            let _disconnected = caller.send(outcome);
        }
    }
    failure
}

/// Sends calls together. A server that does not know a script for many locks gets its source.
async fn send_calls(
    connection: &Connection,
    calls: &[Combined],
    commands: Vec<Cmd>,
    requests: &[Request],
    limit: Duration,
) -> Vec<Result<Value, RedisError>> {
    let mut replies = connection.send_all(commands, limit).await;
    let is_unknown = |reply: &Result<Value, RedisError>| reply.as_ref().is_err_and(is_unknown_script);
    let unknown = (0..calls.len()).filter(|place| is_unknown(&replies[*place]));
    let again = unknown.filter_map(|place| Some((place, calls[place].by_source(requests)?)));
    let (places, commands): (Vec<usize>, Vec<Cmd>) = again.unzip();
    for (place, reply) in places.into_iter().zip(connection.send_all(commands, limit).await) {
        replies[place] = reply;
    }
    replies
}

/// Sends a script's source where its SHA1 is not known. After a restart or SCRIPT FLUSH, 20,000
/// requests in flight would otherwise each send several kilobytes.
#[derive(Debug, Default)]
pub(super) struct ScriptLoader {
    tickets: AtomicU64,
    /// The ticket of the request that sends a source; 0 if none does.
    sender: AtomicU64,
    /// How often a source was sent.
    sent: AtomicU64,
    /// Notified when the sender is done.
    done: Notify,
}

/// How often a request waits for another one to send a source. A client with one kind of lock uses
/// about five scripts, and a cluster has several servers that may not know them.
const MAX_WAITS: u32 = 8;

/// How long it waits each time before it sends the source itself. The other request may belong to a
/// future that is not polled any more, and would keep all requests of its client waiting.
const MAX_WAIT: Duration = Duration::from_millis(250);

impl ScriptLoader {
    pub(super) async fn run(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let mut turn = None;
        for _ in 0..MAX_WAITS {
            let seen = self.sent.load(Ordering::SeqCst);
            match batcher.send(call.request(), sent).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sent.load(Ordering::SeqCst) != seen {
                continue; // another request has sent the source meanwhile
            }
            turn = LoadTurn::take(self, 0);
            if turn.is_none() {
                let sender = self.sender.load(Ordering::SeqCst);
                if timeout(MAX_WAIT, done).await.is_err() {
                    turn = LoadTurn::take(self, sender);
                }
            }
            if turn.is_some() {
                break;
            }
        }
        let answer = self.send_source(batcher, call, sent).await;
        drop(turn);
        answer
    }

    /// Sent ahead of the queue: the queued requests need it as well.
    async fn send_source(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let answer = batcher.send_at_once(call.by_source(), sent).await;
        self.sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// Runs calls together. Each script's source is sent once, then the others again by SHA1.
    /// Between two commands of a pipeline another client may flush the scripts again, so calls that
    /// fail then are sent by source.
    pub(super) async fn run_all(
        &self,
        batcher: &Batcher,
        calls: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = batcher.send_combined(calls, limit).await;
        for by_source in [false, true] {
            let unknown: Vec<usize> = (0..answers.len())
                .filter(|&index| answers[index].as_ref().is_err_and(is_unknown_script))
                .collect();
            if unknown.is_empty() {
                break;
            }
            let mut sources = HashSet::new();
            let again = unknown.iter().map(|&index| {
                let call = &calls[index];
                if sources.insert(call.call.script().name()) || by_source {
                    call.by_source()
                } else {
                    call.by_sha1()
                }
            });
            let again = again.collect();
            for (index, answer) in unknown.into_iter().zip(batcher.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
        answers
    }
}

/// The right to send a source, until it is dropped or another request takes it over.
struct LoadTurn<'a> {
    loader: &'a ScriptLoader,
    ticket: u64,
}

impl<'a> LoadTurn<'a> {
    /// Takes the turn from the request with this ticket, if that still has it.
    fn take(loader: &'a ScriptLoader, from: u64) -> Option<LoadTurn<'a>> {
        let ticket = loader.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        let taken = loader.sender.compare_exchange(from, ticket, Ordering::SeqCst, Ordering::SeqCst);
        taken.is_ok().then_some(LoadTurn { loader, ticket })
    }
}

impl Drop for LoadTurn<'_> {
    fn drop(&mut self) {
        let _taken_over =
            self.loader.sender.compare_exchange(self.ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        self.loader.done.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_requests_in_flight_is_the_documented_one() {
        let most = MAX_UNBATCHED + MAX_BATCHES * MAX_BATCH_SIZE;
        assert!(include_str!("../options.rs").contains(&format!("while {most} others are in flight")));
        assert!(include_str!("../locks.rs").contains(&format!("While {most} requests are in flight")));
    }
}
