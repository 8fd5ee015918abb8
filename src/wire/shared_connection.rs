//! [`SharedConnection`]: one connection for all requests of a node, replaced when it breaks.
//! [`ScriptLoader`]: which of these requests sends a script's source.
//!
//! [`ServerClock`]: the minimum token, which follows the clock of the node's servers. New fencing
//! tokens must be larger, whatever a server has lost.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use redis::{RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::batcher::{SentFlag, TimedReply};
use super::connecting::Connecting;
use super::connection::Connection;
use super::endpoint::Endpoint;
use super::failure::{is_demoted, lacks_replicas, too_slow};
use super::handshake::Handshake;
use super::script::{PreparedCall, Request, is_unknown_script};
#[cfg(feature = "sentinel")]
use super::sentinel::SentinelMaster;
use crate::clock::Moment;

/// How often a connection is checked for still leading to the master.
#[cfg(feature = "sentinel")]
const MASTER_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How often the connections to the servers of a pool's cluster get their name again.
const RENAME_INTERVAL: Duration = Duration::from_secs(30);

/// One connection shared by all requests. A request that finds it broken drops it; the next one
/// connects again.
///
/// Requests that wait for replicas use a second connection, because requests behind them on the
/// same connection would wait as well. Both are made together and dropped together, so that a grant
/// is never on another server than its renewals.
#[derive(Clone, Debug)]
pub(super) struct SharedConnection {
    endpoint: Endpoint,
    limit: Duration,
    /// The connections' name in `CLIENT LIST`.
    name: Option<Arc<str>>,
    runtime: Handle,
    current: Arc<Current>,
    connecting: Arc<Connecting>,
    pub(super) server_clock: Arc<ServerClock>,
    /// Whether requests wait for replicas.
    is_confirming: Arc<AtomicBool>,
    /// Whether a connection to a pool's cluster is being replaced.
    is_replacing: Arc<AtomicBool>,
}

/// A connection and its generation.
#[derive(Debug)]
pub(super) struct LiveConnection {
    pub(super) connection: Connection,
    pub(super) generation: u64,
    /// The run id of its server, where that was queried.
    pub(super) run: Option<Arc<str>>,
}

/// Connections that were made together, under one generation.
#[derive(Debug)]
struct ConnectionPair {
    shared: Arc<LiveConnection>,
    /// For requests that wait for replicas, if there are any.
    second: Option<Arc<LiveConnection>>,
    /// The tasks that look after the connections. They are aborted when the pair is dropped.
    _tasks: JoinSet<()>,
}

impl SharedConnection {
    /// Must be called on the client's runtime. If `is_confirming` is true, both connections are
    /// made from the start.
    pub(super) fn new(
        endpoint: Endpoint,
        limit: Duration,
        is_confirming: bool,
        name: Option<Arc<str>>,
    ) -> SharedConnection {
        let server_clock =
            Arc::new(ServerClock { is_of_one_server: endpoint.is_one_server(), ..Default::default() });
        SharedConnection {
            endpoint,
            limit,
            name,
            runtime: Handle::current(),
            current: Arc::default(),
            connecting: Arc::default(),
            server_clock,
            is_confirming: Arc::new(AtomicBool::new(is_confirming)),
            is_replacing: Arc::default(),
        }
    }

