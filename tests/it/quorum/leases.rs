//! Leases, waiters and releases while some nodes fail.

use std::time::{Duration, Instant};

use redlatch::{Error, Options, Renewal};
use tokio::time::sleep;

use super::{CLEANED, KINDS, Quorum, TIMEOUT, options};
use crate::support::{AnyGuard, Kind, eventually, soon};

fn short(millis: u64) -> Options {
    options().ttl(Duration::from_millis(millis))
}

/// Two of five hang: whoever waits is served as if they were not there.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_serves_waiters_while_a_minority_hangs() {
    let quorum = Quorum::start(5).await;
    let options = Options::new().poll_cap(Duration::from_secs(10)).node_timeout(Duration::from_secs(2));
    for kind in KINDS {
        let holder = quorum.lock(kind.rival(), kind.name(), options.clone()).await;
        let lock = quorum.lock(kind, kind.name(), options.clone()).await;
        let guard = quorum.take(&holder).await;
        quorum.hang(0b00110);
        let waiting = tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await }
        });
        quorum.queued(0b11001, &holder, 1).await;
        let start = Instant::now();
        assert!(lock.for_another().try_lock().await.unwrap().is_none());
        assert!(start.elapsed() < Duration::from_secs(1), "told that it is busy in {:?}", start.elapsed());
        let start = Instant::now();
        guard.release().await.unwrap();
        let guard = soon("handed over", waiting).await.unwrap().unwrap();
        assert!(start.elapsed() < Duration::from_secs(1), "{kind:?}: {:?}", start.elapsed());
        // And who waits for as long as he wants to.
        let limit = Duration::from_millis(400);
        let start = Instant::now();
        let outcome = holder.lock_timeout(limit).await;
        assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        assert!(start.elapsed() < limit + Duration::from_millis(500), "{:?}", start.elapsed());
        guard.release().await.unwrap();
        quorum.resume(0b00110);
        // What the two were asked meanwhile is undone.
        let start = Instant::now();
        eventually("free everywhere", || async { quorum.having(quorum.all(), lock.key()).await == 0 }).await;
        assert!(start.elapsed() < CLEANED, "{:?}", start.elapsed());
    }
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_renews_while_a_minority_hangs_or_is_dead() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(short(1_200)).await;
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
        sleep(Duration::from_millis(3 * 1_200)).await;
        for (lock, guard) in locks.iter().zip(guards) {
            assert!(!guard.lease().is_lost(), "{lock:?}, hanging: {hangs}");
            assert_eq!(quorum.having(0b10101, lock.key()).await, 0b10101);
            let start = Instant::now();
            guard.release().await.unwrap();
            assert!(start.elapsed() < TIMEOUT * 3 / 2, "{:?}", start.elapsed());
        }
        if hangs { quorum.resume(0b01010) } else { quorum.restart(0b01010).await }
    }
    drop((locks, client));
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_tells_of_a_loss_on_a_majority() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(short(3_000)).await;
    for kind in KINDS {
        let lock = kind.lock(&client, &format!("lost-{}", kind.name()));
        let guard = lock.lock().await.unwrap();
        // Two are not enough.
        quorum.run::<u64>(0b00011, &["DEL", lock.key()]).await;
        eventually("renewed", || async { quorum.having(0b11111, lock.key()).await == 0b11111 }).await;
        assert!(!guard.lease().is_lost());
        quorum.run::<u64>(0b00111, &["DEL", lock.key()]).await;
        let start = Instant::now();
        soon("told", guard.lease().lost()).await;
        assert!(start.elapsed() < Duration::from_millis(1_500), "by a renewal: {:?}", start.elapsed());
        // While the guard is there: dropped, it would give it back as well.
        eventually("the others give it up", || async { quorum.having(0b11111, lock.key()).await == 0 }).await;
        // They have just renewed it: its ttl would end it after three seconds and more.
        assert!(start.elapsed() < Duration::from_millis(2_500), "long before its ttl: {:?}", start.elapsed());
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    }
    // Nobody answers for it any more: it is over by its deadline.
    let mut guards = Vec::new();
    for kind in KINDS {
        guards.push(kind.lock(&client, &format!("dead-{}", kind.name())).lock().await.unwrap());
    }
    let start = Instant::now();
    quorum.kill(0b11100);
    for guard in guards {
        soon("told", guard.lease().lost()).await;
        assert!(start.elapsed() < Duration::from_millis(3_050), "{:?}", start.elapsed());
        assert!(start.elapsed() > Duration::from_millis(1_500), "{:?}", start.elapsed());
    }
    quorum.restart(0b11100).await;
    drop(client);
    quorum.finish().await;
}

