//! `Options::hold_at_least`: a lock that stays held for a time, although it was released before.

use std::time::{Duration, Instant};

use redlatch::{LeaseEnd, Options};

use crate::support::{AnyGuard, AnyLock, Setup, eventually, soon, ttl};

const MINUTE: Duration = Duration::from_secs(60);

fn at_least(span: Duration) -> Options {
    ttl(20_000).hold_at_least(span)
}

/// Acquires, and returns a time before the grant.
async fn granted(lock: &AnyLock) -> (Instant, AnyGuard) {
    let before = Instant::now();
    (before, lock.lock().await.unwrap())
}

/// Checks that the servers hold the lock until a minute after its grant, for no attempt, and
/// revokes it then.
async fn assert_kept(setup: &Setup, lock: &AnyLock, watcher: &AnyLock, before: Instant) {
    let kept = setup.deployment.kept_until(lock.key()).await;
    // A server counts in milliseconds.
    let least = before + MINUTE - Duration::from_millis(5);
    assert!(kept >= least, "{:?} are missing", least - kept);
    let state = setup.state_of(lock.name()).await;
    let owners: Vec<_> = state.holds().map(|hold| hold.owner.as_str()).collect();
    assert!(matches!(owners[..], [owner] if owner.starts_with("kept-")), "{owners:?}");
    assert!(watcher.try_lock().await.unwrap().is_none(), "the rival finds it held");
    assert!(lock.force_release().await.unwrap());
    assert!(!setup.deployment.is_locked(watcher).await);
}

pub async fn release_leaves_the_lock_held_for_its_minimum(setup: Setup) {
    let locks = setup.client_with(at_least(MINUTE)).await;
    let (lock, watcher) = (setup.kind.lock(&locks, "at-least"), setup.rival("at-least").await);
    let (before, guard) = granted(&lock).await;
    let lease = guard.lease().clone();
    guard.release().await.unwrap();
    assert_eq!(lease.end(), Some(LeaseEnd::Released));
    assert_kept(&setup, &lock, &watcher, before).await;
    let (before, guard) = granted(&lock).await;
    drop(guard);
    locks.settled().await;
    assert_kept(&setup, &lock, &watcher, before).await;
    drop((locks, lock, watcher));
    setup.finish().await;
}

pub async fn close_leaves_the_lock_held_for_its_minimum(setup: Setup) {
    let locks = setup.client_with(at_least(MINUTE)).await;
    let (lock, watcher) = (setup.kind.lock(&locks, "closed"), setup.rival("closed").await);
    let (before, guard) = granted(&lock).await;
    locks.close(MINUTE).await.unwrap();
    assert_eq!(guard.lease().end(), Some(LeaseEnd::Closed));
    assert_kept(&setup, &lock, &watcher, before).await;
    drop((guard, locks, lock, watcher));
    setup.finish().await;
}

/// Neither a second delivery of the release nor a renewal that arrives after it makes it last
/// longer.
pub async fn minimum_counts_once_if_the_reply_is_lost(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock_behind(&proxy, "lossy", at_least(MINUTE)).await;
    let watcher = setup.rival("lossy").await;
    for _ in 0..3 {
        let (before, guard) = granted(&lock).await;
        let lease = guard.lease().clone();
        setup.lose_next_answer(&proxy);
        soon("the lock is released", guard.release()).await.unwrap();
        assert!(lease.renew().await.is_err());
        assert_kept(&setup, &lock, &watcher, before).await;
    }
    drop((lock, watcher));
    setup.finish().await;
}

pub async fn lock_is_free_after_its_minimum(setup: Setup) {
    let span = Duration::from_millis(700);
    let lock = setup.lock_with("ends", at_least(span)).await;
    let watcher = setup.rival("ends").await;
    let (before, guard) = granted(&lock).await;
    guard.release().await.unwrap();
    eventually("the minimum ends", || async { !setup.deployment.is_locked(&watcher).await }).await;
    assert!(before.elapsed() >= span, "after {:?}", before.elapsed());
    // A release after the minimum frees the lock at once.
    let (before, guard) = granted(&lock).await;
    eventually("the minimum has passed", || async { before.elapsed() > 2 * span }).await;
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&watcher).await);
    drop((lock, watcher));
    setup.finish().await;
}

pub async fn waiter_acquires_once_the_minimum_ends(setup: Setup) {
    let span = Duration::from_millis(1_500);
    let lock = setup.lock_with("waited", at_least(span)).await;
    let rival = setup.rival("waited").await;
    let (before, guard) = granted(&lock).await;
    let waiting = setup.queued(lock.key(), async move { rival.lock().await.unwrap() }).await;
    guard.release().await.unwrap();
    let next = soon("the waiter acquires", waiting).await.unwrap();
    assert!(before.elapsed() >= span, "after {:?}", before.elapsed());
    next.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

/// Tasks of one client do not share or pass on what must stay held after its first task.
pub async fn no_hold_with_a_minimum_is_passed_on(setup: Setup) {
    let span = Duration::from_millis(700);
    let options = at_least(span).local_turn(Duration::from_secs(5));
    let lock = setup.lock_with("turns", options).await;
    let (before, guard) = granted(&lock).await;
    let waiting = setup
        .queued(lock.key(), {
            let lock = lock.for_another();
            async move { lock.lock().await.unwrap() }
        })
        .await;
    guard.release().await.unwrap();
    let next = soon("the next task acquires", waiting).await.unwrap();
    assert!(before.elapsed() >= span, "after {:?}", before.elapsed());
    next.release().await.unwrap();
    eventually("the minimum ends", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop(lock);
    setup.finish().await;
}
