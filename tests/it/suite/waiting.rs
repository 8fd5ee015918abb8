//! Waiting: order, wake-ups, limits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::Error;
use tokio::time::Instant;

use crate::support::{Setup, Stopwatch, Wake, eventually, notified_only, patient, soon, ttl};

/// The longest time for which the server holds a lock for a waiter that has not answered.
const CLAIM: Duration = Duration::from_secs(3);

pub async fn release_grants_in_queue_order(setup: Setup) {
    let lock = setup.lock("queue").await;
    let guard = lock.lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..6 {
        let (other, order) = (setup.lock("queue").await, Arc::clone(&order));
        waiting.push(tokio::spawn(async move {
            let guard = soon("the lock is acquired", other.lock()).await.unwrap();
            order.lock().unwrap().push((number, guard.token()));
            guard.release().await.unwrap();
        }));
        eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await == number + 1 })
            .await;
    }
    let before = setup.published_before_grant(lock.key()).await;
    guard.release().await.unwrap();
    for task in waiting {
        task.await.unwrap();
    }
    setup.assert_notified(before).await;
    let order = order.lock().unwrap().clone();
    assert!(order.iter().map(|(number, _)| *number).eq(0..6), "first come, first served: {order:?}");
    assert!(order.is_sorted_by_key(|(_, token)| *token), "{order:?}");
    drop(lock);
    setup.finish().await;
}

pub async fn tasks_of_one_client_acquire_in_order(setup: Setup) {
    let lock = setup.lock("inside").await;
    let guard = lock.lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..6 {
        let (other, order) = (lock.for_another(), Arc::clone(&order));
        let before = setup.deployment.scripts_run().await;
        let (began, begun) = tokio::sync::oneshot::channel();
        waiting.push(tokio::spawn(async move {
            let locking = other.lock();
            tokio::pin!(locking);
            // Each task is polled once before the next one starts: that defines the order.
            let early = std::future::poll_fn(|cx| std::task::Poll::Ready(locking.as_mut().poll(cx))).await;
            assert!(early.is_pending());
            began.send(()).unwrap();
            let guard = soon("the lock is acquired", locking).await.unwrap();
            order.lock().unwrap().push(number);
            guard.release().await.unwrap();
        }));
        begun.await.unwrap();
        if setup.kind.name() == "reentrant" {
            // An owner tries once before it queues.
            eventually("the owner tries", || async { setup.deployment.scripts_run().await > before }).await;
        }
    }
    eventually("one task queues in Redis for all", || async { setup.deployment.waiters(&lock).await == 1 })
        .await;
    let before = setup.published_before_grant(lock.key()).await;
    guard.release().await.unwrap();
    for task in waiting {
        task.await.unwrap();
    }
    setup.assert_notified(before).await;
    assert!(order.lock().unwrap().iter().copied().eq(0..6), "{order:?}");
    drop(lock);
    setup.finish().await;
}

pub async fn lock_times_out_and_leaves_queue(setup: Setup) {
    let (lock, other) = (setup.rival("slow").await, setup.lock("slow").await);
    let guard = lock.lock().await.unwrap();
    let limit = Duration::from_millis(300);
    for _ in 0..2 {
        let start = Stopwatch::start();
        let outcome = other.lock_timeout(limit).await;
        assert!(matches!(&outcome, Err(Error::TimedOut { limit: set, .. }) if *set == limit), "{outcome:?}");
        assert!(start.elapsed() >= limit, "{start:?}");
        assert!(start.undisturbed() < limit + Duration::from_secs(2), "{start:?}");
        let start = Stopwatch::start();
        assert!(tokio::time::timeout(limit, other.lock()).await.is_err());
        assert!(start.undisturbed() < limit + Duration::from_secs(2), "{start:?}");
    }
    eventually("the waiter has left the queue", || async { setup.deployment.waiters(&lock).await == 0 })
        .await;
    guard.release().await.unwrap();
    other.lock_timeout(limit * 10).await.unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn release_grants_at_once_to_waiter(setup: Setup) {
    let options = notified_only();
    let (lock, other) = (setup.rival("prompt").await, setup.lock_with("prompt", options).await);
    let mut times = Vec::new();
    for _ in 0..2 {
        let guard = lock.lock().await.unwrap();
        let waiting = other.for_another().lock_in_task();
        eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
        setup.pauses_have_grown().await;
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        times.push(start.stop());
        assert!(!next.lease().is_lost());
        setup.assert_conservative(&lock, &next).await;
        drop(next);
        eventually("the lock is free", || async { !setup.deployment.is_locked(&lock).await }).await;
    }
    // A waiter that is not notified polls after two seconds.
    let shortest = times.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(Duration::from_millis(500)), "{times:?}");
    drop((lock, other));
    setup.finish().await;
}

