//! Calls with a time limit.

use std::time::Duration;

use redlatch::Error;

use crate::support::{Kind, Server};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// `lock_timeout(0)` acquires a free lock, and times out on a held one.
#[tokio::test(flavor = "multi_thread")]
async fn lock_timeout_of_zero_tries_once() {
    let server = Server::start().await;
    let (locks, others) = (server.locks().await, server.locks().await);
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("zero-{}", kind.name()));
        for _ in 0..80 {
            let guard = lock.lock_timeout(Duration::ZERO).await.unwrap();
            guard.release().await.unwrap();
        }
        let busy = kind.rival().lock(&others, &format!("zero-{}", kind.name()));
        let guard = busy.lock().await.unwrap();
        let outcome = lock.lock_timeout(Duration::ZERO).await;
        assert!(matches!(outcome, Err(Error::TimedOut { limit: Duration::ZERO, .. })), "{outcome:?}");
        guard.release().await.unwrap();
    }
}
