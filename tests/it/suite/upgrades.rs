//! Upgrades: from reading to writing.

use std::time::Duration;

use redlatch::{Error, Mode, Owner};

use super::queued;
use crate::support::{Setup, Stopwatch, eventually, notified_only, patient, soon};

pub async fn upgrade_succeeds_once_owner_is_sole_reader(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let owner = Owner::new();
    let mine = lock.with_owner(&owner).read().await.unwrap();
    let (second, third) = (other.read().await.unwrap(), other.read().await.unwrap());
    let upgrading = queued(&setup, &lock, {
        let (lock, owner) = (lock.clone(), owner.clone());
        async move { lock.with_owner(&owner).write().await }
    })
    .await;
    assert!(other.try_read().await.unwrap().is_none(), "new readers are kept out meanwhile");
    assert!(lock.with_owner(&owner).try_read().await.unwrap().is_some(), "the owner may read again");
    // Another writer, queued later, cannot go first: it waits for the owner's read.
    let writer = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    second.release().await.unwrap();
    // The release itself would have granted the upgrade.
    let state = setup.state_of(lock.name()).await;
    assert_eq!((state.mode, state.waiting_writers), (Mode::Read, 2), "another reader still holds the lock");
    let before = setup.published_before_grant(lock.name().key()).await;
    third.release().await.unwrap();
    let writing = soon("the upgrade is granted", upgrading).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    assert!(!mine.lease().is_lost() && !writer.is_finished());
    assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Write);
    mine.release().await.unwrap();
    assert!(other.try_read().await.unwrap().is_none(), "the owner still writes");
    writing.release().await.unwrap();
    soon("the writer acquires", writer).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn second_upgrade_returns_would_deadlock(setup: Setup) {
    let (lock, elsewhere) = (setup.rwlock(patient()).await, setup.rwlock(patient()).await);
    for other in [&lock, &elsewhere] {
        let (one, two) = (Owner::new(), Owner::new());
        let (first, second) =
            (lock.with_owner(&one).read().await.unwrap(), other.with_owner(&two).read().await.unwrap());
        let upgrading = queued(&setup, &lock, {
            let (lock, one) = (lock.clone(), one.clone());
            async move { lock.with_owner(&one).write().await }
        })
        .await;
        let start = Stopwatch::start();
        let outcome = soon("the upgrade is refused", other.with_owner(&two).write()).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        let outcome = other.with_owner(&two).write_timeout(Duration::from_secs(9)).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        assert!(other.with_owner(&two).try_write().await.unwrap().is_none(), "try_write does not wait");
        assert!(start.undisturbed() < Duration::from_secs(2), "{start:?}");
        let before = setup.published_before_grant(lock.name().key()).await;
        second.release().await.unwrap();
        let writing = soon("the upgrade is granted", upgrading).await.unwrap().unwrap();
        setup.assert_notified(before).await;
        writing.release().await.unwrap();
        first.release().await.unwrap();
        // The first upgrade's mark has ended with it: the next upgrade may queue.
        let (first, second) =
            (lock.with_owner(&one).read().await.unwrap(), other.with_owner(&two).read().await.unwrap());
        let upgrading = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.with_owner(&two).write().await }
        })
        .await;
        first.release().await.unwrap();
        soon("the upgrade is granted", upgrading).await.unwrap().unwrap().release().await.unwrap();
        second.release().await.unwrap();
    }
    drop((lock, elsewhere));
    setup.finish().await;
}

/// Two tasks of an owner wait to write, and one gives up: the other one still waits, so another
/// reader must not queue to write as well.
pub async fn cancelled_upgrade_leaves_that_of_another_task(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let (one, two) = (Owner::new(), Owner::new());
    let first = lock.with_owner(&one).read().await.unwrap();
    let second = other.with_owner(&two).read().await.unwrap();
    let upgrade = || {
        let (lock, one) = (lock.clone(), one.clone());
        async move { lock.with_owner(&one).write().await }
    };
    let staying = queued(&setup, &lock, upgrade()).await;
    let leaving = queued(&setup, &lock, upgrade()).await;
    leaving.abort();
    eventually("one has left the queue", || async { setup.state_of(lock.name()).await.waiting_writers == 1 })
        .await;
    let outcome = other.with_owner(&two).write_timeout(Duration::from_secs(9)).await;
    assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
    second.release().await.unwrap();
    soon("the upgrade is granted", staying).await.unwrap().unwrap().release().await.unwrap();
    first.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// A cancelled upgrade no longer keeps readers out, nor blocks another upgrade.
pub async fn cancelled_upgrade_admits_waiting_readers(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let (one, two) = (Owner::new(), Owner::new());
    let first = lock.with_owner(&one).read().await.unwrap();
    let second = other.with_owner(&two).read().await.unwrap();
    let upgrading = queued(&setup, &lock, {
        let lock = lock.clone();
        async move { lock.with_owner(&one).write().await.map(drop) }
    })
    .await;
    let kept_out = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.read().await }
    })
    .await;
    let before = setup.published_before_grant(lock.name().key()).await;
    upgrading.abort();
    soon("the reader is admitted at once", kept_out).await.unwrap().unwrap().release().await.unwrap();
    setup.assert_notified(before).await;
    let upgrading = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.with_owner(&two).write().await }
    })
    .await;
    first.release().await.unwrap();
    soon("the second owner's upgrade is granted", upgrading).await.unwrap().unwrap().release().await.unwrap();
    second.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// Writers of the same client wait for the reader to finish: its upgrade must not queue behind
/// them.
pub async fn upgrade_overtakes_waiting_writers_of_same_client(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let owner = Owner::new();
    let mine = lock.with_owner(&owner).read().await.unwrap();
    let beside = other.read().await.unwrap();
    let writers: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.write().await?.release().await })
        })
        .collect();
    eventually("one task queues in Redis for all", || async {
        setup.state_of(lock.name()).await.waiting_writers == 1
    })
    .await;
    let upgrading = queued(&setup, &lock, {
        let (lock, owner) = (lock.clone(), owner.clone());
        async move { lock.with_owner(&owner).write().await }
    })
    .await;
    let before = setup.published_before_grant(lock.name().key()).await;
    beside.release().await.unwrap();
    let writing = soon("the upgrade is granted", upgrading).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    writing.release().await.unwrap();
    mine.release().await.unwrap();
    for writer in writers {
        soon("the lock is acquired", writer).await.unwrap().unwrap();
    }
    drop((lock, other));
    setup.finish().await;
}
