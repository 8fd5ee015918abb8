//! [`Batcher`]: requests of many callers, sent together over one connection to one server.
//!
//! While few requests are in flight, each one is sent at once, alone. Others queue in the order of
//! their arrival. While a batch is in flight, the next one gathers; it leaves beside it as soon as
//! it is worth a call, so that the server works while the client does.
//!
//! In a batch, requests for many locks become one script call (`request.rs`), and its calls travel
//! in one pipeline.
//!
//! A queued request is a future of its caller: a caller that gives up leaves the queue.
//!
//! Time spent in the queue is not silence of the server: a server counts as silent once a request
//! was written and the connection has delivered no reply for a node timeout. Then all queued
//! requests fail together.

use std::collections::VecDeque;
use std::pin::pin;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::error_replies::{closed, is_broken, too_slow};
use super::super::request::{PreparedCall, TimedReply};
use super::sending::{LastReply, SentFlag, last, pipeline, send_calls};
use super::transport::UNWRITTEN;
use crate::guarded::Guarded;
use crate::measure;

/// No limit here, since the caller has a timer: a second timer would only take time.
pub(super) const UNLIMITED: Duration = Duration::MAX;

/// With fewer requests than this in flight, waiting for a batch costs more than it saves: for
/// requests that may become one call with others, and for those that only share a pipeline.
const MAX_UNCOMBINED: usize = 8;
const MAX_UNBATCHED: usize = 64;
/// From this many requests on, a further batch is sent beside others, if it is at least a third of
/// what they have.
const WORTH_A_BATCH: usize = 16;
const PART_OF_IN_FLIGHT: usize = 3;
const MAX_BATCH_SIZE: usize = 128;
const MAX_BATCHES: usize = 7;
/// All requests in flight may have been sent at once by callers that are not polled any more, or
/// one by one after a call was refused: even so, there are places for others, such as renewals.
const _: () = assert!(UNWRITTEN > 2 * (MAX_UNBATCHED + MAX_BATCHES * MAX_BATCH_SIZE));
/// The queue has one request of each caller that waits, of about 1 KB. From this many on that were
/// withdrawn, it is cleared of those.
///
/// There are no places for which further callers would wait: such a place would be reserved for the
/// caller that has waited longest. If that future is not polled any more, nothing else would ever
/// be sent.
const MAX_WITHDRAWN: usize = 1024;

/// One connection, shared by many callers, and the requests that wait for it. It sets no limit for
/// replies.
pub(in crate::wire) struct Batcher {
    limit: Duration,
    /// Each caller that waits has a clone.
    callers: Arc<()>,
    /// Where batches are sent from, until the connection is no longer used.
    runtime: Handle,
    connection: MultiplexedConnection,
    last_reply: LastReply,
    gathered: Guarded<Gathered>,
}

/// The queued requests. While there are any, a batch is in flight: its task takes them.
#[derive(Default)]
struct Gathered {
    requests: VecDeque<QueuedRequest>,
    /// How many were withdrawn since the queue was cleared of such ones.
    withdrawn: usize,
    batches: usize,
    /// The number of requests in those batches.
    in_flight: usize,
    /// A task is about to take the next batch, with all that is queued until it runs.
    is_leaving: bool,
    /// Nothing is sent any more: the connection has failed, or its runtime has shut down.
    is_closed: bool,
}

impl Gathered {
    fn is_due(&self) -> bool {
        self.requests.len() >= least_batch(self.in_flight)
    }
}

/// How many requests may leave together beside so many in flight. Few: if eleven waited for one,
/// they would lose a round trip each time. Many: in calls for sixteen locks each, a server spends a
/// tenth more time on a lock than in calls for fifty.
fn least_batch(in_flight: usize) -> usize {
    (in_flight / PART_OF_IN_FLIGHT).clamp(WORTH_A_BATCH.min(in_flight), MAX_BATCH_SIZE).max(1)
}

struct QueuedRequest {
    request: PreparedCall,
    /// Written, or about to be; or withdrawn by its caller, so never written.
    has_left: Arc<AtomicBool>,
    outcome: oneshot::Sender<Result<TimedReply, RedisError>>,
}

impl Batcher {
    /// The tasks that send pipelines run on `runtime` until the connection is no longer used.
    pub(super) fn new(connection: MultiplexedConnection, limit: Duration, runtime: &Handle) -> Batcher {
        let (last_reply, gathered) = (LastReply::new(), Guarded::default());
        Batcher { limit, callers: Arc::default(), runtime: runtime.clone(), connection, last_reply, gathered }
    }

