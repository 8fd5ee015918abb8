//! Leases, waiters and releases while some nodes fail.

use std::time::{Duration, Instant};

use redlatch::{Error, Options, Renewal};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{CLEANED, KINDS, Quorum, TIMEOUT, options};
use crate::support::{AnyGuard, Kind, Stopwatch, eventually, renewed_by, soon};

/// Long: a stall of seconds loses no lease.
const TTL: Duration = Duration::from_secs(6);

fn short(millis: u64) -> Options {
    options().ttl(Duration::from_millis(millis))
}

/// Waits until renewals have extended each of these leases by this time.
async fn all_renewed_by(guards: &[AnyGuard], span: Duration) {
    let leases = guards.iter().map(|guard| guard.lease().clone());
    let renewed: JoinSet<()> = leases.map(|lease| async move { renewed_by(&lease, span).await }).collect();
    renewed.join_all().await;
}

/// Two of five nodes hang. Waiters, tries and calls with a time limit take as long as without them.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_waiter_is_granted_while_a_minority_hangs() {
    let quorum = Quorum::start(5).await;
    let options = Options::new().poll_cap(Duration::from_secs(10)).node_timeout(Duration::from_secs(2));
    for kind in KINDS {
        let holder = quorum.lock(kind.rival(), kind.name(), options.clone()).await;
        let lock = quorum.lock(kind, kind.name(), options.clone()).await;
        let guard = quorum.take(&holder).await;
        quorum.hang(0b00110);
        let waiting = lock.lock_in_task();
        quorum.queued(0b11001, &holder, 1).await;
        let start = Stopwatch::start();
        assert!(lock.for_another().try_lock().await.unwrap().is_none());
        assert!(start.undisturbed() < Duration::from_secs(1), "try_lock returned after {start:?}");
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        assert!(start.undisturbed() < Duration::from_secs(1), "{kind:?}: {start:?}");
        // A call with a time limit ends soon after the limit.
        let limit = Duration::from_millis(400);
        let start = Stopwatch::start();
        let outcome = holder.lock_timeout(limit).await;
        assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        assert!(start.undisturbed() < limit + Duration::from_millis(500), "{start:?}");
        guard.release().await.unwrap();
        quorum.resume(0b00110);
        // The requests that the two nodes received while they hung are undone.
        let start = Stopwatch::start();
        quorum.wait_for(quorum.all(), 0, &lock).await;
        assert!(start.undisturbed() < CLEANED, "{start:?}");
    }
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_is_renewed_while_a_minority_hangs_or_is_dead() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(options().ttl(TTL)).await;
    let locks = KINDS.map(|kind| kind.lock(&client, kind.name()));
    for hangs in [true, false] {
        let mut guards = Vec::new();
        for lock in &locks {
            guards.push(lock.lock().await.unwrap());
        }
        if hangs {
            quorum.hang(0b01010)
        } else {
            quorum.kill(0b01010)
        }
        all_renewed_by(&guards, TTL).await;
        for (lock, guard) in locks.iter().zip(guards) {
            assert!(!guard.lease().is_lost(), "{lock:?}, hanging: {hangs}");
            assert_eq!(quorum.having(0b10101, lock.key()).await, 0b10101);
            let start = Stopwatch::start();
            guard.release().await.unwrap();
            assert!(start.undisturbed() < TIMEOUT * 3 / 2, "{start:?}");
        }
        if hangs { quorum.resume(0b01010) } else { quorum.restart(0b01010).await }
    }
    drop((locks, client));
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_is_lost_after_a_majority_lost_it() {
    const TTL: Duration = Duration::from_secs(3);
    let mut quorum = Quorum::start(5).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, options().ttl(TTL)).await;
    for kind in KINDS {
        let lock = kind.lock(&client, &format!("lost-{}", kind.name()));
        let guard = quorum.take(&lock).await;
        // Two of five nodes are no majority: the lease is repaired there.
        quorum.run::<u64>(0b00011, &["DEL", lock.key()]).await;
        quorum.wait_for(0b11111, 0b11111, &lock).await;
        assert!(!guard.lease().is_lost());
        // Held back: a renewal between two of the deletions would repair the lease.
        proxies.iter().for_each(|proxy| proxy.hold_requests(true));
        quorum.run::<u64>(0b00111, &["DEL", lock.key()]).await;
        proxies.iter().for_each(|proxy| proxy.hold_requests(false));
        let start = Stopwatch::start();
        soon("the lease is lost", guard.lease().lost()).await;
        assert!(start.undisturbed() < TTL / 2, "a renewal should find it: {start:?}");
        // The guard still exists, so this is not the release of a dropped guard.
        quorum.wait_for(0b11111, 0, &lock).await;
        // The other nodes have just renewed it: by its TTL it would expire after three seconds.
        assert!(start.undisturbed() < TTL * 5 / 6, "long before its TTL: {start:?}");
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    }
    // A majority is dead: the lease ends at its deadline.
    let mut guards = Vec::new();
    for kind in KINDS {
        guards.push(kind.lock(&client, &format!("dead-{}", kind.name())).lock().await.unwrap());
    }
    let start = Stopwatch::start();
    quorum.kill(0b11100);
    let ends: Vec<_> = guards.iter().map(|guard| guard.lease().valid_until()).collect();
    for (guard, end) in guards.into_iter().zip(ends) {
        soon("the lease is lost", guard.lease().lost()).await;
        assert!(Instant::now() >= end, "{:?} too early", end - Instant::now());
        // A reply that was on its way may have moved the deadline, at most to a TTL from then.
        assert!(start.undisturbed() < TTL * 4 / 3, "{start:?}");
    }
    quorum.restart(0b11100).await;
    drop(client);
    quorum.finish_behind(proxies).await;
}

