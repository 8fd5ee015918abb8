//! Compares uncontended locks with those of rslock and rlock, on one private server: `scripts/bench
//! peers`.
//!
//! All are measured in the same run, in short alternating slices, so that a disturbance affects
//! all. Absolute numbers depend on the machine; the ratio hardly does.

mod measure;
mod pair;
mod report;

/// The parts that both benches share.
#[path = "../../suite"]
#[allow(dead_code, reason = "neither bench uses everything")]
mod suite {
    pub(crate) mod gate;
    pub(crate) mod placement;
    pub(crate) mod plan;
    pub(crate) mod record;
    pub(crate) mod samples;
    pub(crate) mod server;

    pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
}

use measure::Row;
use pair::{Peer, Work};
use report::Report;
use suite::Outcome;
use suite::plan::{Plan, Section};
use suite::record::{Head, Target};
use suite::server::Server;

#[tokio::main]
async fn main() -> Outcome<()> {
    let plan = Plan::from_arguments(std::env::args().skip(1))?;
    if !plan.includes(Section::Peers) {
        return Ok(());
    }
    let server = Server::start().await?;
    let head = Head::new(&plan, &server).await?;
    head.print();
    let rows = measure::measure(&server, &plan).await?;
    let report = Report { head, targets: targets(&rows), rows };
    report.print();
    report.write()
}

/// The targets of the crate: its rate divided by that of the fastest other library. The others are
/// not fenced, and rslock does not renew.
const TARGETS: [(Work, usize, f64); 9] = [
    (Work::Mutex, 64, 1.0),
    (Work::Mutex, 256, 1.3),
    (Work::Mutex, 1024, 1.5),
    (Work::Reentrant, 64, 0.9),
    (Work::Reentrant, 256, 1.15),
    (Work::Read, 64, 1.3),
    (Work::Read, 256, 1.8),
    (Work::Write, 64, 1.3),
    (Work::Write, 256, 1.8),
];

fn targets(rows: &[Row]) -> Vec<Target> {
    let ours = rows.iter().filter(|row| row.peer == Peer::Redlatch);
    ours.filter_map(|row| {
        let (.., least) = TARGETS.iter().find(|(work, tasks, _)| (*work, *tasks) == (row.work, row.tasks))?;
        let limit = format!("{}, {} tasks: at least {least} x the best peer", row.work.title(), row.tasks);
        Some(Target::at_least(limit, row.to_best_peer, *least))
    })
    .collect()
}
