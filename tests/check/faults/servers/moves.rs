//! Locks that move: to a replica that has missed grants, or with their slot to another master.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::processes::{run, wait_until_whole};
use super::state::{Outcome, gone, read_locks, wait_for_new_hold};
use crate::faults::Scene;
use crate::history::Time;
use crate::plan::Fault;
use crate::support::{Deployment, Server, Topology};
use crate::workload::LOCKS;

/// Lets a replica take over that has missed the last writes. It takes over at once, while a lock
/// that it has missed is still held. The master is killed, or learns that it was replaced;
/// afterwards it is a replica.
pub async fn fail_over(scene: &mut Scene<'_>, deployment: &mut Deployment) -> Outcome {
    let place = scene.place(deployment.masters().len());
    let lag = scene.millis(20, 400);
    let is_cluster = deployment.topology() == Topology::Cluster;
    // Sentinels reconfigure a living old master only after seconds: two masters would grant
    // meanwhile. So there the master is always killed.
    let dies = !is_cluster || scene.random.below(2) == 0;
    let behind = if is_cluster { place..place + 1 } else { 0..deployment.replicas().len() };
    let mut successor = match is_cluster {
        true => Some(deployment.replicas()[place].connection().await),
        false => None,
    };
    deployment.replicas()[behind.clone()].iter().for_each(|replica| replica.pause());
    // Otherwise the paused replicas would read the missed writes from their sockets when they
    // continue.
    let master = &deployment.masters()[place];
    let _: u64 = run(master, &["CLIENT", "KILL", "TYPE", "replica"]).await;
    let known = read_locks(master).await;
    sleep(lag).await;
    let held = wait_for_new_hold(master, &known).await;
    let start = Time::now();
    if dies {
        deployment.masters_mut()[place].kill();
    }
    let killed = Time::now();
    // Sent while the replica is paused, so that it takes over before it replicates anything.
    let taking_over = successor.take().map(|mut replica| {
        tokio::spawn(async move {
            redis::cmd("CLUSTER").arg(&["FAILOVER", "TAKEOVER"]).query_async::<()>(&mut replica).await
        })
    });
    sleep(Duration::from_millis(5)).await;
    let replicas = &deployment.replicas()[behind];
    replicas.iter().for_each(|replica| replica.resume());
    if let Some(taking_over) = taking_over {
        taking_over.await.unwrap().unwrap();
    }
    // Read before a client can acquire one of the missing locks.
    let gone = gone(&held, &read_locks(&replicas[0]).await);
    let ended = match dies {
        true => killed,
        false => wait_until_replica(&deployment.masters()[place]).await,
    };
    if is_cluster {
        deployment.has_failed_over(place).await;
    } else {
        deployment.fail_over(place).await;
    }
    let taken_over = Time::now();
    let master = deployment.masters()[place].port().to_string();
    if let Some(old) = deployment.replicas_mut().iter_mut().find(|server| !server.is_alive()) {
        old.restart().await;
        // Sentinels demote the old master, but only after ten seconds. Half of the time it is
        // demoted here; otherwise it acts as a second master until then.
        if !is_cluster && scene.random.below(2) == 0 {
            run::<()>(old, &["REPLICAOF", "127.0.0.1", &master]).await;
        }
    }
    let moved = timeout(Duration::from_secs(20), wait_until_whole(deployment)).await;
    let effect = (moved.is_ok() && !gone.is_empty())
        .then(|| format!("a replica {lag:?} behind took over, without the locks {}", gone.join(", ")));
    // The other masters of a cluster have lost nothing.
    let of = is_cluster.then(|| held.iter().map(|seen| seen.lock.to_owned()).collect());
    Outcome { effect, lost: Some((start, ended)), of, away: Some((start, taken_over)) }
}

/// Waits until a former master reports that it is a replica.
async fn wait_until_replica(server: &Server) -> Time {
    while !run::<String>(server, &["INFO", "replication"]).await.contains("role:slave") {
        sleep(Duration::from_millis(2)).await;
    }
    Time::now()
}

/// Moves the slot of a lock to another master while the lock is used.
pub async fn move_slot(scene: &mut Scene<'_>, deployment: &Deployment) -> Option<String> {
    debug_assert!(Fault::SlotMoved.is_of(deployment.topology()));
    let (lock, _) = LOCKS[scene.place(LOCKS.len())];
    let key = format!("lock:{lock}");
    let from = deployment.owner(&key).await?;
    let to = (from + 1 + scene.place(2)) % deployment.masters().len();
    let before = redirected(&deployment.masters()[from]).await;
    deployment.begin_move(&key, to).await;
    sleep(scene.millis(10, 400)).await;
    deployment.move_keys(&key, to).await;
    sleep(scene.millis(0, 100)).await;
    deployment.end_move(&key, to).await;
    // Clients still send requests to the old master, which redirects them.
    sleep(Duration::from_millis(200)).await;
    let redirected = redirected(&deployment.masters()[from]).await - before;
    (redirected > 0)
        .then(|| format!("{lock} moved from master {from} to {to}, {redirected} requests were redirected"))
}

/// How many requests for locks a server of a cluster has redirected to another.
async fn redirected(server: &Server) -> u64 {
    let stats: String = run(server, &["INFO", "commandstats"]).await;
    let refused = stats
        .lines()
        .filter(|line| line.starts_with("cmdstat_eval"))
        .filter_map(|line| line.split_once("rejected_calls=")?.1.split(',').next()?.parse::<u64>().ok());
    refused.sum()
}
