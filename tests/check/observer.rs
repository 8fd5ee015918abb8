//! Looks at the locks past all proxies, for as long as a run lasts, as nobody who uses them would.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::history::Time;
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

/// Looks at each server until it is told to stop.
pub async fn observe(servers: Vec<(u16, String)>, stopped: watch::Receiver<bool>) -> Vec<Observation> {
    let mut looking = JoinSet::new();
    for (port, url) in servers {
        looking.spawn(look(port, url, stopped.clone()));
    }
    looking.join_all().await.concat()
}

async fn look(port: u16, url: String, stopped: watch::Receiver<bool>) -> Vec<Observation> {
    let client = redis::Client::open(url).unwrap();
    let mut connection: Option<MultiplexedConnection> = None;
    let mut seen = Vec::new();
    while !*stopped.borrow() {
        let asked = timeout(PATIENCE, async {
            if connection.is_none() {
                connection = client.get_multiplexed_async_connection().await.ok();
            }
            glance(connection.as_mut()?, port).await
        });
        match asked.await {
            Ok(Some(observations)) => seen.extend(observations),
            _ => connection = None,
        }
        sleep(GLANCE).await;
    }
    seen
}

/// One look at all locks. `None`: the server does not answer, or is a replica.
async fn glance(connection: &mut MultiplexedConnection, port: u16) -> Option<Vec<Observation>> {
    let mut pipe = redis::pipe();
    for (lock, _) in LOCKS {
        let key = format!("lock:{lock}");
        pipe.cmd("MULTI").cmd("EXISTS").arg(&key).cmd("GET").arg(format!("{{{key}}}:fence")).cmd("EXEC");
    }
    pipe.cmd("ROLE");
    let from = Time::now();
    let mut answers: Vec<redis::Value> = pipe.ignore_errors().query_async(connection).await.ok()?;
    let to = Time::now();
    let role: Vec<redis::Value> = redis::from_redis_value(answers.pop()?).ok()?;
    if role.first() != Some(&redis::Value::BulkString(b"master".to_vec())) {
        return None;
    }
    let executed = answers.into_iter().skip(3).step_by(4);
    let observed = LOCKS.iter().zip(executed).filter_map(|((lock, _), answer)| {
        // In a cluster, the slot may be another's.
        let (exists, fence): (bool, Option<u64>) = redis::from_redis_value(answer).ok()?;
        Some(Observation { from, to, port, lock, held_with: exists.then(|| fence.unwrap_or(0)) })
    });
    Some(observed.collect())
}
