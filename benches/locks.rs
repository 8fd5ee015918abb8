//! Measures what locks cost, on a private server: `scripts/bench`, or `scripts/bench --quick` for a
//! first look. A run of all sections writes `docs/benchmarks.md`.
//!
//! Each figure is compared with another one of the same run: a lock and its release with two bare
//! round trips, handovers among many clients with those between two. Absolute numbers depend on the
//! machine; these ratios hardly do.
//!
//! Arguments that name sections (`pairs`, `handover`, `turns`, `renewal`, `server`, `peers`,
//! `scale`, `topologies`) run only those.

mod suite;

use suite::page_pairs::pairs_of;
use suite::peers::{Peers, Subject};
use suite::plan::{Plan, Section};
use suite::record::{self, Target};
use suite::report::Report;
use suite::server::Server;
use suite::server_cpu::Kind;
use suite::work::Work;
use suite::{
    Outcome, handover, limits, page, pairs, peers, reads, renewal, scale, server_cpu, topologies, turns,
};

#[tokio::main]
async fn main() -> Outcome<()> {
    let plan = Plan::from_arguments(std::env::args().skip(1))?;
    let server = Server::start().await?;
    let mut report = Report::new(&plan, &server).await?;
    report.head.print();
    // The first one: it measures this process's memory.
    if plan.includes(Section::Scale) {
        report.scale = scale::measure(&server, &plan).await?;
        report.print_scale();
    }
    if plan.includes(Section::Pairs) {
        report.pairs = pairs::measure(&server, &plan).await?;
        report.print_pairs();
    }
    if plan.includes(Section::Handover) {
        report.handover = handover::measure(&server, &plan).await?;
        report.print_handover();
    }
    if plan.includes(Section::Turns) {
        report.turns = turns::measure(&server, &plan).await?;
        turns::print(&report.turns);
        report.reads = reads::measure(&server, &plan).await?;
        reads::print(&report.reads);
    }
    if plan.includes(Section::Renewal) {
        report.renewal = Some(renewal::measure(&server, &plan).await?);
        report.print_renewal();
    }
    if plan.includes(Section::Server) {
        report.server_cpu = server_cpu::measure(&server, &plan).await?;
        report.print_server_cpu();
    }
    if plan.includes(Section::Peers) {
        report.peers = Some(peers::measure(&server, &plan).await?);
        report.print_peers();
    }
    if plan.includes(Section::Topologies) {
        report.topologies = topologies::measure(&plan).await?;
        report.print_topologies();
    }
    report.targets = targets(&report);
    record::print_targets(&report.targets);
    report.write()?;
    if plan.is_whole() { page::write(&report, plan.is_quick()) } else { Ok(()) }
}

/// The rate with this number of tasks, divided by that of rslock, or for the sides of a read-write
/// lock, of rlock. Neither has fencing tokens, and rslock does not renew.
const PAIR_TARGETS: [(&str, usize, f64); 9] = [
    ("mutex", 64, 1.0),
    ("mutex", 256, 1.3),
    ("mutex", 1024, 1.5),
    ("reentrant", 64, 0.9),
    ("reentrant", 256, 1.15),
    ("read", 64, 1.3),
    ("read", 256, 1.8),
    ("write", 64, 1.3),
    ("write", 256, 1.8),
];

