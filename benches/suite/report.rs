//! The figures: printed as human-readable tables, and written to `target/bench.json` for programs.

use serde::Serialize;

use super::peers::{PairsRow, Peers, TurnsRow};
use super::plan::Plan;
use super::record::{self, Head, Target};
use super::server::Server;
use super::topologies::Topologies;
use super::{Outcome, beside_rslock, handover, limits, pairs, reads, renewal, server_cpu, topologies, turns};

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) pairs: Vec<pairs::Row>,
    pub(crate) handover: Vec<handover::Row>,
    pub(crate) turns: Vec<turns::Row>,
    pub(crate) reads: Vec<reads::Row>,
    pub(crate) renewal: Option<renewal::Row>,
    pub(crate) server_cpu: Vec<server_cpu::Row>,
    pub(crate) peers: Option<Peers>,
    pub(crate) scale: Vec<limits::Row>,
    pub(crate) topologies: Topologies,
    pub(crate) targets: Vec<Target>,
}

impl Report {
    pub(crate) async fn new(plan: &Plan, server: &Server) -> Outcome<Report> {
        Ok(Report {
            head: Head::new(plan, server).await?,
            pairs: Vec::new(),
            handover: Vec::new(),
            turns: Vec::new(),
            reads: Vec::new(),
            renewal: None,
            server_cpu: Vec::new(),
            peers: None,
            scale: Vec::new(),
            topologies: Topologies::default(),
            targets: Vec::new(),
        })
    }

    pub(crate) fn print_pairs(&self) {
        println!("\nuncontended: each task has a lock of its own; one connection for all");
        println!(
            "{:>5}  {:<9} {:<25} {:>9} {:>10} {:>10} {:>8} {:>14}",
            "tasks", "server", "pair", "pairs/s", "median us", "p99 us", "x baseline", "server CPU us"
        );
        for row in &self.pairs {
            println!(
                "{:>5}  {:<9} {:<25} {:>9.0} {:>10.1} {:>10.1} {:>8.2} {:>14.2}",
                row.tasks,
                row.placement.title(),
                row.work.title(),
                row.pairs_per_second,
                row.median_us,
                row.p99_us,
                row.to_baseline,
                row.server_cpu_us_per_pair,
            );
        }
    }

    pub(crate) fn print_handover(&self) {
        println!("\nall clients contend for one mutex; each has its own connections");
        println!(
            "{:>7} {:>9} {:>12} {:>12} {:>8} {:>8} {:>12} {:>16} {:>14}",
            "clients",
            "turns/s",
            "handed over",
            "x 2 clients",
            "fewest",
            "most",
            "fewest/most",
            "longest wait ms",
            "server CPU us"
        );
        for row in &self.handover {
            println!(
                "{:>7} {:>9.0} {:>12.2} {:>12.2} {:>8} {:>8} {:>12.2} {:>16.1} {:>14.2}",
                row.clients,
                row.turns_per_second,
                row.handed_over,
                row.to_two_clients,
                row.fewest_turns,
                row.most_turns,
                row.fairness,
                row.longest_wait_ms,
                row.server_cpu_us_per_turn,
            );
        }
    }

    pub(crate) fn print_renewal(&self) {
        let Some(row) = &self.renewal else { return };
        println!("\nmany locks held for a long time");
        println!(
            "{} locks, TTL {} ms, for {} TTLs: {} stayed held; connections: {}; server: {:.0} % of a core, \
             {:.1} us a renewal, {:.0} bytes a lock",
            row.locks,
            row.ttl_ms,
            row.ttls,
            row.held,
            row.connections,
            row.server_cpu_part * 100.0,
            row.server_us_per_renewal,
            row.bytes_per_lock,
        );
    }

    pub(crate) fn print_server_cpu(&self) {
        println!(
            "\nCPU time of the server and of all clients; pairs: 256 tasks, each with a lock of its own"
        );
        println!(
            "{:<25} {:>14} {:>8} {:>12} {:>9} {:>14}",
            "pair", "server us/pair", "x baseline", "x pipelined", "pairs/s", "client us/pair"
        );
        for row in &self.server_cpu {
            println!(
                "{:<25} {:>14.2} {:>8.2} {:>12.2} {:>9.0} {:>14.2}",
                row.kind.title(),
                row.server_us,
                row.to_baseline,
                row.to_pipelined,
                row.pairs_per_second,
                row.client_us,
            );
        }
    }

    pub(crate) fn print_scale(&self) {
        println!("\nmany waiters, holders and readers; a killed holder; a new client");
        for row in &self.scale {
            println!("{:>10.3} {:<14} {}", row.measured, row.unit, row.what);
        }
    }

    pub(crate) fn print_topologies(&self) {
        println!("\nother topologies, mutex; CPU time of all servers together");
        println!(
            "{:<12} {:<10} {:>5} {:>9} {:>14} {:>14}",
            "topology", "library", "tasks", "pairs/s", "server CPU us", "client CPU us"
        );
        for topologies::Row { topology, library, tasks, pairs_per_second, server_us, client_us } in
            &self.topologies.rows
        {
            println!(
                "{topology:<12} {library:<10} {tasks:>5} {pairs_per_second:>9.0} {server_us:>14.2} {client_us:>14.2}"
            );
        }
        self.topologies.processes.print();
        beside_rslock::print(&self.topologies.beside_rslock);
    }

    pub(crate) fn print_peers(&self) {
        let Some(peers) = &self.peers else { return };
        println!("\nlibraries in turn; each task has a lock of its own; one client for all");
        println!(
            "{:>5}  {:<30} {:>9} {:>11} {:>14} {:>14}",
            "tasks", "lock", "pairs/s", "x reference", "server CPU us", "client CPU us"
        );
        for PairsRow { subject, tasks, pairs_per_second, to_reference, server_us, client_us, .. } in
            peers.pairs.iter().chain(&peers.on_shared_cores)
        {
            let title = subject.title();
            println!(
                "{tasks:>5}  {title:<30} {pairs_per_second:>9.0} {to_reference:>11.2} {server_us:>14.2} {client_us:>14.2}"
            );
        }
        println!("\nlibraries in turn; all clients contend for one lock");
        println!(
            "{:>7}  {:<30} {:>7} {:>9} {:>12} {:>8} {:>8}",
            "clients", "lock", "poll ms", "turns/s", "x best peer", "fewest", "most"
        );
        for TurnsRow { subject, clients, poll_ms, turns_per_second, to_best_peer, fewest, most } in
            &peers.turns
        {
            let (title, poll) = (subject.title(), poll_ms.map_or("-".to_owned(), |poll| poll.to_string()));
            println!(
                "{clients:>7}  {title:<30} {poll:>7} {turns_per_second:>9.0} {to_best_peer:>12.2} {fewest:>8} {most:>8}"
            );
        }
    }

    pub(crate) fn write(&self) -> Outcome<()> {
        record::write("bench.json", self)
    }
}
