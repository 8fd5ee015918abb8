//! `ReentrantLock`: owners that enter, and owners that exclude each other.

use std::time::Duration;

use redlatch::{Options, Owner, Renewal};

use crate::support::{Server, Stopwatch, eventually, soon};

/// Tasks of two owners wait in one client. Once a task of one owner acquires the lock, its other
/// tasks enter at once: not after the task of the other owner, which would deadlock, and not after
/// a poll.
#[tokio::test]
async fn reentrant_tasks_enter_once_their_owner_holds_the_lock() {
    let server = Server::start().await;
    let polls_rarely = Options::new().poll_cap(Duration::from_secs(10));
    let (locks, elsewhere) = (server.locks_with(polls_rarely).await, server.locks().await);
    let (lock, holder) = (locks.reentrant("entered").unwrap(), elsewhere.reentrant("entered").unwrap());
    let (owner, between) = (Owner::new(), Owner::new());
    let held = holder.lock().await.unwrap();
    let waits = |owner: &Owner| {
        let (lock, owner) = (lock.clone(), owner.clone());
        tokio::spawn(async move { lock.with_owner(&owner).lock().await })
    };
    let first = waits(&owner);
    let in_redis = || async { server.run::<u64>(&["ZCARD", "{lock:entered}:waiters"]).await == 1 };
    eventually("the first task queues in Redis", in_redis).await;
    let mut tried = server.scripts_run().await;
    let mut tasks = Vec::new();
    for owner in [&between, &owner, &owner] {
        tasks.push(waits(owner));
        tried += 1;
        eventually("the task has tried once", || async { server.scripts_run().await >= tried }).await;
    }
    held.release().await.unwrap();
    let start = Stopwatch::start();
    let outer = soon("the first task is granted the lock", first).await.unwrap().unwrap();
    for task in tasks.drain(1..) {
        soon("the owner's other tasks enter", task).await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(start.undisturbed() < Duration::from_secs(2), "{start:?}");
    outer.release().await.unwrap();
    soon("the other owner is granted the lock", tasks.remove(0))
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    drop((lock, locks, holder, elsewhere));
    server.assert_nothing_left().await;
}

/// Without an explicit owner, every hold has a new one, which can be passed on.
#[tokio::test]
async fn reentrant_holds_without_explicit_owner_exclude_each_other() {
    let server = Server::start().await;
    let lock = server.locks().await.reentrant("alone").unwrap();
    assert!(lock.owner().is_none());
    let outer = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let bound = lock.with_owner(outer.owner());
    assert_eq!(bound.owner(), Some(outer.owner()));
    let inner = bound.try_lock().await.unwrap().expect("the same owner enters");
    let count: String = server.run(&["HGET", "lock:alone", &outer.owner().to_string()]).await;
    assert_eq!(count, "2");
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:alone"]).await, 0);
}

/// The owner holds the lock through another client. Its task tries to enter while the server
/// refuses writes for a moment, and no event follows: the lock does not change hands.
#[tokio::test]
async fn reentrant_task_tries_again_after_a_passing_failure() {
    let server = Server::start().await;
    let (locks, elsewhere) = (server.locks().await, server.locks().await);
    let unrenewed = Options::new().ttl(Duration::from_secs(60)).renewal(Renewal::Never);
    let holder = elsewhere.with_options(unrenewed).unwrap().reentrant("entered").unwrap();
    let (lock, owner) = (locks.reentrant("entered").unwrap(), Owner::new());
    let outer = holder.with_owner(&owner).lock().await.unwrap();
    let waits = |owner: &Owner| {
        let (lock, owner) = (lock.clone(), owner.clone());
        tokio::spawn(async move { lock.with_owner(&owner).lock().await })
    };
    let front = waits(&Owner::new());
    let in_redis = || async {
        server.run::<u64>(&["ZCOUNT", "{lock:entered}:waiters", "0", "4503599627370495"]).await == 1
    };
    eventually("the first task queues in Redis", in_redis).await;
    let tried = server.scripts_run().await;
    let behind = waits(&Owner::new());
    // Three requests: the second task tries once, and the first one polls and asks for the holder.
    eventually("both have asked", || async { server.scripts_run().await >= tried + 3 }).await;
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    let refused = async || server.run::<String>(&["INFO", "errorstats"]).await.contains("NOREPLICAS");
    let inner = waits(&owner);
    eventually("the owner's task is refused", refused).await;
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    soon("the owner's task enters", inner).await.unwrap().unwrap().release().await.unwrap();
    outer.release().await.unwrap();
    for task in [front, behind] {
        soon("the others follow", task).await.unwrap().unwrap().release().await.unwrap();
    }
}
