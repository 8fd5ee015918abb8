//! Compares read and write locks with those of rlock, on one private server: `scripts/bench peers`.
//!
//! Both are measured in the same run, in short alternating slices, so that a disturbance affects
//! both. Absolute numbers depend on the machine; the ratio hardly does.

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
use pair::Peer;
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

/// The targets of the crate, for uncontended locks.
fn targets(rows: &[Row]) -> Vec<Target> {
    let ours = |row: &&Row| row.tasks == 256 && row.peer == Peer::Redlatch && !row.work.is_shared();
    rows.iter()
        .filter(ours)
        .map(|row| {
            let limit = format!("{}, {} tasks: at least 1.5 x rlock's rate", row.work.title(), row.tasks);
            Target::at_least(limit, row.to_rlock, 1.5)
        })
        .collect()
}
