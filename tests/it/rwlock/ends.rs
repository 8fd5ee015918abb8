//! Ends: each holder has his own, and so has the mark of a writer who waits.

use std::time::{Duration, Instant};

use redlatch::{Error, Mode, Options, Owner, Renewal};

use super::{client, queued, see, told};
use crate::support::{Server, eventually, soon};

/// A reader who crashed is in the way until his own ttl is over, however long the others read.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_a_dead_reader_ends_by_himself() {
    let server = Server::start().await;
    let short = Duration::from_millis(500);
    let lock = client(&server, Options::new()).await;
    let dying = client(&server, Options::new().read_ttl(short)).await;
    // Another one reads for long and is renewed all the time; he leaves before the dead one ends, or after.
    for leaves_first in [true, false] {
        let long = lock.read().await.unwrap();
        dying.read().await.unwrap().leak();
        let died = Instant::now();
        assert_eq!(see(&lock).await.readers.len(), 2);
        let writer = queued(&lock, {
            let lock = lock.clone();
            async move { lock.write().await }
        })
        .await;
        if !leaves_first {
            eventually("the dead one ends", || async { see(&lock).await.readers.len() == 1 }).await;
            assert!(!writer.is_finished(), "the living one still reads");
        }
        long.release().await.unwrap();
        let writing = soon("his turn", writer).await.unwrap().unwrap();
        assert!(died.elapsed() > short / 2, "not before the dead one's ttl is over");
        assert!(died.elapsed() < short + Duration::from_secs(3), "{:?}", died.elapsed());
        writing.release().await.unwrap();
    }
    drop((lock, dying));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_ttls_do_not_touch_each_other() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let with = |seconds: u64| {
        let options = Options::new().ttl(Duration::from_secs(seconds)).renewal(Renewal::Never);
        locks.with_options(options).unwrap().rwlock("rw").unwrap()
    };
    let (long, middle, short) = (with(100), with(50), with(5));
    let remaining = |owner: Owner| {
        let long = long.clone();
        async move {
            let seen = see(&long).await;
            let holder = seen.readers.into_iter().find(|holder| holder.owner == owner.to_string());
            holder.unwrap().remaining.unwrap().as_secs_f32().round() as u64
        }
    };
    let (one, other) = (Owner::new(), Owner::new());
    let guards = [long.read_as(&one).await.unwrap(), short.read_as(&other).await.unwrap()];
    assert_eq!((remaining(one).await, remaining(other).await), (100, 5));
    // A further hold of the same owner: the larger of the two, not the sum, and not the shorter one.
    let further = [short.read_as(&one).await.unwrap(), middle.read_as(&other).await.unwrap()];
    assert_eq!((remaining(one).await, remaining(other).await), (100, 50));
    let pttl: i64 = server.run(&["PTTL", "lock:rw"]).await;
    assert!((95_000..=100_000).contains(&pttl), "the latest end: {pttl}");
    for guard in further {
        guard.release().await.unwrap();
    }
    assert_eq!((remaining(one).await, remaining(other).await), (100, 50));
    for guard in guards {
        guard.release().await.unwrap();
    }
    // The two sides have a ttl each.
    let options = Options::new().read_ttl(Duration::from_secs(7)).write_ttl(Duration::from_secs(70));
    let sided = locks.with_options(options.renewal(Renewal::Never)).unwrap().rwlock("rw").unwrap();
    let writing = sided.write_as(&one).await.unwrap();
    let reading = sided.read_as(&one).await.unwrap();
    let seen = see(&sided).await;
    let seconds = |holder: &redlatch::Holder| holder.remaining.unwrap().as_secs_f32().round() as u64;
    assert_eq!((seconds(&seen.writer.unwrap()), seconds(&seen.readers[0])), (70, 7));
    writing.release().await.unwrap();
    reading.release().await.unwrap();
    drop((long, middle, short, sided, locks));
    server.assert_nothing_left().await;
}

