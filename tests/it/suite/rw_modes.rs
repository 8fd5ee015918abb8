//! Holds of a read-write lock's owner on both sides, and what strangers may hold beside them.

use std::time::Duration;

use redlatch::{Error, Mode, Owner, Renewal, RwLock};

use super::{TTLS, queued, ttl_of};
use crate::support::{AnyGuard, Setup, eventually, notified_only, patient, soon};

async fn try_side(lock: &RwLock, owner: &Owner, side: &str) -> Option<AnyGuard> {
    match side {
        "read" => lock.with_owner(owner).try_read().await.unwrap().map(AnyGuard::Read),
        "write" => lock.with_owner(owner).try_write().await.unwrap().map(AnyGuard::Write),
        _ => panic!("no side: {side}"),
    }
}

pub async fn owner_and_stranger_acquire_as_the_table_lists(setup: Setup) {
    let (lock, elsewhere) = (setup.rwlock(patient()).await, setup.rwlock(patient()).await);
    // The owner's holds; whether it may read and write; whether a stranger may read and write.
    let table: [(&[&str], [bool; 2], [bool; 2]); 7] = [
        (&[], [true, true], [true, true]),
        (&["read"], [true, true], [true, false]),
        (&["read", "read"], [true, true], [true, false]),
        (&["write"], [true, true], [false, false]),
        (&["write", "write"], [true, true], [false, false]),
        (&["write", "read"], [true, true], [false, false]),
        (&["read", "write"], [true, true], [false, false]),
    ];
    for (holds, owners, strangers) in table {
        let (owner, stranger) = (Owner::new(), Owner::new());
        for (side, (owner_may, stranger_may)) in
            ["read", "write"].into_iter().zip(owners.into_iter().zip(strangers))
        {
            let mut guards = Vec::new();
            for held in holds {
                guards
                    .push(try_side(&lock, &owner, held).await.expect("the owner acquires all of its holds"));
            }
            // In another client as well: an owner is the same in every process.
            for lock in [&lock, &elsewhere] {
                let guard = try_side(lock, &stranger, side).await;
                assert_eq!(guard.is_some(), stranger_may, "{holds:?}: a stranger tries to {side}");
                if let Some(guard) = guard {
                    guard.release().await.unwrap();
                }
                let guard = try_side(lock, &owner, side).await;
                assert_eq!(guard.is_some(), owner_may, "{holds:?}: the owner tries to {side}");
                if let Some(guard) = guard {
                    guard.release().await.unwrap();
                }
            }
            for guard in guards {
                guard.release().await.unwrap();
            }
            assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Free, "{holds:?} {side}");
        }
    }
    drop((lock, elsewhere));
    setup.finish().await;
}

