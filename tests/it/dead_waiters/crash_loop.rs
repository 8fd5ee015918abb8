//! A client that queues and crashes again and again, before and beside a live waiter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{BOUND, CLAIM, KEY, NAME, waiting};
use crate::support::raw::{RawLock, RawWaiter};
use crate::support::{Kind, Server, Stopwatch, eventually, soon};

/// The period of the crashes.
const PERIOD: Duration = Duration::from_millis(100);

/// Queues a new waiter without a client in each period.
async fn crashes(
    server: Arc<Server>,
    kind: Kind,
    channel: &'static str,
    count: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
) {
    let lock = RawLock { server: &server, kind, key: KEY };
    let claim_ms = CLAIM.as_millis() as u64;
    while !ends.load(Ordering::Relaxed) {
        let attempt = format!("crashed-{}-{}", kind.name(), count.fetch_add(1, Ordering::Relaxed));
        // An attempt that acquires instead of queueing releases the lock: it is no waiter.
        if lock.acquire(&attempt, claim_ms, Some(RawWaiter { claim_ms, channel })).await.is_some() {
            lock.release(&attempt).await;
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Checks the time from the release until the live waiter acquires.
async fn delay(holder: Kind, crashing: Kind, living: Kind, channel: &'static str) {
    let server = Arc::new(Server::start().await);
    let guard = holder.lock(&server.locks().await, NAME).lock().await.unwrap();
    let (count, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let looping =
        tokio::spawn(crashes(Arc::clone(&server), crashing, channel, Arc::clone(&count), Arc::clone(&ends)));
    let crashed = |more: u64| {
        let end = count.load(Ordering::Relaxed) + more;
        let count = &count;
        async move {
            eventually("the client crashes again", || async { count.load(Ordering::Relaxed) >= end }).await
        }
    };
    crashed(6).await;
    let queue = RawLock { server: &server, kind: living, key: KEY };
    let lock = living.lock(&server.locks_with(waiting()).await, NAME);
    let attempt = tokio::spawn(async move { lock.lock().await });
    let ours = |waiters: Vec<(String, f64)>| waiters.iter().any(|(text, _)| !text.starts_with("crashed-"));
    eventually("the live waiter queues", || async { ours(queue.waiters().await) }).await;
    crashed(4).await; // the crashed waiters before it still count as alive
    let length = queue.waiters().await.len();
    let start = Stopwatch::start();
    guard.release().await.unwrap();
    let granted = soon("the live waiter acquires", attempt).await.unwrap().unwrap();
    let took = start.stop();
    ends.store(true, Ordering::Relaxed);
    looping.await.unwrap();
    println!("FIG {took:?}: {crashing:?} crash in a loop before {living:?} ({channel:?}), {length} queued");
    assert!(took.undisturbed() < BOUND, "{took:?}: {crashing:?} before {living:?}");
    drop(granted);
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_loop_of_polling_waiters_takes_one_claim() {
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        delay(kind, kind, kind, "").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_loop_of_notified_waiters_takes_one_claim() {
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        delay(kind, kind, kind, "lock:wake:00000000000000000000000000000000").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_loop_of_readers_takes_one_claim_of_a_writer() {
    delay(Kind::Write, Kind::Read, Kind::Write, "").await;
    delay(Kind::Read, Kind::Read, Kind::Write, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_loop_of_writers_takes_one_claim_of_a_reader() {
    delay(Kind::Write, Kind::Write, Kind::Read, "").await;
}
