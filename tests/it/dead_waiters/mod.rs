//! Waiters whose clients are gone: however many they are and however they died, they delay the
//! living ones by at most one claim in total.

mod crash_loop;
mod delays;
mod queue;
mod resumed;

use std::time::Duration;

use redlatch::Options;

use crate::support::{Deployment, Kind, Server, Topology, Wake, Worker, eventually};

/// The lease and with it the claim of waiters: for so long a released lock is kept for a waiter
/// that does not answer.
const CLAIM: Duration = Duration::from_millis(1_500);

/// One claim, one poll, and what a busy machine adds. Claims of two dead waiters, one after the
/// other, take longer.
const BOUND: Duration = Duration::from_secs(3);

/// How often the living waiter polls at the latest.
const POLL: Duration = Duration::from_millis(250);

/// What the living waiter is opened with.
fn waiting() -> Options {
    Options::new().ttl(CLAIM).poll_cap(POLL).node_timeout(Duration::from_secs(5))
}

/// What every lock of these tests is called, and its key.
const NAME: &str = "dead";
const KEY: &str = "lock:dead";

/// Waits until every node that has the queue counts so many waiters.
async fn queued(deployment: &Deployment, count: u64) {
    let queue = format!("{{{KEY}}}:waiters");
    let words = ["ZCOUNT", &queue, "-inf", crate::support::raw::WAITERS];
    eventually("they queue", || async {
        deployment.run_at::<u64>(&queue, &words).await.iter().all(|found| *found == count)
    })
    .await;
}

/// A process of waiters, each with a client of its own: as many processes would have. `user` is
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
