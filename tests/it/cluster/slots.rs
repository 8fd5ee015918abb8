//! Slots that move while their locks are held, queued for and released.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::Value;
use redlatch::Error;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{open, tag_at};
use crate::support::events::{TRACED, listen};
use crate::support::failover::{Contention, Ends, NODE_TIMEOUT, SLACK, was_one_notified};
use crate::support::raw::script;
use crate::support::{Deployment, KINDS, Kind, Stopwatch, Topology, eventually, notified_only, soon, ttl};

/// `release` sends the request three times within this time; then the keeper takes over.
const RELEASE: Duration = Duration::from_secs(3);

/// While a slot moves, its keys are on two servers, and each refuses requests for keys on both
/// (ASK, TRYAGAIN).
#[tokio::test(flavor = "multi_thread")]
async fn cluster_lock_stays_held_while_its_slot_moves() {
    listen();
    let deployment = Deployment::start(Topology::Cluster).await;
    let (locks, others) = (open(&deployment, ttl(12_000)).await, open(&deployment, notified_only()).await);
    let tag = tag_at(&deployment, 0).await;
    let names = format!("{tag}{TRACED}moved-");
    let contended = Contention::of_each_kind(&deployment, &names, &locks, &others).await;
    let mut released = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("{tag}released-{}", kind.name()));
        released.push((lock.clone(), lock.lock().await.unwrap()));
    }
    // Without waiters, only one of a lock's keys exists beside its counter.
    let mut alone = Vec::new();
    for kind in KINDS {
        alone.push(kind.lock(&locks, &format!("{tag}alone-{}", kind.name())).lock().await.unwrap());
    }
    deployment.begin_move(&tag, 1).await;
    let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
    assert!(!refused.contains("TRYAGAIN"), "{refused}");
    let mut releasing = JoinSet::new();
    let mut free = Vec::new();
    for (lock, guard) in released {
        free.push(lock);
        releasing.spawn(async move {
            let start = Stopwatch::start();
            (guard.release().await, start.stop())
        });
    }
    assert_no_other_holder(&contended).await;
    while let Some(outcome) = releasing.join_next().await {
        let (outcome, took) = outcome.unwrap();
        assert!(matches!(outcome, Ok(()) | Err(Error::Redis { .. })), "{outcome:?}");
        assert!(took.undisturbed() < RELEASE + SLACK, "{took:?}");
        println!("release during the move: {outcome:?} after {took:?}");
    }
    deployment.move_keys(&tag, 1).await;
    assert_no_other_holder(&contended).await;
    let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
    assert!(refused.contains("TRYAGAIN") && refused.contains("ASK"), "{refused}");
    // The leases are renewed when the old server refuses that, and then on the new one.
    let held = || contended.iter().map(|held| &held.guard).chain(&alone);
    Ends::of(held()).are_extended().await;
    deployment.end_move(&tag, 1).await;
    Ends::of(held()).are_extended().await;
    for guard in alone {
        guard.release().await.unwrap();
    }
    for held in &contended {
        held.assert_held(&deployment).await;
        assert_eq!(deployment.waiters(&held.lock).await, 1, "the queue has not moved");
        assert_eq!(deployment.owner(held.lock.key()).await, Some(1));
    }
    for lock in free {
        eventually("a failed release is repeated in the background", || async {
            !deployment.is_locked(&lock).await
        })
        .await;
    }
    for held in contended {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    assert!(was_one_notified(&names), "all waiters have polled");
    drop((locks, others));
    deployment.assert_nothing_left().await;
}

/// All keys of a contended lock exist, so that a release runs on the old server. It must not delete
/// a key and create it again, which the server refuses while the slot moves.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_release_grants_to_the_waiter_while_its_slot_moves() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (locks, others) = (open(&deployment, ttl(60_000)).await, open(&deployment, notified_only()).await);
    let tag = tag_at(&deployment, 0).await;
    let contended = Contention::of_each_kind(&deployment, &tag, &locks, &others).await;
    deployment.begin_move(&tag, 1).await;
    let mut granted = Vec::new();
    for Contention { guard, waiting, lock, .. } in contended {
        let token = guard.token();
        let outcome = soon("it is released", guard.release()).await;
        // If its reply is late, it is sent again: the waiter has the lock by then.
        assert!(matches!(outcome, Ok(()) | Err(Error::Unconfirmed { .. })), "{lock:?}: {outcome:?}");
        let held = deployment.run_at::<u64>(lock.key(), &["EXISTS", lock.key()]).await;
        assert_eq!(held, [1], "{lock:?} is not the waiter's");
        granted.push((token, waiting));
    }
    deployment.move_keys(&tag, 1).await;
    deployment.end_move(&tag, 1).await;
    // They learn of it now: a slot that moves serves a call if it has all of its keys.
    for (token, waiting) in granted {
        let next = soon("the waiter has the lock", waiting).await.unwrap().unwrap();
        assert!(next.token() > token, "{next:?}");
        next.release().await.unwrap();
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}

