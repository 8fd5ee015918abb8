//! The restart guard: it prevents double grants by nodes that lost their data, and `rejoin` admits
//! such nodes again.

use std::time::Duration;

use redlatch::{Error, NodeState, NodeStatus, Renewal, RestartGuard};
use tokio::task::JoinSet;

use super::rejoin::{NODE, TTL, guarded, start_rejoin};
use super::{KINDS, Quorum, admitted, named, no_quorum};
use crate::support::{AnyGuard, AnyLock, Stopwatch, eventually, soon};

/// The TTL of the leases: long enough for a node to restart before they expire.
const LEASE: Duration = Duration::from_millis(2_500);

/// How a node loses its data.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// A restart without any data.
    Restart,
    Flush,
    /// A restart from an older snapshot.
    OldSnapshot,
}

async fn lose_data(quorum: &mut Quorum, set: u32, loss: Loss) {
    if loss == Loss::Flush {
        quorum.run::<String>(set, &["FLUSHALL"]).await;
    } else {
        quorum.kill(set);
        quorum.restart(set).await;
    }
}

/// Tries for a held lock until it is granted or the holder's lease has ended. Returns whether it
/// was granted while the lease was valid, and how many tries failed.
async fn tries(held: AnyGuard, rival: AnyLock) -> (bool, u32) {
    let mut refused = 0;
    loop {
        let granted = matches!(rival.try_lock().await, Ok(Some(_)));
        if granted || held.lease().is_lost() {
            return (granted && !held.lease().is_lost(), refused);
        }
        refused += 1;
    }
}

