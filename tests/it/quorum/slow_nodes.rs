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

/// A client is granted a lock by two nodes, and waits on the third one. Once it has handed over the
/// hold, the third node must not grant the lock to its attempt, which has ended.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_ticket_leaves_no_place_on_a_node_that_had_not_granted_it() {
    let quorum = Quorum::start(3).await;
    let last = &quorum.servers[2];
    let locks = quorum.client(options()).await;
    let mutex = locks.mutex("handed").unwrap();
    let lock = Kind::Mutex.lock(&locks, "handed");
    // The first wait subscribes.
    let first = mutex.lock().await.unwrap();
    let other = quorum.client(options()).await.mutex("handed").unwrap();
    let waiting = tokio::spawn(async move { other.lock().await });
    quorum.queued(0b111, &lock, 1).await;
    first.release().await.unwrap();
    let before = soon("the other one has it", waiting).await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    quorum.queued(0b111, &lock, 1).await;
    // As if the release of the holder before were late there.
    before.release().await.unwrap();
    soon("it is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    locks.settled().await;
    let alone = last.locks().await.mutex("handed").unwrap().lock().await.unwrap();
    let ticket = mutex.lock().await.unwrap().into_ticket().unwrap();
    mutex.adopt(&ticket).await.unwrap().release().await.unwrap();
    soon("all is released", locks.settled()).await;
    alone.release().await.unwrap();
    assert_eq!(last.run::<u64>(&["EXISTS", "lock:handed"]).await, 0, "granted to an attempt that has ended");
    drop((mutex, lock, locks));
    quorum.finish().await;
}
