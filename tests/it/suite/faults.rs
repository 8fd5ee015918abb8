//! Faults of the network and of the server: no false success, and no request that counts twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use redlatch::{Error, Options};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::{
    AnyLock, Kind, Proxy, Setup, Stopwatch, eventually, idles, patient, renewed_by, soon, ttl,
};

/// The acquire ran, its reply is lost, and it is sent again: the server counts one hold.
pub async fn acquire_counts_once_if_its_reply_is_lost(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "lossy", patient()).await;
    warm_up(&lock).await;
    let (mut lost, mut last) = (0, None);
    for round in 0..24 {
        if round % 4 < 2 {
            lost += lose(&setup, &proxy, round);
        } // else the release alone is uncertain
        let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
        all_lost(&setup, &proxy, lost).await;
        let (counts, last_token) = setup.deployment.holds_and_token(&lock).await;
        assert_eq!(counts, [1], "one hold");
        let token = guard.lease().fencing_token();
        assert_eq!(last_token, token.map(|token| token.get()), "one token, not two");
        // A reader has the last writer's token, and there was no writer.
        assert!(token > last || setup.kind == Kind::Read, "{token:?} after {last:?}");
        last = token;
        lost += lose(&setup, &proxy, round);
        // The lock is released once, and the caller gets `Ok` although the first reply was lost.
        soon("the lock is released", guard.release()).await.unwrap();
        all_lost(&setup, &proxy, lost).await;
        assert!(!setup.deployment.is_locked(&lock).await);
    }
    drop(lock);
    setup.finish().await;
}

/// The connection is cut in the middle of a request, after various numbers of bytes.
pub async fn requests_succeed_after_connection_is_cut(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "cut", patient()).await;
    warm_up(&lock).await;
    for bytes in (1..700).step_by(37) {
        proxy.cut_after(Some(bytes));
        let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
        assert!(
            setup.deployment.is_held_by(&lock, &guard).await,
            "cut after {bytes}: the server holds the lock for the guard"
        );
        assert_eq!(setup.deployment.holds_and_token(&lock).await.0, [1], "one hold");
        soon("the lock is released", guard.release())
            .await
            .unwrap_or_else(|error| panic!("cut after {bytes}: {error}"));
        assert!(!setup.deployment.is_locked(&lock).await, "cut after {bytes}");
    }
    assert!(proxy.lost() > 10, "{} connections were cut", proxy.lost());
    drop(lock);
    setup.finish().await;
}

/// The server is stopped during an acquire, for longer than the client waits for a reply.
pub async fn calls_fail_in_time_while_server_is_stopped(setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(500));
    let lock = setup.lock_with("stopped", options).await;
    let watcher = setup.rival("stopped").await;
    warm_up(&lock).await;
    for _ in 0..3 {
        setup.deployment.pause();
        let start = Stopwatch::start();
        assert!(setup.failed(&lock.try_lock().await), "never a false success");
        assert!(start.undisturbed() < Duration::from_secs(3), "{start:?}");
        let outcome = lock.lock_timeout(Duration::from_millis(100)).await;
        let in_time = matches!(outcome, Err(Error::TimedOut { .. })) || setup.failed(&outcome);
        assert!(in_time, "{outcome:?}");
        setup.deployment.resume();
        // The server now runs the requests that were sent meanwhile; none of them may leave a hold.
        let start = Stopwatch::start();
        let guard = soon("the lock is acquired", watcher.lock()).await.unwrap();
        assert!(
            start.undisturbed() < Duration::from_secs(5),
            "an orphaned grant blocked the lock for {start:?}"
        );
        assert!(setup.deployment.is_held_by(&watcher, &guard).await);
        guard.release().await.unwrap();
    }
    drop((lock, watcher));
    setup.finish().await;
}

/// The server grants the lock, but the reply takes longer than the TTL: the caller must not get a
/// guard.
pub async fn try_lock_returns_lost_if_reply_arrives_after_ttl(setup: Setup) {
    let proxy = setup.proxy().await;
    // No timeout ends the call before.
    let options = ttl(3_000).node_timeout(Duration::from_secs(30));
    let client = setup.client_behind(&proxy, options).await;
    let lock = setup.kind.lock(&client, "late");
    let watcher = setup.rival("late").await;
    warm_up(&lock).await;
    idles(&client).await; // all nodes have released it
    proxy.hold_replies(true);
    let all = setup.deployment.scripts_run().await + setup.nodes() as u64;
    let trying = tokio::spawn({
        let lock = lock.clone();
        async move { lock.try_lock().await.map(drop) }
    });
    // The lock may not be seen held: a stall may be longer than its TTL.
    eventually("the servers grant the lock", || async { setup.deployment.scripts_run().await >= all }).await;
    eventually("the lease expires", || async { !setup.deployment.is_locked(&watcher).await }).await;
    let successor = watcher.lock().await.unwrap();
    proxy.hold_replies(false);
    let outcome = soon("the late reply arrives", trying).await.unwrap();
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    assert!(setup.deployment.is_held_by(&watcher, &successor).await);
    successor.release().await.unwrap();
    drop((client, lock, watcher));
    setup.finish().await;
}

