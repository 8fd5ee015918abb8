//! One node of three hangs, or has a lock for longer than the others: what two nodes do without it.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::contention::{Holders, turns};
use super::{KINDS, Quorum, options};
use crate::support::{Kind, Stopwatch, soon};

/// Two clients have one node each, and the third one hangs. Each would wait for it as long as the
/// other one, and release its own node at the same moment, for ever.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_two_clients_progress_while_one_of_three_nodes_hangs() {
    for kind in KINDS {
        let quorum = Quorum::start(3).await;
        let holders = Arc::new(Holders::default());
        let mut locks = Vec::new();
        for kind in [kind, kind.rival()] {
            locks.push(quorum.lock(kind, "contended", options()).await);
        }
        quorum.hang(0b100);
        let mut tasks = JoinSet::new();
        for lock in locks {
            tasks.spawn(turns(lock, Arc::clone(&holders), 50));
        }
        let waits = tasks.join_all().await;
        println!("FIG {kind:?}: longest waits {waits:?}");
        quorum.resume(0b100);
        quorum.finish().await;
    }
}

/// A dropped read is released in the background, where the node that hangs is waited for. The
/// release of the next one does not wait for that.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_of_a_reader_does_not_wait_for_a_node_that_hangs() {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let quorum = Quorum::start(3).await;
    let lock = quorum.client(options().node_timeout(TIMEOUT)).await.rwlock("shared").unwrap();
    lock.read().await.unwrap().release().await.unwrap();
    quorum.hang(0b100);
    let mut took = Vec::new();
    for _ in 0..4 {
        drop(lock.read().await.unwrap());
        let guard = lock.read().await.unwrap();
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        took.push(start.stop());
    }
    println!("FIG released after {took:?}");
    // The first ones may not know yet that the node hangs.
    let shortest = took.iter().map(Stopwatch::undisturbed).min();
    assert!(shortest < Some(TIMEOUT / 4), "{took:?}");
    quorum.resume(0b100);
    drop(lock);
    quorum.finish().await;
}

/// A client that was notified before takes a lock, leaks it or hands it over: it is to outlive a
/// node, also where the reply of one of them came after those of a majority.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_hold_that_is_to_stay_stays_on_all_nodes() {
    let quorum = Quorum::start(3).await;
    let locks = quorum.client(options()).await;
    let mutex = locks.mutex("stays").unwrap();
    let lock = Kind::Mutex.lock(&locks, "stays");
    // The first wait subscribes.
    let first = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    quorum.queued(0b111, &lock, 1).await;
    first.release().await.unwrap();
    let mut guard = soon("it is granted", waiting).await.unwrap().unwrap();
    for _ in 0..4 {
        quorum.wait_for(0b111, 0b111, &lock).await;
        let ticket = guard.into_ticket().unwrap();
        locks.settled().await;
        assert_eq!(quorum.having(0b111, lock.key()).await, 0b111);
        guard = mutex.adopt(&ticket).await.unwrap();
        guard.release().await.unwrap();
        guard = mutex.lock().await.unwrap();
    }
    quorum.wait_for(0b111, 0b111, &lock).await;
    guard.leak();
    locks.settled().await;
    assert_eq!(quorum.having(0b111, lock.key()).await, 0b111);
    drop((mutex, lock, locks));
}
