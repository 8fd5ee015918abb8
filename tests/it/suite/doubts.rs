//! What a sceptic tried: unlikely orders of events, each of which once went wrong.

use std::time::Duration;

use redlatch::{Error, Options};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::support::{Setup, Topology, Wake, eventually, soon, ttl};

/// The server comes back with an old snapshot, and the first request finds out that it was gone.
pub async fn tokens_grow_over_an_old_snapshot(mut setup: Setup) {
    let lock = setup.lock("snapshot").await;
    lock.lock().await.unwrap().release().await.unwrap();
    setup.deployment.run::<()>(&["SAVE"]).await;
    let mut last = 0;
    for _ in 0..10 {
        let guard = lock.lock().await.unwrap();
        last = guard.token();
        guard.release().await.unwrap();
    }
    setup.deployment.kill();
    setup.deployment.restart().await;
    for _ in 0..3 {
        let guard = lock.lock().await.unwrap();
        assert!(guard.token() > last, "{} after {last}", guard.token());
        last = guard.token();
        guard.release().await.unwrap();
    }
    drop(lock);
    setup.finish().await;
}

/// A release that has to be sent again finds nothing: it may have been released, or lost before.
pub async fn takes_no_doubtful_release_for_a_success(mut setup: Setup) {
    let (lock, other) = (setup.lock("doubtful").await, setup.rival("doubtful").await);
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    let successor = other.lock().await.unwrap();
    setup.deployment.kill_connections().await;
    let outcome = guard.release().await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(setup.deployment.is_held_by(&other, &successor).await);
    let _ = successor.release().await;

    let guard = lock.lock().await.unwrap();
    setup.deployment.kill();
    setup.deployment.restart().await;
    let successor = other.lock().await.unwrap();
    let outcome = guard.release().await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(setup.deployment.is_held_by(&other, &successor).await);
    successor.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn leaks_although_a_renewal_is_under_way(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "leaking", ttl(4_000)).await;
    let watcher = setup.lock("leaking").await;
    let guard = lock.lock().await.unwrap();
    proxy.hold_replies(true);
    let before = setup.deployment.scripts_run().await;
    eventually("a renewal runs", || async { setup.deployment.scripts_run().await > before }).await;
    guard.leak();
    proxy.hold_replies(false);
    sleep(Duration::from_millis(500)).await;
    assert!(setup.deployment.is_locked(&watcher).await, "leaked, so not released");
    eventually("its ttl frees it", || async { !setup.deployment.is_locked(&watcher).await }).await;
    drop((lock, watcher));
    setup.finish().await;
}

/// The first to wait does so on a runtime that ends soon after.
pub async fn hears_after_the_runtime_of_the_first_waiter_is_gone(setup: Setup) {
    let options = Options::new().poll_cap(Duration::from_secs(10));
    let lock = setup.lock_with("runtimes", options).await;
    let holder = setup.rival("runtimes").await;
    let guard = holder.lock().await.unwrap();
    let elsewhere = lock.for_another();
    let waited = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(elsewhere.lock_timeout(Duration::from_millis(300))).map(drop)
    });
    assert!(matches!(waited.await.unwrap(), Err(Error::TimedOut { .. })));
    eventually("it left the queue", || async { setup.deployment.waiters(&holder).await == 0 }).await;
    guard.release().await.unwrap();
    // Told, not found: the median of five, since a single one may be found by looking.
    let mut times = Vec::new();
    for _ in 0..5 {
        let guard = holder.lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = lock.for_another();
            async move { lock.lock().await }
        });
        eventually("it queues", || async { setup.deployment.waiters(&holder).await == 1 }).await;
        let start = Instant::now();
        guard.release().await.unwrap();
        let guard = soon("handed over", waiting).await.unwrap().unwrap();
        times.push(start.elapsed());
        guard.release().await.unwrap();
    }
    times.sort();
    assert!(times[2] < Duration::from_millis(500), "{times:?}");
    drop((lock, holder));
    setup.finish().await;
}

/// Tasks that wait inside one client for a server that does not answer give up together, not one by one.
pub async fn loses_patience_together(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(200)).ttl(Duration::from_secs(1));
    let lock = setup.lock_with("crowd", options).await;
    setup.deployment.pause();
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let lock = lock.for_another();
        tasks.spawn(async move { lock.lock().await.map(drop) });
    }
    while let Some(outcome) = tasks.join_next().await {
        assert!(setup.failed(&outcome.unwrap()));
    }
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    setup.deployment.resume();
    drop(lock);
    setup.finish().await;
}

