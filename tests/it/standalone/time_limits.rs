//! Calls with a time limit.

use std::time::Duration;

use redlatch::{Error, Locks, Options, Wakeups};

use crate::support::{KINDS, Proxy, Server, eventually};

/// `lock_timeout(0)` acquires a free lock, and times out on a held one.
#[tokio::test(flavor = "multi_thread")]
async fn lock_timeout_of_zero_tries_once() {
    let server = Server::start().await;
    let (locks, others) = (server.locks().await, server.locks().await);
    let (lock, busy) = (locks.mutex("zero").unwrap(), others.mutex("zero").unwrap());
    for _ in 0..80 {
        lock.lock_timeout(Duration::ZERO).await.unwrap().release().await.unwrap();
    }
    let guard = busy.lock().await.unwrap();
    let outcome = lock.lock_timeout(Duration::ZERO).await;
    assert!(matches!(outcome, Err(Error::TimedOut { limit: Duration::ZERO, .. })), "{outcome:?}");
    guard.release().await.unwrap();
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

/// A task waits behind another one of its client while the server is down. That one leaves, and the
/// limit for outages of the next one counts from its own beginning, not from its coming to the
/// front.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_limit_counts_from_the_beginning_of_the_call() {
    const LIMIT: Duration = Duration::from_secs(4);
    let mut server = Server::start().await;
    let options = Options::new().outage_limit(LIMIT);
    let locks = Locks::builder().server(server.url()).options(options).connect().await.unwrap();
    server.kill();
    let (alone, front) = (locks.mutex("alone").unwrap(), locks.mutex("shared").unwrap());
    let behind = front.clone();
    let front = tokio::spawn(async move { front.lock_timeout(LIMIT * 3 / 4).await });
    eventually("it is at the front", || async { !locks.is_idle() }).await;
    let lock = |lock: redlatch::Mutex| async move {
        let start = std::time::Instant::now();
        assert!(lock.lock().await.is_err(), "the server is down");
        start.elapsed()
    };
    let (alone, behind) = tokio::join!(lock(alone), lock(behind));
    assert!(front.await.unwrap().is_err());
    assert!(behind < alone + LIMIT / 2, "{behind:?}, and {alone:?} without another task");
}
