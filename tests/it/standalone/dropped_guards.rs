//! Guards and calls that are dropped: each of them is released, however many there are.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use redis::Value;
use redlatch::{Locks, Options};
use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;

use crate::support::raw::RawLock;
use crate::support::{Kind, Proxy, Server, eventually, patient, queued, soon};

/// More than the attempts without a lease that a client remembers, and those that it is releasing.
const GUARDS: usize = 80_000;

/// How many attempts without a lease a client remembers at most.
const REMEMBERED: usize = 65_536;

#[tokio::test(flavor = "multi_thread")]
async fn very_many_guards_dropped_at_once_are_all_released() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let (mut tasks, mut guards) = (JoinSet::new(), Vec::new());
    for task in 0..100 {
        let locks = locks.clone();
        tasks.spawn(async move {
            let mut guards = Vec::new();
            for number in 0..GUARDS / 100 {
                guards.push(locks.mutex(format!("{task}-{number}")).unwrap().lock().await.unwrap());
            }
            guards
        });
    }
    while let Some(some) = tasks.join_next().await {
        guards.extend(some.unwrap());
    }
    assert_eq!(guards.len(), GUARDS);
    // So that none is released before all are due.
    server.pause();
    drop(guards);
    server.resume();
    soon("all are released", locks.settled()).await;
    let held: Vec<String> = server.run(&["KEYS", "lock:*"]).await;
    assert!(held.is_empty(), "{} locks are still held", held.len());
}

/// The server refuses the first try of that release, as during a failover. It is tried again after
/// a pause, in which the last reader releases its own hold.
#[tokio::test]
async fn the_last_reader_waits_for_the_release_of_a_dropped_guard() {
    let server = Server::start().await;
    let (locks, elsewhere) = (server.locks_with(patient()).await, server.locks().await);
    let (lock, rival) = (locks.rwlock("dropped").unwrap(), elsewhere.rwlock("dropped").unwrap());
    let dropped = lock.read().await.unwrap();
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    drop(dropped);
    let refused = async || server.run::<String>(&["INFO", "errorstats"]).await.contains("NOREPLICAS");
    eventually("its release is refused", refused).await;
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    let last = lock.read().await.unwrap();
    soon("the last reader leaves", last.release()).await.unwrap();
    let writer = rival.try_write().await.unwrap().expect("no reader is left");
    writer.release().await.unwrap();
    drop((lock, locks, rival, elsewhere));
    server.assert_nothing_left().await;
}

/// The release of a dropped guard is delayed in the network, and the client releases the lock on
/// another connection. Then a second copy of its acquire arrives. No task holds that attempt any
/// more, so it must not be granted.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_was_sent_twice_refuses_a_late_acquire() {
    const KEY: &str = "lock:late";
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = Options::new().node_timeout(Duration::from_secs(1));
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    let guard = locks.mutex("late").unwrap().lock().await.unwrap();
    let attempt: String = server.run(&["GET", KEY]).await;
    proxy.hold_requests(true);
    drop(guard);
    eventually("it is released", async || server.run::<u64>(&["EXISTS", KEY]).await == 0).await;
    let raw = RawLock { server: &server, kind: Kind::Mutex, key: KEY };
    let late = raw.send("acquire", &raw.acquiring(&attempt, 60_000, None)).await.unwrap();
    assert_eq!(late, Value::Int(-1), "the late acquire was not refused");
    proxy.hold_requests(false);
    soon("it is settled", locks.settled()).await;
    drop(locks);
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// Attempts that were undone make room for others among those that a client remembers: the last
/// one, which is queued when its call is dropped, leaves the queue.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_is_undone_however_many_were_before() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut without_reply = 0;
    while without_reply <= REMEMBERED {
        for number in 0..1_000 {
            let lock = locks.mutex(format!("dropped-{number}")).unwrap();
            let mut call = Box::pin(lock.try_lock());
            // Its reply has hardly ever arrived.
            let early = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
            without_reply += usize::from(early.is_pending());
            yield_now().await; // after many polls in a row, none gets further
        }
        soon("all are undone", locks.settled()).await;
    }
    let guard = server.locks().await.mutex("last").unwrap().lock().await.unwrap();
    let waiters = async || server.waiters("{lock:last}:waiters").await;
    let lock = locks.mutex("last").unwrap();
    let waiting = queued(async || vec![waiters().await], async move { lock.lock().await.map(drop) }).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    soon("it is undone", locks.settled()).await;
    assert_eq!(waiters().await, 0);
    guard.release().await.unwrap();
}

/// The server hangs: the first request of an adoption was written, and the next one was not yet
/// when the call was dropped. What the first one does, once the server continues, is undone.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_adoption_is_undone_however_often_it_was_sent() {
    let limit = Duration::from_secs(1);
    let server = Server::start().await;
    let locks = server.locks_with(Options::new().ttl(Duration::from_secs(200)).node_timeout(limit)).await;
    let lock = locks.mutex("adopted").unwrap();
    let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
    server.pause();
    assert!(timeout(limit * 3 / 2, lock.adopt(&ticket)).await.is_err(), "the server hangs");
    server.resume();
    let free = || async { server.run::<u64>(&["EXISTS", "lock:adopted"]).await == 0 };
    eventually("the hold is released", free).await;
    soon("all is released", locks.settled()).await;
    drop((lock, locks));
    server.assert_nothing_left().await;
}
