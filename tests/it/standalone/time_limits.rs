//! Calls with a time limit.

use std::time::Duration;

use redlatch::{Error, Locks, Options, Wakeups};

use crate::support::{Kind, Proxy, Server, eventually};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// `lock_timeout(0)` acquires a free lock, and times out on a held one.
#[tokio::test(flavor = "multi_thread")]
async fn lock_timeout_of_zero_tries_once() {
    let server = Server::start().await;
    let (locks, others) = (server.locks().await, server.locks().await);
    for kind in [KINDS[0]] {
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

/// The reply to a grant is lost, and the second delivery comes too late to be granted. That is
/// refused, but the first one holds the lock: it is released, and the error says that it may have
/// run.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_does_not_hide_a_lost_grant() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let slow = Proxy::at("127.0.0.3", vec![server.port()]).await;
    slow.slow_down(Some(Duration::from_millis(150)));
    let in_time = Options::new().grant_within(Duration::from_millis(100)).wakeups(Wakeups::Poll);
    for kind in KINDS {
        let locks = Locks::builder().server(proxy.url()).options(in_time.clone()).connect().await.unwrap();
        let lock = kind.lock(&locks, &format!("late-{}", kind.name()));
        lock.lock().await.unwrap().release().await.unwrap(); // the server knows the script
        proxy.lose_next_reply();
        proxy.lead_through(&slow);
        let error = lock.try_lock().await.unwrap_err();
        assert!(error.is_indeterminate(), "{kind:?}: {error:?}");
        eventually("it is released", || async { !server.is_locked(&lock).await }).await;
        proxy.lead_to(server.port());
    }
}
