//! Readers beside other readers and waiting writers: expiry, force, inspection, limits.

use std::time::{Duration, Instant};

use redlatch::{Error, Mode, Owner, Renewal};

use super::{TTLS, queued, ttl_of};
use crate::support::{Setup, Stopwatch, eventually, notified_only, patient, soon};

/// A crashed reader blocks writers until its own TTL expires, however long other readers stay.
pub async fn dead_reader_blocks_writer_until_its_ttl(setup: Setup) {
    let short = Duration::from_secs(2);
    let lock = setup.rwlock(patient()).await;
    let dying = setup.rwlock(patient().read_ttl(short)).await;
    // Another reader is renewed all the time; it is released before the dead reader's hold expires,
    // or after.
    for leaves_first in [true, false] {
        let long = lock.read().await.unwrap();
        let died = Stopwatch::start();
        dying.read().await.unwrap().leak();
        let readers = setup.state_of(lock.name()).await.readers.len();
        assert!(readers == 2 || died.elapsed() > short, "{readers} after {died:?}");
        let writer = queued(&setup, &lock, {
            let lock = lock.clone();
            async move { lock.write().await }
        })
        .await;
        if !leaves_first {
            eventually("the dead reader's hold expires", || async {
                setup.state_of(lock.name()).await.readers.len() == 1
            })
            .await;
            assert!(!writer.is_finished(), "the live reader still reads");
        }
        long.release().await.unwrap();
        let writing = soon("the waiter acquires", writer).await.unwrap().unwrap();
        // A server counts in milliseconds.
        let least = short - Duration::from_millis(5);
        assert!(died.elapsed() > least, "not before the dead reader's TTL");
        assert!(died.undisturbed() < short + Duration::from_secs(3), "{died:?}");
        writing.release().await.unwrap();
    }
    drop((lock, dying));
    setup.finish().await;
}

pub async fn owners_expire_independently(setup: Setup) {
    let locks = setup.client().await;
    let with = |seconds: u64| {
        let options = patient().ttl(Duration::from_secs(seconds)).renewal(Renewal::Never);
        locks.with_options(options).unwrap().rwlock("rw").unwrap()
    };
    let (short, middle, long) = (with(TTLS[0]), with(TTLS[1]), with(TTLS[2]));
    let remaining = |owner: Owner| {
        let (setup, long) = (&setup, long.clone());
        async move {
            let seen = setup.state_of(long.name()).await;
            let holder = seen.readers.into_iter().find(|holder| holder.owner == owner.to_string());
            ttl_of(holder.unwrap().remaining)
        }
    };
    let (one, other) = (Owner::new(), Owner::new());
    let guards =
        [long.with_owner(&one).read().await.unwrap(), short.with_owner(&other).read().await.unwrap()];
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (90, 30));
    // A nested hold of the same owner: the larger TTL of the two, not the sum, not the shorter one.
    let further =
        [short.with_owner(&one).read().await.unwrap(), middle.with_owner(&other).read().await.unwrap()];
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (90, 60));
    let kept = setup.deployment.kept_until(long.name().key()).await.duration_since(Instant::now());
    assert_eq!(ttl_of(kept), 90, "the key lasts until the latest expiry");
    for guard in further {
        guard.release().await.unwrap();
    }
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (90, 60));
    for guard in guards {
        guard.release().await.unwrap();
    }
    // Each side has a TTL of its own.
    let options = patient().read_ttl(Duration::from_secs(30)).write_ttl(Duration::from_secs(90));
    let sided = locks.with_options(options.renewal(Renewal::Never)).unwrap().rwlock("rw").unwrap();
    let writing = sided.with_owner(&one).write().await.unwrap();
    let reading = sided.with_owner(&one).read().await.unwrap();
    let seen = setup.state_of(sided.name()).await;
    assert_eq!((ttl_of(seen.writer.unwrap().remaining), ttl_of(seen.readers[0].remaining)), (90, 30));
    writing.release().await.unwrap();
    reading.release().await.unwrap();
    drop((long, middle, short, sided, locks));
    setup.finish().await;
}

