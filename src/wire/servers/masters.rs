//! [`Masters`]: the masters of a cluster, each with a connection of its own, and the slots that
//! they serve.
//!
//! **Why not the cluster client of the library**: it reconnects to a master while all its requests
//! wait, and may wait for itself for ever. One of three masters hangs; after ten seconds or so no
//! request to the two others is sent any more, and their leases end.

use std::collections::HashMap;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::error_replies::{is_broken, is_spent, too_slow};
use super::super::request::{Batch, PreparedCall, Shard, Slot, TimedReply};
use super::batcher::Batcher;
use super::connecting::Connecting;
use super::first_reply::first_reply;
use super::master::{Dialing, Master};
use super::seeds::{CLUSTER_DOWN, Seeds, at_address};
use super::sending::{SentFlag, last};
use super::slot_table::{SLOTS, SlotTable, master_at, slot_of, unserved};
use super::transport::RepliesByServer;
use crate::clock::Moment;
use crate::guarded::Guarded;

/// Further servers are asked after each of these parts of the limit. Those before are still waited
/// for: a server far away takes a quarter of a second for its connection and its reply.
pub(super) const PARTS: u32 = 8;

/// How long a client that has learned the slots waits before it asks again.
pub(super) const LEARNING_PAUSE: Duration = Duration::from_millis(100);

/// The masters of a cluster. A master that hangs delays only the requests for its own slots.
pub(in crate::wire) struct Masters {
    pub(super) seeds: Arc<Seeds>,
    pub(super) dialing: Arc<Dialing>,
    pub(super) table: Guarded<SlotTable>,
    pub(super) learning: Connecting,
    /// How often the slots were learned.
    pub(super) lessons: AtomicU64,
    /// Whether a task of its own learns the slots again.
    pub(super) is_learning: AtomicBool,
    next: AtomicUsize,
}

impl Masters {
    /// Learns the slots from one of the seeds. Must be called on the client's runtime.
    pub(super) async fn open(
        seeds: Arc<Seeds>,
        limit: Duration,
        name: Option<&str>,
    ) -> Result<Arc<Masters>, RedisError> {
        let (name, runtime) = (name.map(str::to_owned), Handle::current());
        let masters = Arc::new(Masters {
            seeds,
            dialing: Arc::new(Dialing {
                limit,
                name,
                runtime,
                made: AtomicU64::new(0),
                fresh: Guarded::default(),
            }),
            table: Guarded::default(),
            learning: Connecting::default(),
            lessons: AtomicU64::new(0),
            is_learning: AtomicBool::new(false),
            next: AtomicUsize::new(0),
        });
        masters.learn(None).await?;
        {
            // Under its lock: a connection that is made meanwhile is counted before or after.
            let mut fresh = masters.dialing.fresh.lock();
            let table = masters.table.lock();
            let unconnected = table.masters.values().filter(|master| master.current().is_none());
            *fresh = Some(unconnected.map(|master| master.address.clone()).collect());
        }
        Ok(masters)
    }

    pub(super) fn limit(&self) -> Duration {
        self.dialing.limit
    }

    /// Sends a call to the master of its slot, when its turn comes there.
    ///
    /// # Cancel safety
    /// Not cancel safe: the call may still run if it was written; `sent_flag` says whether it was.
    pub(super) async fn send_once(
        self: &Arc<Masters>,
        call: &PreparedCall,
        sent_flag: &SentFlag,
        deadline: Instant,
    ) -> Result<TimedReply, RedisError> {
        let master = self.master_of(call.slot, deadline).await?;
        let send = async |batcher: Arc<Batcher>| [batcher.send(call, sent_flag).await];
        let [reply] = self.run(&master, deadline, send).await?;
        reply
    }