/// Checks that rivals are refused, or fail in time.
async fn assert_no_other_holder(contended: &[Contention]) {
    let start = Stopwatch::start();
    let mut tries = JoinSet::new();
    for held in contended {
        let rival = held.rival.for_another();
        tries.spawn(async move { rival.try_lock().await });
    }
    while let Some(outcome) = tries.join_next().await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Ok(None) | Err(Error::Redis { .. })), "{outcome:?}");
    }
    println!("refused after {:?}", start.elapsed());
    assert!(start.undisturbed() < NODE_TIMEOUT + SLACK, "{start:?}");
    for held in contended {
        assert!(!held.guard.lease().is_lost(), "{:?}", held.guard);
        assert!(!held.waiting.is_finished(), "{:?}", held.guard);
    }
}

/// Nine clients acquire three locks in turn while the slot moves three times: one holder at a time,
/// with growing tokens.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_clients_progress_while_the_slot_moves() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let tag = tag_at(&deployment, 0).await;
    let (end, all_turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        let (inside, highest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        for _ in 0..3 {
            // A busy machine moves the slot for longer than a call outlasts by default.
            let options = ttl(10_000).outage_limit(Duration::from_secs(60));
            let lock = kind.lock(&open(&deployment, options).await, &format!("{tag}{}", kind.name()));
            let (end, inside, highest) = (Arc::clone(&end), Arc::clone(&inside), Arc::clone(&highest));
            let all_turns = Arc::clone(&all_turns);
            tasks.spawn(async move {
                let (mut turns, mut failures) = (0, 0);
                while !end.load(Ordering::SeqCst) {
                    let guard = soon("the lock is granted", lock.lock()).await.unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "two holders at a time");
                    let before = highest.swap(guard.token(), Ordering::SeqCst);
                    assert!(before < guard.token(), "{before} before {}", guard.token());
                    sleep(Duration::from_millis(2)).await;
                    assert!(!guard.lease().is_lost());
                    assert!(inside.swap(false, Ordering::SeqCst));
                    match soon("release() returns", guard.release()).await {
                        // If its reply was late, the next client may have the lock already.
                        Ok(()) | Err(Error::Unconfirmed { .. }) => {
                            turns += 1;
                            all_turns.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(Error::Redis { .. }) => failures += 1,
                        Err(error) => panic!("{error:?}"),
                    }
                }
                (turns, failures)
            });
        }
    }
    let progress = async || {
        let before = all_turns.load(Ordering::SeqCst);
        eventually("clients progress", async || all_turns.load(Ordering::SeqCst) > before + 60).await;
    };
    for to in [1, 2, 0] {
        deployment.begin_move(&tag, to).await;
        progress().await;
        deployment.move_keys(&tag, to).await;
        progress().await;
        deployment.end_move(&tag, to).await;
        progress().await;
    }
    end.store(true, Ordering::SeqCst);
    while let Some(outcome) = tasks.join_next().await {
        let (turns, failures) = outcome.unwrap();
        println!("{turns} turns, {failures} failures");
        assert!(turns > 5, "{turns} turns, {failures} failures");
    }
    deployment.assert_nothing_left().await;
}

/// The first release of a call deletes the lock, and the server refuses to look for it again for
/// the second one: that passes once the slot has moved.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_lock_that_a_call_deletes_while_its_slot_moves_is_no_lasting_error() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let tag = tag_at(&deployment, 0).await;
    let (lock, text) = (format!("{tag}lock"), script("mutex"));
    let keys = ["", ":waiters", ":fence"].map(|end| format!("{lock}{end}"));
    let [lock, waiters, fence] = keys.each_ref().map(String::as_str);
    let single = ["EVAL", text.as_str(), "3", lock, waiters, fence];
    let run = async |words: &[&str]| deployment.run_at::<Vec<Value>>(lock, words).await.remove(0);
    let acquired = run(&[&single[..], &["acquire", "a", "", "", "60000", "0"]].concat()).await;
    assert!(matches!(acquired[..], [Value::Int(1..)]), "{acquired:?}");
    // With a mark, all three keys exist.
    assert_eq!(run(&[&single[..], &["release", "b", "", "0", "1"]].concat()).await, [Value::Int(0)]);
    deployment.begin_move(&tag, 1).await;
    let both = ["EVAL", text.as_str(), "6", lock, lock, waiters, waiters, fence, fence];
    let answers = run(&[&both[..], &["release", "a", "b", "", "", "0"]].concat()).await;
    let passes = |answer: &Value| matches!(answer, Value::BulkString(text) if text.starts_with(b"TRYAGAIN "));
    assert!(answers[0] == Value::Int(1) && passes(&answers[1]), "{answers:?}");
    deployment.move_keys(&tag, 1).await;
    deployment.end_move(&tag, 1).await;
}
