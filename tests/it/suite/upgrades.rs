//! From reading to writing.

use std::time::{Duration, Instant};

use redlatch::{Error, Mode, Options, Owner};

use super::queued;
use crate::support::{Setup, eventually, soon, told};

pub async fn upgrades_the_sole_reader(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
    let owner = Owner::new();
    let mine = lock.with_owner(&owner).read().await.unwrap();
    let (second, third) = (other.read().await.unwrap(), other.read().await.unwrap());
    let upgrading = queued(&setup, &lock, {
        let (lock, owner) = (lock.clone(), owner.clone());
        async move { lock.with_owner(&owner).write().await }
    })
    .await;
    assert!(other.try_read().await.unwrap().is_none(), "new readers stay out meanwhile");
    assert!(lock.with_owner(&owner).try_read().await.unwrap().is_some(), "but not he");
    // Another writer, who queued later, and cannot go first: he waits for the reader who waits.
    let writer = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    second.release().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!upgrading.is_finished(), "there is another reader");
    let before = setup.deployment.published().await;
    third.release().await.unwrap();
    let writing = soon("upgraded", upgrading).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    assert!(!mine.lease().is_lost() && !writer.is_finished());
    assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Write);
    mine.release().await.unwrap();
    assert!(other.try_read().await.unwrap().is_none(), "he still writes");
    writing.release().await.unwrap();
    soon("the writer's turn", writer).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn refuses_a_second_upgrade_at_once(setup: Setup) {
    let (lock, elsewhere) = (setup.rwlock(Options::new()).await, setup.rwlock(Options::new()).await);
    for other in [&lock, &elsewhere] {
        let (one, two) = (Owner::new(), Owner::new());
        let (first, second) =
            (lock.with_owner(&one).read().await.unwrap(), other.with_owner(&two).read().await.unwrap());
        let upgrading = queued(&setup, &lock, {
            let (lock, one) = (lock.clone(), one.clone());
            async move { lock.with_owner(&one).write().await }
        })
        .await;
        let start = Instant::now();
        let outcome = soon("at once", other.with_owner(&two).write()).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        let outcome = other.with_owner(&two).write_timeout(Duration::from_secs(9)).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        assert!(other.with_owner(&two).try_write().await.unwrap().is_none(), "who tries waits for nobody");
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let before = setup.deployment.published().await;
        second.release().await.unwrap();
        let writing = soon("upgraded", upgrading).await.unwrap().unwrap();
        setup.assert_notified(before).await;
        writing.release().await.unwrap();
        first.release().await.unwrap();
        // The mark is gone with him: the next one may.
        let (first, second) =
            (lock.with_owner(&one).read().await.unwrap(), other.with_owner(&two).read().await.unwrap());
        let upgrading = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.with_owner(&two).write().await }
        })
        .await;
        first.release().await.unwrap();
        soon("upgraded", upgrading).await.unwrap().unwrap().release().await.unwrap();
        second.release().await.unwrap();
    }
    drop((lock, elsewhere));
    setup.finish().await;
}

/// Who gives up waiting for an upgrade is in nobody's way.
pub async fn a_cancelled_upgrade_leaves_no_mark(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
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
    let before = setup.deployment.published().await;
    upgrading.abort();
    soon("let in at once", kept_out).await.unwrap().unwrap().release().await.unwrap();
    setup.assert_notified(before).await;
    let upgrading = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.with_owner(&two).write().await }
    })
    .await;
    first.release().await.unwrap();
    soon("the other one's upgrade", upgrading).await.unwrap().unwrap().release().await.unwrap();
    second.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// Tasks of his own client wait for him: he must not wait behind them.
pub async fn upgrades_past_writers_of_the_same_client(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
    let owner = Owner::new();
    let mine = lock.with_owner(&owner).read().await.unwrap();
    let beside = other.read().await.unwrap();
    let writers: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.write().await?.release().await })
        })
        .collect();
    eventually("one queues for all", || async { setup.state_of(lock.name()).await.waiting_writers == 1 })
        .await;
    let upgrading = queued(&setup, &lock, {
        let (lock, owner) = (lock.clone(), owner.clone());
        async move { lock.with_owner(&owner).write().await }
    })
    .await;
    let before = setup.deployment.published().await;
    beside.release().await.unwrap();
    let writing = soon("upgraded", upgrading).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    writing.release().await.unwrap();
    mine.release().await.unwrap();
    for writer in writers {
        soon("a turn", writer).await.unwrap().unwrap();
    }
    drop((lock, other));
    setup.finish().await;
}
