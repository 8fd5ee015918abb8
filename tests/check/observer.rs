//! The observer: reads the locks' keys on all servers, past the proxies, for the whole run.

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

/// The pause between two reads of a server.
const INTERVAL: Duration = Duration::from_millis(20);

/// A read that takes longer than this counts as unanswered.
const REPLY_LIMIT: Duration = Duration::from_millis(100);

/// What one server stored of one lock, at some moment between `from` and `to`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Observation {
    pub from: Time,
    pub to: Time,
    pub port: u16,
    pub lock: String,
    /// The last token, if there is an exclusive hold.
    pub held_with: Option<u64>,
    /// The owner of the exclusive hold, if the server stores it.
    pub by: Option<String>,
    /// When that hold expires at the latest, without a renewal.
    pub ends: Time,
}

/// What one server stored of one reader.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReaderEnd {
    pub from: Time,
    pub to: Time,
    pub lock: String,
    pub owner: String,
    /// Whether it was the only reader: then no renewal of another reader can keep its hold.
    pub is_alone: bool,
    /// When the reader's hold expires, or has expired, without a renewal: earliest and latest time.
    pub ends: (Time, Time),
}

pub type ReaderEnds = Vec<ReaderEnd>;

/// All observations of a run.
#[derive(Debug, Default)]
pub struct Observations {
    pub observations: Vec<Observation>,
    pub reader_ends: ReaderEnds,
}

impl Observations {
    fn add(&mut self, other: Observations) {
        self.observations.extend(other.observations);
        self.reader_ends.extend(other.reader_ends);
    }
}

/// Reads each server again and again, until `stopped`.
pub async fn observe(servers: Vec<(u16, String)>, stopped: watch::Receiver<bool>) -> Observations {
    let mut observers = JoinSet::new();
    for (port, url) in servers {
        observers.spawn(observe_server(port, url, stopped.clone()));
    }
    let mut seen = Observations::default();
    observers.join_all().await.into_iter().for_each(|of_server| seen.add(of_server));
    seen
}

async fn observe_server(port: u16, url: String, stopped: watch::Receiver<bool>) -> Observations {
    let client = redis::Client::open(url).unwrap();
    let mut connection: Option<MultiplexedConnection> = None;
    let mut seen = Observations::default();
    while !*stopped.borrow() {
        let reading = timeout(REPLY_LIMIT, async {
            if connection.is_none() {
                connection = client.get_multiplexed_async_connection().await.ok();
            }
            read_locks(connection.as_mut()?, port).await
        });
        match reading.await {
            Ok(Some(locks)) => seen.add(locks),
            _ => connection = None,
        }
        sleep(INTERVAL).await;
    }
    seen
}

/// Reads all locks once. `None`: the server does not reply, or is a replica.
async fn read_locks(connection: &mut MultiplexedConnection, port: u16) -> Option<Observations> {
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
    let mut seen = Observations::default();
    let executed = answers.into_iter().skip(5).step_by(6);
    for ((lock, kind), answer) in LOCKS.into_iter().zip(executed) {
        type Answer = (redis::Value, i64, Option<u64>, (i64, i64));
        // In a cluster, another master may serve the slot.
        let Ok((key, pttl, fence, (seconds, micros))) = redis::from_redis_value::<Answer>(answer) else {
            continue;
        };
        let now = seconds * 1_000 + micros / 1_000;
        let Some(holds) = StoredHolds::read(kind, key, pttl, now) else { continue };
        // The server counts in whole milliseconds.
        let ends = |left: i64| (after(from, left), after(to, left + 1));
        seen.reader_ends.extend(holds.readers.into_iter().map(|(owner, is_alone, left)| ReaderEnd {
            from,
            to,
            lock: lock.to_owned(),
            owner,
            is_alone,
            ends: ends(left),
        }));
        let (held_with, by, ends) = match holds.exclusive {
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

/// The holds that a lock's key stores, in the format of `lua/README.md`. Times are in milliseconds
/// until they expire.
#[derive(Default)]
struct StoredHolds {
    /// The owner, if the key stores one, and the time.
    exclusive: Option<(Option<String>, i64)>,
    /// Owner, whether it is the only reader, and the time.
    readers: Vec<(String, bool, i64)>,
}

impl StoredHolds {
    fn read(kind: Kind, key: redis::Value, pttl: i64, now: i64) -> Option<StoredHolds> {
        let mut holds = StoredHolds::default();
        if kind == Kind::Mutex {
            let attempt: Option<String> = redis::from_redis_value(key).ok()?;
            holds.exclusive = attempt.map(|_| (None, pttl));
            return Some(holds);
        }
        let hash: HashMap<String, String> = redis::from_redis_value(key).ok()?;
        for (field, value) in hash {
            let words: Vec<&str> = value.split(' ').collect();
            match (kind, field.strip_prefix("read:"), field.as_str(), words.as_slice()) {
                (Kind::Reentrant, ..) if field == "mode" || field.starts_with(':') => {}
                (Kind::Reentrant, ..) => holds.exclusive = Some((Some(field), pttl)),
                (_, _, "mode", ["sole", "read", owner, ..]) => {
                    holds.readers.push(((*owner).to_owned(), true, pttl));
                }
                (_, _, "mode", ["sole", _, owner, ..]) => {
                    holds.exclusive = Some((Some((*owner).to_owned()), pttl));
                }
                // An expired hold may stay in the hash, and is ignored.
                (_, _, "write", [end, owner, ..]) => {
                    let left = end.parse::<i64>().ok()? - now;
                    holds.exclusive = (left > 0).then(|| (Some((*owner).to_owned()), left));
                }
                (_, Some(owner), _, [end, ..]) => {
                    holds.readers.push((owner.to_owned(), false, end.parse::<i64>().ok()? - now));
                }
                _ => {}
            }
        }
        Some(holds)
    }
}