/// The connection falls silent, the server does not: a lease shorter than the timeout must survive.
pub async fn renews_past_a_silent_connection(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "silent", ttl(2_400)).await;
    let watcher = setup.lock("silent").await;
    let guard = lock.lock().await.unwrap();
    proxy.hold_requests(true);
    sleep(Duration::from_millis(6_000)).await;
    assert!(!guard.lease().is_lost() && setup.deployment.is_held_by(&watcher, &guard).await);
    proxy.hold_requests(false);
    guard.release().await.unwrap();
    drop((lock, watcher));
    setup.finish().await;
}

/// Lost here because no answer came, kept by the server because the requests did: given back at once.
pub async fn gives_back_what_it_lost_late(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = ttl(6_000).node_timeout(Duration::from_millis(300));
    let lock = setup.lock_behind(&proxy, "kept", options).await;
    let watcher = setup.lock("kept").await;
    let guard = lock.lock().await.unwrap();
    proxy.hold_replies(true);
    soon("lost at its deadline", guard.lease().lost()).await;
    assert!(setup.deployment.is_locked(&watcher).await, "its renewals arrived");
    // As if the last of them had asked for much more: its TTL does not end it meanwhile.
    setup.deployment.run_at::<u64>(lock.key(), &["PEXPIRE", lock.key(), "60000"]).await;
    proxy.hold_replies(false);
    let start = Instant::now();
    eventually("given back", || async { !setup.deployment.is_locked(&watcher).await }).await;
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    drop((lock, watcher));
    setup.finish().await;
}

/// Dropped while the server does not answer: tried again until it does, not left to the ttl.
pub async fn releases_what_was_dropped_during_an_outage(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(200));
    let lock = setup.lock_with("outage", options).await;
    let watcher = setup.lock("outage").await;
    let guard = lock.lock().await.unwrap();
    setup.deployment.kill_connections().await;
    setup.deployment.pause();
    drop(guard);
    sleep(Duration::from_millis(1_500)).await;
    setup.deployment.resume();
    let start = Instant::now();
    eventually("released", || async { !setup.deployment.is_locked(&watcher).await }).await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    drop((lock, watcher));
    setup.finish().await;
}

/// A subscription that broke is made again, and heard again.
pub async fn hears_again_after_its_subscription_broke(setup: Setup) {
    let options = Options::new().poll_cap(Duration::from_secs(10));
    let lock = setup.lock_with("again", options).await;
    let holder = setup.rival("again").await;
    let (mut times, mut broken) = (Vec::new(), Vec::new());
    for round in 0..5 {
        let guard = holder.lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = lock.for_another();
            async move { lock.lock().await }
        });
        eventually("it queues", || async { setup.deployment.waiters(&holder).await == 1 }).await;
        if setup.wake == Wake::Push {
            let subscribed = || async { setup.deployment.subscriptions().await >= setup.nodes() };
            eventually("subscribed everywhere", subscribed).await;
            let killed = setup.deployment.kill_subscribers().await;
            assert!(
                killed == setup.nodes() || setup.topology() == Topology::Cluster,
                "round {round}: {killed}"
            );
            let start = Instant::now();
            // In a cluster an old and a new one may have been killed, of which one comes back.
            eventually("subscribed again", subscribed).await;
            broken.push(start.elapsed());
        }
        let start = Instant::now();
        guard.release().await.unwrap();
        let guard = soon("handed over", waiting).await.unwrap().unwrap();
        times.push(start.elapsed());
        guard.release().await.unwrap();
    }
    times.sort();
    assert!(times[2] < Duration::from_millis(500), "{times:?}");
    broken.sort();
    // A subscription that is not known to be broken is asked after five seconds.
    assert!(broken.get(2).is_none_or(|took| *took < Duration::from_secs(2)), "{broken:?}");
    drop((lock, holder));
    setup.finish().await;
}

/// The answer to an acquire is lost, and the line is dead when it is to be sent again: it may be granted.
pub async fn gives_back_what_was_granted_as_the_line_went_dead(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = Options::new().node_timeout(Duration::from_millis(200));
    let lock = setup.lock_behind(&proxy, "dead-line", options).await;
    let watcher = setup.lock("dead-line").await;
    lock.lock().await.unwrap().release().await.unwrap();
    proxy.be_deaf(true);
    setup.lose_next_answer(&proxy);
    let outcome = lock.try_lock().await;
    assert!(setup.failed(&outcome), "{outcome:?}");
    assert!(setup.deployment.is_locked(&watcher).await, "it was granted, and nobody knows");
    proxy.be_deaf(false);
    let start = Instant::now();
    eventually("given back", || async { !setup.deployment.is_locked(&watcher).await }).await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    drop((lock, watcher));
    setup.finish().await;
}
