//! Nodes that forget: what the restart guard keeps from happening, and how they are let in again.

use std::time::{Duration, Instant};

use redlatch::{Error, Locks, NodeState, NodeStatus, Options, Renewal, RestartGuard};
use tokio::task::JoinSet;

use super::{KINDS, Quorum, admitted, named, no_quorum, options};
use crate::support::{AnyGuard, AnyLock, eventually, soon};

const TTL: Duration = Duration::from_millis(800);
const NODE: &str = "lock:{}node";

/// Long enough for a node to be back before a lease is over.
const STANDS: Duration = Duration::from_millis(1_600);

fn guarded() -> Options {
    options().ttl(TTL).restart_guard(RestartGuard::On)
}

/// How a node loses what it knew.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// A restart with nothing.
    Restart,
    Flush,
    /// A restart from what was saved before.
    OldSnapshot,
}

async fn forget(quorum: &mut Quorum, set: u32, loss: Loss) {
    if loss == Loss::Flush {
        quorum.run::<String>(set, &["FLUSHALL"]).await;
    } else {
        quorum.kill(set);
        quorum.restart(set).await;
    }
}

/// Wants what is held until he gets it or the lease is over: whether he got it, and how often he tried in vain.
async fn tries(held: AnyGuard, rival: AnyLock) -> (bool, u32) {
    let mut in_vain = 0;
    loop {
        let granted = matches!(rival.try_lock().await, Ok(Some(_)));
        if granted || held.lease().is_lost() {
            return (granted && !held.lease().is_lost(), in_vain);
        }
        in_vain += 1;
    }
}

/// One holds the lock on nodes 0 and 1, since 2 is out of his reach. Node 1 forgets it, and another who reaches 1 and 2
/// wants it. How often he gets it while the first one's lease stands, of four kinds and so many rounds.
async fn double_grants(guard: RestartGuard, loss: Loss, rounds: usize) -> u32 {
    let mut quorum = Quorum::start(3).await;
    let options = guarded().ttl(STANDS).restart_guard(guard);
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
        proxies[2].be_deaf(true);
        proxies[2].cut();
        let second = quorum.client(options.clone()).await;
        let mut guards = Vec::new();
        for kind in KINDS {
            let name = format!("{}-{round}", kind.name());
            let held = soon("granted by two", kind.lock(&first, &name).lock()).await.unwrap();
            assert_eq!(quorum.having(0b111, &format!("lock:{name}")).await, 0b011, "not by the third");
            let rival = kind.rival().lock(&second, &name);
            assert!(rival.try_lock().await.unwrap().is_none(), "{kind:?}: it is held");
            eventually("undone", || async { quorum.having(0b100, rival.key()).await == 0 }).await;
            guards.push((held, rival));
        }
        forget(&mut quorum, 0b010, loss).await;
        // He reaches the node again, and with the guard it says that it has no vote.
        let label = quorum.labels(0b010).remove(0);
        let answers = |node: &NodeStatus| {
            node.node == label && (node.is_voter() || matches!(node.state, NodeState::NotAdmitted))
        };
        eventually("it answers", || async { second.nodes().await.iter().any(answers) }).await;
        // All at a time, so that each is tried while the leases stand.
        let mut trying = JoinSet::new();
        for (place, (held, rival)) in guards.into_iter().enumerate() {
            trying.spawn(async move { (place, tries(held, rival).await) });
        }
        while let Some(tried) = trying.join_next().await {
            let (place, (granted, in_vain)) = tried.unwrap();
            doubles += u32::from(granted);
            refused[place] += in_vain;
        }
        proxies[2].be_deaf(false);
        first.settled().await;
        second.settled().await;
        drop(first);
        if guard == RestartGuard::On {
            assert_eq!(admitted(second.rejoin().await), quorum.labels(0b010), "the others vouch for it");
            let lock = KINDS[0].lock(&second, "again");
            quorum.hang(0b001);
            lock.lock().await.unwrap().release().await.unwrap();
            quorum.resume(0b001);
        }
    }
    for proxy in proxies {
        proxy.outlive_clients().await;
    }
    println!("FIG {loss:?}, {guard:?}: {doubles} granted twice, {refused:?} tried in vain");
    assert!(guard == RestartGuard::Off || !refused.contains(&0), "not tried in time: {refused:?}");
    doubles
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_guard_prevents_double_grants_by_nodes_that_forget() {
    let granted = tokio::join!(
        double_grants(RestartGuard::On, Loss::Restart, 2),
        double_grants(RestartGuard::On, Loss::Flush, 2),
        double_grants(RestartGuard::On, Loss::OldSnapshot, 2),
    );
    assert_eq!(granted, (0, 0, 0));
}

