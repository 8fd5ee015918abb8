//! Every subset of the nodes hangs, dies or is cut off.

use std::time::Duration;

use redlatch::Error;

use super::{CLEANED, KINDS, Quorum, TIMEOUT, named, no_quorum, options, places};
use crate::suite::local_turns::contended;
use crate::support::{AnyLock, Kind, Proxy, Stopwatch, idles, patient, soon};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// The process is stopped; its connections stay open.
    Hangs,
    Killed,
    /// The network drops everything; the connections stay open.
    HalfOpen,
}

/// A quorum whose nodes fail in one of these ways.
struct FaultyQuorum {
    quorum: Quorum,
    fault: Fault,
    proxies: Vec<Proxy>,
}

impl FaultyQuorum {
    async fn start(nodes: usize, fault: Fault) -> FaultyQuorum {
        let quorum = Quorum::start(nodes).await;
        let proxies = if fault == Fault::HalfOpen { quorum.proxies().await } else { Vec::new() };
        FaultyQuorum { quorum, fault, proxies }
    }

    async fn locks(&self) -> redlatch::Locks {
        match self.fault {
            Fault::HalfOpen => self.quorum.client_behind(&self.proxies, options()).await,
            Fault::Hangs => self.quorum.client(options()).await,
            // A killed node refuses at once, and a live one may be slow.
            Fault::Killed => self.quorum.client(patient().outage_limit(TIMEOUT * 2)).await,
        }
    }

    fn labels(&self, set: u32) -> Vec<String> {
        let labels = self.quorum.labels(set);
        if self.fault != Fault::HalfOpen {
            return labels;
        }
        labels.iter().map(|label| label.replace("127.0.0.1", "127.0.0.2")).collect()
    }

    fn fail(&mut self, set: u32) {
        match self.fault {
            Fault::Hangs => self.quorum.hang(set),
            Fault::Killed => self.quorum.kill(set),
            Fault::HalfOpen => self.pass(set, false),
        }
    }

    async fn heal(&mut self, set: u32) {
        match self.fault {
            Fault::Hangs => self.quorum.resume(set),
            Fault::Killed => self.quorum.restart(set).await,
            Fault::HalfOpen => self.pass(set, true),
        }
    }

    fn pass(&self, set: u32, passes: bool) {
        for place in places(set) {
            self.proxies[place].set_drops_requests(!passes);
            self.proxies[place].hold_requests(!passes);
        }
    }
}

