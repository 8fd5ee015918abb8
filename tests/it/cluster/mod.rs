//! Redis Cluster: failovers, masters that are replaced, slots that move, and the nodes that a
//! client uses.

mod failover;
mod nodes;
mod replaced;
mod slots;

use redlatch::{Locks, Options};

use crate::support::Deployment;
use crate::support::failover::{NODE_TIMEOUT, urls};

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
