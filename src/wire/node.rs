//! One Redis deployment that scripts are run on.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::connection::too_slow;
use super::crowd::Crowd;
use super::floor::Floor;
use super::greeting::Greeting;
use super::link::{Connected, Link};
use super::reply::{LATE, NOT_ADMITTED};
use super::roster::Roster;
use super::script::Filled;
use super::{Call, Dial, Failure, Reply};
use crate::clock::Moment;

/// How late a server may find that the time of who waits is over, as it is set up unless told otherwise.
const TICK: Duration = Duration::from_millis(100);

/// How far a floor may be ahead of the server's clock, in microseconds: a day, less what clocks may drift meanwhile.
const MOST_AHEAD: u64 = 86_000_000_000;

/// One deployment, reached through one shared connection, and one beside it to wait for replicas.
#[derive(Debug)]
pub(crate) struct Node {
    link: Link,
    limit: Duration,
    floor: Arc<Floor>,
    outage: Mutex<Option<(Moment, Failure)>>,
    /// Whether there is an outage, so that nobody locks to find that there is none.
    fails: AtomicBool,
    /// One request at a time sends the source of a script to a server that does not know it.
    loading: Loading,
    /// Of a quorum: its place in it, and the others.
    place: Option<(usize, Arc<Roster>)>,
}

impl Node {
    /// If it `confirms`, replicas are waited for from the start.
    pub(crate) fn new(
        dial: Dial,
        limit: Duration,
        confirms: bool,
        place: Option<(usize, Arc<Roster>)>,
    ) -> Node {
        Node {
            link: Link::new(dial, limit, confirms),
            limit,
            floor: Arc::default(),
            outage: Mutex::new(None),
            fails: AtomicBool::new(false),
            loading: Loading::default(),
            place,
        }
    }

    /// The longest that one request takes.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Which connection this is. Server times from different ones must not be compared: there may be
    /// another server behind the address.
    pub(crate) fn generation(&self) -> u64 {
        self.link.generation()
    }

    /// Whether it is many servers, of which one may answer for another, and a request may be sent again unseen.
    pub(crate) fn is_cluster(&self) -> bool {
        self.link.is_cluster()
    }

    /// Whether all connections lead to one server: else another one may grant beside it, or take over unseen.
    pub(crate) fn is_one_server(&self) -> bool {
        self.link.is_one_server()
    }

    /// New fencing tokens must be larger than this, whatever the server has forgotten.
    fn floor(&self) -> u64 {
        let floor = if self.is_one_server() { self.floor.seen() } else { self.floor.advanced() };
        // A server refuses a floor that is more than a day ahead of its clock. If the clock was set back by more than
        // that, tokens are in no order across that step; but the locks work.
        floor.min(self.clock().saturating_add(MOST_AHEAD))
    }

    /// The server's clock, as far as it is known.
    pub(super) fn clock(&self) -> u64 {
        self.floor.now()
    }

    /// Takes note of the server's time from one of its answers.
    pub(crate) fn observe(&self, server_time: u64) {
        self.floor.observe(server_time);
    }

    /// Connects, if there is no connection: an error within the limit says that the server is down.
    pub(crate) async fn connect(&self) -> Result<(), RedisError> {
        self.linked(false).await.map(drop)
    }

    /// Which run of which server it is.
    pub(super) async fn run_id(&self) -> Result<Option<Arc<str>>, RedisError> {
        Ok(self.linked(false).await?.run)
    }

    async fn linked(&self, confirming: bool) -> Result<Connected, RedisError> {
        if let Some(link) = self.link.current(confirming) {
            return Ok(link);
        }
        let (limit, floor, place) = (self.limit, Arc::clone(&self.floor), self.place.clone());
        self.link.get(confirming, Greeting { limit, floor, place }).await
    }

    /// Since when the node has failed, and how, if it does: too few replicas are a failure only to who wants as many.
    pub(crate) fn outage(&self, replicas: u32) -> Option<(Moment, Failure)> {
        if !self.fails.load(Ordering::Relaxed) {
            return None;
        }
        let outage = self.outage_lock().clone();
        outage.filter(|(_, failure)| failure.replicas().is_none_or(|wanted| replicas >= wanted))
    }

