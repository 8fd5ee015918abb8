//! Waiters of dead clients: whatever their number and the way they died, they delay live waiters by
//! at most one claim in total.

mod crash_loop;
mod delays;
mod queue;
mod resumption;

use std::time::Duration;

use redlatch::Options;

use crate::support::{Deployment, Kind, Server, Topology, Wake, Worker, eventually};

/// The TTL, and so the waiters' claim: the server holds a released lock for this long for a waiter
/// that does not answer.
const CLAIM: Duration = Duration::from_millis(1_500);

/// One claim, one poll, and a margin for a busy machine. Consecutive claims of two dead waiters
/// take longer.
const BOUND: Duration = Duration::from_secs(3);

/// The live waiter polls at least this often.
const POLL: Duration = Duration::from_millis(250);

/// The options of the live waiter.
fn waiting() -> Options {
    Options::new().ttl(CLAIM).poll_cap(POLL).node_timeout(Duration::from_secs(5))
}

/// The name of every lock of these tests, and its key.
const NAME: &str = "dead";
const KEY: &str = "lock:dead";

/// Waits until the queue has this number of waiters on each of its nodes.
async fn queued(deployment: &Deployment, count: u64) {
    let queue = format!("{{{KEY}}}:waiters");
    let words = ["ZCOUNT", &queue, "-inf", crate::support::raw::WAITERS];
    eventually("the waiters queue", || async {
        deployment.run_at::<u64>(&queue, &words).await.iter().all(|found| *found == count)
    })
    .await;
}

/// Starts a process of waiters, each with a client of its own, as in separate processes. `user` is
/// part of the URL.
fn waiters(deployment: &Deployment, user: &str, kind: Kind, wake: Wake, count: usize) -> Worker {
    let topology = match deployment.topology() {
        Topology::Standalone => "standalone",
        Topology::Cluster => "cluster",
        Topology::Sentinel => "sentinel",
        Topology::Quorum3 => "quorum3",
        Topology::Quorum5 => "quorum5",
    };
    let wake = if wake == Wake::Push { "push" } else { "poll" };
    let ports: Vec<String> =
        deployment.entrances().iter().map(Server::port).map(|port| port.to_string()).collect();
    let ports = ports.join(",");
    let ttl_ms = CLAIM.as_millis().to_string();
    Worker::start(&["wait", topology, user, &ports, wake, kind.name(), NAME, &ttl_ms, &count.to_string()])
}
