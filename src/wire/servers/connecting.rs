//! [`Connecting`]: attempts to connect, which callers share.

use std::sync::atomic::{AtomicU64, Ordering};

use redis::RedisError;
use tokio::sync::Mutex;

/// Attempts to connect to one place, one at a time. Callers that wait for an attempt share its
/// failure, so a dead server costs the last of them no more than the first.
#[derive(Debug, Default)]
pub(in crate::wire) struct Connecting {
    /// Held by the task that connects, while the others wait for its result. The number of the last
    /// attempt that failed, and why.
    last_failure: Mutex<Option<(u64, RedisError)>>,
    tries: AtomicU64,
}

impl Connecting {
    /// The number of the latest attempt. A caller that has to wait takes it before.
    pub(in crate::wire) fn latest(&self) -> u64 {
        self.tries.load(Ordering::SeqCst)
    }

    /// Returns what there is by now, or connects. Attempts after `seen` count as the caller's own.
    pub(in crate::wire) async fn connect<T>(
        &self,
        seen: u64,
        current: impl Fn() -> Option<T>,
        attempt: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisError> {
        let mut last_failure = self.last_failure.lock().await;
        if let Some(live) = current() {
            return Ok(live);
        }
        if let Some((_, error)) = last_failure.as_ref().filter(|(number, _)| *number > seen) {
            return Err(error.clone());
        }
        let number = self.tries.fetch_add(1, Ordering::SeqCst) + 1;
        attempt.await.inspect_err(|error| *last_failure = Some((number, error.clone())))
    }
}