    /// Sends calls for slots of one master to it, together and ahead of its queue.
    pub(super) async fn send_ahead_once(
        self: &Arc<Masters>,
        calls: &[PreparedCall],
        deadline: Instant,
    ) -> Result<Vec<Result<TimedReply, RedisError>>, RedisError> {
        let master = self.master_of(calls.first().and_then(|call| call.slot), deadline).await?;
        let send = async |batcher: Arc<Batcher>| batcher.send_ahead(calls, left_until(deadline)).await;
        self.run(&master, deadline, send).await
    }

    /// Sends a command once, beside the calls: to the master of its key's slot; without a key, to
    /// any master.
    pub(super) async fn query(
        self: &Arc<Masters>,
        command: &Cmd,
        limit: Duration,
    ) -> Result<Value, RedisError> {
        let deadline = Instant::now() + limit.min(self.limit());
        match slot_of(command) {
            None => self.send_to_any(command, deadline).await,
            slot => self.send_to(&self.master_of(slot, deadline).await?, command, deadline).await,
        }
    }

    async fn master_of(
        self: &Arc<Masters>,
        slot: Option<Slot>,
        deadline: Instant,
    ) -> Result<Arc<Master>, RedisError> {
        let master = || slot.and_then(|slot| self.of_slot(slot));
        if let Some(master) = master() {
            return Ok(master);
        }
        if self.has_asked_since(Moment::now() - LEARNING_PAUSE) {
            return Err(unserved());
        }
        timeout_at(deadline, self.learn(None)).await.map_err(|_| too_slow())??;
        master().ok_or_else(unserved)
    }

    /// The places of calls, by the masters of their slots. Those without a known one are together.
    pub(super) fn by_master(&self, calls: &[PreparedCall]) -> Vec<Vec<usize>> {
        let mut groups: HashMap<Option<String>, Vec<usize>> = HashMap::new();
        for (place, call) in calls.iter().enumerate() {
            let master = call.slot.and_then(|slot| self.of_slot(slot));
            groups.entry(master.map(|master| master.address.clone())).or_default().push(place);
        }
        groups.into_values().collect()
    }

    /// Sends a call to the server that has its keys already while their slot moves.
    pub(super) async fn ask(
        self: &Arc<Masters>,
        call: &PreparedCall,
        target: (&str, u16),
        deadline: Instant,
    ) -> Result<TimedReply, RedisError> {
        let master = self.named(call.slot, target).ok_or_else(unserved)?;
        let send = async |batcher: Arc<Batcher>| {
            let mut batch = Batch::new(slice::from_ref(call));
            while let Some(cmd) = batch.commands().pop() {
                let both = vec![redis::cmd("ASKING"), cmd];
                let replies = batcher.send_all(both, left_until(deadline)).await;
                // Without the right to ASKING, the reply would only be MOVED.
                batch.record(replies.into_iter().reduce(Result::and).into_iter().collect());
            }
            batch.replies
        };
        self.run(&master, deadline, send).await.and_then(last)
    }

    /// Records where a slot is, as another master has answered, and learns the others.
    pub(super) fn moved(self: &Arc<Masters>, slot: Option<Slot>, target: (&str, u16)) {
        if let (Some(slot), Some(master)) = (slot, self.named(slot, target)) {
            self.table.lock().slots.insert(slot, master);
        }
        self.learn_later(None);
    }

    /// Sends a request to every master, and returns the replies by address.
    pub(super) async fn send_to_all(self: &Arc<Masters>, request: &Cmd, limit: Duration) -> RepliesByServer {
        let deadline = Instant::now() + limit;
        let masters: Vec<_> = self.table.lock().masters.values().cloned().collect();
        let mut asked = JoinSet::new();
        for master in masters {
            let (this, request) = (Arc::clone(self), request.clone());
            asked.spawn(async move {
                let reply = this.send_to(&master, &request, deadline).await;
                (Some(master.address.clone()), reply)
            });
        }
        let mut replies = Vec::new();
        while let Some(reply) = asked.join_next().await {
            // A join fails only if the runtime shuts down.
            replies.extend(reply);
        }
        replies
    }

