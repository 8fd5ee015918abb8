//! Uncontended locks: tasks of one client, each with a lock name of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::libraries::{Client, Kind, Library, Lock, NO_POLL};
use crate::{Commands, Outcome};

#[derive(Debug, Serialize)]
pub(crate) struct Pairs {
    seconds: f64,
    pairs: u64,
    overlaps: u64,
}

pub(crate) async fn measure(
    url: &str,
    library: Library,
    kind: Kind,
    tasks: usize,
    span: Duration,
    commands: &mut Commands,
) -> Outcome<Pairs> {
    let client = Client::connect(library, url, NO_POLL).await?;
    run(&client, kind, tasks, span / 5).await?;
    commands.go().await?;
    run(&client, kind, tasks, span).await
}

async fn run(client: &Client, kind: Kind, tasks: usize, span: Duration) -> Outcome<Pairs> {
    let barrier = Arc::new(Barrier::new(tasks + 1));
    let overlaps = Arc::new(AtomicU64::new(0));
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let lock = client.lock(kind, &format!("own-{task}"))?;
        running.spawn(repeat(lock, Arc::clone(&barrier), span, Arc::clone(&overlaps)));
    }
    barrier.wait().await;
    let (start, mut pairs) = (Instant::now(), 0);
    while let Some(done) = running.join_next().await {
        pairs += done??;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Pairs { seconds, pairs, overlaps: overlaps.load(Ordering::Relaxed) })
}

async fn repeat(lock: Lock, barrier: Arc<Barrier>, span: Duration, overlaps: Arc<AtomicU64>) -> Outcome<u64> {
    let held = AtomicBool::new(false);
    barrier.wait().await;
    let (start, mut pairs) = (Instant::now(), 0);
    while pairs == 0 || start.elapsed() < span {
        let guard = lock.acquire().await?;
        overlaps.fetch_add(u64::from(held.swap(true, Ordering::SeqCst)), Ordering::Relaxed);
        held.store(false, Ordering::SeqCst);
        guard.release().await?;
        pairs += 1;
    }
    Ok(pairs)
}
