//! Re-entrant locks: owners that enter and that exclude each other.

use std::time::{Duration, Instant};

use redlatch::{Options, Owner};

use crate::support::{Server, eventually, soon};

/// Tasks of two owners wait in one client. Once a task of one owner gets the lock, the others of
/// that owner enter with it, and wait neither for the task between them, which would be for ever,
/// nor for a poll.
#[tokio::test]
async fn reentrant_tasks_enter_as_soon_as_their_owner_holds_the_lock_in_their_client() {
    let server = Server::start().await;
    let patient = Options::new().poll_cap(Duration::from_secs(10));
    let (locks, elsewhere) = (server.locks_with(patient).await, server.locks().await);
    let (lock, holder) = (locks.reentrant("entered").unwrap(), elsewhere.reentrant("entered").unwrap());
    let (owner, between) = (Owner::new(), Owner::new());
    let held = holder.lock().await.unwrap();
    let waits = |owner: &Owner| {
        let (lock, owner) = (lock.clone(), owner.clone());
        tokio::spawn(async move { lock.with_owner(&owner).lock().await })
    };
    let first = waits(&owner);
    let in_redis = || async { server.run::<u64>(&["ZCARD", "{lock:entered}:waiters"]).await == 1 };
    eventually("the first one waits in Redis", in_redis).await;
    let mut tried = server.scripts_run().await;
    let mut tasks = Vec::new();
    for owner in [&between, &owner, &owner] {
        tasks.push(waits(owner));
        tried += 1;
        eventually("it has tried", || async { server.scripts_run().await >= tried }).await;
    }
    held.release().await.unwrap();
    let start = Instant::now();
    let outer = soon("handed over", first).await.unwrap().unwrap();
    for task in tasks.drain(1..) {
        soon("entered", task).await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    outer.release().await.unwrap();
    soon("a turn", tasks.remove(0)).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, locks, holder, elsewhere));
    server.assert_nothing_left().await;
}

/// Without an owner, holds of a re-entrant lock exclude each other; the owner of one can be passed
/// on.
#[tokio::test]
async fn reentrant_holds_without_an_owner_exclude_each_other() {
    let server = Server::start().await;
    let lock = server.locks().await.reentrant("alone").unwrap();
    assert!(lock.owner().is_none());
    let outer = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let bound = lock.with_owner(outer.owner());
    assert_eq!(bound.owner(), Some(outer.owner()));
    let inner = bound.try_lock().await.unwrap().expect("it is of the same owner");
    let count: String = server.run(&["HGET", "lock:alone", &outer.owner().to_string()]).await;
    assert_eq!(count, "2");
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:alone"]).await, 0);
}
