//! Ends: drops, cancellations, losses.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use redlatch::{Error, Options};
use tokio::time::Instant;

use crate::support::{Random, Setup, eventually, idles, soon, ttl};

pub async fn releases_on_drop(setup: Setup) {
    let (lock, other) = (setup.lock("dropped").await, setup.rival("dropped").await);
    let guard = lock.lock().await.unwrap();
    let lease = guard.lease().clone();
    drop(guard);
    assert!(lease.is_lost());
    soon("released in the background", other.lock()).await.unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// What a program waits for before it ends: after it, nothing is held.
pub async fn settles(setup: Setup) {
    let locks = setup.client().await;
    soon("nothing to settle", locks.settled()).await;
    let watcher = setup.client().await;
    for round in 0..20 {
        let names: Vec<String> = (0..5).map(|number| format!("settled-{round}-{number}")).collect();
        for name in &names {
            drop(setup.kind.lock(&locks, name).lock().await.unwrap());
        }
        soon("settled", locks.settled()).await;
        for name in &names {
            assert!(!setup.deployment.is_locked(&setup.kind.lock(&watcher, name)).await, "{name}");
        }
    }
    drop((locks, watcher));
    setup.finish().await;
}

pub async fn survives_its_release_being_dropped(setup: Setup) {
    let lock = setup.lock("half-released").await;
    for polls in 0..4 {
        let guard = lock.lock().await.unwrap();
        poll_at_most(guard.release(), polls).await;
        eventually("released all the same", || async { !setup.deployment.is_locked(&lock).await }).await;
    }
    drop(lock);
    setup.finish().await;
}

pub async fn is_taken_away_by_force(setup: Setup) {
    let lock = setup.lock_with("forced", ttl(900)).await;
    assert!(!lock.force_release().await.unwrap(), "nobody holds it");
    let guard = lock.lock().await.unwrap();
    let other = setup.rival_with("forced", Options::new().poll_cap(Duration::from_secs(10))).await;
    let waiting = tokio::spawn({
        let other = other.clone();
        async move { other.lock().await }
    });
    eventually("it queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
    let before = setup.deployment.published().await;
    assert!(lock.force_release().await.unwrap());
    let next = soon("handed over", waiting).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    assert!(next.token() > guard.token());
    soon("the former holder learns", guard.lease().lost()).await;
    assert!(matches!(guard.release().await, Err(Error::Lost { .. } | Error::NotHeld { .. })));
    assert!(setup.deployment.is_held_by(&other, &next).await, "the heir keeps it");
    next.release().await.unwrap();
    // Released before it could learn: that is told too.
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    assert!(matches!(guard.release().await, Err(Error::NotHeld { .. })));
    drop((lock, other));
    setup.finish().await;
}

/// The median of five: a waiter that is not granted the lock may find it free by a poll that comes
/// just then.
pub async fn hands_over_by_force(setup: Setup) {
    let options = Options::new().poll_cap(Duration::from_secs(10));
    let (lock, other) = (setup.lock("seized").await, setup.rival_with("seized", options).await);
    let mut times = Vec::new();
    for _ in 0..5 {
        let guard = lock.lock().await.unwrap();
        let waiting = tokio::spawn({
            let other = other.for_another();
            async move { other.lock().await }
        });
        eventually("it queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
        let start = Instant::now();
        assert!(lock.force_release().await.unwrap());
        let next = soon("handed over", waiting).await.unwrap().unwrap();
        times.push(start.elapsed());
        assert!(guard.release().await.is_err());
        next.release().await.unwrap();
    }
    times.sort();
    // A waiter that is not notified polls after more than a second.
    assert!(times[2] < Duration::from_millis(500), "{times:?}");
    drop((lock, other));
    setup.finish().await;
}

pub async fn tells_of_a_loss(setup: Setup) {
    let lock = setup.lock_with("lost", ttl(3_000)).await;
    let guard = lock.lock().await.unwrap();
    let work = guard.lease().while_held(std::future::pending::<()>());
    setup.deployment.run_at::<i64>(lock.key(), &["DEL", lock.key()]).await;
    let start = Instant::now();
    assert!(matches!(soon("told", work).await, Err(Error::Lost { .. })));
    assert!(start.elapsed() < Duration::from_millis(2_500), "from a renewal: {:?}", start.elapsed());
    assert!(guard.lease().is_lost());
    assert!(!setup.deployment.is_locked(&lock).await, "a renewal never brings it back");
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    let held = lock.lock().await.unwrap();
    assert_eq!(held.lease().while_held(async { 7 }).await.unwrap(), 7);
    held.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn forgets_a_thousand_dropped_futures(setup: Setup) {
    let mut random = Random::new();
    let lock = setup.rival("crowded").await;
    let locks = setup.client().await;
    let crowd = setup.kind.lock(&locks, "crowded");
    let guard = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for number in 0..5 {
        let faithful = setup.rival("crowded").await;
        waiting.push(tokio::spawn(async move { soon("a turn", faithful.lock()).await }));
        eventually("it queues", || async { setup.deployment.waiters(&lock).await > number }).await;
        let mut dropped = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let (lock, polls) = (crowd.for_another(), random.below(12));
            dropped.spawn(async move { poll_at_most(lock.lock(), polls).await });
            let (lock, micros) = (crowd.for_another(), random.below(20_000));
            let limit = Duration::from_micros(micros);
            dropped.spawn(async move { drop(tokio::time::timeout(limit, lock.lock()).await) });
        }
        // Some wait inside the client for as long as those before them do: all end with their polls.
        tokio::time::timeout(Duration::from_millis(400), async {
            while dropped.join_next().await.is_some() {}
        })
        .await
        .ok();
        dropped.shutdown().await;
    }
    eventually("only the faithful are left", || async { setup.deployment.waiters(&lock).await == 5 }).await;
    guard.release().await.unwrap();
    let mut last = 0;
    for faithful in waiting {
        let guard = faithful.await.unwrap().unwrap();
        assert!(guard.token() > last, "served in order");
        last = guard.token();
        guard.release().await.unwrap();
    }
    assert!(!setup.deployment.is_locked(&lock).await && setup.deployment.waiters(&lock).await == 0);
    // Free: what is granted to a future that is dropped meanwhile comes back.
    for polls in 0..200 {
        poll_at_most(crowd.for_another().lock(), polls % 5).await;
    }
    let start = Instant::now();
    soon("no orphan is in the way", lock.lock()).await.unwrap().release().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    idles(&locks).await;
    drop((lock, crowd, locks));
    setup.finish().await;
}

/// Polls a future so many times, whenever it wants to be polled, and then drops it.
async fn poll_at_most<F: Future>(future: F, polls: u64) {
    let mut future = pin!(future);
    let mut left = polls;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending if left == 0 => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
}
