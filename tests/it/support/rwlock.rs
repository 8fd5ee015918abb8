//! Shorthands for read-write locks.

use std::time::Duration;

use redlatch::{Options, RwInspection, RwLock};

use super::{Deployment, eventually, patient};

/// A `poll_cap` longer than any wait: a waiter that acquires sooner was notified.
pub const NEVER: Duration = Duration::from_secs(10);

/// Options of waiters that acquire early only if they are notified.
pub fn notified_only() -> Options {
    patient().poll_cap(NEVER)
}

pub async fn see(lock: &RwLock) -> RwInspection {
    lock.inspect().await.unwrap()
}

/// Waits for the slowest nodes of a quorum, for which a grant to read does not wait.
pub async fn is_read_on_all_nodes(deployment: &Deployment, lock: &RwLock) {
    let key = lock.name().key();
    let modes = async || deployment.run_at::<Option<String>>(key, &["HGET", key, "mode"]).await;
    let is_read = |mode: &Option<String>| mode.as_ref().is_some_and(|mode| !mode.contains("write"));
    eventually("all nodes have a reader", async || modes().await.iter().all(is_read)).await;
}
