//! Redis Sentinel: failovers, and two masters at a time.

mod failover;
mod two_masters;

use std::time::Duration;

use redlatch::{Locks, Options};
use tokio::runtime::Handle;

use crate::support::failover::{NODE_TIMEOUT, urls};
use crate::support::{Deployment, MASTER, Server, Stopwatch, Topology, eventually};

async fn open(deployment: &Deployment, options: Options) -> Locks {
    Locks::builder()
        .sentinel(urls("127.0.0.1", deployment.sentinels()), MASTER)
        .options(options.node_timeout(NODE_TIMEOUT))
        .connect()
        .await
        .unwrap()
}

/// Makes these sentinels name this server as the master.
pub async fn monitor<'a>(promoted: &Server, sentinels: impl IntoIterator<Item = &'a Server>) {
    let port = promoted.port().to_string();
    for sentinel in sentinels {
        sentinel.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
        sentinel.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
    }
}

/// The task that checks where the master is sleeps for 5 s at a time, and must not outlive its
/// client for as long.
#[tokio::test]
async fn sentinel_dropped_client_leaves_no_task() {
    let deployment = Deployment::start_or_reuse(Topology::Sentinel).await;
    let no_task_left = || async { Handle::current().metrics().num_alive_tasks() == 0 };
    eventually("the test's own connections end", no_task_left).await;
    let locks = open(&deployment, Options::new()).await;
    locks.mutex("a").unwrap().lock().await.unwrap().release().await.unwrap();
    drop(locks);
    let dropped = Stopwatch::start();
    eventually("no task left", no_task_left).await;
    assert!(dropped.undisturbed() < Duration::from_millis(2_500), "{dropped:?}");
    deployment.leave();
}