    /// The connection itself. With a limit, each of its replies must arrive by then.
    pub(super) fn connection(&self, limit: Duration) -> MultiplexedConnection {
        let mut connection = self.connection.clone();
        if limit < UNLIMITED {
            connection.set_response_timeout(limit);
        }
        connection
    }

    /// Whether the server has replied to some request within the limit, so that a caller's wait is
    /// time in the queue, not silence of the server.
    pub(super) fn is_answering(&self) -> bool {
        self.last_reply.is_within(self.limit)
    }

    /// Whether it has delivered a reply since then.
    pub(super) fn has_replied_since(&self, start: Instant) -> bool {
        self.last_reply.at() > start
    }

    /// Sends a request when its turn comes, and waits for the reply for as long as the server
    /// replies to any request.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run if it was written; `sent_flag` says whether it
    /// was.
    pub(super) async fn send(
        self: &Arc<Batcher>,
        request: &PreparedCall,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let _caller = Arc::clone(&self.callers);
        let others = Arc::strong_count(&self.callers) - 2;
        let max_at_once = if request.may_combine() { MAX_UNCOMBINED } else { MAX_UNBATCHED };
        // It does not overtake a queued request, which may be a release of the same lock.
        let may_go_first = others < max_at_once && self.gathered.lock().requests.is_empty();
        if may_go_first {
            sent_flag.set();
            return last(self.send_now(slice::from_ref(request)).await);
        }
        let (outcome, delivered) = oneshot::channel();
        let has_left = Arc::new(AtomicBool::new(false));
        let queued = QueuedRequest { request: request.clone(), has_left: Arc::clone(&has_left), outcome };
        if !self.queue(queued) {
            return Err(closed()); // nothing is sent here any more: another connection may work
        }
        let mut ticket = QueueTicket { delivered, has_left, sent_flag, queue: self };
        match (&mut ticket.delivered).await {
            Ok(outcome) => outcome,
            // Requests before this one found the server silent or the connection broken.
            // Or the batcher's runtime has shut down.
            Err(_) => Err(self.last_reply.failure.get().cloned().unwrap_or_else(closed)),
        }
    }

    /// Queues a request, and sends the next batch if one may leave. False if the queue is closed.
    fn queue(self: &Arc<Batcher>, request: QueuedRequest) -> bool {
        let mut gathered = self.gathered.lock();
        if gathered.is_closed {
            return false;
        }
        gathered.requests.push_back(request);
        // One task at a time takes a batch: of two that were started, the later one may run first,
        // and its requests would overtake earlier ones for the same locks.
        if !gathered.is_leaving && gathered.batches < MAX_BATCHES && gathered.is_due() {
            gathered.is_leaving = true;
            gathered.batches += 1;
            drop(gathered);
            let turn = BatchTurn { queue: Arc::clone(self), size: 0, has_passed: false };
            self.runtime.spawn(run_batches(turn));
        }
        true
    }

    /// Fails if the connection was closed, or the server is silent for `limit`.
    pub(super) async fn check(&self, limit: Duration) -> Result<(), RedisError> {
        let ping = redis::cmd("PING");
        match self.query_in_turn(&ping, limit).await {
            Err(error) if is_broken(&error) => Err(error),
            _answered => Ok(()),
        }
    }

    /// Sends a command beside the queued requests, and waits for its reply for at most `limit`.
    ///
    /// # Cancel safety
    /// Not cancel safe: the command may still run.
    pub(super) async fn query(&self, command: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        measure::sent(1);
        let reply = command.query_async(&mut self.connection(limit)).await;
        if reply.is_ok() {
            self.last_reply.note();
        }
        reply
    }

    /// As [`query`](Batcher::query), but waits for as long as the server replies to any request: it
    /// serves one `WAIT` after the other.
    pub(super) async fn query_in_turn(&self, command: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        let asking = pin!(self.query(command, UNLIMITED));
        self.last_reply.unless_silent(limit, asking).await.unwrap_or_else(|| Err(too_slow()))
    }

    /// Sends commands together and returns a reply for each, even if the pipeline fails as a whole.
    pub(super) async fn send_all(
        &self,
        commands: Vec<Cmd>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        pipeline(self.connection(limit.min(self.limit)), commands).await
    }

    /// Sends requests together, ahead of the queue, combined where they may be.
    pub(super) async fn send_ahead(
        &self,
        requests: &[PreparedCall],
        limit: Duration,
    ) -> Vec<Result<TimedReply, RedisError>> {
        send_calls(&self.connection(limit.min(self.limit)), requests, &self.last_reply).await
    }

    /// Sends requests together, and waits for their replies for as long as the server replies to
    /// any request.
    async fn send_now(&self, requests: &[PreparedCall]) -> Vec<Result<TimedReply, RedisError>> {
        let sending = pin!(send_calls(&self.connection, requests, &self.last_reply));
        let replies = self.last_reply.unless_silent(self.limit, sending).await;
        replies.unwrap_or_else(|| vec![Err(too_slow()); requests.len()])
    }