/// The same without the guard: so it is the guard that makes the difference.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_without_a_guard_grants_twice_if_a_node_forgets() {
    for loss in [Loss::Restart, Loss::Flush, Loss::OldSnapshot] {
        let doubles = double_grants(RestartGuard::Off, loss, 1).await;
        println!("FIG {loss:?}: {doubles} of 4 granted twice");
        assert!(doubles > 0, "{loss:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_guard_founds_once() {
    let quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let start = Instant::now();
        for outcome in [lock.try_lock().await.map(drop), lock.lock().await.map(drop)] {
            let (answered, failures) = no_quorum(outcome);
            assert_eq!((answered, named(&failures)), (0, quorum.labels(0b111)));
            assert!(
                failures
                    .iter()
                    .all(|failure| matches!(failure.answer.error(), Some(Error::NotAdmitted { .. })))
            );
        }
        assert!(start.elapsed() < Duration::from_millis(500), "told at once: {:?}", start.elapsed());
    }
    let start = Instant::now();
    let founded = admitted(client.rejoin().await);
    assert_eq!(founded, quorum.labels(0b111));
    assert!(start.elapsed() >= TTL, "{:?}", start.elapsed());
    for client in [client, quorum.client(guarded()).await] {
        let start = Instant::now();
        assert!(client.rejoin().await.unwrap().is_empty(), "founded already");
        assert!(start.elapsed() < TTL / 2, "and nothing to wait for");
        for kind in KINDS {
            let lock = kind.lock(&client, kind.name());
            let guard = lock.lock().await.unwrap();
            assert!(lock.for_rival().try_lock().await.unwrap().is_none());
            guard.release().await.unwrap();
        }
    }
    // Not while one is away: it might remember.
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    quorum.kill(0b100);
    let (answered, failures) = no_quorum(client.rejoin().await);
    assert_eq!((answered, named(&failures)), (0, quorum.labels(0b111)));
    quorum.restart(0b100).await;
    assert_eq!(client.rejoin().await.unwrap().len(), 3);
}

/// It waits for the longest lease that anybody was granted, whatever the one who lets it in knows.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_the_longest_ttl() {
    let mut quorum = Quorum::start(3).await;
    let short = quorum.client(guarded().ttl(Duration::from_millis(200))).await;
    short.rejoin().await.unwrap();
    for kind in KINDS {
        let long = guarded().ttl(Duration::from_millis(700)).write_ttl(Duration::from_millis(1_300));
        let long = quorum.client(long).await;
        long.rwlock("long").unwrap().write().await.unwrap().release().await.unwrap();
        kind.lock(&long, kind.name()).lock().await.unwrap().release().await.unwrap();
        let gone = 1 << (kind as u32 % 3);
        forget(&mut quorum, gone, Loss::Restart).await;
        let start = Instant::now();
        assert_eq!(admitted(short.rejoin().await), quorum.labels(gone));
        assert!(start.elapsed() >= Duration::from_millis(1_300), "{:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_millis(2_300), "{:?}", start.elapsed());
    }
}