/// A waiting writer keeps new readers out until it gives up, in any of three ways.
pub async fn readers_enter_after_waiting_writer_gave_up(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let owner = Owner::new();
    let reading = lock.with_owner(&owner).read().await.unwrap();
    for ends in ["cancelled", "timed out", "client dropped"] {
        let elsewhere = setup.rwlock(notified_only()).await;
        let writer = queued(&setup, &lock, async move {
            match ends {
                "timed out" => {
                    // Longer than a busy machine needs to queue a reader behind it.
                    let outcome = elsewhere.write_timeout(Duration::from_secs(5)).await;
                    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
                }
                _ => drop(elsewhere.write().await),
            }
        })
        .await;
        assert!(other.try_read().await.unwrap().is_none(), "{ends}: a new reader is kept out");
        lock.with_owner(&owner)
            .try_read()
            .await
            .unwrap()
            .expect("a reader may read again")
            .release()
            .await
            .unwrap();
        let waiting = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.read().await }
        })
        .await;
        let before = setup.published_before_grant(lock.name().key()).await;
        if ends != "timed out" {
            writer.abort();
        }
        let beside = soon("the waiter is admitted", waiting).await.unwrap().unwrap();
        setup.assert_notified(before).await;
        beside.release().await.unwrap();
        eventually("the waiter has left the queue", || async {
            setup.state_of(lock.name()).await.waiting_writers == 0
        })
        .await;
    }
    reading.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// Checks the result of releasing a revoked hold. The release finds the loss, or a renewal found it
/// before: renewals come early where not all nodes have the hold.
pub(super) fn assert_gone(released: Result<(), Error>) {
    assert!(matches!(released, Err(Error::NotHeld { .. } | Error::Lost { .. })), "{released:?}");
}

pub async fn force_release_revokes_one_side_only(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    assert!(!lock.force_release_read().await.unwrap() && !lock.force_release_write().await.unwrap());
    // Force on the readers: the waiting writer is admitted.
    let readers = [lock.read().await.unwrap(), other.read().await.unwrap()];
    assert!(!lock.force_release_write().await.unwrap(), "no writer holds the lock");
    let writer = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    let before = setup.published_before_grant(lock.name().key()).await;
    assert!(other.force_release_read().await.unwrap());
    let writing = soon("the waiter is admitted", writer).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    for guard in readers {
        assert_gone(guard.release().await);
    }
    assert!(setup.deployment.has_holders(lock.name()).await, "late releases do not revoke the write");
    // Force on the writer: all waiting readers are admitted.
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let lock = lock.clone();
        waiting.push(queued(&setup, &other, async move { lock.read().await }).await);
    }
    assert!(!lock.force_release_read().await.unwrap(), "no reader holds the lock");
    let before = setup.published_before_grant(lock.name().key()).await;
    assert!(lock.force_release_write().await.unwrap());
    for reader in waiting {
        soon("the waiter is admitted", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    setup.assert_notified(before).await;
    assert_gone(writing.release().await);
    // An owner that holds both sides keeps the other one.
    let owner = Owner::new();
    for side in ["read", "write"] {
        let (writing, reading) =
            (lock.with_owner(&owner).write().await.unwrap(), lock.with_owner(&owner).read().await.unwrap());
        if side == "read" {
            assert!(lock.force_release_read().await.unwrap());
            assert_gone(reading.release().await);
            assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Write);
            writing.release().await.unwrap();
        } else {
            assert!(lock.force_release_write().await.unwrap());
            assert_gone(writing.release().await);
            assert_eq!(setup.state_of(lock.name()).await.mode, Mode::Read);
            reading.release().await.unwrap();
        }
    }
    drop((lock, other));
    setup.finish().await;
}

