//! Tasks of one client that come too late for the hold of the others, to read without an owner.

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::shared_reads::{holds, reading, waiting};
use crate::support::{Setup, eventually, patient, soon};

pub async fn a_reader_that_comes_late_has_a_hold_of_its_own(setup: Setup) {
    let turn = Duration::from_millis(5);
    let lock = reading(&setup, "late", patient().local_turn(turn)).await;
    let first = lock.read().await.unwrap();
    let late = Instant::now() + turn;
    eventually("the turn is over", || async { Instant::now() > late }).await;
    let second = lock.read().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 2);
    first.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 1);
    assert!(!second.lease().is_lost());
    second.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 0);
    drop(lock);
    setup.finish().await;
}

/// Where tasks are polled later than a turn lasts, one that was too late must not wait behind newer
/// ones, and be too late again.
pub async fn a_reader_that_is_late_twice_asks_for_itself(setup: Setup) {
    let turn = Duration::from_millis(300);
    let lock = reading(&setup, "twice", patient().local_turn(turn)).await;
    let rival = setup.rival("twice").await;
    let mut held = rival.lock().await.unwrap();
    let mut leader = waiting(&lock).await;
    let mut late = waiting(&lock).await;
    for _ in 0..2 {
        let mut newer = waiting(&lock).await;
        held.release().await.unwrap();
        let guard = soon("the first one reads", leader).await.unwrap();
        let over = Instant::now() + turn;
        eventually("the turn is over", || async { Instant::now() > over }).await;
        guard.release().await.unwrap();
        held = soon("another client writes", rival.lock()).await.unwrap();
        for reading in [&mut late, &mut newer] {
            assert!(poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await.is_pending());
        }
        leader = newer;
    }
    held.release().await.unwrap();
    // The newer one, which is not polled, has asked before it.
    let guard = soon("the one that was late twice reads", late).await.unwrap();
    guard.release().await.unwrap();
    drop((leader, lock, rival));
    setup.finish().await;
}

/// A hold that is kept for a task that is not polled ends once this client has another one.
pub async fn a_turn_of_readers_ends_when_another_begins(setup: Setup) {
    let turn = Duration::from_secs(10);
    let options = patient().local_turn(turn).ttl(Duration::from_secs(600));
    let locks = setup.client_with(options.clone()).await;
    let others = locks.with_options(options.ttl(Duration::from_secs(601))).unwrap();
    let (lock, other) = (locks.rwlock("newer").unwrap(), others.rwlock("newer").unwrap());
    let rival = setup.rival("newer").await;
    let held = rival.lock().await.unwrap();
    let (first, unpolled) = (waiting(&lock).await, waiting(&lock).await);
    held.release().await.unwrap();
    let guard = soon("the first task reads", first).await.unwrap();
    let over = Instant::now() + turn;
    guard.release().await.unwrap();
    let guard = other.try_read().await.unwrap().expect("readers exclude none");
    eventually("the first hold is released", || async { holds(&setup, &lock).await == 1 }).await;
    assert!(Instant::now() < over, "before its turn is over");
    guard.release().await.unwrap();
    drop((unpolled, lock, other, rival));
    drop((locks, others));
    setup.finish().await;
}

/// Some of those that wait come too late for the hold that they were to join.
pub async fn nothing_is_left_after_the_last_release(setup: Setup) {
    let (lock, rival) = (reading(&setup, "last", patient()).await, setup.rival("last").await);
    for _ in 0..60 {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..64 {
            let lock = lock.clone();
            tasks.spawn(async move { lock.read().await?.release().await });
        }
        while let Some(outcome) = tasks.join_next().await {
            outcome.unwrap().unwrap();
        }
        // At once: the servers may be asked before a release that nothing waits for arrives.
        rival.try_lock().await.unwrap().expect("no reader is left").release().await.unwrap();
    }
    drop((lock, rival));
    setup.finish().await;
}

/// A hold is kept for a task that is to join it, and that task gives up: it ends with that, not
/// with the turn.
pub async fn a_hold_that_is_kept_for_a_task_ends_once_that_leaves(setup: Setup) {
    let turn = Duration::from_secs(10);
    let lock = reading(&setup, "kept", patient().local_turn(turn).ttl(Duration::from_secs(600))).await;
    let rival = setup.rival("kept").await;
    let held = rival.lock().await.unwrap();
    let (first, unpolled) = (waiting(&lock).await, waiting(&lock).await);
    held.release().await.unwrap();
    let guard = soon("the first task reads", first).await.unwrap();
    let over = Instant::now() + turn;
    guard.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 1, "the other one is to join it");
    drop(unpolled);
    eventually("the hold is released", || async { holds(&setup, &lock).await == 0 }).await;
    assert!(Instant::now() < over, "before its turn is over");
    drop((lock, rival));
    setup.finish().await;
}
