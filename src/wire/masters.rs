//! [`Masters`]: the masters of a cluster, each with a connection of its own, and the slots that
//! they serve.
//!
//! **Why not the cluster client of the library**: it reconnects to a master while all its requests
//! wait, and may wait for itself for ever. One of three masters hangs; after ten seconds or so no
//! request to the two others is sent any more, and their leases end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster_routing::Slot;
use redis::{Arg, Client, Cmd, ConnectionInfo, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::connecting::Connecting;
use super::failure::{is_broken, is_demoted, too_slow};
use super::seeds::{Seeds, ask_slots, at_address, with_settings_of};
use super::transport::{config, connect, introduction};

const SLOTS: u16 = 16_384;

/// How many servers are asked for the slots at a time: one of them may be dead, another one hang.
const ASKED_AT_ONCE: usize = 3;

/// A part of the limit for one server, so that time is left for another one.
const PARTS: u32 = 3;

/// How long a client that has learned the slots waits before it asks again.
const PAUSE: Duration = Duration::from_millis(100);

const CLUSTER_DOWN: ErrorKind = ErrorKind::Server(ServerErrorKind::ClusterDown);

/// The masters of a cluster. A master that hangs delays only the requests for its own slots.
#[derive(Debug)]
pub(super) struct Masters {
    seeds: Arc<Seeds>,
    limit: Duration,
    /// The connections' name in `CLIENT LIST`.
    name: Option<String>,
    /// Where connections are made and driven.
    runtime: Handle,
    table: RwLock<SlotTable>,
    learning: Connecting,
    /// How often the slots were learned.
    lessons: AtomicU64,
    /// Whether a task of its own learns the slots again.
    is_learning: AtomicBool,
    turn: AtomicUsize,
}

#[derive(Debug, Default)]
struct SlotTable {
    slots: HashMap<Slot, Arc<Master>>,
    /// By address.
    masters: HashMap<String, Arc<Master>>,
}

/// A master, or a server that was named as one.
#[derive(Debug)]
struct Master {
    info: ConnectionInfo,
    address: String,
    current: Mutex<Option<Live>>,
    connecting: Connecting,
}

#[derive(Clone, Debug)]
struct Live {
    connection: MultiplexedConnection,
    number: u64,
    /// How many replies it has delivered.
    replies: Arc<AtomicU64>,
}

impl Masters {
    /// Learns the slots from one of the seeds. Must be called on the client's runtime.
    pub(super) async fn open(
        seeds: Arc<Seeds>,
        limit: Duration,
        name: Option<&str>,
    ) -> Result<Arc<Masters>, RedisError> {
        let masters = Arc::new(Masters {
            seeds,
            limit,
            name: name.map(str::to_owned),
            runtime: Handle::current(),
            table: RwLock::default(),
            learning: Connecting::default(),
            lessons: AtomicU64::new(0),
            is_learning: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
        });
        masters.learn(None).await?;
        Ok(masters)
    }

    /// Sends a request once, to the master of its slot; without a key, to any master.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run.
    pub(super) async fn send(
        self: &Arc<Masters>,
        request: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisError> {
        let Some(slot) = slot_of(request) else { return self.send_to_any(request, deadline).await };
        let master = match self.of_slot(slot) {
            Some(master) => master,
            None => {
                timeout_at(deadline, self.learn(None)).await.map_err(|_| too_slow())??;
                self.of_slot(slot).ok_or_else(unserved)?
            }
        };
        self.send_to(&master, request, deadline).await
    }

    /// Sends a request to the server that has its keys already while their slot moves.
    pub(super) async fn ask(
        self: &Arc<Masters>,
        request: &Cmd,
        (host, port): (&str, u16),
        deadline: Instant,
    ) -> Result<Value, RedisError> {
        let master = self.at(host, port).ok_or_else(unserved)?;
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.cmd("ASKING").ignore().add_command(request.clone());
        let send = async |mut connection| pipeline.query_async::<Vec<Value>>(&mut connection).await;
        let missing = || RedisError::from((ErrorKind::UnexpectedReturnType, "no reply of a pipeline"));
        self.run(&master, deadline, send).await?.pop().ok_or_else(missing)
    }

    /// Records where a slot is, as another master has answered, and learns the others.
    pub(super) fn moved(self: &Arc<Masters>, request: &Cmd, (host, port): (&str, u16)) {
        if let (Some(slot), Some(master)) = (slot_of(request), self.at(host, port)) {
            self.table_mut(|table| drop(table.slots.insert(slot, master)));
        }
        self.learn_later(None);
    }

    /// Learns the slots again, soon.
    fn learn_later(self: &Arc<Masters>, without: Option<&str>) {
        if self.is_learning.swap(true, Ordering::SeqCst) {
            return;
        }
        let (this, without) = (Arc::clone(self), without.map(str::to_owned));
        self.runtime.spawn(async move {
            // It outlives the client by at most this. A failure is found again by the next request.
            let _ = timeout(this.limit, this.learn(without.as_deref())).await;
            sleep(PAUSE.min(this.limit)).await;
            this.is_learning.store(false, Ordering::SeqCst);
        });
    }

    /// Sends a request to every master, and returns the replies by address.
    pub(super) async fn send_to_all(
        self: &Arc<Masters>,
        request: &Cmd,
        deadline: Instant,
    ) -> Result<Vec<(Option<String>, Value)>, RedisError> {
        let masters: Vec<_> = self.table(|table| table.masters.values().cloned().collect());
        let mut asked = JoinSet::new();
        for master in masters {
            let (this, request) = (Arc::clone(self), request.clone());
            asked.spawn(async move {
                let reply = this.send_to(&master, &request, deadline).await?;
                Ok::<_, RedisError>((Some(master.address.clone()), reply))
            });
        }
        let mut replies = Vec::new();
        while let Some(reply) = asked.join_next().await {
            replies.push(reply.map_err(std::io::Error::other)??);
        }
        Ok(replies)
    }

    /// Tries one master after the other, those first that are connected.
    async fn send_to_any(self: &Arc<Masters>, request: &Cmd, deadline: Instant) -> Result<Value, RedisError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut masters: Vec<_> = self.table(|table| table.masters.values().cloned().collect());
        if masters.is_empty() {
            return Err(unserved());
        }
        let count = masters.len();
        masters.rotate_left(turn % count);
        masters.sort_by_key(|master| master.current().is_none());
        let mut outcome = Err(too_slow());
        for master in masters {
            let part = deadline.min(Instant::now() + self.limit / PARTS);
            outcome = self.send_to(&master, request, part).await;
            if !outcome.as_ref().is_err_and(is_broken) || Instant::now() >= deadline {
                break;
            }
        }
        outcome
    }

    async fn send_to(
        self: &Arc<Masters>,
        master: &Arc<Master>,
        request: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisError> {
        self.run(master, deadline, async |mut connection| request.query_async(&mut connection).await).await
    }

    /// Sends something to a master. Drops its connection if that is of no further use, and looks
    /// for another master of its slots.
    async fn run<T>(
        self: &Arc<Masters>,
        master: &Arc<Master>,
        deadline: Instant,
        send: impl AsyncFnOnce(MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, RedisError> {
        let live = match master.live(self, deadline).await {
            Ok(live) => live,
            Err(error) => {
                self.learn_later(Some(&master.address));
                return Err(error);
            }
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(too_slow());
        }
        let mut connection = live.connection.clone();
        connection.set_response_timeout(left);
        let before = live.replies.load(Ordering::Relaxed);
        let outcome = send(connection).await;
        match &outcome {
            Err(error) if is_broken(error) || is_demoted(error) => {
                // A connection that delivers other replies meanwhile is busy, not silent.
                if !error.is_timeout() || live.replies.load(Ordering::Relaxed) == before {
                    master.drop_if(live.number);
                }
                self.learn_later(Some(&master.address));
            }
            outcome => {
                live.replies.fetch_add(1, Ordering::Relaxed);
                // It may be cut off from the others, and know only what was true before.
                if outcome.as_ref().is_err_and(|error| error.kind() == CLUSTER_DOWN) {
                    self.learn_later(Some(&master.address));
                }
            }
        }
        outcome
    }

    fn of_slot(&self, slot: Slot) -> Option<Arc<Master>> {
        self.table(|table| table.slots.get(&slot).cloned())
    }

    /// The server at an address that another one named.
    fn at(&self, host: &str, port: u16) -> Option<Arc<Master>> {
        let from = self.seeds.all().into_iter().next()?;
        let info = at_address(&from, host, port)?;
        Some(self.table_mut(|table| master_at(&mut table.masters, info)))
    }

    /// Asks servers for the slots, the masters that are connected first. Callers that wait for an
    /// attempt share its failure.
    async fn learn(&self, without: Option<&str>) -> Result<(), RedisError> {
        let (seen, lessons) = (self.learning.latest(), self.lessons.load(Ordering::SeqCst));
        let has_learned = || (self.lessons.load(Ordering::SeqCst) > lessons).then_some(());
        self.learning.connect(seen, has_learned, |_| self.learn_once(without)).await
    }

    async fn learn_once(&self, without: Option<&str>) -> Result<(), RedisError> {
        let mut masters: Vec<_> = self.table(|table| table.masters.values().cloned().collect());
        masters.sort_by_key(|master| master.current().is_none());
        for info in self.seeds.all() {
            if !masters.iter().any(|master| master.info.addr() == info.addr()) {
                masters.push(Arc::new(Master::new(info)));
            }
        }
        masters.retain(|master| without != Some(master.address.as_str()));
        let mut failure = too_slow();
        for some in masters.chunks(ASKED_AT_ONCE) {
            let part = self.limit / PARTS;
            let mut asked = JoinSet::new();
            for master in some.iter().cloned() {
                let asking = async move { (slots_of(&master, part).await, master) };
                asked.spawn_on(asking, &self.runtime);
            }
            while let Some(reply) = asked.join_next().await {
                match reply.map_err(std::io::Error::other)? {
                    (Ok(slots), from) if !slots.is_empty() => {
                        self.adopt(&slots, &from.info);
                        self.lessons.fetch_add(1, Ordering::SeqCst);
                        return Ok(());
                    }
                    (Ok(_), from) => failure = not_in_a_cluster(&from.address),
                    (Err(error), _) => failure = error,
                }
            }
        }
        Err(failure)
    }

    /// Takes over which master serves which slots. Masters that are known keep their connections.
    fn adopt(&self, slots: &[Vec<Value>], from: &ConnectionInfo) {
        self.seeds.replace_others(slots, from);
        self.table_mut(|table| {
            let mut known = std::mem::take(&mut table.masters);
            let mut masters = HashMap::new();
            table.slots.clear();
            for range in slots {
                let [Value::Int(first), Value::Int(last), master, ..] = range.as_slice() else { continue };
                let Some(info) = with_settings_of(from, master) else { continue };
                let address = info.addr().to_string();
                if let Some(master) = known.remove(&address) {
                    masters.insert(address, master);
                }
                let master = master_at(&mut masters, info);
                let slots = (*first..=*last).filter_map(|slot| Slot::new(u16::try_from(slot).ok()?));
                table.slots.extend(slots.take(SLOTS.into()).map(|slot| (slot, Arc::clone(&master))));
            }
            table.masters = masters;
        });
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn table<T>(&self, read: impl FnOnce(&SlotTable) -> T) -> T {
        read(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn table_mut<T>(&self, write: impl FnOnce(&mut SlotTable) -> T) -> T {
        write(&mut self.table.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Master {
    fn new(info: ConnectionInfo) -> Master {
        let address = info.addr().to_string();
        Master { info, address, current: Mutex::default(), connecting: Connecting::default() }
    }

    fn current(&self) -> Option<Live> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn drop_if(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|live| live.number == number) {
            *current = None;
        }
    }

    /// The connection, which is made if there is none: on the client's runtime, whose task drives
    /// it, and whether or not the caller is polled.
    async fn live(self: &Arc<Master>, masters: &Masters, deadline: Instant) -> Result<Live, RedisError> {
        if let Some(live) = self.current() {
            return Ok(live);
        }
        let (this, seen) = (Arc::clone(self), self.connecting.latest());
        let (name, limit) = (masters.name.clone(), masters.limit);
        let connecting = masters.runtime.spawn(async move {
            let attempt = |number| this.connect(number, name, limit / PARTS);
            this.connecting.connect(seen, || this.current(), attempt).await
        });
        let connected = timeout_at(deadline, connecting).await.map_err(|_| too_slow())?;
        connected.map_err(std::io::Error::other)?
    }

    async fn connect(&self, number: u64, name: Option<String>, limit: Duration) -> Result<Live, RedisError> {
        let opening = async {
            let mut connection = connect(&Client::open(self.info.clone())?, &config(limit)).await?;
            let mut pipeline = redis::pipe();
            for command in introduction() {
                pipeline.add_command(command);
            }
            if let Some(name) = name {
                pipeline.cmd("CLIENT").arg("SETNAME").arg(name);
            }
            pipeline.cmd("PING");
            // Refusals do not matter: a server that replies can be used.
            pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(&mut connection).await?;
            Ok(connection)
        };
        let connection = timeout(limit, opening).await.unwrap_or_else(|_| Err(too_slow()))?;
        let live = Live { connection, number, replies: Arc::default() };
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(live.clone());
        Ok(live)
    }
}

/// The master with this address, which is added if it is new.
fn master_at(masters: &mut HashMap<String, Arc<Master>>, info: ConnectionInfo) -> Arc<Master> {
    let master = masters.entry(info.addr().to_string()).or_insert_with(|| Arc::new(Master::new(info)));
    Arc::clone(master)
}

/// Asks a server for the slots, over its connection if there is one.
async fn slots_of(master: &Master, limit: Duration) -> Result<Vec<Vec<Value>>, RedisError> {
    let asking = async {
        let mut connection = match master.current() {
            Some(live) => live.connection,
            None => connect(&Client::open(master.info.clone())?, &config(limit)).await?,
        };
        ask_slots(&mut connection).await
    };
    timeout(limit, asking).await.unwrap_or_else(|_| Err(too_slow()))
}

/// The slot of the first key, for the commands that this client sends.
fn slot_of(request: &Cmd) -> Option<Slot> {
    let word = |place: usize| match request.args_iter().nth(place) {
        Some(Arg::Simple(word)) => Some(word),
        _ => None,
    };
    match word(0)? {
        b"EVAL" | b"EVALSHA" | b"EVAL_RO" | b"EVALSHA_RO" if word(2)? != b"0" => word(3).map(Slot::for_key),
        b"GET" | b"ZCOUNT" => word(1).map(Slot::for_key),
        _ => None,
    }
}

fn unserved() -> RedisError {
    RedisError::from((CLUSTER_DOWN, "no master serves the slot"))
}

fn not_in_a_cluster(address: &str) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, "the server knows no slots", address.to_owned()))
}
