//! Faults of the network and of the server: never a false success, never more than once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Error, Locks, Options};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::support::{AnyLock, Proxy, Setup, eventually, soon, ttl};

/// The acquire ran, its answer was lost, and it is sent again: once held, counted once.
pub async fn counts_once_when_a_reply_is_lost(setup: Setup) {
    let proxy = Proxy::start(setup.server.port()).await;
    let lock = setup.kind.lock(&setup.client_at(&proxy.url(), Options::new()).await, "lossy");
    let watcher = setup.lock("lossy").await;
    warm_up(&lock).await;
    for round in 0..20 {
        proxy.lose_next_reply();
        let guard = soon("lock", lock.lock()).await.unwrap();
        assert_eq!(proxy.lost(), 2 * round + 1, "a reply was lost");
        let seen = watcher.inspect().await.unwrap();
        assert_eq!((seen.holders.len(), seen.holders[0].count), (1, 1));
        assert_eq!(seen.fencing_token, guard.lease().fencing_token(), "one token, not two");
        proxy.lose_next_reply();
        // Released once. Whether the first delivery did it is known only where the server keeps a note.
        let outcome = soon("release", guard.release()).await;
        assert!(matches!(outcome, Ok(()) | Err(Error::Redis { .. })), "{outcome:?}");
        assert_eq!(proxy.lost(), 2 * round + 2, "a reply was lost");
        assert!(!watcher.is_locked().await);
    }
    drop((lock, watcher, proxy));
    setup.finish().await;
}

/// Requests that are cut off in the middle, at every length.
pub async fn survives_a_cut_connection(setup: Setup) {
    let proxy = Proxy::start(setup.server.port()).await;
    let lock = setup.kind.lock(&setup.client_at(&proxy.url(), Options::new()).await, "cut");
    let watcher = setup.lock("cut").await;
    warm_up(&lock).await;
    for bytes in (1..700).step_by(37) {
        proxy.cut_after(bytes);
        let guard = soon("lock", lock.lock()).await.unwrap();
        assert!(watcher.is_held_by(&guard).await, "a success is a success, cut after {bytes}");
        assert_eq!(watcher.inspect().await.unwrap().holders[0].count, 1);
        let outcome = soon("release", guard.release()).await;
        assert!(matches!(outcome, Ok(()) | Err(Error::Redis { .. })), "{outcome:?}");
        assert!(!watcher.is_locked().await, "cut after {bytes}");
    }
    assert!(proxy.lost() > 10, "{} connections were cut", proxy.lost());
    drop((lock, watcher, proxy));
    setup.finish().await;
}

/// The server is stopped while an acquire is under way, for longer than the client waits for an answer.
pub async fn survives_a_stopped_server(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(200));
    let lock = setup.lock_with("stopped", options).await;
    let watcher = setup.rival("stopped").await;
    warm_up(&lock).await;
    for _ in 0..3 {
        setup.server.pause();
        let start = Instant::now();
        assert!(matches!(lock.try_lock().await, Err(Error::Redis { .. })), "never a false success");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        let outcome = lock.lock_timeout(Duration::from_millis(100)).await;
        assert!(matches!(outcome, Err(Error::TimedOut { .. } | Error::Redis { .. })), "{outcome:?}");
        setup.server.resume();
        // What was sent while it stood still runs now; nothing of it may stay.
        let start = Instant::now();
        let guard = soon("lock", watcher.lock()).await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "an orphan for {:?}", start.elapsed());
        assert!(watcher.is_held_by(&guard).await);
        guard.release().await.unwrap();
    }
    drop((lock, watcher));
    setup.finish().await;
}

/// Granted, but the answer took longer than the lease lasts: nobody may be told that he holds it.
pub async fn takes_no_late_answer_for_a_success(setup: Setup) {
    let proxy = Proxy::start(setup.server.port()).await;
    let options = ttl(300).node_timeout(Duration::from_secs(5));
    let lock = setup.kind.lock(&setup.client_at(&proxy.url(), options).await, "late");
    let watcher = setup.rival("late").await;
    warm_up(&lock).await;
    proxy.hold_replies(true);
    let trying = tokio::spawn({
        let lock = lock.clone();
        async move { lock.try_lock().await.map(drop) }
    });
    eventually("it is granted", || async { watcher.is_locked().await }).await;
    eventually("it expires", || async { !watcher.is_locked().await }).await;
    let successor = watcher.lock().await.unwrap();
    proxy.hold_replies(false);
    let outcome = soon("the answer", trying).await.unwrap();
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    assert!(watcher.is_held_by(&successor).await);
    successor.release().await.unwrap();
    drop((lock, watcher, proxy));
    setup.finish().await;
}