    /// The present connection, for requests that wait for replicas or for others. Poisoning does
    /// not matter: no code under this lock panics half-way.
    pub(super) fn current(&self, is_confirming: bool) -> Option<Arc<LiveConnection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let pair = current.as_ref()?;
        if is_confirming { pair.second.clone() } else { Some(Arc::clone(&pair.shared)) }
    }

    pub(super) fn generation(&self) -> u64 {
        generation(&self.current)
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.endpoint.is_cluster()
    }

    pub(super) fn may_resend(&self) -> bool {
        self.endpoint.may_resend()
    }

    pub(super) fn is_one_server(&self) -> bool {
        self.server_clock.is_of_one_server
    }

    /// Returns the connection, connecting if there is none. A new connection passes the handshake
    /// before any request uses it.
    ///
    /// Takes at most twice the limit: for an attempt that is under way, and for one of its own.
    /// Callers that wait for one attempt share its failure, so a dead server costs the last of them
    /// no more.
    pub(super) async fn get(
        &self,
        is_confirming: bool,
        handshake: Handshake,
    ) -> Result<Arc<LiveConnection>, RedisError> {
        if let Some(live) = self.current(is_confirming) {
            return Ok(live);
        }
        let seen = self.connecting.latest();
        // Connects on the client's runtime, where the task that drives the connection outlives the
        // caller. A caller that is not polled for long must not hold the turn: all other requests,
        // and the renewals, would wait for it.
        let connecting = self.runtime.spawn(self.clone().connect_in_turn(seen, is_confirming, handshake));
        connecting.await.map_err(|error| RedisError::from(std::io::Error::other(error)))?
    }

    async fn connect_in_turn(
        self,
        seen: u64,
        is_confirming: bool,
        handshake: Handshake,
    ) -> Result<Arc<LiveConnection>, RedisError> {
        let current = || self.current(is_confirming);
        self.connecting
            .connect(seen, current, |generation| self.open(generation, is_confirming, handshake))
            .await
    }

    async fn open(
        &self,
        generation: u64,
        is_confirming: bool,
        handshake: Handshake,
    ) -> Result<Arc<LiveConnection>, RedisError> {
        let has_second = self.is_confirming.fetch_or(is_confirming, Ordering::Relaxed) || is_confirming;
        let connected = async {
            let name = self.name.as_deref();
            let (connection, second) =
                self.endpoint.clone().connect_pair(self.limit, has_second, name).await?;
            // For both connections: neither outlives the run of the server that it was made to.
            let (run, time) = handshake.run(&connection).await?;
            time.into_iter().for_each(|time| self.server_clock.raise(time));
            Ok((connection, second, run))
        };
        let (connection, second, run) =
            timeout(self.limit, connected).await.unwrap_or_else(|_| Err(too_slow()))?;
        let made = |connection| Arc::new(LiveConnection { connection, generation, run: run.clone() });
        let _tasks = self.look_after(generation);
        let pair = ConnectionPair { shared: made(connection), second: second.map(made), _tasks };
        let live = pair.second.as_ref().filter(|_| is_confirming).unwrap_or(&pair.shared).clone();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(pair);
        Ok(live)
    }

    /// Starts the tasks that look after connections of this generation.
    fn look_after(&self, generation: u64) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let current = Arc::downgrade(&self.current); // it owns the tasks
        #[cfg(feature = "sentinel")]
        if let Endpoint::Sentinel(sentinel) = &self.endpoint {
            let task = follow_master(Arc::clone(sentinel), Weak::clone(&current), generation);
            tasks.spawn_on(task, &self.runtime);
        }
        #[cfg(not(feature = "sentinel"))]
        let _ = generation;
        if let Some(name) = self.name.clone().filter(|_| self.endpoint.may_resend()) {
            tasks.spawn_on(name_again(name, self.limit, current), &self.runtime);
        }
        tasks
    }

    /// Drops the connection that an error came through, if it is of no further use.
    pub(super) fn drop_if_spent(&self, generation: u64, error: &RedisError) {
        // The server's replicas may have moved to another master.
        if is_spent(error) || (self.endpoint.finds_master() && lacks_replicas(error)) {
            self.drop_generation(generation);
        }
    }

    /// Drops the connection, unless a newer one is in place.
    ///
    /// A connection to a pool's cluster stays until a better one is made: most of its servers may
    /// still respond. Only one is made at a time, so that a silent server does not cause all
    /// connections to be made again and again.
    fn drop_generation(&self, generation: u64) {
        if self.endpoint.replaces_its_parts() {
            // Only the part that is broken.
        } else if !self.is_cluster() {
            forget(&self.current, generation);
        } else if self.generation() == generation && !self.is_replacing.swap(true, Ordering::SeqCst) {
            let this = self.clone();
            self.runtime.spawn(async move {
                // Outlives the client by at most two limits and a pause.
                if let Ok(connection) = this.endpoint.clone().connect(this.limit, this.name.as_deref()).await
                    && connection.is_whole(this.limit).await
                {
                    let generation = this.connecting.next();
                    let shared = Arc::new(LiveConnection { connection, generation, run: None });
                    let _tasks = this.look_after(generation);
                    *this.current.write().unwrap_or_else(PoisonError::into_inner) =
                        Some(ConnectionPair { shared, second: None, _tasks });
                }
                sleep(this.limit).await;
                this.is_replacing.store(false, Ordering::SeqCst);
            });
        }
    }
}

