//! Shorthands for read-write locks.

use std::time::Duration;

use redlatch::{Options, RwInspection, RwLock};

use super::patient;

/// A `poll_cap` longer than any wait: a waiter that acquires sooner was notified.
pub const NEVER: Duration = Duration::from_secs(10);

/// Options of waiters that acquire early only if they are notified.
pub fn notified_only() -> Options {
    patient().poll_cap(NEVER)
}

pub async fn see(lock: &RwLock) -> RwInspection {
    lock.inspect().await.unwrap()
}