/// A request is held up in the network; its client gives up, and says so on another connection; then the
/// request arrives. Nobody waits for its answer: it must not take the lock.
pub async fn refuses_what_arrives_after_its_client_gave_up(setup: Setup) {
    let proxy = Proxy::start(setup.server.port()).await;
    let options = Options::new().node_timeout(Duration::from_millis(200));
    let lock = setup.kind.lock(&setup.client_at(&proxy.url(), options).await, "overtaken");
    let watcher = setup.rival("overtaken").await;
    warm_up(&lock).await;
    let notes = || async { setup.server.run::<Vec<String>>(&["KEYS", "*:ended:*"]).await.len() };
    for round in 1..=3 {
        proxy.hold_requests(true);
        assert!(matches!(lock.try_lock().await, Err(Error::Redis { .. })), "unknown, so no success");
        eventually("the attempt is ended", || async { notes().await == round }).await;
        let before = setup.scripts_run().await;
        proxy.hold_requests(false);
        eventually("the request arrives", || async { setup.scripts_run().await > before }).await;
        assert!(!watcher.is_locked().await, "an orphan");
    }
    watcher.lock().await.unwrap().release().await.unwrap();
    drop((lock, watcher, proxy));
    setup.finish().await;
}

/// All connections are reset again and again while clients take turns.
pub async fn survives_reset_connections(setup: Setup) {
    let proxy = Proxy::start(setup.server.port()).await;
    let inside = Arc::new(AtomicBool::new(false));
    let options = Options::new().poll_cap(Duration::from_millis(100));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let lock = setup.kind.lock(&setup.client_at(&proxy.url(), options.clone()).await, "reset");
        let inside = Arc::clone(&inside);
        tasks.spawn(async move {
            for _ in 0..10 {
                let guard = soon("a turn", lock.lock()).await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two at a time");
                sleep(Duration::from_millis(1)).await;
                assert!(inside.swap(false, Ordering::SeqCst));
                assert!(!guard.lease().is_lost());
                let outcome = soon("released", guard.release()).await;
                assert!(matches!(outcome, Ok(()) | Err(Error::Redis { .. })), "{outcome:?}");
            }
        });
    }
    let mut cuts = 0;
    while !tasks.is_empty() {
        tokio::select! {
            Some(outcome) = tasks.join_next() => outcome.unwrap(),
            () = sleep(Duration::from_millis(7)) => {
                proxy.cut();
                cuts += 1;
            }
        }
    }
    assert!(cuts > 3, "{cuts}");
    drop(proxy);
    setup.finish().await;
}

/// A full server grants nothing more, but what is held is renewed, released and handed over by looking.
pub async fn renews_and_releases_without_memory(setup: Setup) {
    let lock = setup.lock_with("full", ttl(600)).await;
    let guard = lock.lock().await.unwrap();
    let dropped = setup.lock_with("full-too", ttl(600)).await;
    let drop_soon = dropped.lock().await.unwrap();
    setup.server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = lock.for_rival().try_lock().await;
    assert!(matches!(refused, Ok(None) | Err(Error::Redis { .. })), "{refused:?}");
    let other = setup.kind.lock(&setup.client().await, "full-new");
    assert!(matches!(other.try_lock().await, Err(Error::Redis { .. })), "never a false success");
    sleep(Duration::from_millis(1_500)).await;
    assert!(!guard.lease().is_lost() && !drop_soon.lease().is_lost(), "renewed");
    soon("released", guard.release()).await.unwrap();
    drop(drop_soon);
    eventually("released", || async { !lock.is_locked().await && !dropped.is_locked().await }).await;
    setup.server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    other.lock().await.unwrap().release().await.unwrap();
    drop((lock, dropped, other));
    setup.finish().await;
}