/// A holds the lock on nodes 0 and 1, since it cannot reach node 2. Node 1 loses its data, and B,
/// which reaches nodes 1 and 2, tries for the lock. Returns how often B is granted it while A's
/// lease is valid, over four kinds and `rounds` rounds.
async fn double_grants(guard: RestartGuard, loss: Loss, rounds: usize) -> u32 {
    let mut quorum = Quorum::start(3).await;
    let options = guarded().ttl(LEASE).restart_guard(guard);
    if guard == RestartGuard::On {
        assert_eq!(quorum.client(options.clone()).await.rejoin().await.unwrap().len(), 3);
    }
    let (mut doubles, mut refused) = (0, [0; 4]);
    let proxies = quorum.proxies().await;
    for round in 0..rounds {
        if loss == Loss::OldSnapshot {
            quorum.run::<String>(0b010, &["SAVE"]).await;
        }
        let first = quorum.client_behind(&proxies, options.clone()).await;
        proxies[2].set_drops_requests(true);
        proxies[2].cut();
        let second = quorum.client(options.clone()).await;
        let mut guards = Vec::new();
        for kind in KINDS {
            let name = format!("{}-{round}", kind.name());
            let held = soon("two nodes grant the lock", kind.lock(&first, &name).lock()).await.unwrap();
            assert_eq!(
                quorum.having(0b111, &format!("lock:{name}")).await,
                0b011,
                "the third node has granted it"
            );
            let rival = kind.rival().lock(&second, &name);
            assert!(rival.try_lock().await.unwrap().is_none(), "{kind:?}: granted while held");
            quorum.wait_for(0b100, 0, &rival).await;
            guards.push((held, rival));
        }
        lose_data(&mut quorum, 0b010, loss).await;
        // B is connected to the node again; with the guard, the node reports that it has no vote.
        let label = quorum.labels(0b010).remove(0);
        let answers = |node: &NodeStatus| {
            node.node == label && (node.is_voter() || matches!(node.state, NodeState::NotAdmitted))
        };
        eventually("the node responds", || async { second.nodes().await.iter().any(answers) }).await;
        // All kinds at the same time, so that each is tried while the leases are valid.
        let mut trying = JoinSet::new();
        for (place, (held, rival)) in guards.into_iter().enumerate() {
            trying.spawn(async move { (place, tries(held, rival).await) });
        }
        while let Some(tried) = trying.join_next().await {
            let (place, (granted, failed)) = tried.unwrap();
            doubles += u32::from(granted);
            refused[place] += failed;
        }
        proxies[2].set_drops_requests(false);
        first.settled().await;
        second.settled().await;
        drop(first);
        if guard == RestartGuard::On {
            assert_eq!(admitted(second.rejoin().await), quorum.labels(0b010), "the other two nodes admit it");
            let lock = KINDS[0].lock(&second, "again");
            quorum.hang(0b001);
            lock.lock().await.unwrap().release().await.unwrap();
            quorum.resume(0b001);
        }
    }
    for proxy in proxies {
        proxy.outlive_clients().await;
    }
    println!("FIG {loss:?}, {guard:?}: {doubles} granted twice, {refused:?} tries refused");
    assert!(
        guard == RestartGuard::Off || !refused.contains(&0),
        "a kind was not tried while its lease was valid: {refused:?}"
    );
    doubles
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_guard_prevents_double_grants_after_data_loss() {
    let granted = tokio::join!(
        double_grants(RestartGuard::On, Loss::Restart, 2),
        double_grants(RestartGuard::On, Loss::Flush, 2),
        double_grants(RestartGuard::On, Loss::OldSnapshot, 2),
    );
    assert_eq!(granted, (0, 0, 0));
}

/// The same without the guard does grant twice, so the guard makes the difference.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_without_guard_grants_twice_after_data_loss() {
    for loss in [Loss::Restart, Loss::Flush, Loss::OldSnapshot] {
        let doubles = double_grants(RestartGuard::Off, loss, 1).await;
        println!("FIG {loss:?}: {doubles} of 4 granted twice");
        assert!(doubles > 0, "{loss:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_guard_requires_founding_once() {
    // No request times out.
    let guarded = || guarded().node_timeout(Duration::from_secs(10));
    let quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    let mut times = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let start = Stopwatch::start();
        for outcome in [lock.try_lock().await.map(drop), lock.lock().await.map(drop)] {
            let (answered, failures) = no_quorum(outcome);
            assert_eq!((answered, named(&failures)), (0, quorum.labels(0b111)));
            assert!(
                failures
                    .iter()
                    .all(|failure| matches!(failure.answer.error(), Some(Error::NotAdmitted { .. })))
            );
        }
        times.push(start.stop());
    }
    // The shortest: a server may stand still, but a wait would delay all.
    let shortest = times.iter().map(Stopwatch::undisturbed).min().unwrap();
    assert!(shortest < Duration::from_millis(500), "the calls took {times:?}");
    let start = Stopwatch::start();
    let founded = admitted(client.rejoin().await);
    assert_eq!(founded, quorum.labels(0b111));
    assert!(start.elapsed() >= TTL, "{:?}", start.elapsed());
    for client in [client, quorum.client(guarded()).await] {
        let mut times = Vec::new();
        for _ in 0..3 {
            let start = Stopwatch::start();
            assert!(client.rejoin().await.unwrap().is_empty(), "the quorum is founded already");
            times.push(start.stop());
        }
        let shortest = times.iter().map(Stopwatch::undisturbed).min().unwrap();
        assert!(shortest < TTL / 2, "rejoin waited although no node needed admission: {times:?}");
        for kind in KINDS {
            let lock = kind.lock(&client, kind.name());
            let guard = lock.lock().await.unwrap();
            assert!(lock.for_rival().try_lock().await.unwrap().is_none());
            guard.release().await.unwrap();
        }
    }
    // Founding needs all nodes: the missing one might hold locks.
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    quorum.kill(0b100);
    let (answered, failures) = no_quorum(client.rejoin().await);
    assert_eq!((answered, named(&failures)), (0, quorum.labels(0b111)));
    quorum.restart(0b100).await;
    assert_eq!(client.rejoin().await.unwrap().len(), 3);
}

/// The node waits for the longest lease that any client was granted, even if the client that calls
/// `rejoin` has shorter TTLs.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_the_longest_ttl() {
    let mut quorum = Quorum::start(3).await;
    let short = quorum.client(guarded().ttl(Duration::from_millis(200))).await;
    short.rejoin().await.unwrap();
    for kind in KINDS {
        let long = guarded().ttl(Duration::from_secs(1)).write_ttl(Duration::from_millis(1_600));
        let long = quorum.client(long).await;
        long.rwlock("long").unwrap().write().await.unwrap().release().await.unwrap();
        kind.lock(&long, kind.name()).lock().await.unwrap().release().await.unwrap();
        let gone = 1 << (kind as u32 % 3);
        lose_data(&mut quorum, gone, Loss::Restart).await;
        let start = Stopwatch::start();
        assert_eq!(admitted(short.rejoin().await), quorum.labels(gone));
        assert!(start.elapsed() >= Duration::from_millis(1_600), "{:?}", start.elapsed());
        assert!(start.undisturbed() < Duration::from_millis(2_600), "{start:?}");
    }
}