/// Renewals touch their own holder only.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_renews_nobody_else() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let with = |options: Options| locks.with_options(options).unwrap().rwlock("rw").unwrap();
    let still = with(Options::new().renewal(Renewal::Never));
    let moving = with(Options::new().ttl(Duration::from_millis(300)));
    let owners = [Owner::new(), Owner::new()];
    let guards = [still.read_as(&owners[0]).await.unwrap(), moving.read_as(&owners[1]).await.unwrap()];
    let fields = owners.map(|owner| format!("read:{owner}"));
    let value = |field: String| {
        let server = &server;
        async move { server.run::<String>(&["HGET", "lock:rw", &field]).await }
    };
    let before = [value(fields[0].clone()).await, value(fields[1].clone()).await];
    eventually("renewed", || async { value(fields[1].clone()).await != before[1] }).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(value(fields[0].clone()).await, before[0], "untouched");
    for guard in guards {
        assert!(!guard.lease().is_lost());
        guard.release().await.unwrap();
    }
    drop((still, moving, locks));
    server.assert_nothing_left().await;
}

/// A writer who waits keeps new readers out: until he gives up, in whichever way.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_a_waiting_writers_mark_ends_with_him() {
    let server = Server::start().await;
    let (lock, other) = (client(&server, told()).await, client(&server, told()).await);
    let owner = Owner::new();
    let reading = lock.read_as(&owner).await.unwrap();
    for ends in ["cancelled", "timed out", "client dropped"] {
        let elsewhere = client(&server, told()).await;
        let writer = queued(&lock, async move {
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
        lock.try_read_as(&owner).await.unwrap().expect("who reads may").release().await.unwrap();
        let waiting = queued(&lock, {
            let other = other.clone();
            async move { other.read().await }
        })
        .await;
        if ends != "timed out" {
            writer.abort();
        }
        let start = Instant::now();
        let beside = soon("let in", waiting).await.unwrap().unwrap();
        assert!(start.elapsed() < super::NEVER / 2, "{ends}: told: {:?}", start.elapsed());
        beside.release().await.unwrap();
        eventually("he left the queue", || async { see(&lock).await.waiting_writers == 0 }).await;
    }
    reading.release().await.unwrap();
    drop((lock, other));
    server.assert_nothing_left().await;
}

/// He died without a word: his mark ends with his heartbeat, and those who wait find out by looking.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_a_dead_writers_mark_ends_with_his_heartbeat() {
    let server = Server::start().await;
    let lock = client(&server, Options::new()).await;
    let reading = lock.read().await.unwrap();
    let script = include_str!("../../../lua/rwlock/write_acquire.lua");
    let keys = ["lock:rw", "{lock:rw}:fence", "{lock:rw}:waiters", "{lock:rw}:ended:aa"];
    let mut words = vec!["EVAL", script, "4"];
    words.extend(keys);
    words.extend(["aa", "aa", "30000", "1", "255", "aa 600 aa lock:wake:gone"]);
    let _: Vec<u64> = server.run(&words).await;
    let start = Instant::now();
    assert!(lock.try_read().await.unwrap().is_none(), "kept out");
    let beside = soon("let in", lock.read()).await.unwrap();
    assert!(start.elapsed() > Duration::from_millis(300), "{:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    reading.release().await.unwrap();
    beside.release().await.unwrap();
    lock.try_write().await.unwrap().expect("the dead are passed over").release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_is_taken_away_by_force_on_either_side() {
    let server = Server::start().await;
    let (lock, other) = (client(&server, told()).await, client(&server, told()).await);
    assert!(!lock.force_release_read().await.unwrap() && !lock.force_release_write().await.unwrap());
    // Readers only: the writer who waits enters.
    let readers = [lock.read().await.unwrap(), other.read().await.unwrap()];
    assert!(!lock.force_release_write().await.unwrap(), "nobody writes");
    let writer = queued(&lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    assert!(other.force_release_read().await.unwrap());
    let writing = soon("let in", writer).await.unwrap().unwrap();
    for guard in readers {
        assert!(matches!(guard.release().await, Err(Error::NotHeld { .. })));
    }
    assert!(lock.is_held_by_lease(writing.lease()).await.unwrap(), "late releases take nothing");
    // The writer only: all readers who wait enter.
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let lock = lock.clone();
        waiting.push(queued(&other, async move { lock.read().await }).await);
    }
    assert!(!lock.force_release_read().await.unwrap(), "nobody reads");
    assert!(lock.force_release_write().await.unwrap());
    for reader in waiting {
        soon("let in", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(matches!(writing.release().await, Err(Error::NotHeld { .. })));
    // One who does both keeps the other side.
    let owner = Owner::new();
    for side in ["read", "write"] {
        let (writing, reading) = (lock.write_as(&owner).await.unwrap(), lock.read_as(&owner).await.unwrap());
        if side == "read" {
            assert!(lock.force_release_read().await.unwrap());
            assert!(matches!(reading.release().await, Err(Error::NotHeld { .. })));
            assert_eq!(see(&lock).await.mode, Mode::Write);
            writing.release().await.unwrap();
        } else {
            assert!(lock.force_release_write().await.unwrap());
            assert!(matches!(writing.release().await, Err(Error::NotHeld { .. })));
            assert_eq!(see(&lock).await.mode, Mode::Read);
            reading.release().await.unwrap();
        }
    }
    drop((lock, other));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_shows_both_sides() {
    let server = Server::start().await;
    let (lock, other) = (client(&server, told()).await, client(&server, told()).await);
    let free = see(&lock).await;
    assert_eq!((free.mode, free.writer, free.readers.len(), free.reader_count), (Mode::Free, None, 0, 0));
    let owner = Owner::new();
    let guards = [lock.read_as(&owner).await.unwrap(), lock.read_as(&owner).await.unwrap()];
    let beside = other.read().await.unwrap();
    let writer = queued(&lock, {
        let other = other.clone();
        async move { other.write().await }
    })
    .await;
    let mut readers = Vec::new();
    for _ in 0..2 {
        let other = other.clone();
        readers.push(queued(&lock, async move { other.read().await }).await);
    }
    let seen = see(&lock).await;
    assert_eq!((seen.mode, seen.reader_count), (Mode::Read, 2));
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
    let seen = see(&lock).await;
    assert_eq!((seen.mode, seen.waiting_readers, seen.reader_count), (Mode::Write, 2, 0));
    assert_eq!(seen.fencing_token, writing.lease().fencing_token());
    writing.release().await.unwrap();
    for reader in readers {
        soon("their turn", reader).await.unwrap().unwrap().release().await.unwrap();
    }
    drop((lock, other));
    server.assert_nothing_left().await;
}

/// Fields of somebody else, a later version perhaps, stay where they are.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_keeps_unknown_fields() {
    let server = Server::start().await;
    let (lock, other) = (client(&server, told()).await, client(&server, told()).await);
    let first = lock.read().await.unwrap();
    let _: i64 = server.run(&["HSET", "lock:rw", "later", "1", "reading", "2"]).await;
    let unknown = || async {
        server.run::<Vec<Option<u32>>>(&["HMGET", "lock:rw", "later", "reading"]).await == [Some(1), Some(2)]
    };
    let second = other.read().await.unwrap();
    first.release().await.unwrap();
    let writer = queued(&lock, {
        let lock = lock.clone();
        async move { lock.write().await }
    })
    .await;
    second.release().await.unwrap();
    let writing = soon("his turn", writer).await.unwrap().unwrap();
    assert!(unknown().await);
    let reading = writing.downgrade().await.unwrap();
    reading.release().await.unwrap();
    assert!(unknown().await, "the lock is free, and they are still there");
    assert_eq!(see(&lock).await.mode, Mode::Free);
    let fields: u64 = server.run(&["HLEN", "lock:rw"]).await;
    assert_eq!(fields, 2, "and nothing of ours");
    let reading = lock.read().await.unwrap();
    assert!(lock.force_release_read().await.unwrap());
    assert!(reading.release().await.is_err());
    lock.write().await.unwrap().release().await.unwrap();
    assert!(unknown().await);
    drop((lock, other));
    server.assert_nothing_left().await;
}
