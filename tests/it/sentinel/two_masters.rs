//! Two masters at the same time, as sentinels may leave for a while: which one a client uses, and
//! how soon.

use std::sync::OnceLock;
use std::time::Duration;

use redlatch::{Error, Locks};

use super::{MASTER, monitor, open};
use crate::support::failover::{SLACK, caught_up, urls};
use crate::support::{
    AnyLock, Deployment, KINDS, LONGEST_WAIT, Proxy, Server, Stopwatch, Topology, eventually, notified_only,
    soon,
};

/// How often a client checks that it is connected to the master.
const CHECK: Duration = Duration::from_secs(5);

async fn names(sentinel: &Server, promoted: &Server) -> bool {
    let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER];
    sentinel.run::<(String, u16)>(&words).await.1 == promoted.port()
}

async fn is_master(server: &Server) -> bool {
    server.run::<Vec<redis::Value>>(&["ROLE"]).await[0] == redis::Value::BulkString(b"master".to_vec())
}

async fn assert_acquired_at(server: &Server, lock: &AnyLock) {
    let guard = soon("the lock is granted", lock.lock()).await.unwrap();
    assert_eq!(server.run::<u64>(&["EXISTS", lock.key()]).await, 1, "{guard:?}");
    guard.release().await.unwrap();
}

/// A sentinel has promoted a replica and still reconfigures the others: it names the new master and
/// still lists the old one, which is alive.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_promoted_replica_is_used_at_once() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let leader = &deployment.sentinels()[0];
    deployment.begin_failover(0).await;
    let promoted = || async {
        for replica in deployment.replicas() {
            if names(leader, replica).await && is_master(replica).await {
                return Some(replica);
            }
        }
        None
    };
    let found = OnceLock::new();
    let is_promoted = || async { promoted().await.is_some_and(|replica| found.set(replica).is_ok()) };
    eventually("the sentinel names the promoted replica", is_promoted).await;
    let promoted = found.into_inner().unwrap();
    let locks =
        Locks::builder().sentinel([leader.url()], MASTER).options(notified_only()).connect().await.unwrap();
    for kind in KINDS {
        assert_acquired_at(promoted, &kind.lock(&locks, kind.name())).await;
    }
}

/// One or two of three sentinels do not know of the failover yet. Neither the first reply nor the
/// most frequent one counts, but the latest configuration.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_latest_configuration_counts() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.fail_over(0).await;
    let (promoted, old) = (&deployment.masters()[0], &deployment.replicas()[0]);
    old.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    for behind in [0b001_u32, 0b010, 0b100, 0b011, 0b101, 0b110] {
        let sentinels = deployment.sentinels().iter().enumerate();
        let outdated: Vec<&Server> =
            sentinels.filter(|(place, _)| behind >> place & 1 == 1).map(|(_, one)| one).collect();
        let all_name = async |server: &Server| {
            for sentinel in &outdated {
                if !names(sentinel, server).await {
                    return false;
                }
            }
            true
        };
        // They learn of it from the others every 2 s: perhaps before the client has connected.
        let opened = async || loop {
            monitor(old, outdated.iter().copied()).await;
            let locks = open(&deployment, notified_only()).await;
            if all_name(old).await {
                return locks;
            }
        };
        let locks = soon("connected while they are outdated", opened()).await;
        for kind in KINDS {
            assert_acquired_at(promoted, &kind.lock(&locks, &format!("{}-{behind}", kind.name()))).await;
        }
        eventually("all sentinels know the new master", || all_name(promoted)).await;
    }
}

/// A sentinel that is cut off with the old master answers first. A client that has used the new one
/// waits for the others, and does not go back.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_client_does_not_go_back_to_an_old_master() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.fail_over(0).await;
    let (promoted, old) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let sentinels = deployment.sentinels();
    let others = Proxy::before(sentinels[1..].iter().map(Server::port).collect()).await;
    let data = Proxy::before(deployment.data().map(Server::port).collect()).await;
    let addresses = [urls("127.0.0.1", &sentinels[..1]), urls("127.0.0.2", &sentinels[1..])].concat();
    let locks =
        Locks::builder().sentinel(addresses, MASTER).options(notified_only()).connect().await.unwrap();
    let lock = KINDS[0].lock(&locks, "first");
    assert_acquired_at(promoted, &lock).await;
    others.slow_down(Some(Duration::from_millis(80)));
    // The other sentinels correct both every few seconds.
    let is_outdated = async || {
        monitor(old, &sentinels[..1]).await;
        old.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
        promoted.kill_connections().await;
        assert_acquired_at(promoted, &lock).await;
        names(&sentinels[0], old).await && is_master(old).await
    };
    soon("connected again while it is outdated", async { while !is_outdated().await {} }).await;
    drop(locks);
    others.outlive_clients().await;
    data.outlive_clients().await;
}

/// A client that has used the new master must connect again while only the sentinel that is cut off
/// with the old one answers.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_client_waits_until_a_later_sentinel_answers() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.fail_over(0).await;
    let (promoted, old) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let (cut_off, others) = deployment.sentinels().split_first().unwrap();
    let options = notified_only().node_timeout(Duration::from_secs(2)).outage_limit(LONGEST_WAIT);
    let lock = KINDS[0].lock(&open(&deployment, options).await, "later");
    assert_acquired_at(promoted, &lock).await;
    others.iter().for_each(Server::pause);
    let port = old.port().to_string();
    cut_off.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
    cut_off.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
    old.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    promoted.kill_connections().await;
    for _ in 0..3 {
        let tried = lock.try_lock().await;
        assert!(tried.as_ref().is_err_and(Error::is_transient), "{tried:?}");
    }
    others.iter().for_each(Server::resume);
    assert_acquired_at(promoted, &lock).await;
}

/// The old master is cut off from sentinels and replicas, and still serves its connections: no
/// request fails that could reveal the new master.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_leave_an_old_master_that_still_responds() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let locks = open(&deployment, notified_only()).await;
    let (old, promoted) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let held = KINDS.map(|kind| kind.lock(&locks, &format!("held-{}", kind.name())));
    for lock in &held {
        assert_acquired_at(old, lock).await;
    }
    caught_up(old, deployment.replicas().len()).await;
    promoted.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    monitor(promoted, deployment.sentinels()).await;
    let start = Stopwatch::start();
    let lock = KINDS[0].lock(&locks, "next");
    eventually("requests go to the new master", || async {
        let guard = lock.lock().await.unwrap();
        let there = promoted.run::<u64>(&["EXISTS", lock.key()]).await == 1;
        // The new master does not know holds of the old one.
        let outcome = guard.release().await;
        assert!(matches!(outcome, Ok(()) | Err(Error::NotHeld { .. })), "{outcome:?}");
        there
    })
    .await;
    println!("moved after {:?}", start.elapsed());
    assert!(start.undisturbed() < CHECK + SLACK, "{start:?}");
    assert!(is_master(old).await, "the old master was a master all the time");
}
