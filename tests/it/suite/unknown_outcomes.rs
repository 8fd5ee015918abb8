//! Unlikely orders of events around requests whose effect is unknown; each once went wrong.

use std::time::Duration;

use redlatch::{Error, Options};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::{
    Setup, Stopwatch, Topology, Wake, eventually, idles, notified_only, renewed_by, soon, ttl,
};

/// The server restarts from an old snapshot, and the first request detects the restart.
pub async fn tokens_grow_after_restart_from_old_snapshot(mut setup: Setup) {
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

/// A release that is sent again finds no hold. The first request may have released it, or it was
/// lost before.
pub async fn retried_release_of_lost_lock_returns_error(mut setup: Setup) {
    let (lock, other) = (setup.lock("doubtful").await, setup.rival("doubtful").await);
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    let successor = soon("the revoked lock is granted", other.lock()).await.unwrap();
    setup.deployment.kill_connections().await;
    let outcome = guard.release().await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(setup.deployment.is_held_by(&other, &successor).await);
    let _ = successor.release().await;

    let guard = lock.lock().await.unwrap();
    setup.deployment.has_everywhere(lock.key()).await;
    setup.deployment.kill();
    setup.deployment.restart().await;
    let successor = soon("the restarted server grants the lock", other.lock()).await.unwrap();
    let outcome = guard.release().await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(setup.deployment.is_held_by(&other, &successor).await);
    successor.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn leak_during_renewal_keeps_lock_until_its_ttl(setup: Setup) {
    let proxy = setup.proxy().await;
    let client = setup.client_behind(&proxy, ttl(6_000)).await;
    let lock = setup.kind.lock(&client, "leaking");
    let guard = lock.lock().await.unwrap();
    proxy.hold_replies(true);
    let before = setup.deployment.scripts_run().await;
    eventually("a renewal runs", || async { setup.deployment.scripts_run().await > before }).await;
    guard.leak();
    proxy.hold_replies(false);
    lock.inspect().await.unwrap(); // its reply comes behind the renewal's
    idles(&client).await;
    assert!(setup.deployment.is_locked(&lock).await, "a leaked lock is not released");
    eventually("the TTL ends the lease", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop((client, lock));
    setup.finish().await;
}

/// The first waiter of the client runs on a runtime that ends soon after.
pub async fn waiter_is_notified_after_first_waiters_runtime_ended(setup: Setup) {
    let options = notified_only();
    let lock = setup.lock_with("runtimes", options).await;
    let holder = setup.rival("runtimes").await;
    let guard = holder.lock().await.unwrap();
    let elsewhere = lock.for_another();
    let waited = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(elsewhere.lock_timeout(Duration::from_millis(300))).map(drop)
    });
    assert!(matches!(waited.await.unwrap(), Err(Error::TimedOut { .. })));
    eventually("the waiter has left the queue", || async { setup.deployment.waiters(&holder).await == 0 })
        .await;
    guard.release().await.unwrap();
    let mut times = Vec::new();
    for _ in 0..2 {
        let guard = holder.lock().await.unwrap();
        let waiting = lock.for_another().lock_in_task();
        eventually("the waiter queues", || async { setup.deployment.waiters(&holder).await == 1 }).await;
        setup.pauses_have_grown().await;
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        times.push(start.stop());
        guard.release().await.unwrap();
    }
    // A waiter that is not notified polls after two seconds.
    let shortest = times.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(Duration::from_millis(500)), "{times:?}");
    drop((lock, holder));
    setup.finish().await;
}

/// Tasks of one client wait for a server that does not respond: all fail together, not one after
/// the other.
pub async fn waiting_tasks_fail_together_while_server_is_paused(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(500)).ttl(Duration::from_secs(1));
    let lock = setup.lock_with("many", options).await;
    setup.deployment.pause();
    let start = Stopwatch::start();
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let lock = lock.for_another();
        tasks.spawn(async move { lock.lock().await.map(drop) });
    }
    while let Some(outcome) = tasks.join_next().await {
        assert!(setup.failed(&outcome.unwrap()));
    }
    // One after the other, they would take 50 seconds.
    assert!(start.undisturbed() < Duration::from_secs(25), "{start:?}");
    setup.deployment.resume();
    drop(lock);
    setup.finish().await;
}

/// The connection stops responding while the server works. A lease with a TTL shorter than the
/// timeout must be renewed all the same.
pub async fn renewal_succeeds_despite_silent_connection(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "silent", ttl(9_000)).await;
    let guard = lock.lock().await.unwrap();
    proxy.hold_requests(true);
    renewed_by(guard.lease(), Duration::from_secs(3)).await;
    assert!(setup.deployment.is_held_by(&lock, &guard).await);
    proxy.hold_requests(false);
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