/// Nodes that were down when the lease was granted have it after the next renewal; then other nodes
/// may fail.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_is_repaired_on_nodes_that_return() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(options().ttl(TTL)).await;
    let locks = KINDS.map(|kind| kind.lock(&client, &format!("repaired-{}", kind.name())));
    quorum.kill(0b00011);
    let mut guards = Vec::new();
    for lock in &locks {
        guards.push(lock.lock().await.unwrap());
    }
    quorum.restart(0b00011).await;
    // All nodes have the lease; then two other nodes die or lose their data, four times.
    for (gone, wiped) in [(0b01100, true), (0b10001, true), (0b00110, false), (0b11000, false)] {
        let start = Stopwatch::start();
        for (lock, guard) in locks.iter().zip(&guards) {
            quorum.wait_for(0b11111, 0b11111, lock).await;
            let fence = format!("{{{}}}:fence", lock.key());
            let tokens: Vec<u64> = quorum.run(0b11111, &["GET", &fence]).await;
            assert_eq!(tokens, [guard.token(); 5]);
        }
        // The next renewal is due after a third of the TTL; the rest is for connecting again.
        assert!(start.undisturbed() < TTL, "repaired after {start:?}");
        if wiped {
            quorum.kill(gone);
        } else {
            quorum.run::<String>(gone, &["FLUSHALL"]).await;
        }
        all_renewed_by(&guards, TTL / 2).await;
        assert!(guards.iter().all(|guard| !guard.lease().is_lost()), "with nodes {gone:b} gone");
        if wiped {
            quorum.restart(gone).await;
        }
    }
    for (lock, guard) in locks.iter().zip(guards) {
        guard.release().await.unwrap();
        quorum.wait_for(0b11111, 0, lock).await;
    }
    drop((locks, client));
    quorum.finish().await;
}

