//! Readers beside each other and beside writers who wait: ends, force, what is seen of them, how many there may be.

use std::time::{Duration, Instant};

use redlatch::{Error, Mode, Options, Owner, Renewal};

use super::queued;
use crate::support::{Hold, Setup, eventually, soon, told};

/// A reader who crashed is in the way until his own ttl is over, however long the others read.
pub async fn a_dead_reader_ends_by_himself(setup: Setup) {
    let short = Duration::from_millis(500);
    let lock = setup.rwlock(Options::new()).await;
    let dying = setup.rwlock(Options::new().read_ttl(short)).await;
    // Another one reads for long and is renewed all the time; he leaves before the dead one ends, or after.
    for leaves_first in [true, false] {
        let long = lock.read().await.unwrap();
        dying.read().await.unwrap().leak();
        let died = Instant::now();
        assert_eq!(setup.state_of(lock.name()).await.readers.len(), 2);
        let writer = queued(&setup, &lock, {
            let lock = lock.clone();
            async move { lock.write().await }
        })
        .await;
        if !leaves_first {
            eventually("the dead one ends", || async {
                setup.state_of(lock.name()).await.readers.len() == 1
            })
            .await;
            assert!(!writer.is_finished(), "the living one still reads");
        }
        long.release().await.unwrap();
        let writing = soon("his turn", writer).await.unwrap().unwrap();
        assert!(died.elapsed() > short / 2, "not before the dead one's ttl is over");
        assert!(died.elapsed() < short + Duration::from_secs(3), "{:?}", died.elapsed());
        writing.release().await.unwrap();
    }
    drop((lock, dying));
    setup.finish().await;
}

pub async fn ttls_do_not_touch_each_other(setup: Setup) {
    let locks = setup.client().await;
    let with = |seconds: u64| {
        let options = Options::new().ttl(Duration::from_secs(seconds)).renewal(Renewal::Never);
        locks.with_options(options).unwrap().rwlock("rw").unwrap()
    };
    let (long, middle, short) = (with(100), with(50), with(5));
    let remaining = |owner: Owner| {
        let (setup, long) = (&setup, long.clone());
        async move {
            let seen = setup.state_of(long.name()).await;
            let holder = seen.readers.into_iter().find(|holder| holder.owner == owner.to_string());
            holder.unwrap().remaining.as_secs_f32().round() as u64
        }
    };
    let (one, other) = (Owner::new(), Owner::new());
    let guards =
        [long.with_owner(&one).read().await.unwrap(), short.with_owner(&other).read().await.unwrap()];
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (100, 5));
    // A further hold of the same owner: the larger of the two, not the sum, and not the shorter one.
    let further =
        [short.with_owner(&one).read().await.unwrap(), middle.with_owner(&other).read().await.unwrap()];
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (100, 50));
    let kept = setup.deployment.kept_until(long.name().key()).await.duration_since(Instant::now());
    assert!((95..=100).contains(&kept.as_secs()), "the latest end: {kept:?}");
    for guard in further {
        guard.release().await.unwrap();
    }
    assert_eq!((remaining(one.clone()).await, remaining(other.clone()).await), (100, 50));
    for guard in guards {
        guard.release().await.unwrap();
    }
    // The two sides have a ttl each.
    let options = Options::new().read_ttl(Duration::from_secs(7)).write_ttl(Duration::from_secs(70));
    let sided = locks.with_options(options.renewal(Renewal::Never)).unwrap().rwlock("rw").unwrap();
    let writing = sided.with_owner(&one).write().await.unwrap();
    let reading = sided.with_owner(&one).read().await.unwrap();
    let seen = setup.state_of(sided.name()).await;
    let seconds = |hold: &Hold| hold.remaining.as_secs_f32().round() as u64;
    assert_eq!((seconds(&seen.writer.unwrap()), seconds(&seen.readers[0])), (70, 7));
    writing.release().await.unwrap();
    reading.release().await.unwrap();
    drop((long, middle, short, sided, locks));
    setup.finish().await;
}