/// Checks periodically whether the connection still leads to the master, and drops it if not. A
/// replaced master may reply for some time, or for ever if it is cut off from the sentinels.
#[cfg(feature = "sentinel")]
async fn follow_master(sentinel: Arc<SentinelMaster>, current: Weak<Current>, generation: u64) {
    loop {
        sleep(MASTER_CHECK_INTERVAL).await;
        if sentinel.has_moved().await {
            return current.upgrade().iter().for_each(|pair| forget(pair, generation));
        }
    }
}

/// Names the connections to a pool's cluster again periodically: the library replaces them unseen
/// as slots move and servers return.
async fn name_again(name: Arc<str>, limit: Duration, current: Weak<Current>) {
    loop {
        sleep(RENAME_INTERVAL).await;
        let Some(connected) = current.upgrade().and_then(|pair| shared(&pair)) else { return };
        let _again_next_time = connected.connection.set_name(&name, limit).await;
    }
}

type Current = RwLock<Option<ConnectionPair>>;

fn generation(current: &Current) -> u64 {
    shared(current).map_or(0, |shared| shared.generation)
}

fn shared(current: &Current) -> Option<Arc<LiveConnection>> {
    let current = current.read().unwrap_or_else(PoisonError::into_inner);
    current.as_ref().map(|pair| Arc::clone(&pair.shared))
}

fn forget(current: &Current, generation: u64) {
    let mut current = current.write().unwrap_or_else(PoisonError::into_inner);
    if current.as_ref().is_some_and(|pair| pair.shared.generation == generation) {
        *current = None;
    }
}

/// Whether a connection that failed with this error is of no further use: broken, silent, or to a
/// server that was demoted. The client library replaces a connection only in the first case.
fn is_spent(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error() || is_demoted(error)
}

