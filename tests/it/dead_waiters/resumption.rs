//! A waiter that was stopped, considered dead, and resumed.

use rustix::process::Signal;

use crate::support::raw::RawLock;
use crate::support::{Kind, Server, Worker, eventually, soon, ttl};

/// The key of the lock that the worker's role acquires.
const KEY: &str = "lock:held";

async fn gets_its_old_place(kind: Kind) {
    let server = Server::start().await;
    let holder = kind.rival().lock(&server.locks().await, "held");
    let guard = holder.lock().await.unwrap();
    let queue = RawLock { server: &server, kind, key: KEY };
    let mut first = Worker::start(&["hold", &server.url(), kind.name(), "1500"]);
    eventually("the first client queues", || async { queue.waiters().await.len() == 1 }).await;
    let place = queue.waiters().await;
    // A rival: readers would enter together. A waiter behind a writer polls as any other.
    let second = kind.rival().lock(&server.locks_with(ttl(600)).await, "held").for_another();
    let mut second = tokio::spawn(async move { second.lock().await });
    eventually("the second client queues", || async { queue.waiters().await.len() == 2 }).await;
    first.stop();
    eventually("the first waiter is counted as dead", || async { queue.waiters().await.len() == 1 }).await;
    assert!(!queue.waiters().await.contains(&place[0]), "{kind:?}: the second waiter is left");
    first.signal(Signal::CONT);
    eventually("the first client queues again", || async { queue.waiters().await.len() == 2 }).await;
    assert_eq!(queue.waiters().await[0], place[0], "{kind:?}: the resumed waiter has its old place");
    guard.release().await.unwrap();
    first.expect_line("holding");
    assert!(!second.is_finished(), "{kind:?}: the second waiter waits for the first");
    first.kill();
    let guard = soon("the second client acquires", &mut second).await.unwrap().unwrap();
    drop(guard);
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_waiter_gets_its_old_place_after_it_was_stopped() {
    gets_its_old_place(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_waiter_gets_its_old_place_after_it_was_stopped() {
    gets_its_old_place(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_gets_its_old_place_after_it_was_stopped() {
    gets_its_old_place(Kind::Read).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writer_gets_its_old_place_after_it_was_stopped() {
    gets_its_old_place(Kind::Write).await;
}