/// Tries locks of all kinds at the same time, while this subset fails.
async fn tries(failing: &FaultyQuorum, locks: &[AnyLock], set: u32) {
    let quorum = &failing.quorum;
    let granted = quorum.count() - set.count_ones() as usize >= quorum.majority();
    let tasks = locks.iter().cloned().map(|lock| {
        let (labels, count) = (failing.labels(set), quorum.count());
        tokio::spawn(async move {
            let start = Stopwatch::start();
            let outcome = lock.try_lock().await;
            let took = start.stop();
            if granted {
                let guard = outcome.unwrap().expect("the lock is free");
                assert!(took.undisturbed() < TIMEOUT * 3 / 2, "{took:?} with {labels:?} failing");
                assert!(!guard.lease().is_lost());
                let start = Stopwatch::start();
                guard.release().await.unwrap();
                assert!(start.undisturbed() < TIMEOUT * 3 / 2, "release() took {start:?}");
                return;
            }
            assert!(took.undisturbed() < TIMEOUT * 2, "{took:?} with {labels:?} failing");
            let (answered, failures) = no_quorum(outcome);
            assert_eq!((answered, named(&failures)), (count - labels.len(), labels.clone()));
            assert!(
                failures.iter().all(|failure| matches!(failure.answer.error(), Some(Error::Redis { .. })))
            );
            // A call with a time limit fails before the limit, too. Only for a third of the sets,
            // since this takes long.
            if !set.is_multiple_of(3) {
                return;
            }
            let limit = TIMEOUT * 5;
            let start = Stopwatch::start();
            let (answered, failures) = no_quorum(lock.lock_timeout(limit).await);
            assert_eq!((answered, named(&failures)), (count - labels.len(), labels));
            assert!(start.undisturbed() < limit, "{start:?}");
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

async fn subsets(nodes: usize, fault: Fault, sets: impl IntoIterator<Item = u32>) {
    let mut failing = FaultyQuorum::start(nodes, fault).await;
    let client = failing.locks().await;
    let locks = KINDS.map(|kind| kind.lock(&client, &format!("subset-{}", kind.name())));
    let mut slowest = Duration::ZERO;
    for set in sets {
        failing.fail(set);
        tries(&failing, &locks, set).await;
        failing.heal(set).await;
        // The requests that the failed nodes missed arrive now.
        let start = Stopwatch::start();
        idles(&client).await;
        for lock in &locks {
            failing.quorum.wait_for(failing.quorum.all(), 0, lock).await;
        }
        slowest = slowest.max(start.elapsed());
        assert!(start.undisturbed() < CLEANED, "subset {set:b}: {start:?} of a TTL of 30 s");
    }
    println!("{nodes} nodes: all released after {slowest:?} at most");
    for lock in &locks {
        assert_eq!(
            failing.quorum.having(failing.quorum.all(), lock.key()).await,
            0,
            "a late request left a hold"
        );
    }
    drop((client, locks));
    for proxy in failing.proxies {
        proxy.outlive_clients().await;
    }
    failing.quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_3_grants_if_at_most_a_minority_hangs() {
    subsets(3, Fault::Hangs, 0..8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_4_grants_if_at_most_a_minority_hangs() {
    subsets(4, Fault::Hangs, 0..16).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_5_grants_if_at_most_a_minority_hangs() {
    subsets(5, Fault::Hangs, 0..32).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_3_grants_if_at_most_a_minority_is_dead() {
    subsets(3, Fault::Killed, 0..8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_4_grants_if_at_most_a_minority_is_dead() {
    subsets(4, Fault::Killed, [0b1000, 0b0011, 0b1010, 0b0111]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_5_grants_if_at_most_a_minority_is_dead() {
    subsets(5, Fault::Killed, [0b10000, 0b00011, 0b10100, 0b00111, 0b11010, 0b11101]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn quorum_grants_if_at_most_a_minority_is_dead_in_all_subsets() {
    subsets(4, Fault::Killed, 0..16).await;
    subsets(5, Fault::Killed, 0..32).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_3_grants_if_at_most_a_minority_is_cut_off() {
    subsets(3, Fault::HalfOpen, 0..8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_of_5_grants_if_at_most_a_minority_is_cut_off() {
    subsets(5, Fault::HalfOpen, [0b00001, 0b01010, 0b11000, 0b10011, 0b01101, 0b11111]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn quorum_grants_if_at_most_a_minority_is_cut_off_in_all_subsets() {
    subsets(4, Fault::HalfOpen, 0..16).await;
    subsets(5, Fault::HalfOpen, 0..32).await;
}

/// No hold is passed on while a node fails. So the task behind its holder does not wait for that:
/// it queues on the nodes.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_queues_the_next_task_while_a_node_fails() {
    let mut quorum = Quorum::start(3).await;
    let turn = Duration::from_secs(10);
    let locks = quorum.client(options().ttl(turn * 6).local_turn(turn)).await;
    quorum.kill(0b100);
    let mut slow = Vec::new();
    // Again and again: not each grant could be passed on.
    for kind in [Kind::Mutex, Kind::Write].repeat(10) {
        let lock = kind.lock(&locks, kind.name());
        let guard = contended(&lock).await;
        let start = Stopwatch::start();
        let next = tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await.unwrap().release().await.unwrap() }
        });
        quorum.queued(0b011, &lock, 1).await;
        if start.undisturbed() > turn / 2 {
            slow.push(format!("{start:?}")); // at the end of the turn
        }
        assert!(slow.len() < 3, "after the client has noticed the failure: {slow:?}");
        guard.release().await.unwrap();
        soon("the next task acquires", next).await.unwrap();
    }
    drop(locks);
    quorum.restart(0b100).await;
    quorum.finish().await;
}