/// One writes on nodes 0 and 1, since 2 is out of his reach, and goes on to read there for far longer than he could write.
/// Node 0 forgets it, and is let in by one who knows of short leases only: not before the reader's is over.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_who_reads_longer_than_he_wrote() {
    const READ: Duration = Duration::from_millis(2_500);
    let mut quorum = Quorum::start(3).await;
    let short = quorum.client(guarded().ttl(Duration::from_millis(200))).await;
    short.rejoin().await.unwrap();
    let proxies = quorum.proxies().await;
    let long = guarded().write_ttl(Duration::from_millis(500)).read_ttl(READ).renewal(Renewal::Never);
    let long = quorum.client_behind(&proxies, long).await;
    proxies[2].be_deaf(true);
    proxies[2].cut();
    let writing = soon("granted by two", long.rwlock("longer").unwrap().write()).await.unwrap();
    let reading = writing.downgrade().await.unwrap();
    assert_eq!(quorum.having(0b111, "lock:longer").await, 0b011, "not by the third");
    forget(&mut quorum, 0b001, Loss::Restart).await;
    let rival = short.rwlock("longer").unwrap();
    let trying = async {
        while !reading.lease().is_lost() {
            let granted = matches!(rival.try_write().await, Ok(Some(_)));
            assert!(!granted || reading.lease().is_lost(), "one reads, another writes");
        }
    };
    let start = Instant::now();
    let (rejoined, ()) = tokio::join!(short.rejoin(), trying);
    assert_eq!(admitted(rejoined), quorum.labels(0b001));
    assert!(start.elapsed() >= READ, "{:?}", start.elapsed());
    soon("nobody reads any more", rival.write()).await.unwrap().release().await.unwrap();
}

/// More than one must be known to have forgotten nothing.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_refuses_where_too_few_may_vote() {
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    let lock = KINDS[0].lock(&client, "few");
    lock.lock().await.unwrap().release().await.unwrap();
    // One has forgotten, and one does not answer.
    forget(&mut quorum, 0b001, Loss::Restart).await;
    quorum.kill(0b010);
    let (answered, failures) = no_quorum(client.rejoin().await);
    assert_eq!((answered, named(&failures)), (1, quorum.labels(0b011)));
    assert_eq!(quorum.run::<u32>(0b001, &["EXISTS", NODE]).await, [0], "nothing is changed");
    // Two have forgotten: nobody can get a lock, until all are there to begin anew.
    quorum.restart(0b010).await;
    let (answered, failures) = no_quorum(lock.try_lock().await);
    assert_eq!((answered, named(&failures)), (1, quorum.labels(0b011)));
    assert!(failures.iter().all(|failure| matches!(failure.answer.error(), Some(Error::NotAdmitted { .. }))));
    let admitted = admitted(client.rejoin().await);
    assert_eq!(admitted, quorum.labels(0b011));
    lock.lock().await.unwrap().release().await.unwrap();
    // A majority of the others goes while it waits.
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    forget(&mut quorum, 0b001, Loss::Flush).await;
    let rejoining = begin(&quorum, 0b001, &client).await;
    forget(&mut quorum, 0b010, Loss::Flush).await;
    let outcome = soon("told", rejoining).await.unwrap();
    assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{outcome:?}");
    no_quorum(client.mutex("few").unwrap().try_lock().await);
}

/// Two of five have forgotten, and one of them goes while it waits: the other one is let in.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_passes_over_who_goes_meanwhile() {
    let mut quorum = Quorum::start(5).await;
    let client = quorum.client(guarded()).await;
    client.rejoin().await.unwrap();
    forget(&mut quorum, 0b11000, Loss::Restart).await;
    let rejoining = begin(&quorum, 0b11000, &client).await;
    quorum.kill(0b10000);
    let rejoined = soon("told", rejoining).await.unwrap().unwrap();
    let gone = quorum.labels(0b10000).remove(0);
    let states: Vec<_> = rejoined
        .iter()
        .map(|it| (it.node == gone, it.is_voter(), matches!(it.state, NodeState::Failed(_))))
        .collect();
    assert!(states.contains(&(false, true, false)) && states.contains(&(true, false, true)), "{rejoined:?}");
    assert_eq!(states.len(), 2);
    quorum.restart(0b10000).await;
    assert_eq!(admitted(client.rejoin().await), [gone]);
    drop(client);
    quorum.finish().await;
}

/// Begins to let nodes in, up to where it waits.
async fn begin(
    quorum: &Quorum,
    set: u32,
    client: &Locks,
) -> tokio::task::JoinHandle<Result<Vec<NodeStatus>, Error>> {
    let client = client.clone();
    let rejoining = tokio::spawn(async move { client.rejoin().await });
    let begun = || async {
        let tickets: Vec<u32> = quorum.run(set, &["HEXISTS", NODE, "ticket"]).await;
        tickets.iter().all(|there| *there == 1)
    };
    eventually("begun", begun).await;
    rejoining
}