fn peer_targets(peers: &Peers) -> Vec<Target> {
    let mut targets = Vec::new();
    for kind in ["mutex", "reentrant", "read", "write"] {
        let row = pairs_of(&peers.pairs, &Subject::new("redlatch", kind), 1);
        for (peer, place) in [("rslock", 0), ("rlock's mutex", 1)] {
            if let Some(ratio) = row.map(|row| row.to_mutexes[place]).filter(|ratio| ratio.is_finite()) {
                let limit = format!("{kind}, 1 task: pairs/s at least 0.95 x {peer}");
                targets.push(Target::at_least(limit, ratio, 0.95));
            }
        }
    }
    for (rows, cores) in [(&peers.pairs, "a core for the server"), (&peers.on_shared_cores, "shared cores")] {
        for (kind, tasks, least) in PAIR_TARGETS {
            let ours = Subject::new("redlatch", kind);
            let reference = if ours.is_exclusive() { "rslock" } else { "rlock" };
            if let Some(row) = pairs_of(rows, &ours, tasks).filter(|row| row.to_reference.is_finite()) {
                let limit = format!("{kind}, {tasks} tasks, {cores}: pairs/s at least {least} x {reference}");
                targets.push(Target::at_least(limit, row.to_reference, least));
            }
        }
    }
    let pairs = |subject: &Subject, tasks| pairs_of(&peers.pairs, subject, tasks);
    let baseline = pairs(&Subject::new("set-nx", "mutex"), 256);
    if let (Some(ours), Some(baseline)) = (pairs(&Subject::new("redlatch", "mutex"), 256), baseline) {
        let limit = "mutex, 256 tasks: server time at most 1.4 x that of SET NX PX";
        targets.push(Target::at_most(limit, ours.server_us / baseline.server_us, 1.4));
    }
    let is_mutex = |subject: &Subject| subject.is_ours() && subject.kind == "mutex";
    for row in peers.turns.iter().filter(|row| is_mutex(&row.subject)) {
        let (clients, least) = (row.clients, if row.clients == 2 { 2.5 } else { 3.0 });
        if row.to_best_peer.is_finite() {
            let limit =
                format!("mutex, {clients} clients: turns/s at least {least} x the best other library");
            targets.push(Target::at_least(limit, row.to_best_peer, least));
        }
        let limit = format!("mutex, {clients} clients: fewest turns at least 0.95 x most");
        targets.push(Target::at_least(limit, row.fairness(), 0.95));
    }
    targets
}

/// The targets of the crate. A missed target is printed, not fatal: a busy machine misses them too.
fn targets(report: &Report) -> Vec<Target> {
    let mut targets = Vec::new();
    for row in report.pairs.iter().filter(|row| row.is_main()) {
        let server = row.placement.title();
        let limit =
            format!("lock and release, 1 task, server {server}: median at most 1.15 x the baseline's");
        targets.push(Target::at_most(limit, row.to_baseline, 1.15));
    }
    if let Some(row) = report.pairs.iter().find(|row| row.tasks == 1 && row.work == Work::NestedLocal) {
        let limit = "nested hold with Nesting::Local, 1 task: median at most 1 us";
        targets.push(Target::at_most(limit, row.median_us, 1.0));
    }
    if let Some(row) = report.handover.last() {
        let limit = format!("handover among {} clients: at least 0.75 x the rate of 2", row.clients);
        targets.push(Target::at_least(limit, row.to_two_clients, 0.75));
    }
    for row in &report.handover {
        let limit = format!("fairness among {} clients: fewest turns at least 0.8 x most", row.clients);
        targets.push(Target::at_least(limit, row.fairness, 0.8));
    }
    targets.extend(report.turns.iter().flat_map(turns::Row::targets));
    targets.extend(report.reads.iter().flat_map(reads::Row::targets));
    if let Some(row) = &report.renewal {
        let limit = format!("renewal: part of {} locks that stay held for 4 TTLs, all", row.locks);
        targets.push(Target::at_least(limit, row.held_part(), 1.0));
        let limit = "renewal: connections to the server, 1 without waiters";
        targets.push(Target::at_most(limit, f64::from(row.connections), 1.0));
    }
    targets.extend(report.server_cpu.iter().filter_map(server_cpu_target));
    targets.extend(report.peers.iter().flat_map(peer_targets));
    targets.extend(report.scale.iter().filter_map(limits::Row::target));
    targets.extend(report.topologies.targets());
    targets
}

/// Returns the target of a kind. The baselines have none.
fn server_cpu_target(row: &server_cpu::Row) -> Option<Target> {
    let title = row.kind.title();
    let most = match row.kind {
        Kind::Pair(Work::Mutex) => 2.0,
        Kind::Pair(Work::MutexWithoutFencing) => 1.7,
        Kind::Pair(Work::Reentrant) => 2.3,
        Kind::Pair(Work::Read | Work::Write) => 2.4,
        Kind::Pair(_) => return None,
        Kind::HandOver => {
            let limit = format!("server CPU time, {title}: at most 35 us");
            return Some(Target::at_most(limit, row.server_us, 35.0));
        }
    };
    Some(Target::at_most(
        format!("server CPU time, {title}: at most {most:.1} x the baseline's"),
        row.to_baseline,
        most,
    ))
}