    /// The number of the newest connection. A count of those that were given up would not do: that
    /// of a master goes with it when a replica takes over.
    pub(super) fn newest(&self) -> u64 {
        let number = |master: &Arc<Master>| Some(master.current()?.number);
        self.table.lock().masters.values().filter_map(number).max().unwrap_or(0)
    }

    /// Tries one master after the other, those first that are connected.
    async fn send_to_any(self: &Arc<Masters>, request: &Cmd, deadline: Instant) -> Result<Value, RedisError> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let mut masters: Vec<_> = self.table.lock().masters.values().cloned().collect();
        let count = masters.len().max(1);
        masters.rotate_left(next % count);
        masters.sort_by_key(|master| master.current().is_none());
        let tries = masters.into_iter().map(|master| {
            let (this, request) = (Arc::clone(self), request.clone());
            async move {
                match this.send_to(&master, &request, deadline).await {
                    Err(error) if is_broken(&error) => Err(error),
                    outcome => Ok(outcome),
                }
            }
        });
        let first = first_reply(&self.dialing.runtime, tries, 1, self.limit() / PARTS);
        timeout_at(deadline, first).await.map_err(|_| too_slow())??
    }

    async fn send_to(
        self: &Arc<Masters>,
        master: &Arc<Master>,
        request: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisError> {
        let query = async |batcher: Arc<Batcher>| [batcher.query(request, left_until(deadline)).await];
        let [reply] = self.run(master, deadline, query).await?;
        reply
    }

    /// Sends something to a master. Drops its connection if that is of no further use, and looks
    /// for another master of its slots.
    async fn run<T, R: AsRef<[Result<T, RedisError>]>>(
        self: &Arc<Masters>,
        master: &Arc<Master>,
        deadline: Instant,
        send: impl AsyncFnOnce(Arc<Batcher>) -> R,
    ) -> Result<R, RedisError> {
        let live = match master.live(&self.dialing, deadline).await {
            Ok(live) => live,
            Err(error) => {
                self.learn_later(Some(&master.address));
                return Err(error);
            }
        };
        if left_until(deadline).is_zero() {
            return Err(too_slow());
        }
        let start = Instant::now();
        let replies = send(Arc::clone(&live.batcher)).await;
        for error in replies.as_ref().iter().filter_map(|reply| reply.as_ref().err()) {
            let is_spent = is_spent(error);
            // A connection that delivers other replies meanwhile is busy, not silent.
            if is_spent && !(error.is_timeout() && live.batcher.has_replied_since(start)) {
                master.drop_if(live.number);
            }
            // A master may be cut off from the others, and know only what was true before.
            if is_spent || error.kind() == CLUSTER_DOWN {
                self.learn_later(Some(&master.address));
            }
        }
        Ok(replies)
    }

    /// The part of the cluster that serves a slot.
    pub(super) fn shard(&self, slot: Slot) -> Shard {
        self.of_slot(slot).map_or(Shard::Unserved, |master| Shard::Master(master.address.clone()))
    }

    /// Whether this is a part of the cluster now, and a request that was begun then may have gone
    /// to it.
    pub(super) fn knew_shard(&self, shard: &Shard, begun: Moment) -> bool {
        match shard {
            Shard::All => true,
            Shard::Master(address) => self.table.lock().knew(address, begun),
            Shard::Unserved => self.table.lock().slots.len() < usize::from(SLOTS),
        }
    }

    fn of_slot(&self, slot: Slot) -> Option<Arc<Master>> {
        self.table.lock().slots.get(&slot).cloned()
    }

    /// The server that the present master of a slot has named.
    fn named(&self, slot: Option<Slot>, (host, port): (&str, u16)) -> Option<Arc<Master>> {
        let by = slot.and_then(|slot| self.of_slot(slot)).map(|master| master.info.clone());
        let info = at_address(&by.or_else(|| self.seeds.all().into_iter().next())?, host, port)?;
        Some(master_at(&mut self.table.lock().masters, info))
    }
}

pub(super) fn left_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
