//! The locks that a server stores, before and after a fault.

use redis::Pipeline;
use tokio::time::{Duration, Instant, sleep};

use crate::history::Time;
use crate::support::Server;
use crate::workload::LOCKS;

/// One lock, as a server stores it.
#[derive(Clone, Copy, Debug)]
pub struct StoredLock {
    pub lock: &'static str,
    is_held: bool,
    /// The last token that the server gave.
    fence: u64,
}

/// The outcome of a fault. The fields are those of `Window`.
pub struct Outcome {
    pub effect: Option<String>,
    pub lost: Option<(Time, Time)>,
    pub of: Option<Vec<String>>,
    pub away: Option<(Time, Time)>,
}

impl From<Option<String>> for Outcome {
    fn from(effect: Option<String>) -> Outcome {
        Outcome { effect, lost: None, of: None, away: None }
    }
}

impl Outcome {
    pub fn lost(since: Time, gone: &[&str]) -> Outcome {
        let effect = (!gone.is_empty()).then(|| format!("lost, while held: {}", gone.join(", ")));
        Outcome { effect, lost: Some((since, Time::now())), of: None, away: None }
    }

    /// Adds that the server did not reply from `since` until now.
    pub fn away(self, since: Time) -> Outcome {
        Outcome { away: Some((since, Time::now())), ..self }
    }
}

/// Adds commands that read all locks.
pub fn add_reads(pipe: &mut Pipeline) {
    for (lock, _) in LOCKS {
        let key = format!("lock:{lock}");
        pipe.cmd("MULTI").cmd("EXISTS").arg(&key).cmd("GET").arg(format!("{{{key}}}:fence")).cmd("EXEC");
    }
}

/// The replies to the commands of `add_reads`.
pub fn seen(answers: &[redis::Value]) -> Vec<StoredLock> {
    let executed = answers.iter().skip(3).step_by(4);
    let seen = LOCKS.iter().zip(executed).filter_map(|((lock, _), answer)| {
        // In a cluster, another master may serve the slot.
        let (is_held, fence) = redis::from_redis_value::<(bool, Option<u64>)>(answer.clone()).ok()?;
        Some(StoredLock { lock, is_held, fence: fence.unwrap_or(0) })
    });
    seen.collect()
}

/// The number of replies to the commands of `add_reads`.
pub const ANSWERS: usize = 4 * LOCKS.len();

/// Sends all commands in one write: the server runs no other client's command in between.
pub async fn ask(server: &Server, pipe: &mut Pipeline) -> Vec<redis::Value> {
    let mut connection = server.connection().await;
    loop {
        match pipe.ignore_errors().query_async(&mut connection).await {
            Ok(answers) => return answers,
            Err(_) => connection = server.connection().await,
        }
    }
}

pub async fn read_locks(server: &Server) -> Vec<StoredLock> {
    let mut pipe = Pipeline::new();
    add_reads(&mut pipe);
    seen(&ask(server, &mut pipe).await)
}

/// The locks that were held before, and are now free, or held with an older token.
pub fn gone(before: &[StoredLock], after: &[StoredLock]) -> Vec<&'static str> {
    let remains = |held: &StoredLock| {
        after.iter().any(|kept| kept.lock == held.lock && kept.is_held && kept.fence >= held.fence)
    };
    before.iter().filter(|seen| seen.is_held && !remains(seen)).map(|seen| seen.lock).collect()
}

/// Waits up to a second until a lock is held with a newer token than in `known`. Returns all locks
/// then.
pub async fn wait_for_new_hold(server: &Server, known: &[StoredLock]) -> Vec<StoredLock> {
    let start = Instant::now();
    loop {
        let seen = read_locks(server).await;
        let unknown = |held: &&StoredLock| {
            held.is_held && known.iter().all(|old| old.lock != held.lock || old.fence < held.fence)
        };
        if seen.iter().any(|held| unknown(&held)) || start.elapsed() > Duration::from_secs(1) {
            return seen;
        }
        sleep(Duration::from_millis(2)).await;
    }
}
