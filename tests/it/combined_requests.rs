//! Requests of one client for many locks travel as few script calls to a Sentinel's master and to
//! each master of a cluster. There, all locks of a call are of one slot. Futures that are not
//! polled any more do not keep the requests of others from being sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Locks, Options, Renewal};
use tokio::task::JoinSet;

use crate::cluster::{open, tag_at};
use crate::support::{AnyGuard, Deployment, KINDS, Kind, Topology, eventually, soon, ttl};

/// Eight requests to each master are sent alone, and the others gather.
const LOCKS: u64 = 200;
const CALLS: u64 = 3 * 8 + LOCKS / 10;

/// A lease that is renewed would add calls.
fn unrenewed() -> Options {
    Options::new().node_timeout(Duration::from_secs(20)).ttl(Duration::from_secs(600)).renewal(Renewal::Never)
}

/// Acquires and releases locks with these names, each time all at once, while the masters are
/// stopped, so that the requests gather. Returns how many scripts the masters ran each time.
async fn gathered(deployment: &Deployment, locks: &Locks, kind: Kind, names: &[String]) -> [u64; 2] {
    let before = deployment.scripts_run().await;
    deployment.pause();
    let mut acquires = JoinSet::new();
    for name in names {
        let lock = kind.lock(locks, name);
        acquires.spawn(async move { lock.lock().await.unwrap() });
    }
    let guards = all_of(deployment, acquires).await;
    let acquired = deployment.scripts_run().await;
    for guard in &guards {
        let key = guard.lease().name().key();
        assert_eq!(deployment.run_at::<u64>(key, &["EXISTS", key]).await, [1], "{key}");
    }
    deployment.pause();
    let mut releases = JoinSet::new();
    for guard in guards {
        releases.spawn(async move { guard.release().await.unwrap() });
    }
    all_of(deployment, releases).await;
    [acquired - before, deployment.scripts_run().await - acquired]
}

async fn all_of<T: 'static>(deployment: &Deployment, mut requests: JoinSet<T>) -> Vec<T> {
    // On a runtime with one thread, tasks run in the order in which they were woken.
    for _ in 0..10 {
        tokio::spawn(async {}).await.unwrap();
    }
    deployment.resume();
    let mut outcomes = Vec::new();
    while let Some(outcome) = requests.join_next().await {
        outcomes.push(outcome.unwrap());
    }
    outcomes
}

#[tokio::test]
async fn sentinel_requests_share_script_calls() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    few_calls_for_locks_of_one_slot(deployment).await;
}

#[tokio::test]
async fn cluster_requests_for_locks_of_one_slot_share_script_calls() {
    let deployment = Deployment::start(Topology::Cluster).await;
    few_calls_for_locks_of_one_slot(deployment).await;
}

async fn few_calls_for_locks_of_one_slot(deployment: Deployment) {
    let locks = deployment.client(unrenewed()).await;
    for kind in KINDS {
        // The master knows the scripts for one lock.
        kind.lock(&locks, "{tag}first").lock().await.unwrap().release().await.unwrap();
        let name = |number| format!("{{tag}}{}-{number}", kind.name());
        let names: Vec<_> = (0..LOCKS).map(name).collect();
        let calls = gathered(&deployment, &locks, kind, &names).await;
        println!("{}: {calls:?} calls for {LOCKS} locks of one slot", kind.name());
        assert!(calls.iter().all(|calls| *calls < CALLS), "{kind:?}: {calls:?}");
    }
    drop(locks);
    deployment.assert_nothing_left().await;
}

/// A script may not have keys of two slots, although one master serves both.
#[tokio::test]
async fn cluster_requests_for_locks_of_many_slots_share_no_script_call() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let locks = open(&deployment, unrenewed()).await;
    for kind in KINDS {
        // All masters know the scripts for one lock.
        for master in 0..deployment.masters().len() {
            let name = format!("{}first", tag_at(&deployment, master).await);
            kind.lock(&locks, &name).lock().await.unwrap().release().await.unwrap();
        }
        let name = |number| format!("{}-{number}", kind.name());
        let names: Vec<_> = (0..LOCKS).map(name).collect();
        let calls = gathered(&deployment, &locks, kind, &names).await;
        println!("{}: {calls:?} calls for {LOCKS} locks of many slots", kind.name());
        assert!(calls.iter().all(|calls| *calls >= LOCKS * 9 / 10), "{kind:?}: {calls:?}");
    }
    let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
    assert!(!refused.contains("CROSSSLOT"), "{refused}");
    drop(locks);
    deployment.assert_nothing_left().await;
}

