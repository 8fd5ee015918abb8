//! Waiting: order, wake-ups, limits.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::{Error, Options};
use tokio::time::Instant;

use crate::support::{Setup, Wake, eventually, soon, ttl};

/// Longer than a test: whoever is told in less was not polling.
const NEVER: Duration = Duration::from_secs(10);

pub async fn hands_over_in_order(setup: Setup) {
    let lock = setup.lock("queue").await;
    let guard = lock.lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..6 {
        let (other, order) = (setup.lock("queue").await, Arc::clone(&order));
        waiting.push(tokio::spawn(async move {
            let guard = soon("a turn", other.lock()).await.unwrap();
            order.lock().unwrap().push((number, guard.token()));
            guard.release().await.unwrap();
        }));
        eventually("it queues", || async { lock.waiters().await == number + 1 }).await;
    }
    guard.release().await.unwrap();
    for task in waiting {
        task.await.unwrap();
    }
    let order = order.lock().unwrap().clone();
    assert!(order.iter().map(|(number, _)| *number).eq(0..6), "first come, first served: {order:?}");
    assert!(order.is_sorted_by_key(|(_, token)| *token), "{order:?}");
    drop(lock);
    setup.finish().await;
}

pub async fn wakes_tasks_of_one_client_in_order(setup: Setup) {
    let lock = setup.lock("inside").await;
    let guard = lock.lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..6 {
        let (other, order) = (lock.for_another(), Arc::clone(&order));
        let (began, begun) = tokio::sync::oneshot::channel();
        waiting.push(tokio::spawn(async move {
            let locking = other.lock();
            tokio::pin!(locking);
            // Polled once before the next one begins: that is the order.
            let early = std::future::poll_fn(|cx| std::task::Poll::Ready(locking.as_mut().poll(cx))).await;
            assert!(early.is_pending());
            began.send(()).unwrap();
            let guard = soon("a turn", locking).await.unwrap();
            order.lock().unwrap().push(number);
            guard.release().await.unwrap();
        }));
        begun.await.unwrap();
        if setup.kind.name() == "reentrant" {
            // Who might be the owner looks once before it queues.
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }
    eventually("one of them queues in Redis for all", || async { lock.waiters().await == 1 }).await;
    guard.release().await.unwrap();
    for task in waiting {
        task.await.unwrap();
    }
    assert!(order.lock().unwrap().iter().copied().eq(0..6), "{order:?}");
    drop(lock);
    setup.finish().await;
}

pub async fn gives_up_in_time(setup: Setup) {
    let (lock, other) = (setup.rival("slow").await, setup.lock("slow").await);
    let guard = lock.lock().await.unwrap();
    let limit = Duration::from_millis(300);
    for _ in 0..2 {
        let start = Instant::now();
        let outcome = other.lock_timeout(limit).await;
        assert!(matches!(&outcome, Err(Error::TimedOut { limit: set, .. }) if *set == limit), "{outcome:?}");
        assert!(start.elapsed() >= limit && start.elapsed() < limit + Duration::from_secs(2));
        let start = Instant::now();
        assert!(tokio::time::timeout(limit, other.lock()).await.is_err());
        assert!(start.elapsed() < limit + Duration::from_secs(2));
    }
    eventually("it left the queue", || async { lock.waiters().await == 0 }).await;
    guard.release().await.unwrap();
    other.lock_timeout(limit * 10).await.unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn hands_over_at_once(setup: Setup) {
    let options = Options::new().poll_cap(NEVER);
    let (lock, other) = (setup.rival("prompt").await, setup.lock_with("prompt", options).await);
    let mut times = Vec::new();
    for _ in 0..5 {
        let guard = lock.lock().await.unwrap();
        let waiting = tokio::spawn({
            let other = other.for_another();
            async move { other.lock().await }
        });
        eventually("it queues", || async { lock.waiters().await == 1 }).await;
        let start = Instant::now();
        guard.release().await.unwrap();
        let next = soon("handed over", waiting).await.unwrap().unwrap();
        times.push(start.elapsed());
        assert!(!next.lease().is_lost());
        setup.assert_conservative(&lock, &next).await;
        drop(next);
        eventually("free", || async { !lock.is_locked().await }).await;
    }
    // Who was not told would look after a second: the median of five.
    times.sort();
    assert!(times[2] < Duration::from_millis(500), "{times:?}");
    drop((lock, other));
    setup.finish().await;
}

pub async fn takes_over_after_expiry(setup: Setup) {
    // The holder is gone without a word: nobody publishes anything.
    let lock = setup.rival_with("expiring", ttl(500)).await;
    let other = setup.lock_with("expiring", Options::new().poll_cap(NEVER)).await;
    lock.lock().await.unwrap().leak();
    let start = Instant::now();
    let guard = soon("taken over", other.lock()).await.unwrap();
    assert!(start.elapsed() > Duration::from_millis(300), "{:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_millis(500) + NEVER / 4, "{:?}", start.elapsed());
    guard.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// A release between the first look and the subscription: the second look must find it.
pub async fn misses_no_release_between_try_and_wait(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.rival("gap").await;
    let options = Options::new().poll_cap(NEVER);
    let other = setup.lock_behind(&proxy, "gap", options).await;
    let guard = lock.lock().await.unwrap();
    proxy.be_deaf(true);
    let (before, acquires) = (proxy.connections(), setup.deployment.scripts_run().await);
    let start = Instant::now();
    let waiting = tokio::spawn({
        let other = other.clone();
        async move { other.lock().await }
    });
    eventually("it has looked", || async { setup.deployment.scripts_run().await > acquires }).await;
    if setup.wake == Wake::Push {
        eventually("it subscribes", || async { proxy.connections() > before }).await;
    }
    guard.release().await.unwrap();
    let next = soon("found", waiting).await.unwrap().unwrap();
    assert!(start.elapsed() < NEVER / 2, "{:?}", start.elapsed());
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// The news of a grant lies in a buffer until the claim is over and somebody else holds the lock.
pub async fn trusts_no_grant_that_was_long_under_way(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.rival("stale").await;
    let options = ttl(500).node_timeout(Duration::from_secs(15));
    let late = setup.lock_behind(&proxy, "stale", options).await;
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let late = late.clone();
        async move { late.lock().await }
    });
    eventually("it queues", || async { lock.waiters().await == 1 }).await;
    proxy.hold_replies(true);
    guard.release().await.unwrap();
    eventually("handed over", || async { lock.is_locked().await && lock.waiters().await == 0 }).await;
    let successor = soon("the claim is over", lock.lock()).await.unwrap();
    proxy.hold_replies(false);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished(), "it was told that it holds what another holds");
    assert!(lock.is_held_by(&successor).await);
    successor.release().await.unwrap();
    let guard = soon("its turn", waiting).await.unwrap().unwrap();
    assert!(late.is_held_by(&guard).await);
    guard.release().await.unwrap();
    drop((lock, late));
    setup.finish().await;
}

/// Clients that are told and clients that look want the same lock all the time: neither starves.
pub async fn takes_turns_with_those_who_look(setup: Setup) {
    let other_wake = if setup.wake == Wake::Push { Wake::Poll } else { Wake::Push };
    let end = Instant::now() + Duration::from_secs(4);
    let mut tasks = tokio::task::JoinSet::new();
    for wake in [setup.wake, other_wake, setup.wake, other_wake] {
        let lock = setup.kind.lock(&setup.client_woken(wake).await, "mixed");
        tasks.spawn(async move {
            let mut turns = 0_u32;
            while Instant::now() < end {
                soon("a turn", lock.lock()).await.unwrap().release().await.unwrap();
                turns += 1;
            }
            turns
        });
    }
    let mut turns = Vec::new();
    while let Some(outcome) = tasks.join_next().await {
        turns.push(outcome.unwrap());
    }
    let (fewest, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
    assert!(*fewest >= 3 && fewest * 3 >= *most, "{turns:?}");
    setup.finish().await;
}
