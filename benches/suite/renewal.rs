//! Many locks held for a long time: whether all stay held, and what that costs.

use std::time::{Duration, Instant};

use redlatch::{Locks, MutexGuard, Options};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Outcome;
use super::plan::Plan;
use super::server::Server;

const LOCKS: usize = 10_000;
const TTL: Duration = Duration::from_secs(3);
const TTLS: u32 = 4;

/// The number of tasks that acquire and release the locks.
const TASKS: usize = 64;

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) locks: usize,
    pub(crate) ttl_ms: u128,
    pub(crate) ttls: u32,
    /// Locks whose release at the end the server confirmed: they were held throughout.
    pub(crate) held: usize,
    pub(crate) connections: u32,
    pub(crate) server_cpu_part: f64,
    /// The server's CPU time for one renewal. It is computed: each lock is renewed every third of
    /// its TTL.
    pub(crate) server_us_per_renewal: f64,
    /// What a held lock adds to the server's memory.
    pub(crate) bytes_per_lock: f64,
}

impl Row {
    pub(crate) fn held_part(&self) -> f64 {
        self.held as f64 / self.locks as f64
    }
}

pub(crate) async fn measure(server: &Server, _plan: &Plan) -> Outcome<Row> {
    let mut observer = server.observer().await?;
    observer.alone().await?;
    let locks = Locks::builder().server(server.url()).options(Options::new().ttl(TTL)).connect().await?;
    observer.empty().await?;
    let memory = observer.memory().await?;
    let guards = acquire_all(&locks).await?;
    let memory = observer.memory().await?.saturating_sub(memory);
    let (start, cpu) = (Instant::now(), observer.cpu().await?);
    sleep(TTL * TTLS).await;
    let (took, cpu) = (start.elapsed(), observer.cpu().await?.saturating_sub(cpu));
    let connections = observer.connections().await?;
    let held = release_all(guards).await?;
    let renewals = 3.0 * LOCKS as f64 * took.as_secs_f64() / TTL.as_secs_f64();
    Ok(Row {
        locks: LOCKS,
        ttl_ms: TTL.as_millis(),
        ttls: TTLS,
        held,
        connections,
        server_cpu_part: cpu.as_secs_f64() / took.as_secs_f64(),
        server_us_per_renewal: cpu.as_secs_f64() * 1e6 / renewals,
        bytes_per_lock: memory as f64 / LOCKS as f64,
    })
}

async fn acquire_all(locks: &Locks) -> Outcome<Vec<Vec<MutexGuard>>> {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(acquire_some(locks.clone(), task));
    }
    tasks.join_all().await.into_iter().collect()
}

async fn acquire_some(locks: Locks, task: usize) -> Outcome<Vec<MutexGuard>> {
    let mut guards = Vec::new();
    for number in (task..LOCKS).step_by(TASKS) {
        guards.push(locks.mutex(format!("renewed:{number}"))?.lock().await?);
    }
    Ok(guards)
}

/// Releases the locks, and returns how many were still held.
async fn release_all(guards: Vec<Vec<MutexGuard>>) -> Outcome<usize> {
    let mut tasks = JoinSet::new();
    for guards in guards {
        tasks.spawn(release_some(guards));
    }
    Ok(tasks.join_all().await.into_iter().sum())
}

async fn release_some(guards: Vec<MutexGuard>) -> usize {
    let mut held = 0;
    for guard in guards {
        held += usize::from(guard.release().await.is_ok());
    }
    held
}
