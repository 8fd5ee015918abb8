//! [`Connecting`]: attempts to connect, which callers share.

use std::sync::atomic::{AtomicU64, Ordering};

use redis::RedisError;

use crate::guarded::Guarded;

/// Attempts to connect to one place, one at a time. Callers that wait for an attempt share its
/// failure, so a dead server costs the last of them no more than the first.
#[derive(Debug, Default)]
pub(in crate::wire) struct Connecting {
    /// Held by the task that connects, while the others wait for its result.
    attempting: tokio::sync::Mutex<()>,
    tries: AtomicU64,
    last_failure: Guarded<Option<(u64, RedisError)>>,
}

impl Connecting {
    /// The number of the latest attempt. A caller that has to wait takes it before.
    pub(in crate::wire) fn latest(&self) -> u64 {
        self.tries.load(Ordering::SeqCst)
    }

    /// Returns what there is by now, or connects. Attempts after `seen` count as the caller's own.
    pub(in crate::wire) async fn connect<T, F>(
        &self,
        seen: u64,
        current: impl Fn() -> Option<T>,
        attempt: impl FnOnce(u64) -> F,
    ) -> Result<T, RedisError>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        let _alone = self.attempting.lock().await;
        if let Some(live) = current() {
            return Ok(live);
        }
        let failed = self.last_failure.lock().clone();
        if let Some((number, error)) = failed
            && number > seen
        {
            return Err(error);
        }
        let number = self.tries.fetch_add(1, Ordering::SeqCst) + 1;
        let outcome = attempt(number).await;
        if let Err(error) = &outcome {
            let failure = Some((number, error.clone()));
            *self.last_failure.lock() = failure;
        }
        outcome
    }
}