/// A renewal repairs a lease on a node that lost it, at about the time of the release. It must
/// neither take the node from another holder nor leave the lock there after the release.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_released_lease_is_not_repaired() {
    let quorum = Quorum::start(3).await;
    // All kinds at the same time, since each waits for renewals.
    let of_kind = async |kind: Kind| {
        let lock = quorum.lock(kind, kind.name(), short(6_000)).await;
        for round in 0..6 {
            let guard = quorum.take(&lock).await;
            let lost = round % 3;
            quorum.run::<u64>(1 << lost, &["DEL", lock.key()]).await;
            // At about the time of the renewal that repairs the lease.
            sleep(Duration::from_millis(1_985 + 6 * round)).await;
            guard.release().await.unwrap();
            quorum.wait_for(0b111, 0, &lock).await;
            let next = lock.for_rival().try_lock().await.unwrap().expect("the lock is free");
            next.release().await.unwrap();
            quorum.wait_for(0b111, 0, &lock).await;
        }
    };
    let [mutex, reentrant, read, write] = KINDS.map(of_kind);
    tokio::join!(mutex, reentrant, read, write);
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_reaches_a_node_that_hung() {
    let quorum = Quorum::start(5).await;
    for kind in KINDS {
        let lock = quorum.lock(kind, kind.name(), options()).await;
        for dropped in [false, true] {
            let guard = lock.lock().await.unwrap();
            quorum.wait_for(0b11111, 0b11111, &lock).await;
            quorum.hang(0b10001);
            let start = Stopwatch::start();
            if dropped {
                drop(guard);
            } else {
                guard.release().await.unwrap();
                assert!(start.undisturbed() < TIMEOUT, "release() waited for the hanging nodes: {start:?}");
            }
            quorum.wait_for(0b01110, 0, &lock).await;
            // Long enough for the first release to time out: the one that arrives is a later one.
            sleep(TIMEOUT * 2).await;
            quorum.resume(0b10001);
            let start = Stopwatch::start();
            quorum.wait_for(0b11111, 0, &lock).await;
            assert!(start.undisturbed() < CLEANED, "{start:?} of a TTL of 30 s");
        }
    }
    quorum.finish().await;
}

/// Some nodes have lost the lock and some are silent. Together they are a majority, but it is
/// unknown whether a majority has lost the lock. So the lease counts as valid: release and
/// downgrade succeed.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_silent_nodes_do_not_count_as_loss() {
    for (nodes, lost, dead) in [(3, 0b001, 0b010), (4, 0b0001, 0b0010), (5, 0b00011, 0b00100)] {
        let mut quorum = Quorum::start(nodes).await;
        let client = quorum.client(options().renewal(Renewal::Never)).await;
        // First a minority has lost the lock, then a majority: that is a loss, whatever the silent
        // node would reply.
        for (number, lost) in [lost, quorum.all() & !dead].into_iter().enumerate() {
            let mut guards = Vec::new();
            for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write, Kind::Write] {
                let lock = kind.lock(&client, &format!("silent-{number}-{}", guards.len()));
                guards.push((quorum.take(&lock).await, lock));
            }
            for (_, lock) in &guards {
                quorum.run::<u64>(lost, &["DEL", lock.key()]).await;
            }
            quorum.kill(dead);
            let downgraded = guards.pop().map(|(guard, _)| guard);
            if let Some(AnyGuard::Write(guard)) = downgraded {
                let outcome = guard.downgrade().await;
                if number == 0 {
                    outcome.unwrap().release().await.unwrap();
                } else {
                    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
                }
            }
            for (guard, lock) in guards {
                let outcome = guard.release().await;
                if number == 0 {
                    outcome.unwrap_or_else(|error| panic!("{lock:?}: {error}"));
                } else {
                    // The lost connection makes the client ask, so it may know of the loss.
                    let lost = matches!(outcome, Err(Error::NotHeld { .. } | Error::Lost { .. }));
                    assert!(lost, "{lock:?}: {outcome:?}");
                }
            }
            quorum.restart(dead).await;
        }
        client.settled().await;
        drop(client);
        quorum.finish().await;
    }
}

/// A lease is held by three of five nodes, and one of them stops. It stays valid, since the renewal
/// repairs it on the other two.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_on_a_bare_majority_survives_a_node_failure() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(options().ttl(TTL)).await;
    let mut held = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        held.push((quorum.take(&lock).await, lock));
    }
    quorum.run::<String>(0b11000, &["FLUSHALL"]).await;
    // Mostly before the next renewal; else the two nodes have the lock again already.
    quorum.kill(0b00100);
    for (guard, lock) in held {
        renewed_by(guard.lease(), TTL).await;
        let live = quorum.having(0b11011, lock.key()).await;
        assert!(live.count_ones() >= 3, "{lock:?}: on nodes {live:b}");
        guard.release().await.unwrap();
    }
    quorum.restart(0b00100).await;
    client.settled().await;
    drop(client);
    quorum.finish().await;
}