/// A waiter is granted the lock for its claim, which is much shorter than its TTL: the lease is
/// renewed before the claim expires.
pub async fn granted_lease_is_renewed_before_its_claim_ends(setup: Setup) {
    let (lock, other) = (setup.rival("claimed").await, setup.lock("claimed").await);
    let guard = lock.lock().await.unwrap();
    let waiting = other.lock_in_task();
    let before = setup.published_before_grant(lock.key()).await;
    guard.release().await.unwrap();
    let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    tokio::select! {
        _ = next.lease().lost() => panic!("the lease was lost when its claim expired"),
        () = eventually("the server holds the lock for its whole TTL", || async {
            setup.deployment.kept_until(other.key()).await > std::time::Instant::now() + 2 * CLAIM
        }) => {}
    }
    assert!(setup.deployment.is_held_by(&other, &next).await);
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// Without renewals, the lease would end with its claim, so the waiter requests its whole TTL.
pub async fn grant_lasts_whole_ttl_if_never_renewed(setup: Setup) {
    let options = patient().renewal(redlatch::Renewal::Never);
    let (lock, other) = (setup.rival("unrenewed").await, setup.lock_with("unrenewed", options).await);
    let guard = lock.lock().await.unwrap();
    let waiting = other.lock_in_task();
    let before = setup.published_before_grant(lock.key()).await;
    guard.release().await.unwrap();
    let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    let (until, granted) = (next.lease().valid_until(), std::time::Instant::now());
    assert!(until > granted + 2 * CLAIM, "the lease is valid for {:?}", until - granted);
    assert!(setup.deployment.kept_until(other.key()).await > granted + 2 * CLAIM);
    setup.assert_notified(before).await;
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn waiter_acquires_after_holder_expires(setup: Setup) {
    // The holder has crashed: no message is published.
    let lock = setup.rival_with("expiring", ttl(1_000)).await;
    let other = setup.lock_with("expiring", notified_only()).await;
    let mut times = Vec::new();
    for _ in 0..2 {
        let start = Stopwatch::start();
        lock.lock().await.unwrap().leak();
        let guard = soon("the waiter acquires after the expiry", other.lock()).await.unwrap();
        times.push(start.stop());
        guard.release().await.unwrap();
    }
    assert!(times.iter().all(|took| took.elapsed() > Duration::from_millis(900)), "{times:?}");
    // The waiter knows the end of the lease; its longest pause is two seconds.
    let shortest = times.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(Duration::from_millis(1_600)), "{times:?}");
    drop((lock, other));
    setup.finish().await;
}

/// A release between the first attempt and the subscription: the second attempt must find it.
pub async fn waiter_finds_release_before_its_subscription(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.rival("gap").await;
    for drops_requests in [true, false] {
        let mut times = Vec::new();
        for _ in 0..3 {
            // A client of its own has no subscription yet.
            let options = notified_only();
            let other = setup.lock_behind(&proxy, "gap", options).await;
            let guard = lock.lock().await.unwrap();
            // It has a connection to the master that it will ask.
            assert!(other.try_lock().await.unwrap().is_none());
            proxy.set_drops_requests(drops_requests);
            let (before, acquires) = (proxy.connections(), setup.deployment.scripts_run().await);
            let waiting = tokio::spawn(async move { other.lock().await });
            eventually("the first attempt ran", || async { setup.deployment.scripts_run().await > acquires })
                .await;
            if setup.wake == Wake::Push {
                eventually("the client subscribes", || async { proxy.connections() > before }).await;
            }
            let start = Stopwatch::start();
            guard.release().await.unwrap();
            let next = soon("the waiter finds the release", waiting).await.unwrap().unwrap();
            times.push(start.stop());
            proxy.set_drops_requests(false);
            next.release().await.unwrap();
        }
        // A waiter that sleeps before its second attempt does so for a quarter of a second.
        let shortest = times.iter().map(Stopwatch::undisturbed).min();
        assert!(shortest < Some(Duration::from_millis(200)), "drops_requests: {drops_requests}: {times:?}");
    }
    drop(lock);
    setup.finish().await;
}

/// The notification of a grant is delayed until the claim has expired and another client holds the
/// lock.
pub async fn waiter_rejects_grant_received_after_its_claim(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.rival("stale").await;
    let late = setup.lock_behind(&proxy, "stale", ttl(2_000)).await;
    let guard = lock.lock().await.unwrap();
    let waiting = late.lock_in_task();
    eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
    proxy.hold_replies(true);
    guard.release().await.unwrap();
    // Its claim may end before that is seen.
    eventually("the waiter is granted the lock", || async { setup.deployment.waiters(&lock).await == 0 })
        .await;
    let successor = soon("the claim expires", lock.lock()).await.unwrap();
    proxy.hold_replies(false);
    assert!(setup.deployment.is_held_by(&lock, &successor).await);
    let token = successor.token();
    // The late grant arrives before any message about this release.
    successor.release().await.unwrap();
    let guard = soon("the waiter acquires", waiting).await.unwrap().unwrap();
    assert!(guard.token() >= token, "the waiter accepted a grant that had expired");
    assert!(setup.deployment.is_held_by(&late, &guard).await);
    guard.release().await.unwrap();
    drop((lock, late));
    setup.finish().await;
}

/// Notified and polling clients contend for the same lock all the time: neither starves.
pub async fn polling_and_notified_clients_take_turns(setup: Setup) {
    let other_wake = if setup.wake == Wake::Push { Wake::Poll } else { Wake::Push };
    let lock = setup.rival("mixed").await;
    let guard = lock.lock().await.unwrap();
    // They end together, once one of them has had many turns.
    let (end, ended) = (Instant::now() + Duration::from_secs(4), Arc::new(AtomicBool::new(false)));
    let mut tasks = tokio::task::JoinSet::new();
    for wake in [setup.wake, other_wake, setup.wake, other_wake] {
        let (lock, ended) = (setup.kind.lock(&setup.client_woken(wake).await, "mixed"), Arc::clone(&ended));
        tasks.spawn(async move {
            let mut turns = 0_u32;
            while !ended.load(Ordering::SeqCst) {
                soon("the lock is acquired", lock.lock()).await.unwrap().release().await.unwrap();
                turns += 1;
                ended.fetch_or(turns >= 40 && Instant::now() > end, Ordering::SeqCst);
            }
            turns
        });
    }
    eventually("all of them wait", || async { setup.deployment.waiters(&lock).await == 4 }).await;
    guard.release().await.unwrap();
    drop(lock);
    let mut turns = Vec::new();
    while let Some(outcome) = tasks.join_next().await {
        turns.push(outcome.unwrap());
    }
    let (fewest, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
    assert!(fewest * 3 >= *most, "{turns:?}");
    setup.finish().await;
}
