//! What one message wakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::{READ_LANE, client, queued, told};
use crate::support::{Oracle, Server, eventually, soon};

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
        eventually("they queue", || async {
            server.lock_state(lock.name()).await.waiting_readers == everybody
        })
        .await;
        let writer = queued(&server, &lock, {
            let other = client(&server, told()).await;
            async move { other.write().await }
        })
        .await;
        let before = server.published().await;
        let start = Instant::now();
        writing.release().await.unwrap();
        soon("all of them", async { while readers.join_next().await.transpose().unwrap().is_some() {} })
            .await;
        let writing = soon("then the writer", writer).await.unwrap().unwrap();
        assert!(start.elapsed() < super::NEVER / 2, "told: {:?}", start.elapsed());
        assert_eq!(server.published().await - before, CLIENTS as u64 + 1, "one message for each client");
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
    // Queued just now, so only PUBLISH can find that nothing listens to their channel.
    let now = server.time().await;
    for number in 0..300 {
        let dead =
            format!("{number:032x} read 60000 lock:wake:00000000000000000000000000000000 o{number} 255");
        let place = (now + number - READ_LANE).to_string();
        let _: i64 = server.run(&["ZADD", "{lock:rw}:waiters", &place, &dead]).await;
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
    eventually("they queue", || async {
        server.lock_state(lock.name()).await.waiting_readers == u64::from(READERS) + 300
    })
    .await;
    let writer = queued(&server, &lock, {
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
