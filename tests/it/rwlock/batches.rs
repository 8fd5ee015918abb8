//! Wake-ups of readers: batches of waiters, and messages per client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::{READ_LANE, client, notified_only, queued};
use crate::support::{Oracle, Server, Stopwatch, eventually, soon};

/// A release admits all waiting readers with one message per client, and notifies the writer only
/// once it is granted the lock.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_release_sends_one_message_per_client() {
    const CLIENTS: usize = 3;
    const READERS: usize = 5;
    // A client that cannot subscribe in time on a busy machine would poll.
    let options = || notified_only().node_timeout(Duration::from_secs(10));
    let server = Server::start().await;
    let lock = client(&server, options()).await;
    for _ in 0..3 {
        let writing = lock.write().await.unwrap();
        let inside = Arc::new(Barrier::new(CLIENTS * READERS));
        let mut readers = JoinSet::new();
        for _ in 0..CLIENTS {
            let other = client(&server, options()).await;
            let subscribers = server.subscribers().await;
            for reader in 0..READERS {
                if reader == 1 {
                    // A client's first waiter subscribes; the subscription serves all of them.
                    eventually("the client subscribes", || async {
                        server.subscribers().await.iter().any(|id| !subscribers.contains(id))
                    })
                    .await;
                }
                let (other, inside) = (other.clone(), Arc::clone(&inside));
                readers.spawn(async move {
                    let guard = other.read().await.unwrap();
                    inside.wait().await; // all of them hold the lock at the same time
                    guard.release().await.unwrap();
                });
            }
        }
        let all = (CLIENTS * READERS) as u64;
        eventually("the waiters queue", || async {
            server.lock_state(lock.name()).await.waiting_readers == all
        })
        .await;
        let writer = queued(&server, &lock, {
            let other = client(&server, options()).await;
            async move { other.write().await }
        })
        .await;
        let before = server.published().await;
        let start = Stopwatch::start();
        writing.release().await.unwrap();
        soon("all readers finish", async {
            while readers.join_next().await.transpose().unwrap().is_some() {}
        })
        .await;
        let writing = soon("the writer acquires", writer).await.unwrap().unwrap();
        assert!(start.undisturbed() < super::NEVER / 2, "the waiters are notified: {start:?}");
        assert_eq!(server.published().await - before, CLIENTS as u64 + 1, "one message for each client");
        writing.release().await.unwrap();
    }
    drop(lock);
    server.assert_nothing_left().await;
}

/// More readers wait than one release admits, with dead ones between them: all live readers are
/// admitted before the writer.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_release_admits_700_readers_past_dead_ones() {
    const READERS: u32 = 700;
    let server = Server::start().await;
    let (lock, shared) = (client(&server, notified_only()).await, client(&server, notified_only()).await);
    let writing = lock.write().await.unwrap();
    // Queued just now: only PUBLISH finds that their channel has no subscriber.
    let now = server.time().await;
    for number in 0..300 {
        let dead =
            format!("{number:032x} read 60000 lock:wake:00000000000000000000000000000000 o{number} 255");
        let place = (now + number - READ_LANE).to_string();
        let _: i64 = server.run(&["ZADD", "{lock:rw}:waiters", &place, &dead]).await;
    }
    let (inside, most) = (Arc::new(AtomicU32::new(0)), tokio::sync::watch::Sender::new(0));
    let mut readers = JoinSet::new();
    for _ in 0..READERS {
        let (shared, inside, most) = (shared.clone(), Arc::clone(&inside), most.clone());
        readers.spawn(async move {
            let guard = shared.read().await.unwrap();
            let count = inside.fetch_add(1, Ordering::SeqCst) + 1;
            most.send_modify(|most| *most = count.max(*most));
            let mut all = most.subscribe();
            soon("many readers at the same time", all.wait_for(|most| *most > 250)).await.unwrap();
            inside.fetch_sub(1, Ordering::SeqCst);
            assert!(!guard.lease().is_lost());
            let token = guard.lease().fencing_token();
            guard.release().await.unwrap();
            token
        });
    }
    eventually("the waiters queue", || async {
        server.lock_state(lock.name()).await.waiting_readers == u64::from(READERS) + 300
    })
    .await;
    let writer = queued(&server, &lock, {
        let lock = client(&server, notified_only()).await;
        async move { lock.write().await }
    })
    .await;
    let start = Stopwatch::start();
    writing.release().await.unwrap();
    let mut tokens = Vec::new();
    while let Some(outcome) = soon("all readers finish", readers.join_next()).await {
        tokens.push(outcome.unwrap());
    }
    assert!(start.undisturbed() < super::NEVER / 2, "{start:?}");
    let next = soon("the writer acquires", writer).await.unwrap().unwrap();
    let token = next.lease().fencing_token();
    assert!(tokens.iter().all(|reader| *reader < token), "readers enter before the writer");
    next.release().await.unwrap();
    drop((lock, shared));
    server.assert_nothing_left().await;
}

/// A release or downgrade admits 1,500 readers, which takes several batches. All hold the lock at
/// the same time, without polling.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_release_admits_1500_readers_together() {
    const READERS: usize = 1_500;
    /// The number of waiters that one script admits at most.
    const BATCH: u64 = 128;
    let server = Server::start().await;
    let lock = client(&server, notified_only()).await;
    for downgrades in [false, true] {
        let writing = lock.write().await.unwrap();
        let inside = Arc::new(Barrier::new(READERS));
        let mut readers = JoinSet::new();
        for _ in 0..2 {
            // The default TTL: renewals are rare enough not to be late on a slow machine.
            let shared = client(&server, notified_only()).await;
            for _ in 0..READERS / 2 {
                let (shared, inside) = (shared.clone(), Arc::clone(&inside));
                readers.spawn(async move {
                    let guard = shared.read().await.unwrap();
                    inside.wait().await;
                    guard.release().await.unwrap();
                });
            }
        }
        eventually("the waiters queue", || async {
            server.lock_state(lock.name()).await.waiting_readers as usize == READERS
        })
        .await;
        let before = server.published().await;
        let reading = if downgrades {
            Some(writing.downgrade().await.unwrap())
        } else {
            writing.release().await.unwrap();
            None
        };
        while let Some(outcome) = soon("all readers finish", readers.join_next()).await {
            outcome.unwrap();
        }
        let messages = server.published().await - before;
        println!("{messages} messages to {READERS} readers");
        // Each script notifies at least one client; without messages, every reader would poll.
        assert!(messages >= READERS as u64 / BATCH, "{messages} messages");
        if let Some(reading) = reading {
            reading.release().await.unwrap();
        }
    }
    drop(lock);
    server.assert_nothing_left().await;
}
