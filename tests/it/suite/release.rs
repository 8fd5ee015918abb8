//! How a hold or a wait ends: drops, cancellations, force, losses.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use redlatch::{Error, LeaseEnd, Renewal};

use super::readers::assert_gone;
use crate::support::{Random, Setup, Stopwatch, eventually, idles, notified_only, soon, ttl};

pub async fn guard_drop_releases(setup: Setup) {
    let (lock, other) = (setup.lock("dropped").await, setup.rival("dropped").await);
    let guard = lock.lock().await.unwrap();
    let lease = guard.lease().clone();
    drop(guard);
    assert!(lease.is_lost());
    soon("the dropped guard is released", other.lock()).await.unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// A program awaits `settled` before it ends; after that, the client holds nothing.
pub async fn settled_waits_for_releases_of_dropped_guards(setup: Setup) {
    let locks = setup.client().await;
    soon("an idle client has settled", locks.settled()).await;
    let guard = setup.kind.lock(&locks, "held").lock().await.unwrap();
    assert!(!locks.is_idle());
    guard.release().await.unwrap();
    let unrenewed = locks.with_options(locks.options().clone().renewal(Renewal::Never)).unwrap();
    let guard = setup.kind.lock(&unrenewed, "held").lock().await.unwrap();
    assert!(!locks.is_idle(), "a lease that is not renewed");
    guard.release().await.unwrap();
    let watcher = setup.client().await;
    let lock = setup.kind.lock(&watcher, "busy");
    let held = lock.lock().await.unwrap();
    let rival = setup.kind.rival().lock(&locks, "busy");
    let waiting = setup.queued(lock.key(), async move { rival.lock().await }).await;
    assert!(!locks.is_idle(), "a call that waits");
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    for round in 0..20 {
        let names: Vec<String> = (0..5).map(|number| format!("settled-{round}-{number}")).collect();
        for name in &names {
            drop(setup.kind.lock(&locks, name).lock().await.unwrap());
        }
        soon("the client has settled", locks.settled()).await;
        for name in &names {
            assert!(!setup.deployment.is_locked(&setup.kind.lock(&watcher, name)).await, "{name}");
        }
        // A quorum's nodes that have not answered yet are released later.
        eventually("the client is idle", || async { locks.is_idle() }).await;
    }
    drop((locks, unrenewed, watcher, lock));
    setup.finish().await;
}

pub async fn dropped_release_future_still_releases(setup: Setup) {
    let lock = setup.lock("half-released").await;
    for polls in 0..4 {
        let guard = lock.lock().await.unwrap();
        poll_at_most(guard.release(), polls).await;
        eventually("the lock is released all the same", || async {
            !setup.deployment.is_locked(&lock).await
        })
        .await;
    }
    drop(lock);
    setup.finish().await;
}

pub async fn force_release_revokes_and_grants_to_waiter(setup: Setup) {
    let lock = setup.lock_with("forced", ttl(6_000)).await;
    assert!(!lock.force_release().await.unwrap(), "the lock is not held");
    let guard = lock.lock().await.unwrap();
    let other = setup.rival_with("forced", notified_only()).await;
    let waiting = other.lock_in_task();
    let before = setup.published_before_grant(lock.key()).await;
    assert!(lock.force_release().await.unwrap());
    let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    assert!(next.token() > guard.token());
    soon("the former holder is notified", guard.lease().lost()).await;
    assert_gone(guard.release().await);
    assert!(setup.deployment.is_held_by(&other, &next).await, "the next holder keeps the lock");
    next.release().await.unwrap();
    // The holder releases at once: no renewal need find the loss.
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    assert_gone(guard.release().await);
    drop((lock, other));
    setup.finish().await;
}

/// The shorter of two times: a busy machine may make a single one longer.
pub async fn force_release_grants_at_once_to_waiter(setup: Setup) {
    let options = notified_only();
    let (lock, other) = (setup.lock("seized").await, setup.rival_with("seized", options).await);
    let mut times = Vec::new();
    for _ in 0..2 {
        let guard = lock.lock().await.unwrap();
        let waiting = other.for_another().lock_in_task();
        eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await == 1 }).await;
        setup.pauses_have_grown().await;
        let start = Stopwatch::start();
        assert!(lock.force_release().await.unwrap());
        let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        times.push(start.stop());
        assert!(guard.release().await.is_err());
        next.release().await.unwrap();
    }
    // A waiter that is not notified polls after two seconds.
    let shortest = times.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(Duration::from_millis(500)), "{times:?}");
    drop((lock, other));
    setup.finish().await;
}