/// A node that was dead or cut off misses a downgrade, and is downgraded after its return. Else it
/// would refuse readers for as long as the lease is renewed.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_downgrade_reaches_nodes_that_return() {
    let mut quorum = Quorum::durable(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, short(12_000)).await;
    for dies in [true, false] {
        let lock = Kind::Write.lock(&client, &format!("downgraded-{dies}"));
        let AnyGuard::Write(writing) = quorum.take(&lock).await else { unreachable!("it writes") };
        if dies {
            quorum.kill(0b100);
        } else {
            proxies[2].set_drops_requests(true);
            proxies[2].hold_requests(true);
        }
        let start = Stopwatch::start();
        let reading = writing.downgrade().await.unwrap();
        assert!(start.undisturbed() < TIMEOUT, "downgrade() waited for the failed node: {start:?}");
        // Long enough for the first request to time out: the one that arrives is a later one.
        sleep(TIMEOUT * 2).await;
        if dies {
            quorum.restart(0b100).await;
        } else {
            proxies[2].cut();
            proxies[2].set_drops_requests(false);
            proxies[2].hold_requests(false);
        }
        let other = quorum.client(Options::new()).await;
        let start = Stopwatch::start();
        // A majority without the hanging node needs the node that was downgraded late.
        quorum.hang(0b001);
        let reads = Kind::Read.lock(&other, &format!("downgraded-{dies}"));
        eventually("another client can read", || async { matches!(reads.try_lock().await, Ok(Some(_))) })
            .await;
        assert!(start.undisturbed() < CLEANED, "{start:?}");
        assert!(!matches!(reads.for_rival().try_lock().await, Ok(Some(_))), "the first client still reads");
        assert!(!reading.lease().is_lost());
        quorum.resume(0b001);
        reading.release().await.unwrap();
        other.settled().await;
    }
    drop(client);
    quorum.finish_behind(proxies).await;
}

/// A write acquire reaches a node after the downgrade, which found nothing to downgrade there. The
/// node is downgraded later.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_downgrade_covers_a_late_write_acquire() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, short(60_000).renewal(Renewal::Never)).await;
    // This loads the scripts into all nodes.
    let AnyGuard::Write(writing) = quorum.take(&Kind::Write.lock(&client, "known")).await else {
        unreachable!("it writes")
    };
    writing.downgrade().await.unwrap().release().await.unwrap();
    let lock = Kind::Write.lock(&client, "late");
    let before = proxies[0].connections();
    proxies[0].hold_requests(true);
    let AnyGuard::Write(writing) = lock.lock().await.unwrap() else { unreachable!("it writes") };
    // The first request to that node has timed out.
    eventually("the client reconnects", || async {
        client.nodes().await;
        proxies[0].connections() > before
    })
    .await;
    assert_eq!(quorum.having(0b111, lock.key()).await, 0b110);
    let scripts_before = quorum.servers[0].scripts_run().await;
    let reading = writing.downgrade().await.unwrap();
    eventually("the downgrade finds nothing on the first node", || async {
        quorum.servers[0].scripts_run().await > scripts_before
    })
    .await;
    proxies[0].hold_requests(false);
    quorum.wait_for(0b001, 0b001, &lock).await;
    // A majority without the hanging node needs the node that was downgraded late.
    quorum.hang(0b010);
    let other = quorum.client(options()).await;
    let reads = Kind::Read.lock(&other, "late");
    eventually("another client can read", || async { matches!(reads.try_lock().await, Ok(Some(_))) }).await;
    other.settled().await;
    assert!(!matches!(reads.for_rival().try_lock().await, Ok(Some(_))), "the first client still reads");
    quorum.resume(0b010);
    reading.release().await.unwrap();
    client.settled().await;
    quorum.wait_for(0b111, 0, &lock).await;
    drop((client, other, lock, reads));
    quorum.finish_behind(proxies).await;
}

/// Two of four nodes hang and hold a dropped lock. No other client can acquire it without one of
/// them, so `settled` keeps waiting.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_settled_waits_while_half_the_nodes_hold_a_dropped_lock() {
    let quorum = Quorum::start(4).await;
    for kind in KINDS {
        let client = quorum.client(options()).await;
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        quorum.hang(0b1100);
        drop(guard);
        quorum.wait_for(0b0011, 0, &lock).await;
        let settled = tokio::time::timeout(TIMEOUT * 3, client.settled()).await;
        assert!(settled.is_err(), "{kind:?}: settled() returned while two nodes hold the lock");
        quorum.resume(0b1100);
        soon("settled() returns", client.settled()).await;
        assert!(quorum.having(0b1111, lock.key()).await.count_ones() <= 1, "{kind:?}");
    }
    quorum.finish().await;
}