/// A writes on nodes 0 and 1, since it cannot reach node 2, and downgrades to a read lease with a
/// far longer TTL. Node 0 loses its data, and B, whose TTLs are short, calls `rejoin`: node 0 is
/// not admitted before A's read lease has expired.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_a_downgraded_lease_with_a_longer_ttl() {
    const READ: Duration = Duration::from_millis(2_500);
    let mut quorum = Quorum::start(3).await;
    let short = quorum.client(guarded().ttl(Duration::from_millis(200))).await;
    short.rejoin().await.unwrap();
    let proxies = quorum.proxies().await;
    let long = guarded().write_ttl(Duration::from_secs(1)).read_ttl(READ).renewal(Renewal::Never);
    let long = quorum.client_behind(&proxies, long).await;
    proxies[2].set_drops_requests(true);
    proxies[2].cut();
    let writing = soon("two nodes grant the lock", long.rwlock("longer").unwrap().write()).await.unwrap();
    let reading = writing.downgrade().await.unwrap();
    assert_eq!(quorum.having(0b111, "lock:longer").await, 0b011, "the third node has granted it");
    lose_data(&mut quorum, 0b001, Loss::Restart).await;
    let rival = short.rwlock("longer").unwrap();
    let trying = async {
        while !reading.lease().is_lost() {
            let granted = matches!(rival.try_write().await, Ok(Some(_)));
            assert!(!granted || reading.lease().is_lost(), "B writes while A reads");
        }
    };
    let start = Stopwatch::start();
    let (rejoined, ()) = tokio::join!(short.rejoin(), trying);
    assert_eq!(admitted(rejoined), quorum.labels(0b001));
    assert!(start.elapsed() >= READ, "{:?}", start.elapsed());
    soon("the read lease has expired", rival.write()).await.unwrap().release().await.unwrap();
}

/// The same for a hold that is adopted with a longer TTL than it was granted with.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_an_adopted_lease_with_a_longer_ttl() {
    const LONG: Duration = Duration::from_millis(2_500);
    let mut quorum = Quorum::start(3).await;
    let short = quorum.client(guarded().ttl(Duration::from_secs(1))).await;
    short.rejoin().await.unwrap();
    let long = quorum.client(guarded().ttl(LONG).renewal(Renewal::Never)).await;
    for kind in KINDS {
        let ticket = kind.lock(&short, kind.name()).lock().await.unwrap().into_ticket().unwrap();
        let adopted = kind.lock(&long, kind.name()).adopt(&ticket).await.unwrap();
        let gone = 1 << (kind as u32 % 3);
        lose_data(&mut quorum, gone, Loss::Restart).await;
        let start = Stopwatch::start();
        assert_eq!(admitted(short.rejoin().await), quorum.labels(gone));
        assert!(start.elapsed() >= LONG, "{:?}", start.elapsed());
        assert!(adopted.lease().is_lost());
    }
}

/// A majority of voters must respond, before and after the wait.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_fails_without_a_majority_of_voters() {
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    let lock = KINDS[0].lock(&client, "few");
    lock.lock().await.unwrap().release().await.unwrap();
    // One node has lost its data, and one does not respond.
    lose_data(&mut quorum, 0b001, Loss::Restart).await;
    quorum.kill(0b010);
    let (answered, failures) = no_quorum(client.rejoin().await);
    assert_eq!((answered, named(&failures)), (1, quorum.labels(0b011)));
    assert_eq!(quorum.run::<u32>(0b001, &["EXISTS", NODE]).await, [0], "rejoin has changed the node");
    // Two nodes have lost their data: no lock is granted until all nodes are there and `rejoin`
    // founds the quorum again.
    quorum.restart(0b010).await;
    let (answered, failures) = no_quorum(lock.try_lock().await);
    assert_eq!((answered, named(&failures)), (1, quorum.labels(0b011)));
    assert!(failures.iter().all(|failure| matches!(failure.answer.error(), Some(Error::NotAdmitted { .. }))));
    let admitted = admitted(client.rejoin().await);
    assert_eq!(admitted, quorum.labels(0b011));
    lock.lock().await.unwrap().release().await.unwrap();
    // One of the two voters loses its data while `rejoin` waits.
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    lose_data(&mut quorum, 0b001, Loss::Flush).await;
    let rejoining = start_rejoin(&quorum, 0b001, &client).await;
    lose_data(&mut quorum, 0b010, Loss::Flush).await;
    let outcome = soon("rejoin returns", rejoining).await.unwrap();
    assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{outcome:?}");
    no_quorum(client.mutex("few").unwrap().try_lock().await);
}

/// Two of five nodes have lost their data, and one of them dies while `rejoin` waits: the other is
/// admitted.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_skips_a_node_that_fails_meanwhile() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    lose_data(&mut quorum, 0b11000, Loss::Restart).await;
    let rejoining = start_rejoin(&quorum, 0b11000, &client).await;
    quorum.kill(0b10000);
    let rejoined = soon("rejoin returns", rejoining).await.unwrap().unwrap();
    let gone = quorum.labels(0b10000).remove(0);
    let states: Vec<_> = rejoined
        .iter()
        .map(|status| (status.node == gone, status.is_voter(), matches!(status.state, NodeState::Failed(_))))
        .collect();
    assert!(states.contains(&(false, true, false)) && states.contains(&(true, false, true)), "{rejoined:?}");
    assert_eq!(states.len(), 2);
    quorum.restart(0b10000).await;
    assert_eq!(admitted(client.rejoin().await), [gone]);
    drop(client);
    quorum.finish().await;
}