/// Nodes that were away when it was granted have it by the next renewal, and then others may go.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_gives_a_lock_to_nodes_that_come_back() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(short(1_500)).await;
    let locks = KINDS.map(|kind| kind.lock(&client, &format!("mended-{}", kind.name())));
    quorum.kill(0b00011);
    let mut guards = Vec::new();
    for lock in &locks {
        guards.push(lock.lock().await.unwrap());
    }
    quorum.restart(0b00011).await;
    // Those that have just come, then two that had it and lost it, and again.
    for (gone, wiped) in [(0b01100, true), (0b10001, true), (0b00110, false), (0b11000, false)] {
        let start = Instant::now();
        for (lock, guard) in locks.iter().zip(&guards) {
            eventually("all have it", || async { quorum.having(0b11111, lock.key()).await == 0b11111 }).await;
            let fence = format!("{{{}}}:fence", lock.key());
            let tokens: Vec<u64> = quorum.run(0b11111, &["GET", &fence]).await;
            assert_eq!(tokens, [guard.token(); 5]);
        }
        // A third of the ttl, and the time that it takes to connect again.
        assert!(start.elapsed() < Duration::from_millis(1_500), "mended after {:?}", start.elapsed());
        if wiped {
            quorum.kill(gone);
        } else {
            quorum.run::<String>(gone, &["FLUSHALL"]).await;
        }
        sleep(Duration::from_millis(2_000)).await;
        assert!(guards.iter().all(|guard| !guard.lease().is_lost()), "with {gone:b} gone");
        if wiped {
            quorum.restart(gone).await;
        }
    }
    for (lock, guard) in locks.iter().zip(guards) {
        guard.release().await.unwrap();
        eventually("free", || async { quorum.having(0b11111, lock.key()).await == 0 }).await;
    }
    drop((locks, client));
    quorum.finish().await;
}

/// A lock that a minority has lost is not taken there from somebody else, nor after its release.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_mends_nothing_that_is_released() {
    let quorum = Quorum::start(3).await;
    for kind in KINDS {
        let lock = quorum.lock(kind, kind.name(), short(300)).await;
        for round in 0..10 {
            let guard = lock.lock().await.unwrap();
            let lost = round % 3;
            quorum.run::<u64>(1 << lost, &["DEL", lock.key()]).await;
            // Somewhere about the renewal that mends it.
            sleep(Duration::from_millis(90 + 4 * round)).await;
            guard.release().await.unwrap();
            eventually("free", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
            let next = lock.for_rival().try_lock().await.unwrap().expect("free");
            next.release().await.unwrap();
            eventually("free", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
        }
    }
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_releases_on_a_node_that_hung_meanwhile() {
    let quorum = Quorum::start(5).await;
    for kind in KINDS {
        let lock = quorum.lock(kind, kind.name(), options()).await;
        for dropped in [false, true] {
            let guard = lock.lock().await.unwrap();
            eventually("all have it", || async { quorum.having(0b11111, lock.key()).await == 0b11111 }).await;
            quorum.hang(0b10001);
            let start = Instant::now();
            if dropped {
                drop(guard);
            } else {
                guard.release().await.unwrap();
                assert!(start.elapsed() < TIMEOUT, "nobody waited for them: {:?}", start.elapsed());
            }
            eventually("free", || async { quorum.having(0b01110, lock.key()).await == 0 }).await;
            // Long enough for the first release to be given up, so that it is a later one that arrives.
            sleep(TIMEOUT * 2).await;
            quorum.resume(0b10001);
            let start = Instant::now();
            eventually("free there too", || async { quorum.having(0b11111, lock.key()).await == 0 }).await;
            assert!(start.elapsed() < CLEANED, "{:?}, and its ttl is 30 s", start.elapsed());
        }
    }
    quorum.finish().await;
}

/// Nodes that have lost the lock and nodes that are silent are together more than half, but it is
/// not known whether more than half have lost it: a valid lease is released, and turned into one to
/// read.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_takes_no_silence_for_a_loss() {
    for (nodes, lost, dead) in [(3, 0b001, 0b010), (4, 0b0001, 0b0010), (5, 0b00011, 0b00100)] {
        let mut quorum = Quorum::start(nodes).await;
        let client = quorum.client(options().renewal(Renewal::Never)).await;
        // More than half that have lost it say enough, whatever the others would.
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
                    assert!(matches!(outcome, Err(Error::NotHeld { .. })), "{lock:?}: {outcome:?}");
                }
            }
            quorum.restart(dead).await;
        }
        client.settled().await;
        drop(client);
        quorum.finish().await;
    }
}

/// A lease that rests on three of five nodes, one of which stops: it is renewed all the same, since
/// the other two take the lock as well.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_renews_on_other_nodes_when_one_of_a_bare_majority_stops() {
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write] {
        let mut quorum = Quorum::start(5).await;
        let client = quorum.client(short(1_500)).await;
        let lock = kind.lock(&client, "bare");
        let guard = quorum.take(&lock).await;
        quorum.run::<u64>(0b11000, &["DEL", lock.key()]).await;
        quorum.kill(0b00100); // before the next renewal, as a rule; else the two nodes have it again already
        let deadline = tokio::time::Instant::now() + Duration::from_millis(4_500);
        tokio::time::sleep_until(deadline).await; // three leases
        assert!(!guard.lease().is_lost(), "{kind:?}");
        let live = quorum.having(0b11011, lock.key()).await;
        assert!(live.count_ones() >= 3, "{kind:?}: on nodes {live:b}");
        guard.release().await.unwrap();
        quorum.restart(0b00100).await;
        client.settled().await;
        drop((lock, client));
        quorum.finish().await;
    }
}