pub async fn inspect_reports_both_sides(setup: Setup) {
    let (lock, other) = (setup.rwlock(notified_only()).await, setup.rwlock(notified_only()).await);
    let free = lock.inspect().await.unwrap();
    assert_eq!((free.mode, free.writer, free.readers.len(), free.reader_count), (Mode::Free, None, 0, 0));
    let owner = Owner::new();
    let guards =
        [lock.with_owner(&owner).read().await.unwrap(), lock.with_owner(&owner).read().await.unwrap()];
    let beside = other.read().await.unwrap();
    let writer = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    let mut readers = Vec::new();
    for _ in 0..2 {
        let other = other.clone();
        readers.push(queued(&setup, &lock, async move { other.read().await }).await);
    }
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.reader_count), (Mode::Read, 2));
    let kept = setup.state_of(lock.name()).await;
    let words = |owner: &str, count: u64| (owner.to_owned(), count);
    let mut shown: Vec<_> = seen.readers.iter().map(|one| words(&one.owner, one.count)).collect();
    let mut held: Vec<_> = kept.readers.iter().map(|one| words(&one.owner, one.count)).collect();
    shown.sort();
    held.sort();
    assert_eq!(shown, held, "the inspection reports what the servers have");
    assert_eq!((seen.waiting_writers, seen.waiting_readers), (1, 2));
    let json = serde_json::to_value(&seen).unwrap();
    assert_eq!((&json["mode"], &json["writer"]), (&"read".into(), &serde_json::Value::Null));
    let holder =
        json["readers"].as_array().unwrap().iter().find(|holder| holder["owner"] == owner.to_string());
    assert_eq!(holder.unwrap()["count"], 2);
    assert!(holder.unwrap()["remaining_ms"].as_u64().unwrap() > 25_000);
    for guard in guards.into_iter().chain([beside]) {
        guard.release().await.unwrap();
    }
    let writing = soon("the waiter acquires", writer).await.unwrap().unwrap();
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.waiting_readers, seen.reader_count), (Mode::Write, 2, 0));
    assert_eq!(seen.fencing_token, writing.lease().fencing_token());
    writing.release().await.unwrap();
    for reader in readers {
        soon("the waiters acquire", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    drop((lock, other));
    setup.finish().await;
}

pub async fn read_beyond_max_readers_is_refused(setup: Setup) {
    let options = patient().max_readers(3);
    let lock = setup.rwlock(options.clone()).await;
    let dying = setup.rwlock(options.read_ttl(Duration::from_secs(5))).await;
    let owner = Owner::new();
    let guards = [lock.with_owner(&owner).read().await.unwrap(), lock.read().await.unwrap()];
    dying.read().await.unwrap().leak();
    for outcome in [
        lock.read().await.map(drop),
        lock.try_read().await.map(drop),
        lock.read_timeout(Duration::from_secs(9)).await.map(drop),
    ] {
        assert!(matches!(outcome, Err(Error::TooManyReaders { limit: 3, .. })), "{outcome:?}");
    }
    assert_eq!(setup.state_of(lock.name()).await.readers.len(), 3, "the refused readers changed nothing");
    lock.with_owner(&owner)
        .read()
        .await
        .expect("a second hold of a reader is not counted")
        .release()
        .await
        .unwrap();
    // The dead reader counts until its TTL expires, and not after it.
    eventually("the dead reader's place is free", || async {
        lock.try_read().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
    for guard in guards {
        guard.release().await.unwrap();
    }
    // Waiting readers count as well: all of them may be admitted at once.
    let writing = lock.write().await.unwrap();
    let mut readers = Vec::new();
    for _ in 0..3 {
        let other = setup.rwlock(patient().max_readers(3)).await;
        readers.push(queued(&setup, &lock, async move { other.read().await?.release().await }).await);
    }
    assert!(matches!(soon("the reader is refused", lock.read()).await, Err(Error::TooManyReaders { .. })));
    writing.release().await.unwrap();
    for reader in readers {
        soon("the waiters acquire", reader).await.unwrap().unwrap();
    }
    drop((lock, dying));
    setup.finish().await;
}
