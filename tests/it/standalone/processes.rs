//! Worker processes that exclude each other, are killed, and are stopped.

use std::time::Duration;

use redlatch::Owner;
use rustix::process::Signal;

use crate::support::{Kind, Oracle, Server, Stopwatch, Worker, eventually, soon};

async fn lock_excludes_among_sixteen_processes(kind: Kind) {
    const TURNS: u64 = 50;
    let server = Server::start().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "0").unwrap();
    let path = file.path().to_str().unwrap();
    let mut workers: Vec<Worker> = (0..16)
        .map(|_| Worker::start(&["count", &server.url(), kind.name(), path, &TURNS.to_string()]))
        .collect();
    for worker in &mut workers {
        worker.expect_line("ready");
    }
    for worker in &mut workers {
        worker.send("go");
    }
    for worker in workers {
        worker.finish();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), (16 * TURNS).to_string());
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_lock_excludes_among_sixteen_processes() {
    lock_excludes_among_sixteen_processes(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_lock_excludes_among_sixteen_processes() {
    lock_excludes_among_sixteen_processes(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_lock_excludes_among_sixteen_processes() {
    lock_excludes_among_sixteen_processes(Kind::Write).await;
}

async fn lock_is_acquired_after_its_holder_was_killed(kind: Kind) {
    let server = Server::start().await;
    let ttl = Duration::from_secs(6);
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), &ttl.as_millis().to_string()]);
    let token: u64 = worker.expect_line("holding").parse().unwrap();
    let lock = kind.rival().lock(&server.locks().await, "held");
    assert!(lock.try_lock().await.unwrap().is_none());
    let killed = Stopwatch::start();
    worker.kill();
    let guard = soon("the lock is granted", lock.lock()).await.unwrap();
    // The rest of the lease, and the longest pause between two polls.
    assert!(killed.undisturbed() < ttl + Duration::from_secs(3), "{killed:?}");
    assert!(guard.token() > token);
    guard.release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_lock_is_acquired_after_its_holder_was_killed() {
    lock_is_acquired_after_its_holder_was_killed(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_lock_is_acquired_after_its_holder_was_killed() {
    lock_is_acquired_after_its_holder_was_killed(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_lock_is_acquired_after_its_holder_was_killed() {
    lock_is_acquired_after_its_holder_was_killed(Kind::Write).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_standalone_lock_is_acquired_after_its_holder_was_killed() {
    lock_is_acquired_after_its_holder_was_killed(Kind::Read).await;
}

/// A holder is stopped for longer than its TTL. Its first check after that must report the loss,
/// and its late write must be refused.
async fn late_write_of_a_stopped_holder_is_refused(kind: Kind) {
    let server = Server::start().await;
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), "700"]);
    let stale: u64 = worker.expect_line("holding").parse().unwrap();
    assert!(write(&server, stale, "first").await);
    worker.stop();
    let lock = kind.rival().lock(&server.locks().await, "held");
    let guard = soon("the stopped holder's lease expires", lock.lock()).await.unwrap();
    assert!(guard.token() > stale);
    assert!(write(&server, guard.token(), "second").await);
    // Sent while it is stopped, so that this is the first thing it does.
    worker.send("look");
    worker.signal(Signal::CONT);
    assert_eq!(worker.expect_line("lost"), "true");
    assert!(!write(&server, stale, "late").await, "the stale token is refused");
    assert_eq!(server.run::<String>(&["GET", "{thing}:value"]).await, "second");
    guard.release().await.unwrap();
    worker.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_late_write_of_a_stopped_holder_is_refused() {
    late_write_of_a_stopped_holder_is_refused(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_late_write_of_a_stopped_holder_is_refused() {
    late_write_of_a_stopped_holder_is_refused(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_late_write_of_a_stopped_holder_is_refused() {
    late_write_of_a_stopped_holder_is_refused(Kind::Write).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_standalone_late_write_of_a_stopped_holder_is_refused() {
    late_write_of_a_stopped_holder_is_refused(Kind::Read).await;
}

/// A waiter is granted the lock while it is stopped. Once resumed, it reads the message after the
/// claim has expired.
async fn stopped_waiter_ignores_an_expired_grant(kind: Kind) {
    let server = Server::start().await;
    let lock = kind.lock(&server.locks().await, "held");
    let guard = lock.lock().await.unwrap();
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), "6000"]);
    eventually("the worker queues", || async { server.queued_for(&lock).await == 1 }).await;
    worker.stop();
    guard.release().await.unwrap();
    let other = lock.for_another();
    let successor = soon("the claim expires", other.lock()).await.unwrap();
    worker.signal(Signal::CONT);
    eventually("the worker queues again", || async { server.queued_for(&lock).await == 1 }).await;
    assert!(server.is_held_by(&lock, &successor).await);
    let token = successor.token();
    successor.release().await.unwrap();
    assert!(
        worker.expect_line("holding").parse::<u64>().unwrap() > token,
        "both held the lock at the same time"
    );
    worker.send("release");
    worker.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_stopped_waiter_ignores_an_expired_grant() {
    stopped_waiter_ignores_an_expired_grant(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_stopped_waiter_ignores_an_expired_grant() {
    stopped_waiter_ignores_an_expired_grant(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_stopped_waiter_ignores_an_expired_grant() {
    stopped_waiter_ignores_an_expired_grant(Kind::Write).await;
}

/// Writes like the protected resource, with `lua/fenced.lua`.
async fn write(server: &Server, token: u64, value: &str) -> bool {
    let script = include_str!("../../../lua/fenced.lua");
    let answer: i64 =
        server.run(&["EVAL", script, "2", "{thing}:value", "{thing}:token", &token.to_string(), value]).await;
    answer == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_another_process_reenters_with_the_same_owner() {
    let server = Server::start().await;
    let lock = server.locks().await.reentrant("shared", &Owner::new()).unwrap();
    let owner = Owner::new();
    let guard = lock.with_owner(&owner).lock().await.unwrap();
    let mut worker = Worker::start(&["reenter", &server.url(), &owner.to_string()]);
    let token = worker.expect_line("inside");
    assert_eq!(
        token,
        guard.lease().fencing_token().unwrap().to_string(),
        "the nested hold has another token"
    );
    assert_eq!(server.lock_state(lock.name()).await.writer.unwrap().count, 2);
    guard.release().await.unwrap();
    assert!(
        lock.with_owner(&Owner::new()).try_lock().await.unwrap().is_none(),
        "the other process is still inside"
    );
    assert_eq!(server.lock_state(lock.name()).await.writer.unwrap().owner, owner.to_string());
    worker.send("leave");
    worker.expect_line("outside");
    assert!(!server.lock_state(lock.name()).await.is_held());
    worker.finish();
    drop(lock);
    server.assert_nothing_left().await;
}