/// An acquire is delayed in the network. Its client gives up and ends the attempt on another
/// connection; then the acquire arrives. No task waits for its reply, so it must not be granted.
pub async fn acquire_is_refused_after_its_attempt_ended(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = Options::new().node_timeout(Duration::from_millis(500));
    let client = setup.client_behind(&proxy, options).await;
    let lock = setup.kind.lock(&client, "overtaken");
    let watcher = setup.rival("overtaken").await;
    warm_up(&lock).await;
    // In a quorum, acquiring one lock may have taken more than one attempt.
    soon("the client has settled", client.settled()).await;
    // The number of attempts that all nodes refuse.
    let queue = format!("{{{}}}:waiters", lock.key());
    let ended = || async {
        let marks = ["ZRANGEBYSCORE", &queue, "4503599627370496", "+inf"];
        let marks = setup.deployment.run_at::<Vec<String>>(&queue, &marks).await.concat();
        let everywhere = |mark: &&String| marks.iter().filter(|other| other == mark).count() == setup.nodes();
        marks.iter().filter(|mark| mark.starts_with("ended ")).filter(everywhere).count() / setup.nodes()
    };
    for _ in 0..3 {
        let ended_before = ended().await;
        proxy.hold_requests(true);
        assert!(setup.failed(&lock.try_lock().await), "an unknown outcome is no success");
        eventually("all nodes refuse the attempt", || async { ended().await > ended_before }).await;
        let before = setup.deployment.scripts_run().await;
        proxy.hold_requests(false);
        let all = before + setup.nodes() as u64;
        eventually("the request arrives", || async { setup.deployment.scripts_run().await >= all }).await;
        assert!(!setup.deployment.is_locked(&watcher).await, "the late request was granted");
    }
    watcher.lock().await.unwrap().release().await.unwrap();
    drop((client, lock, watcher));
    setup.finish().await;
}

