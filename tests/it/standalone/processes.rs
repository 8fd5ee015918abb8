//! Real processes: taken turns, killed, stopped.

use std::time::{Duration, Instant};

use redlatch::Owner;
use rustix::process::Signal;

use crate::support::{Kind, Oracle, Server, Worker, eventually, soon};

async fn excludes_among_sixteen_processes(kind: Kind) {
    const TURNS: u64 = 50;
    let server = Server::start().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "0").unwrap();
    let path = file.path().to_str().unwrap();
    let mut workers: Vec<Worker> = (0..16)
        .map(|_| Worker::start(&["count", &server.url(), kind.name(), path, &TURNS.to_string()]))
        .collect();
    for worker in &mut workers {
        worker.hear("ready");
    }
    for worker in &mut workers {
        worker.tell("go");
    }
    for worker in workers {
        worker.finish();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), (16 * TURNS).to_string());
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_excludes_among_sixteen_processes() {
    excludes_among_sixteen_processes(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_excludes_among_sixteen_processes() {
    excludes_among_sixteen_processes(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_excludes_among_sixteen_processes() {
    excludes_among_sixteen_processes(Kind::Write).await;
}

async fn survives_a_killed_holder(kind: Kind) {
    let server = Server::start().await;
    let ttl = Duration::from_millis(1_000);
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), &ttl.as_millis().to_string()]);
    let token: u64 = worker.hear("holding").parse().unwrap();
    let lock = kind.rival().lock(&server.locks().await, "held");
    assert!(lock.try_lock().await.unwrap().is_none());
    let killed = Instant::now();
    worker.kill();
    let guard = soon("taken over", lock.lock()).await.unwrap();
    // Its lease, and the longest that a waiter goes without looking.
    assert!(killed.elapsed() < ttl + Duration::from_secs(3), "{:?}", killed.elapsed());
    assert!(guard.token() > token);
    guard.release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_survives_a_killed_holder() {
    survives_a_killed_holder(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_survives_a_killed_holder() {
    survives_a_killed_holder(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_survives_a_killed_holder() {
    survives_a_killed_holder(Kind::Write).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_standalone_survives_a_killed_holder() {
    survives_a_killed_holder(Kind::Read).await;
}

/// Stopped beyond its ttl, a holder must know at its first look, and its late write must be refused.
async fn a_paused_holder_is_fenced_off(kind: Kind) {
    let server = Server::start().await;
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), "700"]);
    let stale: u64 = worker.hear("holding").parse().unwrap();
    assert!(write(&server, stale, "first").await);
    worker.stop();
    let lock = kind.rival().lock(&server.locks().await, "held");
    let guard = soon("the paused holder's lease ends", lock.lock()).await.unwrap();
    assert!(guard.token() > stale);
    assert!(write(&server, guard.token(), "second").await);
    // Asked while it sleeps: its first look after waking up.
    worker.tell("look");
    worker.signal(Signal::CONT);
    assert_eq!(worker.hear("lost"), "true");
    assert!(!write(&server, stale, "late").await, "the stale token is refused");
    assert_eq!(server.run::<String>(&["GET", "{thing}:value"]).await, "second");
    guard.release().await.unwrap();
    worker.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_a_paused_holder_is_fenced_off() {
    a_paused_holder_is_fenced_off(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_a_paused_holder_is_fenced_off() {
    a_paused_holder_is_fenced_off(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_a_paused_holder_is_fenced_off() {
    a_paused_holder_is_fenced_off(Kind::Write).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_standalone_a_paused_holder_is_fenced_off() {
    a_paused_holder_is_fenced_off(Kind::Read).await;
}

/// Handed the lock while it is stopped, a waiter wakes up to news of a claim that is long over.
async fn trusts_no_news_from_before_it_was_stopped(kind: Kind) {
    let server = Server::start().await;
    let lock = kind.lock(&server.locks().await, "held");
    let guard = lock.lock().await.unwrap();
    let mut worker = Worker::start(&["hold", &server.url(), kind.name(), "1000"]);
    eventually("it queues", || async { server.queued_for(&lock).await == 1 }).await;
    worker.stop();
    guard.release().await.unwrap();
    let other = lock.for_another();
    let successor = soon("the claim is over", other.lock()).await.unwrap();
    worker.signal(Signal::CONT);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(server.is_held_by(&lock, &successor).await);
    let token = successor.token();
    successor.release().await.unwrap();
    assert!(worker.hear("holding").parse::<u64>().unwrap() > token, "it held what its successor held");
    worker.tell("release");
    worker.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_trusts_no_news_from_before_it_was_stopped() {
    trusts_no_news_from_before_it_was_stopped(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_trusts_no_news_from_before_it_was_stopped() {
    trusts_no_news_from_before_it_was_stopped(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn write_standalone_trusts_no_news_from_before_it_was_stopped() {
    trusts_no_news_from_before_it_was_stopped(Kind::Write).await;
}

/// What the protected resource does: `lua/fenced/set.lua`.
async fn write(server: &Server, token: u64, value: &str) -> bool {
    let script = include_str!("../../../lua/fenced/set.lua");
    let answer: i64 =
        server.run(&["EVAL", script, "2", "{thing}:value", "{thing}:token", &token.to_string(), value]).await;
    answer == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_another_process_enters_for_the_same_owner() {
    let server = Server::start().await;
    let lock = server.locks().await.reentrant("shared").unwrap();
    let owner = Owner::new();
    let guard = lock.with_owner(&owner).lock().await.unwrap();
    let mut worker = Worker::start(&["reenter", &server.url(), &owner.to_string()]);
    let token = worker.hear("inside");
    assert_eq!(token, guard.lease().fencing_token().unwrap().to_string(), "one token at every depth");
    assert_eq!(server.lock_state(lock.name()).await.writer.unwrap().count, 2);
    guard.release().await.unwrap();
    assert!(
        lock.with_owner(&Owner::new()).try_lock().await.unwrap().is_none(),
        "the other process is still inside"
    );
    assert_eq!(server.lock_state(lock.name()).await.writer.unwrap().owner, owner.to_string());
    worker.tell("leave");
    worker.hear("outside");
    assert!(!server.lock_state(lock.name()).await.is_held());
    worker.finish();
    drop(lock);
    server.assert_nothing_left().await;
}
