//! How soon a client knows that a server has restarted without its data. Only the time counts that
//! the paused clock skips, so a busy machine changes nothing.

use std::time::Duration;

use redlatch::simulation::skip_with_the_runtime;
use redlatch::{LeaseEnd, Options};
use tokio::time::Instant;

use super::locks::KINDS;
use super::network::{ConnectionOwner, Network, Order};
use super::scenario::open;
use super::server::Server;

/// With the default TTL, a renewal alone finds out after ten seconds.
#[test]
fn holders_know_of_lost_data_within_a_second() {
    all_are_lost(1, 10_000);
}

#[test]
fn holders_know_of_data_that_a_quorum_lost_within_a_second() {
    all_are_lost(3, 1_000);
}

fn all_are_lost(nodes: usize, leases: usize) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(tokio::task::unconstrained(async {
        skip_with_the_runtime();
        let servers = std::iter::repeat_with(Server::start).take(nodes).collect();
        let net = Network::before(servers, Order::RequestsFirst);
        let locks = net.flow("it connects", open(&net, ConnectionOwner::Subject, &Options::new())).await;
        let mut guards = Vec::new();
        for (number, kind) in KINDS.iter().cycle().enumerate().take(leases) {
            let lock = kind.lock(&locks, &number.to_string());
            guards.push(net.flow("it acquires", lock.lock()).await.unwrap());
        }
        net.servers.iter().for_each(|server| server.run(&["FLUSHALL"]));
        net.cut(true);
        let start = Instant::now();
        for guard in &guards {
            let end = net.flow("it knows", guard.lease().lost()).await;
            assert_eq!(end, LeaseEnd::Revoked, "{guard:?}");
        }
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?} for {leases} leases of {nodes} nodes");
        println!("{took:?} for {leases} leases of {nodes} nodes");
    }));
}
