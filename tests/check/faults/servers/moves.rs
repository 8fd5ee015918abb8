//! Locks that move: to a replica that has missed something, or to another master with their slot.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Effect;
use super::processes::{run, whole};
use crate::faults::Scene;
use crate::plan::Fault;
use crate::support::{Deployment, Topology};
use crate::visit::LOCKS;

/// The master is killed, and replaced by a replica that has not heard of its last writes. It comes back as a replica.
pub async fn fail_over(scene: &mut Scene<'_>, deployment: &mut Deployment) -> Effect {
    let place = scene.place(deployment.masters().len());
    let lag = scene.millis(20, 400);
    let cut_off = match deployment.topology() {
        Topology::Cluster => &deployment.replicas()[place..=place],
        _ => deployment.replicas(),
    };
    deployment.allow_failover().await;
    cut_off.iter().for_each(|replica| replica.pause());
    // Else, what is on its way would be found once they go on.
    let _: u64 = run(&deployment.masters()[place], &["CLIENT", "KILL", "TYPE", "replica"]).await;
    sleep(lag).await;
    deployment.masters_mut()[place].kill();
    deployment.replicas().iter().for_each(|replica| replica.resume());
    deployment.has_failed_over(place).await;
    deployment.forbid_failover().await;
    let old = deployment.replicas_mut().iter_mut().find(|server| !server.is_alive())?;
    old.restart().await;
    let moved = timeout(Duration::from_secs(20), whole(deployment)).await;
    moved.is_ok().then(|| format!("a replica that was {lag:?} behind took over"))
}

/// The slot of a lock goes to another master, while it is used.
pub async fn move_slot(scene: &mut Scene<'_>, deployment: &Deployment) -> Effect {
    debug_assert!(Fault::SlotMoved.is_of(deployment.topology()));
    let (lock, _) = LOCKS[scene.place(LOCKS.len())];
    let key = format!("lock:{lock}");
    let from = deployment.owner(&key).await?;
    let to = (from + 1 + scene.place(2)) % deployment.masters().len();
    deployment.begin_move(&key, to).await;
    sleep(scene.millis(10, 400)).await;
    deployment.move_keys(&key, to).await;
    sleep(scene.millis(0, 100)).await;
    deployment.end_move(&key, to).await;
    Some(format!("{lock} went from {from} to {to}"))
}
