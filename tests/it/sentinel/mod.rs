//! Redis Sentinel: failovers, and two masters at a time.

mod failover;
mod two_masters;

use redlatch::{Locks, Options};

use crate::support::failover::urls;
use crate::support::{Deployment, Server};

/// The name of the master, as the sentinels know it.
const MASTER: &str = "mymaster";

async fn open(deployment: &Deployment, options: Options) -> Locks {
    Locks::builder()
        .sentinel(urls("127.0.0.1", deployment.sentinels()), MASTER)
        .options(options)
        .connect()
        .await
        .unwrap()
}

/// Makes all sentinels name this server as the master.
async fn monitor(promoted: &Server, deployment: &Deployment) {
    let port = promoted.port().to_string();
    for sentinel in deployment.sentinels() {
        sentinel.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
        sentinel.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
    }
}