pub async fn holder_is_notified_of_deleted_key(setup: Setup) {
    let lock = setup.lock_with("lost", ttl(6_000)).await;
    let guard = lock.lock().await.unwrap();
    let work = guard.lease().while_held(std::future::pending::<()>());
    setup.deployment.delete_until_lost(lock.key(), &[guard.lease()]).await;
    assert!(matches!(soon("the holder is notified", work).await, Err(Error::Lost { .. })));
    assert_eq!(guard.lease().end(), Some(LeaseEnd::Revoked), "a renewal finds the loss");
    assert!(!setup.deployment.is_locked(&lock).await, "a renewal does not acquire the lock again");
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    let held = lock.lock().await.unwrap();
    assert_eq!(held.lease().while_held(async { 7 }).await.unwrap(), 7);
    held.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn dropped_lock_futures_leave_nothing_behind(setup: Setup) {
    let mut random = Random::new();
    let lock = setup.rival("many").await;
    let locks = setup.client().await;
    let many = setup.kind.lock(&locks, "many");
    let guard = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for number in 0..5 {
        let waiter = setup.rival("many").await;
        waiting.push(tokio::spawn(async move { soon("the lock is acquired", waiter.lock()).await }));
        eventually("the waiter queues", || async { setup.deployment.waiters(&lock).await > number }).await;
        let mut dropped = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let (lock, polls) = (many.for_another(), random.below(12));
            dropped.spawn(async move { poll_at_most(lock.lock(), polls).await });
            let (lock, micros) = (many.for_another(), random.below(20_000));
            let limit = Duration::from_micros(micros);
            dropped.spawn(async move { drop(tokio::time::timeout(limit, lock.lock()).await) });
        }
        // Some wait in the client's queue and are not polled: the shutdown below ends them.
        tokio::time::timeout(Duration::from_millis(400), async {
            while dropped.join_next().await.is_some() {}
        })
        .await
        .ok();
        dropped.shutdown().await;
    }
    eventually("only the five waiters are left", || async { setup.deployment.waiters(&lock).await == 5 })
        .await;
    guard.release().await.unwrap();
    let mut last = 0;
    for waiter in waiting {
        let guard = waiter.await.unwrap().unwrap();
        assert!(guard.token() > last, "waiters acquire in their order");
        last = guard.token();
        guard.release().await.unwrap();
    }
    assert!(!setup.deployment.is_locked(&lock).await);
    eventually("no node has a waiter", || async { setup.deployment.waiters(&lock).await == 0 }).await;
    // The lock is free: a grant to a future that is dropped meanwhile is released.
    for polls in 0..200 {
        poll_at_most(many.for_another().lock(), polls % 5).await;
    }
    let start = Stopwatch::start();
    soon("no orphaned grant blocks the lock", lock.lock()).await.unwrap().release().await.unwrap();
    assert!(start.undisturbed() < Duration::from_secs(5), "{start:?}");
    idles(&locks).await;
    drop((lock, many, locks));
    setup.finish().await;
}

/// Polls a future up to this many times, whenever it is woken, and then drops it.
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

/// A new connection is a reason to ask about every lease: its server may have lost its data. The
/// next renewal would be due after several minutes, and one of these leases is never renewed.
pub async fn losses_are_known_once_the_client_is_connected_again(mut setup: Setup) {
    let renewed = setup.lock_with("renewed", ttl(600_000)).await;
    let never = setup.lock_with("never-renewed", ttl(600_000).renewal(Renewal::Never)).await;
    for restarts in [true, false] {
        let mut held = Vec::new();
        for lock in [&renewed, &never] {
            held.push(soon("the lock is acquired", lock.lock()).await.unwrap());
            setup.deployment.has_everywhere(lock.key()).await;
        }
        if restarts {
            setup.deployment.kill();
            setup.deployment.restart().await;
        } else {
            for lock in [&renewed, &never] {
                setup.deployment.run_at::<u64>(lock.key(), &["DEL", lock.key()]).await;
            }
            setup.deployment.kill_connections().await;
        }
        for guard in held {
            soon("the holder is notified of the loss", guard.lease().lost()).await;
            assert_eq!(guard.lease().end(), Some(LeaseEnd::Revoked));
            assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
        }
    }
    // A lease that the server still has stays, and ends as before.
    let guard = never.lock().await.unwrap();
    let (until, before) = (guard.lease().valid_until(), setup.deployment.scripts_run().await);
    setup.deployment.kill_connections().await;
    eventually("the lease is asked about", || async { setup.deployment.scripts_run().await > before }).await;
    soon("the lock is acquired", renewed.lock()).await.unwrap().release().await.unwrap();
    assert_eq!(guard.lease().end(), None);
    // The clocks are read anew each time. It was asked about half a second after the grant.
    assert!(guard.lease().valid_until() < until + Duration::from_millis(100), "it keeps its end");
    guard.release().await.unwrap();
    drop((renewed, never));
    setup.finish().await;
}
