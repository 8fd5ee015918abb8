//! Tokens that a grant reserves for the tasks of a client that pass the hold on.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::suite::local_turns::{contended, waiting};
use crate::support::{AnyLock, LONGEST_WAIT, Server, eventually, patient, soon};

/// A counter that is lost is rebuilt from the server's clock. So a client whose counter is ahead of
/// that clock reserves nothing, also if no task has waited for the lock for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn no_token_is_reserved_while_the_counter_is_ahead_of_the_clock() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().local_turn(Duration::from_millis(100))).await;
    let lock = locks.mutex("ahead").unwrap();
    let counter = || async { server.run::<u64>(&["GET", "{lock:ahead}:fence"]).await };
    let clock = server.run::<(u64, u64)>(&["TIME"]).await;
    let ahead = (clock.0 + 3_600) * 1_000_000;
    server.run::<()>(&["SET", "{lock:ahead}:fence", &ahead.to_string(), "EX", "3600"]).await;
    for round in 0..3 {
        let first = lock.lock().await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let lock = lock.clone();
            waiting.spawn(async move { lock.lock().await.unwrap() });
        }
        eventually("one of them queues", || async { server.waiters("{lock:ahead}:waiters").await == 1 })
            .await;
        first.release().await.unwrap();
        while let Some(guard) = soon("the next task has its turn", waiting.join_next()).await {
            let guard = guard.unwrap();
            let token: u64 = guard.lease().fencing_token().unwrap().to_string().parse().unwrap();
            let reserved = counter().await - token;
            // The first round tells the client where the counter is.
            assert!(round == 0 || reserved == 0, "round {round}: {reserved} tokens beside {token}");
            guard.release().await.unwrap();
        }
        eventually("no task is left", || async { locks.is_idle() }).await;
    }
    drop((lock, locks));
    server.assert_nothing_left().await;
}

/// A call is dropped before its task learns of the grant, so what that has reserved stays reserved.
/// Many such calls a second must not make the counter outrun the clock.
#[tokio::test(flavor = "multi_thread")]
async fn grants_that_no_task_learns_of_keep_the_counter_behind_the_clock() {
    const CALLS: u64 = 100;
    let server = Server::start().await;
    let locks = server.locks_with(patient().local_turn(Duration::from_millis(100))).await;
    let lock = AnyLock::Mutex(locks.mutex("unseen").unwrap());
    contended(&lock).await.release().await.unwrap();
    // One connection and no pauses: the clock must have no time to catch up.
    let mut connection = server.connection().await;
    let mut look = async || -> (u64, bool) {
        let mut both = redis::pipe();
        both.get("{lock:unseen}:fence").exists("lock:unseen").query_async(&mut connection).await.unwrap()
    };
    let clock = async || {
        let (seconds, micros) = server.run::<(u64, u64)>(&["TIME"]).await;
        seconds * 1_000_000 + micros
    };
    let (mut counter, _) = look().await;
    let (first, began, start) = (counter, clock().await, Instant::now());
    for _ in 0..CALLS {
        let mut front = Box::pin(lock.lock());
        // On a busy machine it may have its grant by then: its guard is dropped, too.
        let early = poll_fn(|context| Poll::Ready(front.as_mut().poll(context))).await;
        let behind = waiting(&lock).await;
        while look().await.0 == counter {
            assert!(start.elapsed() < LONGEST_WAIT, "the lock is granted");
        }
        drop((behind, early, front));
        while look().await.1 {
            assert!(start.elapsed() < LONGEST_WAIT, "it is released");
        }
        (counter, _) = look().await;
    }
    let (used, micros) = (counter - first, clock().await - began);
    println!("{used} tokens for {CALLS} calls in {micros} us");
    // The first call, and the last, may reserve 1,000 at once.
    assert!(used <= micros + 2_000 + CALLS, "{used} tokens in {micros} us");
    drop((lock, locks));
    server.assert_nothing_left().await;
}