/// Neither of two readers may write. A caller without an owner is a stranger to every hold, its own
/// included.
pub async fn write_is_refused_beside_another_reader(setup: Setup) {
    let lock = setup.rwlock(patient()).await;
    let (one, other) = (Owner::new(), Owner::new());
    let (first, second) =
        (lock.with_owner(&one).read().await.unwrap(), lock.with_owner(&other).read().await.unwrap());
    assert!(lock.with_owner(&one).try_write().await.unwrap().is_none());
    assert!(lock.with_owner(&other).try_write().await.unwrap().is_none());
    assert!(lock.try_write().await.unwrap().is_none());
    second.release().await.unwrap();
    lock.with_owner(&one).try_write().await.unwrap().expect("the sole reader").release().await.unwrap();
    first.release().await.unwrap();

    let reading = lock.read().await.unwrap();
    let beside = lock.try_read().await.unwrap().expect("beside another reader");
    assert!(lock.try_write().await.unwrap().is_none());
    let limit = Duration::from_millis(50);
    assert!(
        matches!(lock.write_timeout(limit).await, Err(Error::TimedOut { .. })),
        "the write waits for its own read"
    );
    reading.release().await.unwrap();
    beside.release().await.unwrap();
    let writing = lock.write().await.unwrap();
    assert!(lock.try_read().await.unwrap().is_none());
    assert!(lock.try_write().await.unwrap().is_none());
    assert!(matches!(lock.read_timeout(limit).await, Err(Error::TimedOut { .. })));
    assert!(matches!(lock.with_owner(&one).read_timeout(limit).await, Err(Error::TimedOut { .. })));
    assert!(matches!(lock.with_owner(&one).write_timeout(limit).await, Err(Error::TimedOut { .. })));
    writing.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

/// All write holds of an owner expire together, at the latest expiry that one of them requested.
pub async fn inner_write_keeps_larger_ttl(setup: Setup) {
    let locks = setup.client().await;
    let with = |seconds: u64| {
        let options = patient().ttl(Duration::from_secs(seconds)).renewal(Renewal::Never);
        locks.with_options(options).unwrap().rwlock("rw").unwrap()
    };
    let (short, long) = (with(TTLS[0]), with(TTLS[2]));
    let remaining = async || {
        let writer = setup.state_of(long.name()).await.writer.unwrap();
        (writer.count, ttl_of(writer.remaining))
    };
    let owner = Owner::new();
    let outer = long.with_owner(&owner).write().await.unwrap();
    let inner = short.with_owner(&owner).write().await.unwrap();
    assert_eq!(remaining().await, (2, 90), "an inner hold with a shorter TTL does not shorten");
    inner.release().await.unwrap();
    assert_eq!(remaining().await, (1, 90), "the inner release does not shorten");
    outer.release().await.unwrap();
    let outer = short.with_owner(&owner).write().await.unwrap();
    let inner = long.with_owner(&owner).write().await.unwrap();
    assert_eq!(remaining().await, (2, 90), "the larger TTL, not the sum");
    for guard in [outer, inner] {
        guard.release().await.unwrap();
    }
    drop((long, short, locks));
    setup.finish().await;
}

pub async fn reads_and_writes_of_an_owner_are_counted_separately(setup: Setup) {
    let lock = setup.rwlock(patient()).await;
    let owner = Owner::new();
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    for depth in 1..=3 {
        writes.push(lock.with_owner(&owner).write().await.unwrap());
        reads.push(lock.with_owner(&owner).read().await.unwrap());
        let seen = setup.state_of(lock.name()).await;
        assert_eq!(seen.mode, Mode::Write);
        assert_eq!(seen.writer.unwrap().count, depth);
        assert_eq!(seen.readers[0].count, depth);
        assert_eq!(seen.readers.len(), 1, "one owner");
        assert!(setup.deployment.has_holder(lock.name(), &owner).await);
        assert!(
            !setup.deployment.has_holder(lock.name(), &Owner::new()).await,
            "another owner holds nothing"
        );
    }
    let token = writes[0].lease().fencing_token();
    assert!(writes.iter().all(|guard| guard.lease().fencing_token() == token), "one token at every depth");
    assert!(reads.iter().all(|guard| setup.reads_after(guard.lease(), token)));
    // In any order: a guard is a hold, not a place on a stack.
    for index in [1, 0, 0] {
        reads.remove(index).release().await.unwrap();
        writes.remove(index).release().await.unwrap();
    }
    assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Free);
    assert!(!setup.deployment.has_holder(lock.name(), &owner).await);
    drop(lock);
    setup.finish().await;
}

/// The write is released first: the read hold remains, and others read beside it.
pub async fn read_stays_held_after_write_is_released(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let owner = Owner::new();
    let writing = lock.with_owner(&owner).write().await.unwrap();
    let reading = lock.with_owner(&owner).read().await.unwrap();
    let waiting = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.read().await }
    })
    .await;
    let before = setup.published_before_grant(lock.name().key()).await;
    writing.release().await.unwrap();
    let beside = soon("the reader is admitted beside the owner", waiting).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    assert!(!reading.lease().is_lost() && setup.deployment.has_holder(lock.name(), &owner).await);
    assert!(!setup.deployment.has_holder(lock.name(), &Owner::new()).await, "another owner holds nothing");
    assert!(other.try_write().await.unwrap().is_none());
    reading.release().await.unwrap();
    beside.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn each_side_returns_too_deep_beyond_max_depth(setup: Setup) {
    let lock = setup.rwlock(patient().max_depth(3)).await;
    let owner = Owner::new();
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        writes.push(lock.with_owner(&owner).write().await.unwrap());
        reads.push(lock.with_owner(&owner).read().await.unwrap());
    }
    for outcome in [
        lock.with_owner(&owner).read().await.map(drop),
        lock.with_owner(&owner).write().await.map(drop),
        lock.with_owner(&owner).try_read().await.map(drop),
        lock.with_owner(&owner).try_write().await.map(drop),
    ] {
        assert!(matches!(outcome, Err(Error::TooDeep { depth: 3, .. })), "{outcome:?}");
    }
    drop((reads, writes));
    eventually("the lock is released", || async { setup.state_of(lock.name()).await.mode == Mode::Free })
        .await;
    drop(lock);
    setup.finish().await;
}

