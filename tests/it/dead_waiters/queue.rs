//! The removal of dead waiters' entries from the queue.

use std::time::Duration;

use redlatch::Wakeups;

use super::{KEY, NAME};
use crate::support::raw::{RawLock, RawWaiter, WAITERS};
use crate::support::{KINDS, Kind, Server, eventually, patient, soon};

/// Waiters that are dead as soon as they are queued.
const SHORT: RawWaiter<'_> = RawWaiter { claim_ms: 1, channel: "" };

/// One live waiter of `kind` polls beside a thousand dead entries of kind `dead`.
async fn shrinks(kind: Kind, dead: Kind) {
    const DEAD: u64 = 1_000;
    let server = Server::start().await;
    let holder = kind.rival().lock(&server.locks().await, NAME);
    let queue = RawLock { server: &server, kind: dead, key: KEY };
    queue.add_dead(DEAD).await;
    assert_eq!(queue.waiters().await.len() as u64, DEAD);
    // Acquires without visiting the queue.
    let raw = RawLock { kind: kind.rival(), ..queue };
    server.run::<()>(&["RENAME", &queue.queue(), "aside"]).await;
    raw.acquire("holder", 60_000, None).await.unwrap();
    server.run::<()>(&["RENAME", "aside", &queue.queue()]).await;
    let before = server.scripts_run().await;
    let polling = patient().ttl(Duration::from_secs(3)).poll_cap(Duration::from_millis(10));
    let lock = kind.lock(&server.locks_with(polling.wakeups(Wakeups::Poll)).await, NAME);
    let waiting = tokio::spawn(async move { lock.lock().await });
    eventually("one waiter is left", || async { queue.waiters().await.len() == 1 }).await;
    let polls = server.scripts_run().await - before;
    println!("FIG {kind:?}: {DEAD} dead entries of {dead:?} are removed after {polls} polls");
    // One poll in sixteen cleans, and removes at most 400: some fifty polls, at random.
    assert!(polls < DEAD, "{kind:?}: {polls} polls");
    let alive: Vec<(String, f64)> = queue.waiters().await;
    assert!(!alive[0].0.starts_with("dead-"), "{kind:?}: {alive:?}");
    assert_eq!(raw.release("holder").await, 1);
    soon("the waiter is granted the lock", waiting).await.unwrap().unwrap().release().await.unwrap();
    drop(holder);
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_of_dead_waiters_shrinks_with_polls_of_one_live_waiter() {
    for kind in KINDS {
        shrinks(kind, kind).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_of_dead_waiters_of_another_kind_shrinks_with_polls() {
    shrinks(Kind::Mutex, Kind::Write).await;
    shrinks(Kind::Write, Kind::Reentrant).await;
}

/// Clients queue and crash in a loop, while the lock is held and no waiter polls.
#[tokio::test(flavor = "multi_thread")]
async fn queue_of_waiters_that_never_poll_stays_short() {
    let server = Server::start().await;
    for kind in KINDS {
        let key = format!("lock:{}", kind.name());
        let queue = RawLock { server: &server, kind, key: &key };
        RawLock { kind: kind.rival(), ..queue }.acquire("holder", 60_000, None).await.unwrap();
        queue.queue_all((0..2_000).map(|number| format!("dead-{number}")), SHORT).await;
        let length = queue.waiters().await.len();
        println!("FIG {kind:?}: {length} of 2,000 are left");
        assert!(length < 300, "{kind:?}: {length} entries are left");
    }
}

/// Each request removes about a hundred dead waiters, and answers that the lock is free in 10 ms.
#[tokio::test(flavor = "multi_thread")]
async fn free_lock_is_granted_past_a_thousand_dead_waiters() {
    let server = Server::start().await;
    for kind in KINDS {
        let key = format!("lock:{}", kind.name());
        let queue = RawLock { server: &server, kind, key: &key };
        let holder = RawLock { kind: kind.rival(), ..queue };
        let token = holder.acquire("holder", 60_000, None).await.unwrap();
        queue.add_dead(1_000).await;
        assert_eq!(holder.release("holder").await, 1);
        let (mut next, mut requests) = (None, 0);
        while next.is_none() && requests < 10 {
            next = queue.acquire("next", 60_000, None).await;
            requests += 1;
        }
        assert!(next >= Some(token), "{kind:?}: {next:?} after {requests} requests");
    }
}

/// Only a waiter that queues or polls extends the queue's TTL.
#[tokio::test(flavor = "multi_thread")]
async fn queue_of_dead_waiters_is_not_extended_by_try_lock() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for kind in KINDS {
        let key = format!("lock:{}", kind.name());
        let queue = RawLock { server: &server, kind, key: &key };
        let guard = kind.rival().lock(&locks, kind.name()).lock().await.unwrap();
        queue.queue_all((0..10).map(|number| format!("dead-{number}")), SHORT).await;
        let pttl = || async { server.run::<i64>(&["PTTL", &queue.queue()]).await };
        let first = pttl().await;
        assert!((1..=60_000).contains(&first), "{kind:?}: {first}");
        eventually("time passes", || async { pttl().await < first - 50 }).await;
        let lock = kind.lock(&locks, kind.name());
        // A few may be gone: one request in sixteen that queues cleans.
        let queued = server.queued_for(&lock).await;
        assert!(lock.try_lock().await.unwrap().is_none());
        assert_eq!(server.queued_for(&lock).await, queued);
        assert!(queued > 0);
        assert!(pttl().await < first - 50, "{kind:?}: the queue's TTL is not extended");
        guard.release().await.unwrap();
    }
}

/// Of many dead waiters, one is granted the lock for its claim, and none of the others ever is.
/// Each grant takes the next token, so tokens count the grants.
#[tokio::test(flavor = "multi_thread")]
async fn skipped_dead_waiter_is_never_granted() {
    let server = Server::start().await;
    // All kinds at the same time, since each waits for a claim to end.
    let of_kind = async |kind: Kind| {
        let key = format!("lock:{}", kind.name());
        let lock = RawLock { server: &server, kind, key: &key };
        let claim_ms = 3_000;
        let dying = RawWaiter { claim_ms, channel: "" };
        let token = lock.acquire("holder", 60_000, None).await.unwrap();
        lock.queue_all((0..10).map(|number| format!("dead-{number}")), dying).await;
        assert_eq!(lock.acquire("living", 60_000, Some(dying)).await, None);
        // The first waiter is granted the lock for its claim; all of them are dead by its end.
        assert_eq!(lock.release("holder").await, 1);
        let granted = std::sync::Mutex::new(None);
        eventually("the live waiter is granted the lock", || async {
            let answer = lock.acquire("living", 60_000, Some(dying)).await;
            *granted.lock().unwrap() = answer;
            answer.is_some()
        })
        .await;
        assert_eq!(
            granted.into_inner().unwrap(),
            Some(token + 2),
            "{kind:?}: one claim for all dead waiters"
        );
        // A late waiter queues behind the entries that were not removed yet.
        assert_eq!(lock.acquire("late", 60_000, Some(dying)).await, None);
        assert_eq!(lock.release("living").await, 1);
        assert_eq!(lock.acquire("late", 60_000, Some(dying)).await, Some(token + 3), "{kind:?}");
        assert_eq!(lock.release("late").await, 1);
        let exists: u64 = server.run(&["EXISTS", &key]).await;
        assert_eq!(exists, 0, "{kind:?}: free");
        assert_eq!(lock.acquire("last", 60_000, None).await, Some(token + 4), "{kind:?}");
        let count: u64 = server.run(&["ZCOUNT", &lock.queue(), "-inf", WAITERS]).await;
        assert_eq!(count, 0, "{kind:?}");
    };
    tokio::join!(of_kind(Kind::Mutex), of_kind(Kind::Reentrant), of_kind(Kind::Write));
}

/// A release in a cluster leaves a mark. Very many of them do not hide the mark that proves a
/// waiter alive.
#[tokio::test(flavor = "multi_thread")]
async fn live_waiter_is_granted_beside_twenty_thousand_marks() {
    let server = Server::start().await;
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        let key = format!("lock:{}", kind.name());
        let lock = RawLock { server: &server, kind, key: &key };
        // A busy machine takes seconds for what follows.
        let polling = RawWaiter { claim_ms: 30_000, channel: "" };
        let token = lock.acquire("holder", 60_000, None).await.unwrap();
        assert_eq!(lock.acquire("living", 60_000, Some(polling)).await, None);
        // The waiter queued long ago, and has just polled.
        let (entry, place) = lock.waiters().await.remove(0);
        let place = format!("{:.0}", place - 60_000_000.0);
        server.run::<()>(&["ZADD", &lock.queue(), &place, &entry]).await;
        assert_eq!(lock.acquire("living", 60_000, Some(polling)).await, None);
        let marks = "local now = redis.call('TIME')
            for number = 1, 20000 do
              redis.call('ZADD', KEYS[1], 2^52 + (now[1] + 30) * 1000000 + 11, 'ended e' .. number)
            end";
        server.run::<redis::Value>(&["EVAL", marks, "1", &lock.queue()]).await;
        let release = lock.releasing("holder", polling);
        let released = lock.send("release", &release).await.unwrap();
        assert_eq!(released, redis::Value::Int(1));
        assert!(lock.waiters().await.is_empty(), "{kind:?}: the waiter is no longer queued");
        assert_eq!(server.run::<u64>(&["EXISTS", &key]).await, 1, "{kind:?}: the waiter is granted the lock");
        assert_eq!(lock.acquire("living", 60_000, Some(polling)).await, Some(token + 1), "{kind:?}");
    }
}
