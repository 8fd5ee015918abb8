//! Locks that move: to a replica that has missed something, or to another master with their slot.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::processes::{run, whole};
use super::state::{Outcome, gone, is_ahead, look};
use crate::faults::Scene;
use crate::history::Time;
use crate::plan::Fault;
use crate::support::{Deployment, Server, Topology};
use crate::workload::LOCKS;

/// A replica that has not heard of the last writes takes over at once, so that what it does not know of is still held.
/// The master is killed, or else finds out that it is none any more; it comes back as a replica.
pub async fn fail_over(scene: &mut Scene<'_>, deployment: &mut Deployment) -> Outcome {
    let place = scene.place(deployment.masters().len());
    let lag = scene.millis(20, 400);
    let is_cluster = deployment.topology() == Topology::Cluster;
    // Behind sentinels, a master that lives is told only after seconds: two would grant for so long.
    let dies = !is_cluster || scene.random.below(2) == 0;
    let behind = if is_cluster { place..place + 1 } else { 0..deployment.replicas().len() };
    let mut heir = match is_cluster {
        true => Some(deployment.replicas()[place].connection().await),
        false => None,
    };
    deployment.replicas()[behind.clone()].iter().for_each(|replica| replica.pause());
    // Else, what is on its way would be found once they go on.
    let master = &deployment.masters()[place];
    let _: u64 = run(master, &["CLIENT", "KILL", "TYPE", "replica"]).await;
    let known = look(master).await;
    sleep(lag).await;
    let held = is_ahead(master, &known).await;
    let start = Time::now();
    if dies {
        deployment.masters_mut()[place].kill();
    }
    let killed = Time::now();
    // It waits for the replica, before what its master would tell it.
    let taking_over = heir.take().map(|mut heir| {
        tokio::spawn(async move {
            redis::cmd("CLUSTER").arg(&["FAILOVER", "TAKEOVER"]).query_async::<()>(&mut heir).await
        })
    });
    sleep(Duration::from_millis(5)).await;
    let replicas = &deployment.replicas()[behind];
    replicas.iter().for_each(|replica| replica.resume());
    if let Some(taking_over) = taking_over {
        taking_over.await.unwrap().unwrap();
    }
    // Before anybody can have what is gone.
    let gone = gone(&held, &look(&replicas[0]).await);
    let ended = match dies {
        true => killed,
        false => is_replica(&deployment.masters()[place]).await,
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
        // Sentinels would say so as well, ten seconds later: until then it takes itself for the master, if nobody tells it.
        if !is_cluster && scene.random.below(2) == 0 {
            run::<()>(old, &["REPLICAOF", "127.0.0.1", &master]).await;
        }
    }
    let moved = timeout(Duration::from_secs(20), whole(deployment)).await;
    let effect = (moved.is_ok() && !gone.is_empty())
        .then(|| format!("a replica that was {lag:?} behind took over, without {}", gone.join(", ")));
    // The other masters of a cluster have lost nothing.
    let of = is_cluster.then(|| held.iter().map(|seen| seen.lock.to_owned()).collect());
    Outcome { effect, lost: Some((start, ended)), of, away: Some((start, taken_over)) }
}

/// Waits until one that was a master knows that it is none any more.
async fn is_replica(server: &Server) -> Time {
    while !run::<String>(server, &["INFO", "replication"]).await.contains("role:slave") {
        sleep(Duration::from_millis(2)).await;
    }
    Time::now()
}

/// The slot of a lock goes to another master, while it is used.
pub async fn move_slot(scene: &mut Scene<'_>, deployment: &Deployment) -> Option<String> {
    debug_assert!(Fault::SlotMoved.is_of(deployment.topology()));
    let (lock, _) = LOCKS[scene.place(LOCKS.len())];
    let key = format!("lock:{lock}");
    let from = deployment.owner(&key).await?;
    let to = (from + 1 + scene.place(2)) % deployment.masters().len();
    let before = sent_on(&deployment.masters()[from]).await;
    deployment.begin_move(&key, to).await;
    sleep(scene.millis(10, 400)).await;
    deployment.move_keys(&key, to).await;
    sleep(scene.millis(0, 100)).await;
    deployment.end_move(&key, to).await;
    // Who uses it comes to where it was, and is told.
    sleep(Duration::from_millis(200)).await;
    let sent_on = sent_on(&deployment.masters()[from]).await - before;
    (sent_on > 0).then(|| format!("{lock} went from {from} to {to}, {sent_on} requests were sent on"))
}

/// How many requests for locks a server of a cluster has sent to another.
async fn sent_on(server: &Server) -> u64 {
    let stats: String = run(server, &["INFO", "commandstats"]).await;
    let refused = stats
        .lines()
        .filter(|line| line.starts_with("cmdstat_eval"))
        .filter_map(|line| line.split_once("rejected_calls=")?.1.split(',').next()?.parse::<u64>().ok());
    refused.sum()
}
