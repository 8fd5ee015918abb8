//! Faults of servers: paused, killed, emptied, out of memory, busy, stepped clocks, or replaced.

mod commands;
mod moves;
mod processes;
mod state;

use crate::clock::Shim;
use crate::history::Time;
use crate::plan::{Fault, Lane};
use crate::support::{Deployment, Topology, binary};

use super::Scene;

pub use state::Outcome;

pub async fn disturb(mut scene: Scene<'_>, deployment: &mut Deployment, clock: &Option<Shim>) {
    debug_assert!(scene.faults.iter().all(|fault| fault.lane() == Lane::Servers));
    let mut left = Vec::new();
    while let Some(fault) = scene.next(&mut left).await {
        let start = Time::now();
        let outcome = match fault {
            Fault::ServerStopped | Fault::Minority | Fault::Majority => {
                processes::stop(&mut scene, deployment, fault).await
            }
            Fault::ServerRestarted => processes::restart(&mut scene, deployment).await.into(),
            Fault::ServerEmptied | Fault::NodeEmptied => {
                processes::lose_data(&mut scene, deployment, false).await
            }
            Fault::ServerSetBack | Fault::NodeSetBack => {
                processes::lose_data(&mut scene, deployment, true).await
            }
            Fault::Failover => moves::fail_over(&mut scene, deployment).await,
            Fault::SlotMoved => moves::move_slot(&mut scene, deployment).await.into(),
            Fault::ClockForward | Fault::ClockBack => match clock {
                Some(shim) => shim.step(&mut scene, deployment, fault == Fault::ClockForward).await,
                None => Outcome::from(None),
            },
            _ => commands::run(&mut scene, deployment, fault).await,
        };
        if deployment.topology().nodes() > 1 {
            admit(deployment).await;
        }
        scene.done_to_servers(fault, start, outcome);
    }
}

/// The arguments with which a server allows `DEBUG SLEEP`. They are required from Redis 7 on, and
/// unknown before.
pub fn debuggable() -> Vec<&'static str> {
    let version = std::process::Command::new(binary()).arg("--version").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    if version.contains(" v=6.") { Vec::new() } else { vec!["--enable-debug-command", "yes"] }
}

/// Admits restarted nodes to their quorum again.
pub async fn admit(deployment: &Deployment) {
    debug_assert_ne!(deployment.topology(), Topology::Standalone);
    let options = crate::worker::options(true).node_timeout(std::time::Duration::from_secs(10));
    let locks = deployment.client(options).await;
    loop {
        match locks.rejoin().await {
            Ok(rejoined) if rejoined.iter().all(redlatch::NodeStatus::is_voter) => return,
            Ok(_) => {}
            Err(error) => eprintln!("nodes not admitted yet, trying again: {error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
