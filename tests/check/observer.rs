//! Looks at the locks past all proxies, for as long as a run lasts, as nobody who uses them would.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::history::Time;
use crate::support::Kind;
use crate::visit::LOCKS;

/// How often it looks.
const GLANCE: Duration = Duration::from_millis(20);

/// A server that takes longer has not answered.
const PATIENCE: Duration = Duration::from_millis(100);

/// What one server had of one lock, at some instant between the two times.
#[derive(Clone, Debug)]
pub struct Observation {
    pub from: Time,
    pub to: Time,
    pub port: u16,
    pub lock: &'static str,
    /// The last token, if somebody holds the lock.
    pub held_with: Option<u64>,
}

/// Until when a server keeps the holds of readers: the latest end of each that it ever had, by lock and owner.
pub type ReaderEnds = HashMap<(&'static str, String), Time>;

/// All that was seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub observations: Vec<Observation>,
    pub reader_ends: ReaderEnds,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.observations.extend(other.observations);
        for (reader, end) in other.reader_ends {
            let latest = self.reader_ends.entry(reader).or_insert(end);
            *latest = end.max(*latest);
        }
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
    for (lock, _) in LOCKS {
        let key = format!("lock:{lock}");
        pipe.cmd("MULTI").cmd("EXISTS").arg(&key).cmd("GET").arg(format!("{{{key}}}:fence")).cmd("EXEC");
    }
    for lock in rwlocks() {
        pipe.cmd("MULTI").cmd("HGETALL").arg(format!("lock:{lock}")).cmd("TIME").cmd("EXEC");
    }
    pipe.cmd("ROLE");
    let from = Time::now();
    let mut answers: Vec<redis::Value> = pipe.ignore_errors().query_async(connection).await.ok()?;
    let to = Time::now();
    let role: Vec<redis::Value> = redis::from_redis_value(answers.pop()?).ok()?;
    if role.first() != Some(&redis::Value::BulkString(b"master".to_vec())) {
        return None;
    }
    let mut executed = answers.into_iter().skip(3).step_by(4);
    let observed = LOCKS.iter().zip(executed.by_ref()).filter_map(|((lock, _), answer)| {
        // In a cluster, the slot may be another's.
        let (exists, fence): (bool, Option<u64>) = redis::from_redis_value(answer).ok()?;
        Some(Observation { from, to, port, lock, held_with: exists.then(|| fence.unwrap_or(0)) })
    });
    let observations = observed.collect();
    let mut reader_ends = ReaderEnds::new();
    for (lock, answer) in rwlocks().zip(executed) {
        type Hash = HashMap<String, String>;
        let Ok((hash, (seconds, micros))) = redis::from_redis_value::<(Hash, (u64, u64))>(answer) else {
            continue;
        };
        let now = seconds * 1_000 + micros / 1_000;
        for (field, hold) in hash {
            let Some(owner) = field.strip_prefix("read:") else { continue };
            let end: u64 = hold.split(' ').next()?.parse().ok()?;
            // Seen after `from`, so it is no later than this.
            // What is over may stay in the hash; it counts for nothing.
            let end = if end > now {
                from + Duration::from_millis(end - now)
            } else {
                from - Duration::from_millis(now - end)
            };
            reader_ends.insert((lock, owner.to_owned()), end);
        }
    }
    Some(Seen { observations, reader_ends })
}

fn rwlocks() -> impl Iterator<Item = &'static str> {
    LOCKS.iter().filter(|(_, kind)| *kind == Kind::Write).map(|(lock, _)| *lock)
}