/// All connections are cut again and again while clients take turns.
pub async fn clients_take_turns_while_connections_are_cut(setup: Setup) {
    let proxy = setup.proxy().await;
    let (inside, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let cuts = Arc::new(AtomicUsize::new(0));
    let options = patient().poll_cap(Duration::from_millis(100));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let lock = setup.lock_behind(&proxy, "reset", options.clone()).await;
        let topology = setup.topology();
        let (inside, turns, cuts) = (Arc::clone(&inside), Arc::clone(&turns), Arc::clone(&cuts));
        tasks.spawn(async move {
            let mut own_turns = 0;
            // On a fast machine, ten turns end before the connections were cut often enough.
            while own_turns < 10 || cuts.load(Ordering::SeqCst) < 4 {
                own_turns += 1;
                let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two clients hold the lock");
                sleep(Duration::from_millis(1)).await;
                assert!(inside.swap(false, Ordering::SeqCst));
                assert!(!guard.lease().is_lost());
                let outcome = soon("the lock is released", guard.release()).await;
                // Other clients have held the lock since, so the outcome cannot be known.
                let is_unknown = matches!(outcome, Err(Error::Unconfirmed { .. }));
                assert!(outcome.is_ok() || is_unknown || topology.failed(&outcome), "{outcome:?}");
                turns.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    // Each node's connection is cut equally often, whatever the number of nodes.
    let pause = Duration::from_millis(7) * setup.nodes() as u32;
    let (mut in_vain, mut seen) = (0, 0);
    while !tasks.is_empty() {
        tokio::select! {
            Some(outcome) = tasks.join_next() => outcome.unwrap(),
            () = sleep(pause) => {
                let turns = turns.load(Ordering::SeqCst);
                in_vain = if turns > seen { 0 } else { in_vain + 1 };
                seen = turns;
                // On a busy machine, connecting may take longer than the pause. Permanently broken
                // connections are not the subject of this test.
                if in_vain < 5 {
                    proxy.cut();
                    cuts.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    }
    setup.finish().await;
}

/// A server at its memory limit grants no new lock, but held locks are renewed and released.
pub async fn held_lock_is_renewed_and_released_on_full_server(setup: Setup) {
    let lock = setup.lock_with("full", ttl(6_000)).await;
    let guard = lock.lock().await.unwrap();
    let dropped = setup.lock_with("full-too", ttl(6_000)).await;
    let drop_soon = dropped.lock().await.unwrap();
    setup.deployment.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = lock.for_rival().try_lock().await;
    assert!(matches!(refused, Ok(None)) || setup.failed(&refused), "{refused:?}");
    let other = setup.kind.lock(&setup.client().await, "full-new");
    assert!(setup.failed(&other.try_lock().await), "never a false success");
    for lease in [guard.lease(), drop_soon.lease()] {
        renewed_by(lease, Duration::from_millis(2_400)).await;
    }
    soon("the lock is released", guard.release()).await.unwrap();
    drop(drop_soon);
    eventually("the lock is released", || async {
        !setup.deployment.is_locked(&lock).await && !setup.deployment.is_locked(&dropped).await
    })
    .await;
    setup.deployment.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    other.lock().await.unwrap().release().await.unwrap();
    drop((lock, dropped, other));
    setup.finish().await;
}

pub async fn lock_succeeds_during_script_flush(setup: Setup) {
    let options = ttl(6_000);
    let lock = setup.lock_with("flushed", options.clone()).await;
    let mut connections = setup.deployment.connections().await;
    let flushing = tokio::spawn(async move {
        loop {
            for connection in &mut connections {
                redis::cmd("SCRIPT").arg("FLUSH").exec_async(connection).await.unwrap();
            }
            sleep(Duration::from_micros(200)).await;
        }
    });
    let mut held = JoinSet::new();
    for number in 0..20 {
        let lock = setup.kind.lock(&setup.client_with(options.clone()).await, &format!("flushed-{number}"));
        held.spawn(async move {
            let guard = lock.lock().await.unwrap();
            renewed_by(guard.lease(), Duration::from_millis(500)).await; // in pipelines, too
            guard.release().await.unwrap();
        });
    }
    for _ in 0..100 {
        let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
        guard.release().await.unwrap();
    }
    while let Some(outcome) = held.join_next().await {
        outcome.unwrap();
    }
    flushing.abort();
    assert!(
        flushing.await.is_err_and(|error| error.is_cancelled()),
        "the scripts were flushed until the end"
    );
    drop(lock);
    setup.finish().await;
}

pub async fn waiters_acquire_while_subscribers_are_killed(setup: Setup) {
    let mut connections = setup.deployment.connections().await;
    let killing = tokio::spawn(async move {
        loop {
            for connection in &mut connections {
                let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "pubsub"]).to_owned();
                kill.query_async::<u64>(connection).await.unwrap();
            }
            sleep(Duration::from_millis(3)).await;
        }
    });
    let options = patient().poll_cap(Duration::from_millis(100));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let lock = setup.lock_with("unheard", options.clone()).await;
        tasks.spawn(async move {
            for _ in 0..10 {
                let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
                sleep(Duration::from_millis(2)).await;
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    killing.abort();
    assert!(killing.await.is_err_and(|error| error.is_cancelled()), "subscribers were killed until the end");
    setup.finish().await;
}

/// The server restarts empty: the holder is notified of the loss, the waiter acquires, tokens
/// continue to grow.
pub async fn waiter_acquires_after_server_restarted_empty(mut setup: Setup) {
    let lock = setup.lock_with("restarted", ttl(6_000)).await;
    let guard = lock.lock().await.unwrap();
    setup.deployment.has_everywhere(lock.key()).await;
    let other = setup.rival("restarted").await;
    let waiting = other.lock_in_task();
    eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
    setup.deployment.kill();
    setup.deployment.restart().await;
    let next = soon("the restarted server grants the lock", waiting).await.unwrap().unwrap();
    assert!(next.token() > guard.token(), "tokens grow although the counter was lost");
    soon("the holder is notified of the loss", guard.lease().lost()).await;
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    assert!(setup.deployment.is_held_by(&other, &next).await);
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn calls_fail_in_time_while_server_is_down(mut setup: Setup) {
    let options = Options::new().node_timeout(Duration::from_millis(500)).ttl(Duration::from_secs(2));
    let lock = setup.lock_with("dead", options.clone()).await;
    let guard = lock.lock().await.unwrap();
    setup.deployment.kill();
    let start = Stopwatch::start();
    assert!(setup.failed(&lock.try_lock().await));
    assert!(setup.failed(&lock.for_another().lock().await));
    let outcome = lock.for_another().lock_timeout(Duration::from_millis(300)).await;
    assert!(setup.failed(&outcome), "the error names a failed server, not a busy lock: {outcome:?}");
    assert!(setup.failed(&lock.inspect().await));
    assert!(setup.failed(&setup.try_client_with(options).await));
    assert!(start.undisturbed() < Duration::from_secs(5), "{start:?}");
    soon("the lease is lost at its deadline", guard.lease().lost()).await;
    assert!(start.undisturbed() < Duration::from_secs(6), "{start:?}");
    let outcome = guard.release().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })) || setup.failed(&outcome), "{outcome:?}");
    setup.deployment.restart().await;
    eventually("the same client acquires again", || async {
        lock.try_lock().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
    drop(lock);
    setup.finish().await;
}

/// Acquires and releases once, so that the next fault hits a request and not a handshake.
async fn warm_up(lock: &AnyLock) {
    lock.lock().await.unwrap().release().await.unwrap();
}

/// Makes the proxy lose one reply; in odd rounds, one reply of each node. Returns their number.
fn lose(setup: &Setup, proxy: &Proxy, round: usize) -> usize {
    if round.is_multiple_of(2) {
        proxy.lose_next_reply();
        return 1;
    }
    setup.lose_next_answer(proxy)
}

/// Checks that all these replies were lost. A majority may have decided before the last one was.
async fn all_lost(setup: &Setup, proxy: &Proxy, lost: usize) {
    if setup.nodes() > 1 {
        eventually("the replies were lost", || async { proxy.lost() >= lost }).await;
    }
    assert_eq!(proxy.lost(), lost, "replies were lost");
}
