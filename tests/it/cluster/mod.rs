//! Redis Cluster: failovers, masters that are replaced, slots that move, and the nodes that a
//! client uses.

mod failover;
mod nodes;
mod replaced;
mod slots;

use redlatch::{Locks, Options};

use crate::support::failover::{NODE_TIMEOUT, urls};
use crate::support::{Deployment, eventually};

/// Opens a client whose seeds are all masters.
pub async fn open(deployment: &Deployment, options: Options) -> Locks {
    Locks::builder()
        .cluster(urls("127.0.0.1", deployment.masters()))
        .options(options.node_timeout(NODE_TIMEOUT))
        .connect()
        .await
        .unwrap()
}

/// A hash tag whose slot belongs to this master.
pub async fn tag_at(deployment: &Deployment, master: usize) -> String {
    for number in 0.. {
        let tag = format!("{{{number}}}");
        if deployment.owner(&tag).await == Some(master) {
            return tag;
        }
    }
    unreachable!("each master has slots")
}

/// Has its replica replace a master that is dead or hangs, and waits until all live servers know.
/// Only meanwhile, a server that stands still seems failed, and no other one is replaced.
pub async fn replace(deployment: &mut Deployment, master: usize) {
    let gone = deployment.masters()[master].port();
    deployment.replicas()[master].run::<()>(&["CONFIG", "SET", "cluster-replica-no-failover", "no"]).await;
    set_node_timeout(deployment, gone, "1000").await;
    deployment.has_failed_over(master).await;
    for server in deployment.data().filter(|server| server.port() != gone && server.is_alive()) {
        eventually("the cluster serves all slots", || async {
            server.run::<String>(&["CLUSTER", "INFO"]).await.contains("cluster_state:ok")
        })
        .await;
    }
    set_node_timeout(deployment, gone, "60000").await;
}

/// Sets after how many milliseconds of silence the live servers but one take another for failed.
pub async fn set_node_timeout(deployment: &Deployment, except: u16, millis: &str) {
    for server in deployment.data().filter(|server| server.port() != except && server.is_alive()) {
        server.run::<()>(&["CONFIG", "SET", "cluster-node-timeout", millis]).await;
    }
}
