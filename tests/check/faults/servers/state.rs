//! What a server has of the locks, before and after something was done to it.

use redis::Pipeline;
use tokio::time::{Duration, Instant, sleep};

use crate::history::Time;
use crate::support::Server;
use crate::workload::LOCKS;

/// One lock, as a server has it.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub lock: &'static str,
    is_held: bool,
    /// The last token that it gave.
    fence: u64,
}

/// What became of one fault: what shows its effect, and when a server lost what it had answered.
pub struct Outcome {
    pub effect: Option<String>,
    /// From when it may have been lost; until when what was granted may be.
    pub lost: Option<(Time, Time)>,
    /// Which locks that concerns, if not all.
    pub of: Option<Vec<String>>,
    /// When nobody answered for it.
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

    /// Since then nobody answered, until now.
    pub fn away(self, since: Time) -> Outcome {
        Outcome { away: Some((since, Time::now())), ..self }
    }
}

/// Adds a look at all locks.
pub fn add_look(pipe: &mut Pipeline) {
    for (lock, _) in LOCKS {
        let key = format!("lock:{lock}");
        pipe.cmd("MULTI").cmd("EXISTS").arg(&key).cmd("GET").arg(format!("{{{key}}}:fence")).cmd("EXEC");
    }
}

/// What a look was answered.
pub fn seen(answers: &[redis::Value]) -> Vec<Seen> {
    let executed = answers.iter().skip(3).step_by(4);
    let seen = LOCKS.iter().zip(executed).filter_map(|((lock, _), answer)| {
        // In a cluster, the slot may be another's.
        let (is_held, fence) = redis::from_redis_value::<(bool, Option<u64>)>(answer.clone()).ok()?;
        Some(Seen { lock, is_held, fence: fence.unwrap_or(0) })
    });
    seen.collect()
}

/// How many answers a look has.
pub const ANSWERS: usize = 4 * LOCKS.len();

/// Sends all at once: a server lets nobody else in between.
pub async fn ask(server: &Server, pipe: &mut Pipeline) -> Vec<redis::Value> {
    let mut connection = server.connection().await;
    loop {
        match pipe.ignore_errors().query_async(&mut connection).await {
            Ok(answers) => return answers,
            Err(_) => connection = server.connection().await,
        }
    }
}

pub async fn look(server: &Server) -> Vec<Seen> {
    let mut pipe = Pipeline::new();
    add_look(&mut pipe);
    seen(&ask(server, &mut pipe).await)
}

/// What was held, and is not, or by somebody from before.
pub fn gone(before: &[Seen], after: &[Seen]) -> Vec<&'static str> {
    let remains = |held: &Seen| {
        after.iter().any(|kept| kept.lock == held.lock && kept.is_held && kept.fence >= held.fence)
    };
    before.iter().filter(|seen| seen.is_held && !remains(seen)).map(|seen| seen.lock).collect()
}

/// Waits for a lock to be held that one with this knowledge does not know of, but not for long.
pub async fn is_ahead(server: &Server, known: &[Seen]) -> Vec<Seen> {
    let start = Instant::now();
    loop {
        let seen = look(server).await;
        let unknown = |held: &&Seen| {
            held.is_held && known.iter().all(|old| old.lock != held.lock || old.fence < held.fence)
        };
        if seen.iter().any(|held| unknown(&held)) || start.elapsed() > Duration::from_secs(1) {
            return seen;
        }
        sleep(Duration::from_millis(2)).await;
    }
}
