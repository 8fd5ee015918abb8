//! Looks at the locks past all proxies, for as long as a run lasts, as nobody who uses them would.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::history::Time;
use crate::support::Kind;
use crate::workload::LOCKS;

/// How often it looks.
const GLANCE: Duration = Duration::from_millis(20);

/// A server that takes longer has not answered.
const PATIENCE: Duration = Duration::from_millis(100);

/// What one server had of one lock, at some instant between the two times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Observation {
    pub from: Time,
    pub to: Time,
    pub port: u16,
    pub lock: String,
    /// The last token, if somebody holds the lock alone.
    pub held_with: Option<u64>,
    /// Who holds it so, where the server knows.
    pub by: Option<String>,
    /// When that ends at the latest, if nobody renews it.
    pub ends: Time,
}

/// What one server had of one reader.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReaderEnd {
    pub from: Time,
    pub to: Time,
    pub lock: String,
    pub owner: String,
    /// Whether nobody else read: then nobody else's renewals keep him.
    pub alone: bool,
    /// When his hold ends, or ended, if nobody renews it: at the earliest, and at the latest.
    pub ends: (Time, Time),
}

pub type ReaderEnds = Vec<ReaderEnd>;

/// All that was seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub observations: Vec<Observation>,
    pub reader_ends: ReaderEnds,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.observations.extend(other.observations);
        self.reader_ends.extend(other.reader_ends);
    }
}

/// Looks at each server until it is told to stop.
pub async fn observe(servers: Vec<(u16, String)>, stopped: watch::Receiver<bool>) -> Seen {
    let mut looking = JoinSet::new();
    for (port, url) in servers {
        looking.spawn(look(port, url, stopped.clone()));
    }
    let mut seen = Seen::default();
    looking.join_all().await.into_iter().for_each(|its| seen.add(its));
    seen
}

async fn look(port: u16, url: String, stopped: watch::Receiver<bool>) -> Seen {
    let client = redis::Client::open(url).unwrap();
    let mut connection: Option<MultiplexedConnection> = None;
    let mut seen = Seen::default();
    while !*stopped.borrow() {
        let asked = timeout(PATIENCE, async {
            if connection.is_none() {
                connection = client.get_multiplexed_async_connection().await.ok();
            }
            glance(connection.as_mut()?, port).await
        });
        match asked.await {
            Ok(Some(glance)) => seen.add(glance),
            _ => connection = None,
        }
        sleep(GLANCE).await;
    }
    seen
}

/// One look at all locks. `None`: the server does not answer, or is a replica.
async fn glance(connection: &mut MultiplexedConnection, port: u16) -> Option<Seen> {
    let mut pipe = redis::pipe();
    for (lock, kind) in LOCKS {
        let key = format!("lock:{lock}");
        let read = if kind == Kind::Mutex { "GET" } else { "HGETALL" };
        pipe.cmd("MULTI").cmd(read).arg(&key).cmd("PTTL").arg(&key);
        pipe.cmd("GET").arg(format!("{{{key}}}:fence")).cmd("TIME").cmd("EXEC");
    }
    pipe.cmd("ROLE");
    let from = Time::now();
    let mut answers: Vec<redis::Value> = pipe.ignore_errors().query_async(connection).await.ok()?;
    let to = Time::now();
    let role: Vec<redis::Value> = redis::from_redis_value(answers.pop()?).ok()?;
    if role.first() != Some(&redis::Value::BulkString(b"master".to_vec())) {
        return None;
    }
    let mut seen = Seen::default();
    let executed = answers.into_iter().skip(5).step_by(6);
    for ((lock, kind), answer) in LOCKS.into_iter().zip(executed) {
        type Answer = (redis::Value, i64, Option<u64>, (i64, i64));
        // In a cluster, the slot may be another's.
        let Ok((key, pttl, fence, (seconds, micros))) = redis::from_redis_value::<Answer>(answer) else {
            continue;
        };
        let Some(held) = Held::read(kind, key, pttl, seconds * 1_000 + micros / 1_000) else { continue };
        // The server counts in whole milliseconds.
        let ends = |left: i64| (after(from, left), after(to, left + 1));
        seen.reader_ends.extend(held.readers.into_iter().map(|(owner, alone, left)| ReaderEnd {
            from,
            to,
            lock: lock.to_owned(),
            owner,
            alone,
            ends: ends(left),
        }));
        let (held_with, by, ends) = match held.alone {
            Some((by, left)) => (Some(fence.unwrap_or(0)), by, ends(left).1),
            None => (None, None, to),
        };
        seen.observations.push(Observation { from, to, port, lock: lock.to_owned(), held_with, by, ends });
    }
    Some(seen)
}

fn after(time: Time, millis: i64) -> Time {
    let span = Duration::from_millis(millis.unsigned_abs());
    if millis < 0 { time - span } else { time + span }
}

/// What a lock's key says, as `lua/README.md` has it: who holds it, and for how many milliseconds more.
#[derive(Default)]
struct Held {
    alone: Option<(Option<String>, i64)>,
    readers: Vec<(String, bool, i64)>,
}

impl Held {
    fn read(kind: Kind, key: redis::Value, pttl: i64, now: i64) -> Option<Held> {
        let mut held = Held::default();
        if kind == Kind::Mutex {
            let attempt: Option<String> = redis::from_redis_value(key).ok()?;
            held.alone = attempt.map(|_| (None, pttl));
            return Some(held);
        }
        let hash: HashMap<String, String> = redis::from_redis_value(key).ok()?;
        for (field, value) in hash {
            let words: Vec<&str> = value.split(' ').collect();
            match (kind, field.strip_prefix("read:"), field.as_str(), words.as_slice()) {
                (Kind::Reentrant, ..) if field == "mode" || field.starts_with(':') => {}
                (Kind::Reentrant, ..) => held.alone = Some((Some(field), pttl)),
                (_, _, "mode", ["sole", "read", owner, ..]) => {
                    held.readers.push(((*owner).to_owned(), true, pttl));
                }
                (_, _, "mode", ["sole", _, owner, ..]) => {
                    held.alone = Some((Some((*owner).to_owned()), pttl));
                }
                // What is over may stay in the hash; it counts for nothing.
                (_, _, "write", [end, owner, ..]) => {
                    let left = end.parse::<i64>().ok()? - now;
                    held.alone = (left > 0).then(|| (Some((*owner).to_owned()), left));
                }
                (_, Some(owner), _, [end, ..]) => {
                    held.readers.push((owner.to_owned(), false, end.parse::<i64>().ok()? - now));
                }
                _ => {}
            }
        }
        Some(held)
    }
}