    /// Removes withdrawn requests once there are many: while a server hangs, nothing takes them,
    /// and callers that give up one after the other would fill the memory.
    fn note_withdrawn(&self) {
        let mut gathered = self.gathered.lock();
        gathered.withdrawn += 1;
        if gathered.withdrawn < MAX_WITHDRAWN {
            return;
        }
        gathered.withdrawn = 0;
        let all = std::mem::take(&mut gathered.requests);
        let (withdrawn, waiting): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|request| request.has_left.load(Ordering::SeqCst));
        gathered.requests = VecDeque::from(waiting);
        drop(gathered);
        drop(withdrawn); // wakes tasks: not under the lock
    }
}

/// A request in the queue. Dropping the ticket withdraws the request, unless it was written before.
struct QueueTicket<'a> {
    delivered: oneshot::Receiver<Result<TimedReply, RedisError>>,
    has_left: Arc<AtomicBool>,
    sent_flag: &'a SentFlag,
    queue: &'a Batcher,
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        if leaves_queue(&self.has_left) {
            self.queue.note_withdrawn();
        } else {
            self.sent_flag.set();
        }
    }
}

/// Takes a request from the queue: to write it, or to withdraw it. False if it had left before.
fn leaves_queue(has_left: &AtomicBool) -> bool {
    !has_left.swap(true, Ordering::SeqCst)
}

/// The right to have one batch in flight. Dropped before it has passed, it closes the queue: the
/// connection has failed, or the runtime has shut down. The callers of the queued requests, which
/// were not written, find out why.
struct BatchTurn {
    queue: Arc<Batcher>,
    size: usize,
    has_passed: bool,
}

impl BatchTurn {
    /// The next batch, at first or after one was answered. `None`: the turn has passed.
    fn next(&mut self) -> Option<Vec<QueuedRequest>> {
        let mut gathered = self.queue.gathered.lock();
        gathered.in_flight -= self.size;
        gathered.is_leaving &= self.size > 0; // at first, this is the task that takes a batch
        self.has_passed = gathered.is_leaving || !gathered.is_due();
        if self.has_passed {
            gathered.batches -= 1;
            return None;
        }
        self.size = gathered.requests.len().min(MAX_BATCH_SIZE);
        gathered.in_flight += self.size;
        Some(gathered.requests.drain(..self.size).collect())
    }
}

impl Drop for BatchTurn {
    fn drop(&mut self) {
        if !self.has_passed {
            let mut gathered = self.queue.gathered.lock();
            gathered.is_closed = true;
            let unwritten = std::mem::take(&mut gathered.requests);
            drop(gathered);
            drop(unwritten);
        }
    }
}

/// Sends batches while some may leave.
async fn run_batches(mut turn: BatchTurn) {
    while let Some(mut waiting) = turn.next() {
        // A caller that gave up needs no request: its effect would have to be undone.
        waiting.retain(|waiting| leaves_queue(&waiting.has_left));
        let (requests, callers): (Vec<_>, Vec<_>) =
            waiting.into_iter().map(|waiting| (waiting.request, waiting.outcome)).unzip();
        if requests.is_empty() {
            continue; // nothing was sent, so nothing shows that the server replies
        }
        let replies = turn.queue.send_now(&requests).await;
        // Another lock's error may come before that of the connection.
        let failure =
            replies.iter().filter_map(|reply| reply.as_ref().err()).find(|error| is_broken(error)).cloned();
        for (caller, reply) in callers.into_iter().zip(replies) {
            // If the caller disconnected, its attempt is undone elsewhere.
            let _disconnected = caller.send(reply);
        }
        if let Some(error) = failure {
            let _of_an_earlier_batch = turn.queue.last_reply.failure.set(error);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_with_the_requests_in_flight() {
        for (in_flight, least) in [(0, 1), (1, 1), (11, 11), (16, 16), (50, 16), (60, 20), (384, 128)] {
            assert_eq!(least_batch(in_flight), least, "{in_flight}");
        }
        assert_eq!(least_batch(MAX_BATCHES * MAX_BATCH_SIZE), MAX_BATCH_SIZE);
    }

    #[test]
    fn the_number_of_requests_in_flight_is_the_documented_one() {
        let most = MAX_UNBATCHED + MAX_BATCHES * MAX_BATCH_SIZE;
        assert!(include_str!("../../options.rs").contains(&format!("while {most} others are in flight")));
        assert!(include_str!("../../locks.rs").contains(&format!("While {most} requests are in flight")));
    }
}