pub async fn survives_script_flush(setup: Setup) {
    let lock = setup.lock_with("flushed", ttl(300)).await;
    let mut connection = setup.server.connection().await;
    let flushing = tokio::spawn(async move {
        loop {
            redis::cmd("SCRIPT").arg("FLUSH").exec_async(&mut connection).await.unwrap();
            sleep(Duration::from_micros(200)).await;
        }
    });
    let mut held = JoinSet::new();
    for number in 0..20 {
        let lock = setup.kind.lock(&setup.client_with(ttl(300)).await, &format!("flushed-{number}"));
        held.spawn(async move {
            let guard = lock.lock().await.unwrap();
            sleep(Duration::from_millis(1000)).await;
            assert!(!guard.lease().is_lost(), "renewed, in pipelines too");
            guard.release().await.unwrap();
        });
    }
    for _ in 0..100 {
        let guard = soon("lock", lock.lock()).await.unwrap();
        guard.release().await.unwrap();
    }
    while let Some(outcome) = held.join_next().await {
        outcome.unwrap();
    }
    flushing.abort();
    assert!(flushing.await.is_err_and(|error| error.is_cancelled()), "it flushed until the end");
    drop(lock);
    setup.finish().await;
}

pub async fn survives_killed_subscribers(setup: Setup) {
    let mut connection = setup.server.connection().await;
    let killing = tokio::spawn(async move {
        let mut killed = 0_u64;
        loop {
            let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "pubsub"]).to_owned();
            killed += kill.query_async::<u64>(&mut connection).await.unwrap();
            sleep(Duration::from_millis(3)).await;
            if killed > u64::MAX / 2 {
                return killed;
            }
        }
    });
    let options = Options::new().poll_cap(Duration::from_millis(100));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let lock = setup.lock_with("unheard", options.clone()).await;
        tasks.spawn(async move {
            for _ in 0..10 {
                let guard = soon("a turn", lock.lock()).await.unwrap();
                sleep(Duration::from_millis(2)).await;
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    killing.abort();
    let _ = killing.await;
    setup.finish().await;
}

/// The server restarts empty: holders learn that they lost, waiters are served, tokens go on.
pub async fn survives_a_restart(mut setup: Setup) {
    let lock = setup.lock_with("restarted", ttl(2_000)).await;
    let guard = lock.lock().await.unwrap();
    let other = setup.rival("restarted").await;
    let waiting = tokio::spawn({
        let other = other.clone();
        async move { other.lock().await }
    });
    eventually("it queues", || async { lock.waiters().await == 1 }).await;
    setup.server.kill();
    setup.server.restart().await;
    let next = soon("served by the new server", waiting).await.unwrap().unwrap();
    assert!(next.token() > guard.token(), "although the counter was lost");
    soon("the holder learns", guard.lease().lost()).await;
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    assert!(other.is_held_by(&next).await);
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn reports_a_dead_server_in_time(mut setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(200)).ttl(Duration::from_secs(2));
    let lock = setup.lock_with("dead", options.clone()).await;
    let guard = lock.lock().await.unwrap();
    setup.server.kill();
    let start = Instant::now();
    assert!(matches!(lock.try_lock().await, Err(Error::Redis { .. })));
    assert!(matches!(lock.for_another().lock().await, Err(Error::Redis { .. })));
    let outcome = lock.for_another().lock_timeout(Duration::from_millis(300)).await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "not a busy lock but a dead server: {outcome:?}");
    assert!(matches!(lock.inspect().await, Err(Error::Redis { .. })));
    let opened = Locks::open_with(&setup.server.url(), options).await;
    assert!(matches!(opened, Err(Error::Redis { .. })));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    soon("lost at its own deadline", guard.lease().lost()).await;
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    assert!(matches!(guard.release().await, Err(Error::Redis { .. } | Error::Lost { .. })));
    setup.server.restart().await;
    eventually("the same client goes on", || async {
        lock.try_lock().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
    drop(lock);
    setup.finish().await;
}

/// One round trip of each kind, so that the next fault meets a request and not a handshake.
async fn warm_up(lock: &AnyLock) {
    lock.lock().await.unwrap().release().await.unwrap();
}