/// The client loses the lease because no reply arrives, but its renewals reach the server, which
/// keeps the lock. Once replies arrive again, the client releases it at once.
pub async fn lost_lease_is_released_once_replies_arrive(setup: Setup) {
    let proxy = setup.proxy().await;
    // The connection is given up after the node timeout: a renewal is sent before.
    let options = ttl(4_500).node_timeout(Duration::from_secs(2));
    let lock = setup.lock_behind(&proxy, "kept", options).await;
    let guard = lock.lock().await.unwrap();
    // The first renewal loads the script: later, the answer that it is unknown would be held back.
    // Its own answer must have arrived, else the client reconnects, and sends no renewal any more.
    renewed_by(guard.lease(), Duration::from_millis(500)).await;
    proxy.hold_replies(true);
    let until = setup.deployment.kept_until(lock.key()).await;
    eventually("a renewal arrives at the server", || async {
        setup.deployment.kept_until(lock.key()).await > until + Duration::from_millis(500)
    })
    .await;
    // A long TTL, so that only the client's release can free the lock.
    let keep = ["PEXPIRE", lock.key(), "60000"];
    setup.deployment.run_at::<u64>(lock.key(), &keep).await;
    soon("the lease is lost at its deadline", guard.lease().lost()).await;
    assert!(setup.deployment.is_locked(&lock).await, "the server has kept it");
    setup.deployment.run_at::<u64>(lock.key(), &keep).await;
    proxy.hold_replies(false);
    let start = Stopwatch::start();
    eventually("the lock is released", || async { !setup.deployment.is_locked(&lock).await }).await;
    assert!(start.undisturbed() < Duration::from_secs(8), "{start:?}");
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    drop(lock);
    setup.finish().await;
}

/// A guard is dropped while the server does not respond: the release is retried until it does.
pub async fn guard_dropped_during_outage_is_released_after_it(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(500));
    let lock = setup.lock_with("outage", options).await;
    let guard = lock.lock().await.unwrap();
    setup.deployment.kill_connections().await;
    setup.deployment.pause();
    drop(guard);
    sleep(Duration::from_millis(1_500)).await;
    setup.deployment.resume();
    let start = Stopwatch::start();
    eventually("the lock is released", || async { !setup.deployment.is_locked(&lock).await }).await;
    assert!(start.undisturbed() < Duration::from_secs(5), "{start:?}");
    drop(lock);
    setup.finish().await;
}

/// The client renews a broken subscription and receives notifications again.
pub async fn waiter_is_notified_after_its_subscription_broke(setup: Setup) {
    let options = notified_only();
    let lock = setup.lock_with("again", options).await;
    let holder = setup.rival("again").await;
    let (mut times, mut broken) = (Vec::new(), Vec::new());
    for round in 0..3 {
        let guard = holder.lock().await.unwrap();
        let waiting = lock.for_another().lock_in_task();
        eventually("the waiter queues", || async { setup.deployment.waiters(&holder).await == 1 }).await;
        if setup.wake == Wake::Push {
            let subscribed = || async { setup.deployment.subscriptions().await >= setup.nodes() };
            eventually("the client is subscribed on every node", subscribed).await;
            let killed = setup.deployment.kill_subscribers().await;
            assert!(
                killed == setup.nodes() || setup.topology() == Topology::Cluster,
                "round {round}: {killed}"
            );
            let start = Stopwatch::start();
            // In a cluster, an old and a new subscription may have been killed; one is renewed.
            eventually("the client is subscribed again", subscribed).await;
            broken.push(start.stop());
        }
        setup.pauses_have_grown().await;
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        times.push(start.stop());
        guard.release().await.unwrap();
    }
    // A waiter that is not notified polls after one or two seconds.
    let shortest = times.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(Duration::from_millis(500)), "{times:?}");
    broken.sort_by_key(Stopwatch::undisturbed);
    // A subscription that is not known to be broken is checked after five seconds.
    assert!(broken.get(1).is_none_or(|took| took.undisturbed() < Duration::from_secs(2)), "{broken:?}");
    drop((lock, holder));
    setup.finish().await;
}

/// The reply to an acquire is lost, and the retry finds no working connection. The server may have
/// granted the lock.
pub async fn grant_with_lost_reply_is_released_after_reconnect(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = Options::new().node_timeout(Duration::from_millis(500));
    let lock = setup.lock_behind(&proxy, "dead-line", options).await;
    lock.lock().await.unwrap().release().await.unwrap();
    proxy.set_drops_requests(true);
    setup.lose_next_answer(&proxy);
    let outcome = lock.try_lock().await;
    assert!(setup.failed(&outcome), "{outcome:?}");
    assert!(setup.deployment.is_locked(&lock).await, "the server granted it, but the client does not know");
    proxy.set_drops_requests(false);
    let start = Stopwatch::start();
    eventually("the lock is released", || async { !setup.deployment.is_locked(&lock).await }).await;
    assert!(start.undisturbed() < Duration::from_secs(5), "{start:?}");
    drop(lock);
    setup.finish().await;
}
