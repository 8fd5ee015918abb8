//! `ReentrantLock`: owners that enter, and owners that exclude each other.

use std::time::Duration;

use redlatch::{Error, Options, Owner, Renewal};

use crate::support::{Server, Stopwatch, eventually, soon};

/// Tasks of two owners wait in one client. Once a task of one owner acquires the lock, its other
/// tasks enter at once: not after the task of the other owner, which would deadlock, and not after
/// a poll.
#[tokio::test]
async fn reentrant_tasks_enter_once_their_owner_holds_the_lock() {
    let server = Server::start().await;
    let polls_rarely = Options::new().poll_cap(Duration::from_secs(10));
    let (locks, elsewhere) = (server.locks_with(polls_rarely).await, server.locks().await);
    let (lock, holder) = (
        locks.reentrant("entered", &Owner::new()).unwrap(),
        elsewhere.reentrant("entered", &Owner::new()).unwrap(),
    );
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

/// Nested calls need no parameter: the owner comes from the task.
#[tokio::test]
async fn reentrant_holds_in_the_scope_of_an_owner_nest() {
    let server = Server::start().await;
    let (locks, owner) = (server.locks().await, Owner::new());
    let count = async || server.run::<Option<String>>(&["HGET", "lock:scoped", &owner.to_string()]).await;
    let inner = async || {
        let lock = locks.reentrant_in_scope("scoped").unwrap();
        assert_eq!(lock.owner(), &owner);
        lock.run(async |_| Ok::<_, Error>(count().await)).await
    };
    let outer = async {
        let lock = locks.reentrant_in_scope("scoped").unwrap();
        let seen = lock.run(async |_| inner().await).await.unwrap();
        assert_eq!(seen.as_deref(), Some("2"));
        // The innermost scope counts, and tasks that are spawned have none.
        let other = Owner::new();
        assert_eq!(other.scope(async { Owner::current() }).await, Some(other));
        let spawned = tokio::spawn(async { Owner::current() }).await.unwrap();
        (Owner::current(), spawned)
    };
    assert_eq!(owner.scope(outer).await, (Some(owner.clone()), None));
    assert_eq!(count().await, None);
}

/// A function that reads calls one that writes.
#[tokio::test]
async fn read_write_holds_in_the_scope_of_an_owner_nest() {
    let server = Server::start().await;
    let (locks, owner) = (server.locks().await, Owner::new());
    let write = async || {
        let lock = locks.rwlock_in_scope("scoped").unwrap();
        assert_eq!(lock.owner(), Some(&owner));
        lock.run_write(async |_| Ok::<_, Error>(lock.inspect().await?.mode)).await
    };
    let read = async {
        let lock = locks.rwlock_in_scope("scoped").unwrap();
        lock.run_read(async |_| write().await).await
    };
    assert_eq!(soon("the upgrade", owner.scope(read)).await.unwrap(), redlatch::Mode::Write);
    // Without that owner, the write would wait for the read.
    let plain = async { locks.rwlock("scoped").map(|lock| lock.owner().cloned()) };
    assert_eq!(owner.scope(plain).await.unwrap(), None);
}

/// Calls without an owner would wait for their own task.
#[tokio::test]
async fn lock_outside_of_a_scope_is_an_error_before_any_request() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let before = server.scripts_run().await;
    let refused = [locks.reentrant_in_scope("orphan").map(drop), locks.rwlock_in_scope("orphan").map(drop)];
    for error in refused.map(Result::unwrap_err) {
        assert!(matches!(&error, Error::NoOwner { name } if name.as_str() == "orphan"), "{error:?}");
        assert!(!error.is_transient() && !error.is_indeterminate() && error.context().is_none());
        assert_eq!(
            error.to_string(),
            "the lock \"orphan\" has no owner here: call it inside Owner::scope, or name the owner"
        );
    }
    assert!(matches!(locks.reentrant_in_scope(""), Err(Error::Name(_))));
    assert_eq!(server.scripts_run().await, before);
}

/// The owner holds the lock through another client. Its task tries to enter while the server
/// refuses writes for a moment, and no event follows: the lock does not change hands.
#[tokio::test]
async fn reentrant_task_tries_again_after_a_passing_failure() {
    let server = Server::start().await;
    let (locks, elsewhere) = (server.locks().await, server.locks().await);
    let unrenewed = Options::new().ttl(Duration::from_secs(60)).renewal(Renewal::Never);
    let holder = elsewhere.with_options(unrenewed).unwrap().reentrant("entered", &Owner::new()).unwrap();
    let (lock, owner) = (locks.reentrant("entered", &Owner::new()).unwrap(), Owner::new());
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
