//! How a client of a cluster learns which master serves which slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use redis::{RedisError, Value};
use tokio::time::{Instant, sleep, timeout};

use super::super::error_replies::too_slow;
use super::first_reply::first_reply;
use super::master::Master;
use super::masters::{LEARNING_PAUSE, Masters, PARTS, left_until};
use super::seeds::ask_slots;
use crate::clock::Moment;

/// How many servers are asked at first, if none is known to reply: one may be dead, one may hang.
const ASKED_AT_ONCE: usize = 3;

impl Masters {
    /// Whether an attempt to learn the slots that began after `start` has ended, in whatever way.
    pub(super) fn has_asked_since(&self, start: Moment) -> bool {
        self.table.lock().asked.is_some_and(|asked| asked >= start)
    }

    /// Learns the slots again, soon.
    pub(super) fn learn_later(self: &Arc<Masters>, without: Option<&str>) {
        if self.is_learning.swap(true, Ordering::SeqCst) {
            return;
        }
        let (this, without) = (Arc::clone(self), without.map(str::to_owned));
        self.dialing.runtime.spawn(async move {
            // It outlives the client by at most this. A failure is found again by the next request.
            let _ = timeout(this.limit(), this.learn(without.as_deref())).await;
            sleep(LEARNING_PAUSE.min(this.limit())).await;
            this.is_learning.store(false, Ordering::SeqCst);
        });
    }

    /// Asks servers for the slots, the masters that are connected first. Callers that wait for an
    /// attempt share its failure.
    ///
    /// On the client's runtime: a caller that is not polled must not keep the turn, since all
    /// others would wait for it, and no failover would be followed.
    pub(super) async fn learn(self: &Arc<Masters>, without: Option<&str>) -> Result<(), RedisError> {
        let (seen, lessons) = (self.learning.latest(), self.lessons.load(Ordering::SeqCst));
        let (this, without) = (Arc::clone(self), without.map(str::to_owned));
        let learning = self.dialing.runtime.spawn(async move {
            let has_learned = || (this.lessons.load(Ordering::SeqCst) > lessons).then_some(());
            let attempt = async {
                let begun = Moment::now();
                let learning = this.learn_once(without.as_deref());
                let outcome = timeout(this.limit(), learning).await.unwrap_or_else(|_| Err(too_slow()));
                this.table.lock().asked = Some(begun);
                outcome
            };
            this.learning.connect(seen, has_learned, attempt).await
        });
        learning.await.map_err(std::io::Error::other)?
    }

    async fn learn_once(self: &Arc<Masters>, without: Option<&str>) -> Result<(), RedisError> {
        let mut masters: Vec<_> = self.table.lock().masters.values().cloned().collect();
        masters.sort_by_key(|master| master.current().is_none());
        let mut seeds = self.seeds.all();
        seeds.retain(|seed| !masters.iter().any(|master| master.info.addr() == seed.addr()));
        let seeds = seeds.into_iter().map(|seed| Arc::new(Master::new(seed)));
        // By turns: of a cluster that has moved, all masters that are known may be silent.
        let numbered = seeds.enumerate().map(|(number, seed)| (2 * number + 1, seed));
        let mut servers: Vec<_> = numbered.collect();
        servers.extend(masters.into_iter().enumerate().map(|(number, master)| (2 * number, master)));
        servers.retain(|(_, server)| without != Some(server.address.as_str()));
        servers.sort_by_key(|(number, _)| *number);
        let is_connected = servers.first().is_some_and(|(_, server)| server.current().is_some());
        let deadline = Instant::now() + self.limit();
        let tries = servers.into_iter().map(|(_, master)| {
            let this = Arc::clone(self);
            async move { this.slots_of(&master, deadline).await.map(|slots| (slots, master)) }
        });
        let at_once = if is_connected { 1 } else { ASKED_AT_ONCE };
        let (slots, from) = first_reply(&self.dialing.runtime, tries, at_once, self.limit() / PARTS).await?;
        self.seeds.replace_others(&slots, &from.info);
        let mut fresh = self.dialing.fresh.lock();
        let mut table = self.table.lock();
        table.adopt(&slots, &from);
        // One that has left may come back as a replica that takes over, without the last writes.
        if let Some(fresh) = fresh.as_mut() {
            fresh.retain(|address| table.masters.contains_key(address));
        }
        self.lessons.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// What a server knows of the slots.
    async fn slots_of(
        self: &Arc<Masters>,
        master: &Arc<Master>,
        deadline: Instant,
    ) -> Result<Vec<Vec<Value>>, RedisError> {
        let live = master.live(&self.dialing, deadline).await?;
        ask_slots(&mut live.batcher.connection(left_until(deadline)), &master.info).await
    }
}
