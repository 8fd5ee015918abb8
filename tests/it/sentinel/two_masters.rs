//! Two masters at a time, as behind sentinels there may be for a while: who is taken for the right one, and how soon.

use std::time::Duration;

use redlatch::{Error, Locks};
use tokio::time::Instant;

use super::failover::{MASTER, open, tell_sentinels_of};
use crate::support::failover::{KINDS, SLACK, caught_up, told};
use crate::support::{AnyLock, Deployment, Server, Topology, eventually, soon};

/// How often it is looked whether requests still go to the master.
const LOOK: Duration = Duration::from_secs(5);

async fn names(sentinel: &Server, heir: &Server) -> bool {
    let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER];
    sentinel.run::<(String, u16)>(&words).await.1 == heir.port()
}

async fn leads(server: &Server) -> bool {
    server.run::<Vec<redis::Value>>(&["ROLE"]).await[0] == redis::Value::BulkString(b"master".to_vec())
}

async fn assert_taken_at(server: &Server, lock: &AnyLock) {
    let guard = soon("taken", lock.lock()).await.unwrap();
    assert_eq!(server.run::<u64>(&["EXISTS", lock.key()]).await, 1, "{guard:?}");
    guard.release().await.unwrap();
}

/// A replica has been promoted, and the sentinel that did it is not done with the other replicas: it tells of the new
/// master and still lists the old one, which is alive.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_the_promoted_replica_is_the_master_at_once() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let leader = &deployment.sentinels()[0];
    deployment.begin_failover(0).await;
    let heir = || async {
        for replica in deployment.replicas() {
            if names(leader, replica).await && leads(replica).await {
                return Some(replica);
            }
        }
        None
    };
    eventually("it tells of the new one", || async { heir().await.is_some() }).await;
    let heir = heir().await.unwrap();
    let locks = Locks::builder().sentinel([leader.url()], MASTER).options(told()).connect().await.unwrap();
    for kind in KINDS {
        assert_taken_at(heir, &kind.lock(&locks, kind.name())).await;
    }
}

/// One sentinel has not heard of the failover yet, or most of them: neither the first answer nor
/// the most frequent one counts.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_the_latest_configuration_counts() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.fail_over(0).await;
    let (heir, old) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let port = old.port().to_string();
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
        // They hear of it from the others every 2 s: perhaps too soon.
        let opened = async || loop {
            for sentinel in &outdated {
                sentinel.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
                sentinel.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
            }
            let locks = open(&deployment, told()).await;
            if all_name(old).await {
                return locks;
            }
        };
        let locks = soon("opened before they hear of it", opened()).await;
        for kind in KINDS {
            assert_taken_at(heir, &kind.lock(&locks, &format!("{}-{behind}", kind.name()))).await;
        }
        eventually("they hear of it", || all_name(heir)).await;
    }
}

/// Nothing fails on the connections to the old master, which is cut off from sentinels and replicas.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_an_old_master_that_answers_on_is_left() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let locks = open(&deployment, told()).await;
    let (old, heir) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let held = KINDS.map(|kind| kind.lock(&locks, &format!("held-{}", kind.name())));
    for lock in &held {
        assert_taken_at(old, lock).await;
    }
    caught_up(old, deployment.replicas().len()).await;
    heir.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    tell_sentinels_of(heir, &deployment).await;
    let start = Instant::now();
    let lock = KINDS[0].lock(&locks, "next");
    eventually("requests go to the new one", || async {
        let guard = lock.lock().await.unwrap();
        let there = heir.run::<u64>(&["EXISTS", lock.key()]).await == 1;
        // Those of the one before are not known to this one.
        let outcome = guard.release().await;
        assert!(matches!(outcome, Ok(()) | Err(Error::NotHeld { .. })), "{outcome:?}");
        there
    })
    .await;
    println!("left after {:?}", start.elapsed());
    assert!(start.elapsed() < LOOK + SLACK, "{:?}", start.elapsed());
    assert!(leads(old).await, "all the time");
}
