//! Read-write locks: who may enter beside whom, and who is let in when.

mod crowds;
mod doubts;
mod downgrades;
mod ends;
mod fairness;
mod table;
mod upgrades;

use std::future::Future;
use std::time::Duration;

use redlatch::{Options, RwInspection, RwLock};
use tokio::task::JoinHandle;

use crate::support::{Server, eventually};

/// The lock through a client of its own, as another process would have it.
async fn client(server: &Server, options: Options) -> RwLock {
    server.locks_with(options).await.rwlock("rw").unwrap()
}

async fn see(lock: &RwLock) -> RwInspection {
    lock.inspect().await.unwrap()
}

/// Starts something that has to wait, and waits until it is queued.
async fn queued<T: Send + 'static>(
    lock: &RwLock,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let waiters = || async {
        let seen = see(lock).await;
        seen.waiting_readers + seen.waiting_writers
    };
    let before = waiters().await;
    let task = tokio::spawn(work);
    eventually("it queues", || async { waiters().await > before }).await;
    task
}

/// How often the server was asked to publish.
async fn published(server: &Server) -> u64 {
    let stats: String = server.run(&["INFO", "commandstats"]).await;
    let line = stats.lines().find(|line| line.starts_with("cmdstat_publish:"));
    line.and_then(|line| line.split_once("calls=")?.1.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// Whoever is told in less was not polling.
const NEVER: Duration = Duration::from_secs(10);

fn told() -> Options {
    Options::new().poll_cap(NEVER)
}