/// A node that missed a downgrade, since it was dead or cut off, learns of it: it would keep out readers for as long as
/// the lease is renewed.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_downgrades_on_nodes_that_come_back() {
    let mut quorum = Quorum::durable(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, short(3_000)).await;
    for dies in [true, false] {
        let lock = Kind::Write.lock(&client, &format!("downgraded-{dies}"));
        let AnyGuard::Write(writing) = quorum.take(&lock).await else { unreachable!("it writes") };
        if dies {
            quorum.kill(0b100);
        } else {
            proxies[2].be_deaf(true);
            proxies[2].hold_requests(true);
        }
        let start = Instant::now();
        let reading = writing.downgrade().await.unwrap();
        assert!(start.elapsed() < TIMEOUT, "nobody waited for it: {:?}", start.elapsed());
        // Long enough for the first request to be given up, so that it is a later one that arrives.
        sleep(TIMEOUT * 2).await;
        if dies {
            quorum.restart(0b100).await;
        } else {
            proxies[2].cut();
            proxies[2].be_deaf(false);
            proxies[2].hold_requests(false);
        }
        let other = quorum.client(Options::new()).await;
        let start = Instant::now();
        // It takes this node to let others read.
        quorum.hang(0b001);
        let reads = Kind::Read.lock(&other, &format!("downgraded-{dies}"));
        eventually("others may read", || async {
            let guard = reads.try_lock().await.unwrap();
            guard.is_some()
        })
        .await;
        assert!(start.elapsed() < CLEANED, "{:?}", start.elapsed());
        assert!(reads.for_rival().try_lock().await.unwrap().is_none(), "it reads still");
        assert!(!reading.lease().is_lost());
        quorum.resume(0b001);
        reading.release().await.unwrap();
        other.settled().await;
    }
    drop(client);
    quorum.finish_behind(proxies).await;
}

/// What was asked for to write arrives at a node after all have been asked to read, and one had nothing to go on from.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_downgrades_what_is_written_late() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, short(60_000).renewal(Renewal::Never)).await;
    // From here on, all nodes know the scripts.
    let AnyGuard::Write(writing) = quorum.take(&Kind::Write.lock(&client, "known")).await else {
        unreachable!("it writes")
    };
    writing.downgrade().await.unwrap().release().await.unwrap();
    let lock = Kind::Write.lock(&client, "late");
    let before = proxies[0].connections();
    proxies[0].hold_requests(true);
    let AnyGuard::Write(writing) = lock.lock().await.unwrap() else { unreachable!("it writes") };
    // Once it has given up that request.
    eventually("it connects again", || async {
        client.nodes().await;
        proxies[0].connections() > before
    })
    .await;
    assert_eq!(quorum.having(0b111, lock.key()).await, 0b110);
    let asked = quorum.servers[0].scripts_run().await;
    let reading = writing.downgrade().await.unwrap();
    eventually("it has nothing", || async { quorum.servers[0].scripts_run().await > asked }).await;
    proxies[0].hold_requests(false);
    eventually("it arrives", || async { quorum.having(0b001, lock.key()).await == 0b001 }).await;
    // It takes this node to let others read.
    quorum.hang(0b010);
    let other = quorum.client(options()).await;
    let reads = Kind::Read.lock(&other, "late");
    eventually("others may read", || async { matches!(reads.try_lock().await, Ok(Some(_))) }).await;
    other.settled().await;
    assert!(reads.for_rival().try_lock().await.unwrap().is_none(), "it reads still");
    quorum.resume(0b010);
    reading.release().await.unwrap();
    client.settled().await;
    eventually("nothing is left", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
    drop((client, other, lock, reads));
    quorum.finish_behind(proxies).await;
}

/// Half of an even number keep what was dropped, and nobody else could have it without one of them.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_is_not_settled_while_half_of_it_keeps_what_was_dropped() {
    let quorum = Quorum::start(4).await;
    for kind in KINDS {
        let client = quorum.client(options()).await;
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        quorum.hang(0b1100);
        drop(guard);
        eventually("the others are free", || async { quorum.having(0b0011, lock.key()).await == 0 }).await;
        let settled = tokio::time::timeout(TIMEOUT * 3, client.settled()).await;
        assert!(settled.is_err(), "{kind:?}: half of them keep it");
        quorum.resume(0b1100);
        soon("settled", client.settled()).await;
        assert!(quorum.having(0b1111, lock.key()).await.count_ones() <= 1, "{kind:?}");
    }
    quorum.finish().await;
}
