//! A queue from before, as a server has it that was set back to an earlier state, or a replica that was behind.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::failover::{KINDS, told};
use crate::support::{AnyLock, Server, eventually, soon};

/// For so long a lock is kept for one who was told, unless he gives it back.
const CLAIM: Duration = Duration::from_secs(3);

async fn queue(server: &Server, lock: &AnyLock) -> Vec<String> {
    server.run(&["ZRANGE", &waiters(lock), "0", "-1", "WITHSCORES"]).await
}

fn waiters(lock: &AnyLock) -> String {
    format!("{{{}}}:waiters", lock.key())
}

/// Puts a queue back, before one who waits, and releases the lock: how long he waits for those who are not there any more.
async fn held_up(server: &Server, lock: &AnyLock, old: &[String], heir: AnyLock) -> Duration {
    let guard = soon("held", lock.lock()).await.unwrap();
    let waiting = tokio::spawn(async move { heir.lock().await });
    eventually("it queues", || async { server.queued_for(lock).await == 1 }).await;
    for entry in old.chunks(2) {
        server.run::<()>(&["ZADD", &waiters(lock), &entry[1], &entry[0]]).await;
    }
    let start = Instant::now();
    guard.release().await.unwrap();
    let served = soon("served", waiting).await.unwrap().unwrap();
    let took = start.elapsed();
    served.release().await.unwrap();
    eventually("it is free", || async { !server.is_locked(lock).await }).await;
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_from_before_hold_nobody_up() {
    let server = Server::start().await;
    let (locks, others) = (server.locks_with(told()).await, server.locks_with(told()).await);
    for kind in KINDS {
        let lock = kind.rival().lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        // One who gets it, and one who gives up.
        let heir = kind.lock(&others, kind.name());
        let another = heir.for_another();
        let served = tokio::spawn(async move { heir.lock().await });
        eventually("the first one queues", || async { queue(&server, &lock).await.len() >= 2 }).await;
        let gives_up = tokio::spawn(async move { another.lock().await });
        eventually("the second one queues", || async { server.queued_for(&lock).await >= 1 }).await;
        let old = queue(&server, &lock).await;
        gives_up.abort();
        assert!(gives_up.await.is_err());
        guard.release().await.unwrap();
        soon("served", served).await.unwrap().unwrap().release().await.unwrap();
        soon("given back", others.settled()).await;
        eventually("it is free", || async { !server.is_locked(&lock).await }).await;
        let took = held_up(&server, &lock, &old, kind.lock(&others, kind.name())).await;
        println!("{kind:?}: held up for {took:?} by {}", old.len() / 2);
        assert!(took < CLAIM / 2, "{kind:?}: {took:?}");
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}
