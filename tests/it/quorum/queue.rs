//! The queue of a quorum: order, notifications, and waiters that died.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::Options;
use tokio::task::JoinSet;

use super::{ALONE, CLEANED, KINDS, Quorum, TIMEOUT, named, no_quorum, options};
use crate::suite::local_turns::contended;
use crate::support::{AnyGuard, Kind, NEVER, Stopwatch, eventually, patient, soon};

fn long_limits() -> Options {
    Options::new().poll_cap(NEVER).node_timeout(Duration::from_secs(10))
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_waiters_are_granted_in_order() {
    let quorum = Quorum::start(5).await;
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), long_limits()).await;
        let mut times = Vec::new();
        for _ in 0..3 {
            let guard = quorum.take(&lock).await;
            let order = Arc::new(Mutex::new(vec![(0, guard.token())]));
            let mut waiting = Vec::new();
            for number in 1..=5 {
                let (other, order) =
                    (quorum.lock(kind, kind.name(), long_limits()).await, Arc::clone(&order));
                waiting.push(tokio::spawn(async move {
                    let guard = soon("the waiter is granted the lock", other.lock()).await.unwrap();
                    order.lock().unwrap().push((number, guard.token()));
                    guard.release().await.unwrap();
                }));
                quorum.queued(0b11111, &lock, number).await;
            }
            let start = Stopwatch::start();
            guard.release().await.unwrap();
            for task in waiting {
                task.await.unwrap();
            }
            times.push(start.stop());
            let order = order.lock().unwrap().clone();
            assert!(order.iter().map(|(number, _)| *number).eq(0..=5), "{order:?}");
            assert!(order.is_sorted_by(|(_, one), (_, next)| one < next), "{order:?}");
        }
        println!("FIG {kind:?}: five grants to waiters in {times:?}");
        // The shortest: a server may stand still, but polls instead of messages delay all.
        let shortest = times.iter().map(Stopwatch::undisturbed).min().unwrap();
        assert!(shortest < Duration::from_secs(1), "notified, not polled: {times:?}");
    }
    quorum.finish().await;
}

/// A majority has granted the lock to a waiter, which is still queued on the third node. Its
/// release removes that entry, too.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_leaves_the_queue_of_a_node_that_did_not_grant() {
    let quorum = Quorum::start(3).await;
    let pair = quorum.client_of(0b011, options()).await;
    let lone = quorum.client_of(0b100, options()).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, options()).await;
    // The third node replies before the two that grant, so no reply is outstanding afterwards.
    let slow_down = |by| proxies[..2].iter().for_each(|proxy| proxy.slow_down(by));
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let other = kind.rival().lock(&lone, kind.name()).lock().await.unwrap();
        let held = kind.rival().lock(&pair, kind.name()).lock().await.unwrap();
        quorum.wait_for(0b111, 0b111, &lock).await;
        let waiting = lock.lock_in_task();
        quorum.queued(0b111, &lock, 1).await;
        slow_down(Some(Duration::from_millis(20)));
        held.release().await.unwrap();
        let guard = soon("two nodes grant the lock", waiting).await.unwrap().unwrap();
        slow_down(None);
        quorum.queued(0b100, &lock, 1).await;
        guard.release().await.unwrap();
        let start = Stopwatch::start();
        quorum.queued(0b100, &lock, 0).await;
        assert!(start.undisturbed() < CLEANED, "{kind:?}: {start:?}; the queue's TTL is a minute");
        assert!(!other.lease().is_lost(), "{kind:?}: nothing was granted there");
        other.release().await.unwrap();
    }
    drop((client, pair, lone));
    quorum.finish_behind(proxies).await;
}

/// Five releases, each with one waiter: all five waits together take less than a second.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_grants_at_once_to_waiter() {
    let quorum = Quorum::start(3).await;
    for kind in KINDS {
        let holder = quorum.lock(kind.rival(), kind.name(), long_limits()).await;
        let lock = quorum.lock(kind, kind.name(), long_limits()).await;
        let mut times = Vec::new();
        for _ in 0..5 {
            let guard = quorum.take(&holder).await;
            let waiting = lock.for_another().lock_in_task();
            quorum.queued(0b111, &holder, 1).await;
            let start = Stopwatch::start();
            guard.release().await.unwrap();
            let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
            times.push(start.stop());
            guard.release().await.unwrap();
        }
        println!("FIG {kind:?}: {times:?}");
        let sum = times.iter().map(Stopwatch::undisturbed).sum::<Duration>();
        assert!(sum < Duration::from_secs(1), "{kind:?}: {sum:?} of {times:?}");
    }
    quorum.finish().await;
}

/// The first waiter has died without leaving the queue. Its channel has no subscriber, so the next
/// waiter is notified.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_skips_a_dead_waiter() {
    let quorum = Quorum::start(5).await;
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), long_limits()).await;
        let guard = quorum.take(&lock).await;
        // Without its runtime, no task of this client can remove its entry.
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let urls = quorum.urls();
        let dead = runtime.spawn(async move {
            let client =
                redlatch::Locks::builder().quorum(urls).options(long_limits()).connect().await.unwrap();
            drop(kind.lock(&client, kind.name()).lock().await);
        });
        quorum.queued(0b11111, &lock, 1).await;
        let waiting = quorum.lock(kind, kind.name(), long_limits()).await.lock_in_task();
        quorum.queued(0b11111, &lock, 2).await;
        for server in &quorum.servers {
            eventually("both waiters are subscribed", || async { server.subscribers().await.len() == 2 })
                .await;
        }
        runtime.shutdown_background();
        assert!(dead.await.is_err(), "it waited until its runtime ended");
        for server in &quorum.servers {
            eventually("only the living waiter is subscribed", || async {
                server.subscribers().await.len() == 1
            })
            .await;
        }
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        println!("FIG {kind:?}: past the dead waiter in {:?}", start.elapsed());
        // It polls after more than a second, and the dead waiter's claim is three.
        assert!(start.undisturbed() < Duration::from_secs(1), "{start:?}");
        guard.release().await.unwrap();
        drop(lock);
        for server in &quorum.servers {
            eventually("no subscription is left", || async { server.subscribers().await.is_empty() }).await;
        }
    }
    quorum.finish().await;
}