/// A writer who waits keeps new readers out: until he gives up, in whichever way.
pub async fn a_waiting_writers_mark_ends_with_him(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
    let owner = Owner::new();
    let reading = lock.with_owner(&owner).read().await.unwrap();
    for ends in ["cancelled", "timed out", "client dropped"] {
        let elsewhere = setup.rwlock(told()).await;
        let before = setup.deployment.published().await;
        let writer = queued(&setup, &lock, async move {
            match ends {
                "timed out" => {
                    let outcome = elsewhere.write_timeout(Duration::from_millis(700)).await;
                    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
                }
                _ => drop(elsewhere.write().await),
            }
        })
        .await;
        assert!(other.try_read().await.unwrap().is_none(), "{ends}: kept out");
        lock.with_owner(&owner).try_read().await.unwrap().expect("who reads may").release().await.unwrap();
        let waiting = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.read().await }
        })
        .await;
        if ends != "timed out" {
            writer.abort();
        }
        let beside = soon("let in", waiting).await.unwrap().unwrap();
        setup.assert_notified(before).await;
        beside.release().await.unwrap();
        eventually("he left the queue", || async { setup.state_of(lock.name()).await.waiting_writers == 0 })
            .await;
    }
    reading.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// It was taken away: the release finds out, or a renewal has before, which comes early where not all nodes have a hold.
pub(super) fn assert_gone(released: Result<(), Error>) {
    assert!(matches!(released, Err(Error::NotHeld { .. } | Error::Lost { .. })), "{released:?}");
}

pub async fn is_taken_away_by_force_on_either_side(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
    assert!(!lock.force_release_read().await.unwrap() && !lock.force_release_write().await.unwrap());
    // Readers only: the writer who waits enters.
    let readers = [lock.read().await.unwrap(), other.read().await.unwrap()];
    assert!(!lock.force_release_write().await.unwrap(), "nobody writes");
    let writer = queued(&setup, &lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    let before = setup.deployment.published().await;
    assert!(other.force_release_read().await.unwrap());
    let writing = soon("let in", writer).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    for guard in readers {
        assert_gone(guard.release().await);
    }
    assert!(setup.deployment.has_holders(lock.name()).await, "late releases take nothing");
    // The writer only: all readers who wait enter.
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let lock = lock.clone();
        waiting.push(queued(&setup, &other, async move { lock.read().await }).await);
    }
    assert!(!lock.force_release_read().await.unwrap(), "nobody reads");
    let before = setup.deployment.published().await;
    assert!(lock.force_release_write().await.unwrap());
    for reader in waiting {
        soon("let in", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    setup.assert_notified(before).await;
    assert_gone(writing.release().await);
    // One who does both keeps the other side.
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

pub async fn shows_both_sides(setup: Setup) {
    let (lock, other) = (setup.rwlock(told()).await, setup.rwlock(told()).await);
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
    assert_eq!(shown, held, "as the servers have it");
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
    let writing = soon("his turn", writer).await.unwrap().unwrap();
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.waiting_readers, seen.reader_count), (Mode::Write, 2, 0));
    assert_eq!(seen.fencing_token, writing.lease().fencing_token());
    writing.release().await.unwrap();
    for reader in readers {
        soon("their turn", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    drop((lock, other));
    setup.finish().await;
}

pub async fn refuses_more_readers_than_allowed(setup: Setup) {
    let options = Options::new().max_readers(3);
    let lock = setup.rwlock(options.clone()).await;
    let dying = setup.rwlock(options.read_ttl(Duration::from_millis(300))).await;
    let owner = Owner::new();
    let guards = [lock.with_owner(&owner).read().await.unwrap(), lock.read().await.unwrap()];
    dying.read().await.unwrap().leak();
    for outcome in [
        lock.read().await.map(drop),
        lock.try_read().await.map(drop),
        lock.read_timeout(Duration::from_secs(9)).await.map(drop),
    ] {
        assert!(matches!(outcome, Err(Error::Crowded { limit: 3, .. })), "{outcome:?}");
    }
    assert_eq!(setup.state_of(lock.name()).await.readers.len(), 3, "nothing has changed");
    lock.with_owner(&owner)
        .read()
        .await
        .expect("who reads already is no reader more")
        .release()
        .await
        .unwrap();
    // The dead one is in the way until his end, and not after it.
    let start = Instant::now();
    eventually("his place is free", || async { lock.try_read().await.is_ok_and(|guard| guard.is_some()) })
        .await;
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    for guard in guards {
        guard.release().await.unwrap();
    }
    // Those who wait count as well: all of them may be let in at once.
    let writing = lock.write().await.unwrap();
    let mut readers = Vec::new();
    for _ in 0..3 {
        let other = setup.rwlock(Options::new().max_readers(3)).await;
        readers.push(queued(&setup, &lock, async move { other.read().await?.release().await }).await);
    }
    assert!(matches!(soon("at once", lock.read()).await, Err(Error::Crowded { .. })));
    writing.release().await.unwrap();
    for reader in readers {
        soon("their turn", reader).await.unwrap().unwrap();
    }
    drop((lock, dying));
    setup.finish().await;
}
