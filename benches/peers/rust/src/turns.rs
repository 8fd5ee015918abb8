//! Clients that contend for one lock name. A turn is an acquisition by another client than the one
//! before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::libraries::{Client, Kind, Library, Lock};
use crate::{Commands, Outcome};

#[derive(Debug, Serialize)]
pub(crate) struct Turns {
    seconds: f64,
    acquisitions: u64,
    turns: u64,
    fewest: u64,
    most: u64,
    overlaps: u64,
}

/// What the clients share.
struct Shared {
    stop: AtomicBool,
    held: AtomicBool,
    last: AtomicUsize,
    acquisitions: AtomicU64,
    overlaps: AtomicU64,
    turns: Vec<AtomicU64>,
}

impl Shared {
    /// The turns of each client so far.
    fn turns(&self) -> Vec<u64> {
        self.turns.iter().map(|turns| turns.load(Ordering::Relaxed)).collect()
    }

    /// Counts an acquisition. The lock is held.
    fn count(&self, client: usize) {
        self.overlaps.fetch_add(u64::from(self.held.swap(true, Ordering::SeqCst)), Ordering::Relaxed);
        self.acquisitions.fetch_add(1, Ordering::Relaxed);
        if self.last.swap(client, Ordering::SeqCst) != client {
            self.turns[client].fetch_add(1, Ordering::Relaxed);
        }
        self.held.store(false, Ordering::SeqCst);
    }
}

pub(crate) async fn measure(
    url: &str,
    library: Library,
    kind: Kind,
    clients: usize,
    span: Duration,
    poll: Duration,
    commands: &mut Commands,
) -> Outcome<Turns> {
    let shared = Arc::new(Shared {
        stop: AtomicBool::new(false),
        held: AtomicBool::new(false),
        last: AtomicUsize::new(usize::MAX),
        acquisitions: AtomicU64::new(0),
        overlaps: AtomicU64::new(0),
        turns: (0..clients).map(|_| AtomicU64::new(0)).collect(),
    });
    let mut running = JoinSet::new();
    for number in 0..clients {
        let client = Client::connect(library, url, poll).await?;
        let lock = client.lock(kind, "contended")?;
        running.spawn(contend(client, lock, number, Arc::clone(&shared)));
    }
    sleep(span / 5).await;
    commands.go().await?;
    let (start, acquisitions, before) =
        (Instant::now(), shared.acquisitions.load(Ordering::Relaxed), shared.turns());
    sleep(span).await;
    let (seconds, after) = (start.elapsed().as_secs_f64(), shared.turns());
    let acquisitions = shared.acquisitions.load(Ordering::Relaxed) - acquisitions;
    shared.stop.store(true, Ordering::Relaxed);
    while let Some(done) = running.join_next().await {
        done??;
    }
    let turns: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    Ok(Turns {
        seconds,
        acquisitions,
        turns: turns.iter().sum(),
        fewest: turns.iter().min().copied().unwrap_or(0),
        most: turns.iter().max().copied().unwrap_or(0),
        overlaps: shared.overlaps.load(Ordering::Relaxed),
    })
}

/// Runs one client, which stays open meanwhile.
async fn contend(_client: Client, lock: Lock, number: usize, shared: Arc<Shared>) -> Outcome<()> {
    while !shared.stop.load(Ordering::Relaxed) {
        let guard = lock.acquire().await?;
        shared.count(number);
        guard.release().await?;
    }
    Ok(())
}