/// The first waiter is cut off with its connections open, so the lock is granted to it. The next
/// waiter gets the lock once that claim has expired.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_claim_of_a_silent_waiter_expires() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let mut contended = Vec::new();
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), options()).await;
        let guard = quorum.take(&lock).await;
        let silent = kind.lock(&quorum.client_behind(&proxies, options()).await, kind.name());
        let hanging = tokio::spawn(async move { silent.lock().await.map(drop) });
        quorum.queued(0b111, &lock, 1).await;
        let waiting = quorum.lock(kind, kind.name(), options()).await.lock_in_task();
        quorum.queued(0b111, &lock, 2).await;
        contended.push((kind, lock, guard, hanging, waiting));
    }
    for proxy in &proxies {
        proxy.hold_replies(true);
        proxy.hold_requests(true);
        proxy.set_drops_requests(true);
    }
    let mut granted = JoinSet::new();
    for (kind, lock, guard, hanging, waiting) in contended {
        granted.spawn(async move {
            let start = Stopwatch::start();
            guard.release().await.unwrap();
            let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
            println!("FIG {kind:?}: past the silent waiter in {:?}", start.elapsed());
            assert!(start.elapsed() > Duration::from_millis(500), "the silent waiter's claim was skipped");
            // The claim is three seconds, the TTL thirty.
            assert!(start.undisturbed() < Duration::from_secs(8), "{start:?}");
            guard.release().await.unwrap();
            (lock, hanging)
        });
    }
    let granted = granted.join_all().await;
    for proxy in &proxies {
        proxy.hold_replies(false);
        proxy.hold_requests(false);
        proxy.set_drops_requests(false);
    }
    for (lock, hanging) in granted {
        // The silent waiter has acquired the lock after its return, or has failed.
        let _ = soon("the silent waiter returns", hanging).await.unwrap();
        quorum.wait_for(0b111, 0, &lock).await;
    }
    quorum.finish_behind(proxies).await;
}

/// Many tasks of one client wait while a majority hangs. All fail at about the same time, and every
/// error names all failed nodes.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_waiting_tasks_fail_together_with_all_failed_nodes() {
    let quorum = Quorum::start(5).await;
    let options = options().ttl(Duration::from_secs(1));
    for kind in KINDS {
        let lock = quorum.lock(kind, kind.name(), options.clone()).await;
        quorum.hang(0b01101);
        let start = Stopwatch::start();
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..60_u64 {
            let lock = lock.for_another();
            tasks.spawn(async move {
                if number % 3 == 0 {
                    lock.lock_timeout(3 * TIMEOUT + Duration::from_millis(5 * number)).await.map(drop)
                } else {
                    lock.lock().await.map(drop)
                }
            });
        }
        while let Some(outcome) = tasks.join_next().await {
            let (answered, failures) = no_quorum(outcome.unwrap());
            assert_eq!((answered, named(&failures)), (2, quorum.labels(0b01101)), "{kind:?}");
        }
        assert!(start.undisturbed() < 10 * TIMEOUT, "one after the other they take 60: {start:?}");
        quorum.resume(0b01101);
        quorum.wait_for(quorum.all(), 0, &lock).await;
    }
    quorum.finish().await;
}

/// A writer that reserves tokens waits in the queue of a node that has another holder, and is
/// granted the lock by the others. After a downgrade it leaves that queue all the same: its place
/// there is named by what it has reserved.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_writer_that_reads_now_leaves_the_queue_of_a_node() {
    let quorum = Quorum::start(3).await;
    let alone = quorum.servers[2].locks_with(patient()).await.rwlock("x").unwrap();
    let options = patient().local_turn(Duration::from_secs(7));
    let lock = quorum.lock(Kind::Write, "x", options).await;
    let elsewhere = alone.write().await.unwrap();
    contended(&lock).await.release().await.unwrap();
    let rival = quorum.lock(Kind::Write, "x", patient()).await;
    let held = rival.lock().await.unwrap();
    let waiting = lock.clone();
    let granted = tokio::spawn(async move { soon("the others grant it the lock", waiting.lock()).await });
    quorum.queued(0b011, &lock, 1).await;
    let queue = "{lock:x}:waiters";
    held.release().await.unwrap();
    let AnyGuard::Write(guard) = granted.await.unwrap().unwrap() else { panic!("it writes") };
    let entries: Vec<String> = quorum.servers[2].run(&["ZRANGE", queue, "0", "-1"]).await;
    assert!(entries.iter().any(|entry| entry.ends_with(" 1000")), "{entries:?}");
    // It stays until the queue expires: a place that is gone before was given up.
    quorum.servers[2].run::<()>(&["ZADD", queue, "9007199254740991", "mark"]).await;
    guard.downgrade().await.unwrap().release().await.unwrap();
    eventually("its place is gone", || async { quorum.servers[2].waiters(queue).await == 0 }).await;
    assert_eq!(quorum.servers[2].run::<u64>(&["DEL", queue]).await, 1, "the queue has expired");
    elsewhere.release().await.unwrap();
    drop((lock, rival, alone));
    quorum.finish().await;
}
