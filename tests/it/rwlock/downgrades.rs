//! From writing to reading, and what one message wakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use redlatch::{Error, Mode, Options, Owner};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::{client, published, queued, see, told};
use crate::support::{Proxy, Server, eventually, soon};

#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_downgrades_without_an_instant_between() {
    let server = Server::start().await;
    let options = told().read_ttl(Duration::from_secs(9)).write_ttl(Duration::from_secs(50));
    let (lock, other) = (client(&server, options).await, client(&server, told()).await);
    for round in 0..20 {
        let writing = lock.write().await.unwrap();
        let old = writing.lease().clone();
        let reader = queued(&lock, {
            let other = other.clone();
            async move { other.read().await }
        })
        .await;
        let writer = queued(&lock, {
            let other = other.clone();
            async move { other.write().await }
        })
        .await;
        let start = Instant::now();
        let mine = writing.downgrade().await.unwrap();
        assert!(old.is_lost(), "nobody may write under it any more");
        assert_eq!(mine.lease().fencing_token(), old.fencing_token(), "the token stays");
        let beside = soon("readers wake", reader).await.unwrap().unwrap();
        assert!(start.elapsed() < super::NEVER / 2, "told: {:?}", start.elapsed());
        assert_eq!(beside.lease().fencing_token(), old.fencing_token(), "nobody wrote in between");
        assert!(!writer.is_finished() && !mine.lease().is_lost(), "round {round}");
        let until = mine.lease().valid_until();
        assert!(until < Instant::now() + Duration::from_secs(9), "the ttl of reading");
        mine.release().await.unwrap();
        beside.release().await.unwrap();
        soon("then the writer", writer).await.unwrap().unwrap().release().await.unwrap();
    }
    drop((lock, other));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_renews_what_was_downgraded() {
    let server = Server::start().await;
    let short = Duration::from_millis(400);
    let lock = client(&server, Options::new().read_ttl(short).write_ttl(Duration::from_secs(60))).await;
    let mine = lock.write().await.unwrap().downgrade().await.unwrap();
    tokio::time::sleep(4 * short).await;
    assert!(!mine.lease().is_lost() && lock.is_held_by_lease(mine.lease()).await.unwrap());
    mine.leak();
    eventually("its own ttl ends it", || async { see(&lock).await.mode == Mode::Free }).await;
    drop(lock);
    server.assert_nothing_left().await;
}

/// One of several holds to write: the others stay.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_downgrades_one_hold_of_several() {
    let server = Server::start().await;
    let lock = client(&server, Options::new()).await;
    let owner = Owner::new();
    let (outer, inner) = (lock.write_as(&owner).await.unwrap(), lock.write_as(&owner).await.unwrap());
    let reading = inner.downgrade().await.unwrap();
    let seen = see(&lock).await;
    assert_eq!((seen.writer.unwrap().count, seen.readers[0].count), (1, 1));
    assert!(lock.try_read().await.unwrap().is_none(), "he still writes");
    let both = outer.downgrade().await.unwrap();
    let seen = see(&lock).await;
    assert_eq!((seen.mode, seen.readers[0].count), (Mode::Read, 2));
    lock.try_read().await.unwrap().expect("beside him").release().await.unwrap();
    reading.release().await.unwrap();
    both.release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

/// The reply is lost, and the request sent again: it is changed once. A hold that was lost is not changed.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_downgrades_over_faults() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = Options::new().node_timeout(Duration::from_millis(300));
    let lock = redlatch::Locks::open_with(&proxy.url(), options).await.unwrap().rwlock("rw").unwrap();
    let watcher = client(&server, Options::new()).await;
    lock.write().await.unwrap().downgrade().await.unwrap().release().await.unwrap();
    for _ in 0..10 {
        let writing = lock.write().await.unwrap();
        proxy.lose_next_reply();
        let reading = soon("changed", writing.downgrade()).await.unwrap();
        let seen = see(&watcher).await;
        assert_eq!((seen.mode, seen.readers.len(), seen.readers[0].count), (Mode::Read, 1, 1));
        reading.release().await.unwrap();
    }
    assert!(proxy.lost() >= 10);
    // No answer at all: an error, and the hold is given back once the server can be reached.
    let writing = lock.write().await.unwrap();
    proxy.hold_replies(true);
    assert!(matches!(writing.downgrade().await, Err(Error::Redis { .. })));
    proxy.hold_replies(false);
    eventually("given back", || async { see(&watcher).await.mode == Mode::Free }).await;
    // Dropped in the middle: likewise.
    for micros in (0..2_000).step_by(100) {
        let writing = lock.write().await.unwrap();
        drop(tokio::time::timeout(Duration::from_micros(micros), writing.downgrade()).await);
        eventually("given back", || async { see(&watcher).await.mode == Mode::Free }).await;
    }
    let writing = lock.write().await.unwrap();
    assert!(watcher.force_release_write().await.unwrap());
    assert!(matches!(writing.downgrade().await, Err(Error::Lost { .. })));
    assert_eq!(see(&watcher).await.mode, Mode::Free);
    drop((lock, watcher, proxy));
    server.assert_nothing_left().await;
}

