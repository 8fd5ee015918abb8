//! Slots that move while their locks are held, waited for, and released.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redlatch::Error;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::{open, tag_at};
use crate::support::failover::{Contended, KINDS, NODE_TIMEOUT, SLACK, told};
use crate::support::{Deployment, Kind, Topology, eventually, soon, ttl};

/// A release is sent three times before the rest is left to the keeper.
const RELEASE: Duration = Duration::from_secs(3);

/// While a slot moves, its keys are in two places, and a server refuses what needs keys of both (ASK, TRYAGAIN).
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_lock_outlasts_the_move_of_its_slot() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (locks, others) = (open(&deployment, ttl(1_500)).await, open(&deployment, told()).await);
    let tag = tag_at(&deployment, 0).await;
    let contended = Contended::of_each_kind(&deployment, &tag, &locks, &others).await;
    let mut released = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("{tag}released-{}", kind.name()));
        released.push((lock.clone(), lock.lock().await.unwrap()));
    }
    deployment.begin_move(&tag, 1).await;
    let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
    assert!(!refused.contains("TRYAGAIN"), "{refused}");
    let mut giving_back = JoinSet::new();
    let mut free = Vec::new();
    for (lock, guard) in released {
        free.push(lock);
        giving_back.spawn(async move {
            let start = Instant::now();
            (guard.release().await, start.elapsed())
        });
    }
    assert_nobody_else(&contended).await;
    while let Some(outcome) = giving_back.join_next().await {
        let (outcome, took) = outcome.unwrap();
        assert!(matches!(outcome, Ok(()) | Err(Error::Redis { .. })), "{outcome:?}");
        assert!(took < RELEASE + SLACK, "{took:?}");
        println!("release during the move: {outcome:?} after {took:?}");
    }
    deployment.move_keys(&tag, 1).await;
    assert_nobody_else(&contended).await;
    let refused = deployment.run::<String>(&["INFO", "errorstats"]).await.concat();
    assert!(refused.contains("TRYAGAIN") && refused.contains("ASK"), "{refused}");
    // Renewed for longer than its ttl, first at the old place and then at the new one.
    sleep(Duration::from_millis(1_600)).await;
    deployment.end_move(&tag, 1).await;
    for it in &contended {
        it.assert_held(&deployment).await;
        assert_eq!(deployment.waiters(&it.lock).await, 1, "the queue has moved as well");
        assert_eq!(deployment.owner(it.lock.key()).await, Some(1));
    }
    for lock in free {
        eventually("what failed to be released is given back", || async {
            !deployment.is_locked(&lock).await
        })
        .await;
    }
    sleep(Duration::from_millis(1_600)).await;
    for it in contended {
        it.assert_held(&deployment).await;
        let took = it.hand_over(&deployment).await;
        println!("handed over after {took:?}");
        assert!(took < NODE_TIMEOUT, "{took:?}");
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}

/// Whoever else wants the lock is refused, or fails in time.
async fn assert_nobody_else(contended: &[Contended]) {
    let start = Instant::now();
    let mut tries = JoinSet::new();
    for it in contended {
        let rival = it.rival.for_another();
        tries.spawn(async move { rival.try_lock().await });
    }
    while let Some(outcome) = tries.join_next().await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Ok(None) | Err(Error::Redis { .. })), "{outcome:?}");
    }
    println!("refused after {:?}", start.elapsed());
    assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    for it in contended {
        assert!(!it.guard.lease().is_lost(), "{:?}", it.guard);
        assert!(!it.waiting.is_finished(), "{:?}", it.guard);
    }
}

/// Clients take turns while the slot goes back and forth: one at a time, with growing tokens.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_turns_are_taken_while_the_slot_moves() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let tag = tag_at(&deployment, 0).await;
    let end = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        let (inside, highest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        for _ in 0..3 {
            let lock = kind.lock(&open(&deployment, ttl(10_000)).await, &format!("{tag}{}", kind.name()));
            let (end, inside, highest) = (Arc::clone(&end), Arc::clone(&inside), Arc::clone(&highest));
            tasks.spawn(async move {
                let (mut turns, mut failures) = (0, 0);
                while !end.load(Ordering::SeqCst) {
                    let guard = soon("a turn", lock.lock()).await.unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at a time");
                    let before = highest.swap(guard.token(), Ordering::SeqCst);
                    assert!(before < guard.token(), "{before} before {}", guard.token());
                    sleep(Duration::from_millis(2)).await;
                    assert!(!guard.lease().is_lost());
                    assert!(inside.swap(false, Ordering::SeqCst));
                    match soon("a release", guard.release()).await {
                        Ok(()) => turns += 1,
                        Err(Error::Redis { .. }) => failures += 1,
                        Err(error) => panic!("{error:?}"),
                    }
                }
                (turns, failures)
            });
        }
    }
    for to in [1, 2, 0] {
        deployment.begin_move(&tag, to).await;
        sleep(Duration::from_millis(150)).await;
        deployment.move_keys(&tag, to).await;
        sleep(Duration::from_millis(150)).await;
        deployment.end_move(&tag, to).await;
        sleep(Duration::from_millis(300)).await;
    }
    end.store(true, Ordering::SeqCst);
    while let Some(outcome) = tasks.join_next().await {
        let (turns, failures) = outcome.unwrap();
        println!("{turns} turns, {failures} failures");
        assert!(turns > 5, "{turns} turns, {failures} failures");
    }
    deployment.assert_nothing_left().await;
}
