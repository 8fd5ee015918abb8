//! Read-write locks: what is seen of them, and how to tell who was told from who looked.

use std::time::Duration;

use redlatch::{Options, RwInspection, RwLock};

/// Whoever is told in less was not polling.
pub const NEVER: Duration = Duration::from_secs(10);

pub fn told() -> Options {
    Options::new().poll_cap(NEVER)
}

pub async fn see(lock: &RwLock) -> RwInspection {
    lock.inspect().await.unwrap()
}