    /// Runs a script: by its SHA1, by its source if the server does not know it, and once more if the
    /// connection turns out to be broken, which every script must tolerate.
    ///
    /// # Cancel safety
    /// A request that was begun may run, now or later, after this future is dropped.
    pub(crate) async fn call(&self, call: &Call<'_>) -> Result<Reply, Failure> {
        let outcome = self.try_call(call).await;
        self.note(outcome.as_ref().err());
        outcome
    }

    /// [`call`](Node::call) for a quorum, which waits for connecting and sending together no longer than it takes to find
    /// out that a connection is silent, and for replicas after that.
    pub(super) async fn vote(&self, call: &Call<'_>) -> Result<Reply, Failure> {
        let patience = call.replicas().map_or(Duration::ZERO, |(_, patience)| patience);
        let outcome = match timeout(self.limit * 5 / 4 + patience, self.try_call(call)).await {
            Ok(Ok(reply)) if self.refuses(call, &reply) => Err(Failure::not_admitted(call.script())),
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::unknown(call.script(), too_slow())),
        };
        self.note(outcome.as_ref().err());
        outcome
    }

    /// Whether it has no vote.
    fn refuses(&self, call: &Call<'_>, reply: &Reply) -> bool {
        let Some((place, roster)) = self.place.as_ref().filter(|_| call.is_guarded()) else { return false };
        let refuses = reply.is_number(NOT_ADMITTED);
        roster.note(*place, refuses);
        refuses
    }

    async fn try_call(&self, call: &Call<'_>) -> Result<Reply, Failure> {
        let script = call.script();
        let mut resent = None;
        loop {
            // Whatever comes of the second delivery, the first one is unknown: that is what is reported.
            let connected = match self.linked(call.replicas().is_some()).await {
                Ok(connected) => connected,
                Err(source) => return Err(resent.unwrap_or_else(|| Failure::unsent(script, source))),
            };
            let generation = connected.generation;
            let error = match self.loading.run(&connected.crowd, &self.fill(call, &connected)).await {
                Ok(value) => {
                    let reply = Reply { script, value, generation, resent };
                    if call.may_be_late() && reply.is_number(LATE) {
                        return Err(Failure::unsent(script, too_slow())); // it was refused, and may be sent again
                    }
                    return self.confirm(call, &connected, reply).await;
                }
                Err(error) => error,
            };
            self.link.drop_if_spent(generation, &error);
            let broken = error.is_connection_dropped();
            let failure = Failure::sent(script, error, self.is_cluster());
            if resent.is_some() || !broken {
                return Err(resent.unwrap_or(failure));
            }
            resent = Some(failure);
        }
    }

    /// Waits until enough replicas have what a request wrote, on the connection that it went through, and so all that
    /// was written before. A server only knows what to wait for if the request did write: every grant does.
    async fn confirm(&self, call: &Call<'_>, on: &Connected, reply: Reply) -> Result<Reply, Failure> {
        let Some((replicas, patience)) = call.replicas().filter(|_| reply.is_number_from(0)) else {
            return Ok(reply);
        };
        let mut wait = redis::cmd("WAIT");
        wait.arg(replicas).arg(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1));
        match on.crowd.send_within(wait, patience + self.limit.max(TICK)).await {
            Ok(Value::Int(count)) if count >= i64::from(replicas) => Ok(reply),
            Ok(Value::Int(count)) => Err(Failure::unreplicated(call.script(), count, replicas)),
            Ok(other) => Err(Reply { value: other, ..reply }.unexpected()),
            Err(error) => {
                self.link.drop_if_spent(on.generation, &error);
                Err(Failure::unknown(call.script(), error))
            }
        }
    }

    /// Runs many scripts in one pipeline, with an answer for each, waiting no longer than `limit` for them.
    pub(crate) async fn call_all(&self, calls: &[&Call<'_>], limit: Duration) -> Vec<Result<Reply, Failure>> {
        let connected = match self.linked(false).await {
            Ok(connected) => connected,
            Err(source) => {
                let unsent = |call: &&Call<'_>| Err(Failure::unsent(call.script(), source.clone()));
                return calls.iter().map(unsent).collect();
            }
        };
        let generation = connected.generation;
        let filled: Vec<_> = calls.iter().map(|call| self.fill(call, &connected)).collect();
        let answers = self.loading.run_all(&connected.crowd, &filled, limit).await;
        let reply = |(call, answer): (&&Call<'_>, Result<Value, RedisError>)| {
            if let Err(error) = &answer {
                self.link.drop_if_spent(generation, error);
            }
            let script = call.script();
            match answer {
                Ok(value) => {
                    let reply = Reply { script, value, generation, resent: None };
                    self.refuses(call, &reply);
                    Ok(reply)
                }
                Err(source) => Err(Failure::sent(script, source, self.is_cluster())),
            }
        };
        calls.iter().zip(answers).map(reply).collect()
    }

    fn fill<'a>(&self, call: &'a Call<'a>, connected: &'a Connected) -> Filled<'a> {
        Filled {
            call,
            floor: self.floor(),
            clock: if self.floor.seen() == 0 { 0 } else { self.clock() },
            run: connected.run.as_deref().unwrap_or_default(),
        }
    }

    fn note(&self, failure: Option<&Failure>) {
        match failure.filter(|failure| failure.is_passing()) {
            Some(failure) => {
                let mut outage = self.outage_lock();
                // Of another sort, it is the end of the one before.
                if outage.as_ref().is_none_or(|(_, before)| before.replicas() != failure.replicas()) {
                    *outage = Some((Moment::now(), failure.clone()));
                }
                self.fails.store(true, Ordering::Relaxed);
            }
            None if self.fails.load(Ordering::Relaxed) => {
                *self.outage_lock() = None;
                self.fails.store(false, Ordering::Relaxed);
            }
            None => {}
        }
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn outage_lock(&self) -> MutexGuard<'_, Option<(Moment, Failure)>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Sends the source of a script where its SHA1 is not known: after a restart or SCRIPT FLUSH, 20,000 requests that
/// are under way would else each send some kilobytes.
#[derive(Debug, Default)]
struct Loading {
    tickets: AtomicU64,
    /// The ticket of the request that is sending a source; 0 if none is.
    sender: AtomicU64,
    /// How often a source was sent.
    sent: AtomicU64,
    /// Notified when the sender is done.
    done: Notify,
}

/// How often a request waits for another one to send a source: about the number of scripts. A cluster has several
/// servers that may not know them.
const TURNS: u32 = 8;

/// How long it waits for that each time, before it sends the source itself. The other request may belong to a future
/// that is not polled any more, and would keep all requests of its client waiting.
const TURN: Duration = Duration::from_millis(250);

impl Loading {
    async fn run(&self, crowd: &Crowd, call: &Filled<'_>) -> Result<Value, RedisError> {
        let mut turn = None;
        for _ in 0..TURNS {
            let seen = self.sent.load(Ordering::SeqCst);
            match crowd.send(call.by_sha1()).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sent.load(Ordering::SeqCst) != seen {
                continue; // another request has sent one meanwhile
            }
            turn = Turn::take(self, 0);
            if turn.is_none() {
                let sender = self.sender.load(Ordering::SeqCst);
                if timeout(TURN, done).await.is_err() {
                    turn = Turn::take(self, sender);
                }
            }
            if turn.is_some() {
                break;
            }
        }
        let answer = self.send_source(crowd, call).await;
        drop(turn);
        answer
    }

    async fn send_source(&self, crowd: &Crowd, call: &Filled<'_>) -> Result<Value, RedisError> {
        let answer = crowd.send(call.by_source()).await;
        self.sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// The same for one pipeline. Each script's source is sent once, and then the rest again by SHA1; between two
    /// commands of a pipeline another client may flush the scripts again, so what fails then goes by its source.
    async fn run_all(
        &self,
        crowd: &Crowd,
        calls: &[Filled<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = crowd.send_all(calls.iter().map(Filled::by_sha1).collect(), limit).await;
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
            for (index, answer) in unknown.into_iter().zip(crowd.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
        answers
    }
}

/// The right to send a source, until it is dropped or another request has taken it over.
struct Turn<'a> {
    loading: &'a Loading,
    ticket: u64,
}

impl<'a> Turn<'a> {
    /// Takes the turn from the request with this ticket, if that still has it.
    fn take(loading: &'a Loading, from: u64) -> Option<Turn<'a>> {
        let ticket = loading.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        let taken = loading.sender.compare_exchange(from, ticket, Ordering::SeqCst, Ordering::SeqCst);
        taken.is_ok().then_some(Turn { loading, ticket })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _taken_over =
            self.loading.sender.compare_exchange(self.ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        self.loading.done.notify_waiters();
    }
}