/// A release lets in all readers who wait, with one message for each client, and no writer to no purpose.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_wakes_readers_in_batches() {
    const CLIENTS: usize = 3;
    const READERS: usize = 5;
    let server = Server::start().await;
    let lock = client(&server, told()).await;
    for _ in 0..3 {
        let writing = lock.write().await.unwrap();
        let inside = Arc::new(Barrier::new(CLIENTS * READERS));
        let mut readers = JoinSet::new();
        for _ in 0..CLIENTS {
            let other = client(&server, told()).await;
            // The first of a client to wait subscribes: then all of them are told.
            for _ in 0..READERS {
                let (other, inside) = (other.clone(), Arc::clone(&inside));
                readers.spawn(async move {
                    let guard = other.read().await.unwrap();
                    inside.wait().await; // all of them at a time
                    guard.release().await.unwrap();
                });
            }
        }
        let everybody = (CLIENTS * READERS) as u64;
        eventually("they queue", || async { see(&lock).await.waiting_readers == everybody }).await;
        let writer = queued(&lock, {
            let other = client(&server, told()).await;
            async move { other.write().await }
        })
        .await;
        let before = published(&server).await;
        let start = Instant::now();
        writing.release().await.unwrap();
        soon("all of them", async { while readers.join_next().await.transpose().unwrap().is_some() {} })
            .await;
        let writing = soon("then the writer", writer).await.unwrap().unwrap();
        assert!(start.elapsed() < super::NEVER / 2, "told: {:?}", start.elapsed());
        assert_eq!(published(&server).await - before, CLIENTS as u64 + 1, "one message for each client");
        writing.release().await.unwrap();
    }
    drop(lock);
    server.assert_nothing_left().await;
}

/// More readers than one release lets in, and dead ones between them: everybody gets in, in the same phase.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_lets_in_more_readers_than_one_batch() {
    const READERS: u32 = 700;
    let server = Server::start().await;
    let (lock, crowd) = (client(&server, told()).await, client(&server, told()).await);
    let writing = lock.write().await.unwrap();
    for number in 0..300 {
        let dead = format!("{number:032x} 3000 o{number} lock:wake:gone");
        let _: i64 = server.run(&["ZADD", "{lock:rw}:waiters", "-4000000000000000", &dead]).await;
    }
    let (inside, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut readers = JoinSet::new();
    for _ in 0..READERS {
        let (crowd, inside, most) = (crowd.clone(), Arc::clone(&inside), Arc::clone(&most));
        readers.spawn(async move {
            let guard = crowd.read().await.unwrap();
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(200)).await;
            inside.fetch_sub(1, Ordering::SeqCst);
            assert!(!guard.lease().is_lost());
            let token = guard.lease().fencing_token();
            guard.release().await.unwrap();
            token
        });
    }
    eventually("they queue", || async { see(&lock).await.waiting_readers == u64::from(READERS) + 300 }).await;
    let writer = queued(&lock, {
        let lock = client(&server, told()).await;
        async move { lock.write().await }
    })
    .await;
    let token = writing.lease().fencing_token();
    let start = Instant::now();
    writing.release().await.unwrap();
    while let Some(outcome) = soon("all of them", readers.join_next()).await {
        assert_eq!(outcome.unwrap(), token, "before the writer");
    }
    assert!(start.elapsed() < super::NEVER / 2, "{:?}", start.elapsed());
    assert!(most.load(Ordering::SeqCst) > 250, "together: {most:?}");
    soon("then the writer", writer).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, crowd));
    server.assert_nothing_left().await;
}
