//! `redlatch bench`: how fast locks are on the user's servers.

use std::time::{Duration, Instant};

use redlatch::{Error, Locks};
use serde_json::json;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::exit::{Failure, print, print_json};
use crate::servers::ServerArgs;

/// The number of tasks that take turns, or have a lock each.
const TASKS: usize = 16;

/// Measure locks on these servers, with locks of new names.
///
/// It keeps the servers fully occupied with requests, for three times five seconds.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Three times one second.
    #[arg(long)]
    quick: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        // The fencing counters are the only keys that stay, for a second.
        let options = servers.options().token_ttl(Duration::from_secs(1));
        let locks = servers.builder()?.options(options).connect().await?;
        let span = Duration::from_secs(if self.quick { 1 } else { 5 });
        let name = format!("redlatch-bench-{}", Uuid::new_v4().simple());
        let mut times = turns(&locks, &name, span).await?;
        times.sort_unstable();
        let percentile = |part: usize| times.get(times.len() * part / 100).map_or(0, Duration::as_micros);
        let (p50, p99) = (percentile(50), percentile(99));
        let turns = rate(&locks, |_| name.clone(), span).await?;
        let each = rate(&locks, |task| format!("{name}-{task}"), span).await?;
        locks.close(Duration::from_secs(5)).await?;
        if self.json {
            print_json(&json!({
                "acquire_release_p50_us": u64::try_from(p50).unwrap_or(u64::MAX),
                "acquire_release_p99_us": u64::try_from(p99).unwrap_or(u64::MAX),
                "turns_per_second": turns,
                "locks_per_second": each,
                "tasks": TASKS,
            }))?;
        } else {
            print(&format!("one task acquires and releases a free lock: {p50} us (median), {p99} us (p99)"))?;
            print(&format!("{TASKS} tasks take turns at one lock: {turns} turns a second"))?;
            print(&format!("{TASKS} tasks with a lock each: {each} acquires and releases a second"))?;
        }
        Ok(0)
    }
}

/// Acquires and releases until the time has elapsed, and returns how long each turn took.
async fn turns(locks: &Locks, name: &str, span: Duration) -> Result<Vec<Duration>, Error> {
    let (lock, start) = (locks.mutex(name)?, Instant::now());
    let mut times = Vec::new();
    while start.elapsed() < span {
        let begin = Instant::now();
        lock.lock().await?.release().await?;
        times.push(begin.elapsed());
    }
    Ok(times)
}

/// The turns of all tasks in a second.
async fn rate(locks: &Locks, name: impl Fn(usize) -> String, span: Duration) -> Result<u64, Failure> {
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for task in 0..TASKS {
        let (locks, name) = (locks.clone(), name(task));
        tasks.spawn(async move { turns(&locks, &name, span).await.map(|times| times.len()) });
    }
    let mut count = 0.0;
    while let Some(turns) = tasks.join_next().await {
        count += turns.map_err(Failure::os("run a task"))?? as f64;
    }
    Ok((count / start.elapsed().as_secs_f64()).round() as u64)
}