async fn more_scripts_run(deployment: &Deployment) {
    let before = deployment.scripts_run().await;
    eventually("requests go on", async || deployment.scripts_run().await > before + 100).await;
}

/// While a slot moves, a call for many of its locks is refused as a whole, if one server has some
/// of their keys and another one the rest.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_combined_requests_follow_a_slot_that_moves() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let tag = tag_at(&deployment, 0).await;
    let locks = open(&deployment, ttl(10_000)).await;
    let (end, mut tasks) = (Arc::new(AtomicBool::new(false)), JoinSet::<u64>::new());
    for number in 0..100 {
        let lock = Kind::Mutex.lock(&locks, &format!("{tag}{number}"));
        let end = Arc::clone(&end);
        tasks.spawn(async move {
            let (mut turns, mut token) = (0, 0);
            while !end.load(Ordering::SeqCst) {
                let guard: AnyGuard = soon("the lock is granted", lock.lock()).await.unwrap();
                assert!(token < guard.token(), "{token} before {}", guard.token());
                token = guard.token();
                // Repeated in the background if it fails while the slot moves.
                turns += u64::from(soon("release() returns", guard.release()).await.is_ok());
            }
            turns
        });
    }
    for to in [1, 2, 0] {
        deployment.run::<()>(&["CONFIG", "RESETSTAT"]).await;
        deployment.begin_move(&tag, to).await;
        // Until the move ends, a script for a lock of which one server has some keys is refused.
        eventually("calls are refused", async || {
            let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
            refused.contains("TRYAGAIN") || refused.contains("ASK")
        })
        .await;
        deployment.move_keys(&tag, to).await;
        deployment.end_move(&tag, to).await;
        more_scripts_run(&deployment).await;
    }
    end.store(true, Ordering::SeqCst);
    let (mut turns, mut fewest) = (0, u64::MAX);
    while let Some(own) = tasks.join_next().await {
        let own = own.unwrap();
        (turns, fewest) = (turns + own, fewest.min(own));
    }
    println!("{turns} turns, the fewest of a lock {fewest}; {} scripts", deployment.scripts_run().await);
    assert!(fewest > 5, "the fewest turns of a lock: {fewest}");
    drop(locks);
    deployment.assert_nothing_left().await;
}

/// A program begins 4,000 calls and then polls none of them, as a loop over a `FuturesUnordered`
/// does while its body is busy. Other calls of the same client must not wait for those.
#[tokio::test]
async fn requests_pass_futures_that_are_not_polled() {
    for topology in [Topology::Standalone, Topology::Cluster] {
        let deployment = Deployment::start(topology).await;
        let locks = deployment.client(unrenewed()).await;
        Kind::Mutex.lock(&locks, "{t}first").lock().await.unwrap().release().await.unwrap();
        let mutexes: Vec<_> =
            (0..4_000).map(|number| Kind::Mutex.lock(&locks, &format!("{{t}}{number}"))).collect();
        let mut stalled: Vec<_> = mutexes.iter().map(|mutex| Box::pin(mutex.lock())).collect();
        deployment.pause();
        for portion in stalled.chunks_mut(30) {
            for future in portion {
                let polled =
                    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_ready()));
                assert!(!polled.await);
            }
            tokio::task::yield_now().await;
        }
        deployment.resume();
        for number in 0..3 {
            let other = Kind::Mutex.lock(&locks, &format!("{{t}}other-{number}"));
            let guard = soon("another lock is acquired", other.lock()).await.unwrap();
            soon("it is released", guard.release()).await.unwrap();
        }
        drop(stalled);
        soon("what they were granted is released", locks.settled()).await;
        drop((mutexes, locks));
        deployment.assert_nothing_left().await;
    }
}