/// Each writer gets a new token. A reader gets the last writer's token, or one that is smaller than
/// every later writer's.
pub async fn tokens_grow_with_each_write(setup: Setup) {
    let lock = setup.rwlock(patient()).await;
    let mut last = None;
    for _ in 0..3 {
        let writing = lock.write().await.unwrap();
        assert!(writing.lease().fencing_token() > last, "a write gets a larger token");
        last = writing.lease().fencing_token();
        writing.release().await.unwrap();
        for _ in 0..2 {
            let (one, other) = (lock.read().await.unwrap(), lock.read().await.unwrap());
            assert!(setup.reads_after(one.lease(), last) && setup.reads_after(other.lease(), last));
            last = last.max(one.lease().fencing_token()).max(other.lease().fencing_token());
            one.release().await.unwrap();
            other.release().await.unwrap();
        }
    }
    // An upgrade is a new write grant.
    let owner = Owner::new();
    let reading = lock.with_owner(&owner).read().await.unwrap();
    let writing = lock.with_owner(&owner).write().await.unwrap();
    assert!(writing.lease().fencing_token() > reading.lease().fencing_token());
    writing.release().await.unwrap();
    reading.release().await.unwrap();
    let unfenced = setup.rwlock(patient().fencing(redlatch::Fencing::Off)).await;
    for _ in 0..2 {
        let reading = unfenced.read().await.unwrap();
        assert_eq!(reading.lease().fencing_token(), None);
        reading.release().await.unwrap();
        let writing = unfenced.write().await.unwrap();
        assert_eq!(writing.lease().fencing_token(), None);
        writing.release().await.unwrap();
    }
    drop((lock, unfenced));
    setup.finish().await;
}

/// A name that is in use by another kind of lock is an error on either side; the locks exclude each
/// other all the same.
pub async fn rwlock_returns_wrong_type_for_other_kind(setup: Setup) {
    let locks = setup.client().await;
    let (lock, other) = (locks.rwlock("rw").unwrap(), locks.reentrant("rw", &Owner::new()).unwrap());
    let held = other.with_owner(&Owner::new()).lock().await.unwrap();
    for outcome in [lock.try_read().await.map(drop), lock.try_write().await.map(drop)] {
        assert!(matches!(outcome, Err(Error::WrongType { .. })), "{outcome:?}");
    }
    held.release().await.unwrap();
    let key = lock.name().key();
    eventually("the lock is free on all nodes", || async { setup.deployment.keys(key).await.is_empty() })
        .await;
    for field in ["mode", "01234567-89ab-cdef-0123-456789abcdef:42"] {
        setup.deployment.run_at::<i64>(key, &["HSET", key, field, "1"]).await;
        setup.deployment.run_at::<i64>(key, &["PEXPIRE", key, "60000"]).await;
        for outcome in [lock.try_read().await.map(drop), lock.try_write().await.map(drop)] {
            assert!(matches!(outcome, Err(Error::WrongType { .. })), "{field}: {outcome:?}");
        }
        setup.deployment.run_at::<i64>(key, &["DEL", key]).await;
    }
    let reading = lock.read().await.unwrap();
    let refused = other.with_owner(&Owner::new()).try_lock().await;
    assert!(matches!(refused, Err(Error::WrongType { .. })), "{refused:?}");
    reading.release().await.unwrap();
    drop((lock, other, locks));
    setup.finish().await;
}