/// Sends a script's source where its SHA1 is not known. After a restart or SCRIPT FLUSH, 20,000
/// requests in flight would otherwise each send several kilobytes.
#[derive(Debug, Default)]
pub(super) struct ScriptLoader {
    tickets: AtomicU64,
    /// The ticket of the request that sends a source; 0 if none does.
    sender: AtomicU64,
    /// How often a source was sent.
    sources_sent: AtomicU64,
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
        connection: &Connection,
        call: &PreparedCall<'_>,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let mut turn = None;
        for _ in 0..MAX_WAITS {
            let seen = self.sources_sent.load(Ordering::SeqCst);
            let mut request = call.request();
            match connection.send(&mut request, sent_flag).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sources_sent.load(Ordering::SeqCst) != seen {
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
        // Boxed, since it is rare, and the future of each request would have a place for it.
        let answer = Box::pin(self.send_source(connection, call, sent_flag)).await;
        drop(turn);
        answer
    }

    /// Sent ahead of the queue: the queued requests need it as well.
    async fn send_source(
        &self,
        connection: &Connection,
        call: &PreparedCall<'_>,
        sent_flag: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let answer = connection.send(&mut Request::urgent(call.by_source()), sent_flag).await;
        self.sources_sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// Runs calls together. Each script's source is sent once, then the others again by SHA1.
    /// Between two commands of a pipeline another client may flush the scripts again, so calls that
    /// fail then are sent by source.
    pub(super) async fn run_all(
        &self,
        connection: &Connection,
        calls: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = connection.send_combined(calls, limit).await;
        for has_source in [false, true] {
            let unknown: Vec<usize> = (0..answers.len())
                .filter(|&index| answers[index].as_ref().is_err_and(is_unknown_script))
                .collect();
            if unknown.is_empty() {
                break;
            }
            let mut sources = HashSet::new();
            let again = unknown.iter().map(|&index| {
                let call = &calls[index];
                if sources.insert(call.call.script().name()) || has_source {
                    call.by_source()
                } else {
                    call.by_sha1()
                }
            });
            let again = again.collect();
            for (index, answer) in unknown.into_iter().zip(connection.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sources_sent.fetch_add(1, Ordering::SeqCst);
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

/// How far the minimum token may lag behind the server's clock, in microseconds. Each raise sends
/// the next grant of every lock through the slower branch once.
const STEP: u64 = 10_000_000;

/// How far a minimum token may be ahead of the server's clock, in microseconds: a day, less what
/// clocks may drift meanwhile.
const MAX_AHEAD: u64 = 86_000_000_000;

/// The latest server time known, in microseconds, and the minimum token that follows from it.
#[derive(Debug, Default)]
pub(super) struct ServerClock {
    /// Whether one server grants all locks. If not, another one may grant beside it, or take over
    /// unseen.
    is_of_one_server: bool,
    /// It never decreases.
    highest: AtomicU64,
    /// How far the server's clock is ahead of ours, as far as this connection has shown.
    ahead: AtomicI64,
    /// Up to here, a minimum token is less than [`MAX_AHEAD`] ahead of the server's clock, so that
    /// no request reads our clock for it.
    unquestioned: AtomicU64,
}

impl ServerClock {
    /// The minimum token: new fencing tokens must be larger, whatever the server has lost.
    pub(super) fn minimum_token(&self) -> u64 {
        let minimum_token = if self.is_of_one_server { self.latest() } else { self.advance() };
        // A server refuses a minimum token that is more than a day ahead of its clock. If the clock
        // was set back by more than that, tokens are in no order across that step, but the locks
        // work.
        if minimum_token > self.unquestioned.load(Ordering::Relaxed) {
            minimum_token.min(self.now().saturating_add(MAX_AHEAD))
        } else {
            minimum_token
        }
    }

    /// The latest server time received.
    pub(super) fn latest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// The latest server time received, plus the time that has passed since. Each token starts from
    /// the clock: if a replica takes over unseen, or beside the old master, its grants have larger
    /// tokens than the other's earlier ones, as far as their clocks agree.
    fn advance(&self) -> u64 {
        let now = self.now();
        self.highest.fetch_max(now, Ordering::Relaxed).max(now)
    }

    /// The server's clock, as far as it is known.
    pub(super) fn now(&self) -> u64 {
        local().saturating_add_signed(self.ahead.load(Ordering::Relaxed))
    }

    /// Records the server's time from a reply. A late reply makes the clock seem to be behind.
    pub(super) fn observe(&self, server_time: u64) {
        self.ahead.fetch_max(ahead(server_time), Ordering::Relaxed);
        if server_time > self.latest().saturating_add(STEP) {
            self.highest.fetch_max(server_time, Ordering::Relaxed);
        }
    }

    /// Records the server's time on a new connection: the next tokens must be larger.
    pub(super) fn raise(&self, server_time: u64) {
        self.ahead.store(ahead(server_time), Ordering::Relaxed);
        self.highest.fetch_max(server_time, Ordering::Relaxed);
        self.unquestioned.store(server_time.saturating_add(MAX_AHEAD), Ordering::Relaxed);
    }
}

fn ahead(server_time: u64) -> i64 {
    i64::try_from(i128::from(server_time) - i128::from(local())).unwrap_or(0)
}

fn local() -> u64 {
    Moment::now().as_nanos() / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimum_token_rises_in_steps_and_never_falls() {
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.observe(1_000_000_000 + STEP);
        assert_eq!(clock.latest(), 1_000_000_000, "not for every answer");
        clock.observe(1_000_000_001 + STEP);
        assert_eq!(clock.latest(), 1_000_000_001 + STEP);
        clock.raise(5);
        assert_eq!(clock.latest(), 1_000_000_001 + STEP);
        assert!(clock.advance() >= 1_000_000_001 + STEP);
    }

    #[test]
    fn minimum_token_advances_with_the_clock() {
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.ahead.fetch_add(50, Ordering::Relaxed); // as if this much time had passed
        assert_eq!(clock.latest(), 1_000_000_000);
        assert!(clock.advance() >= 1_000_000_050);
        assert!(clock.latest() >= 1_000_000_050);
    }

    #[test]
    fn a_late_answer_does_not_set_the_clock_back() {
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.observe(999_000_000);
        assert!(clock.now() >= 1_000_000_000);
        clock.raise(900_000_000); // of another server
        assert!(clock.now() < 1_000_000_000);
    }
}
