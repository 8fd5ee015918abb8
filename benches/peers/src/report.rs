//! The figures: printed as a human-readable table, and written to `target/bench-peers.json` for
//! programs.

use serde::Serialize;

use crate::measure::Row;
use crate::suite::Outcome;
use crate::suite::record::{self, Head, Target};

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) rows: Vec<Row>,
    pub(crate) targets: Vec<Target>,
}

impl Report {
    pub(crate) fn print(&self) {
        println!("\nwithout waiters; each task has its own lock, or all read one; one client for all");
        println!(
            "{:>5}  {:<9} {:<27} {:<17} {:>9} {:>8} {:>10} {:>10} {:>14}",
            "tasks", "server", "pair", "of", "pairs/s", "x best", "median us", "p99 us", "server CPU us"
        );
        for row in &self.rows {
            println!(
                "{:>5}  {:<9} {:<27} {:<17} {:>9.0} {:>8.2} {:>10.1} {:>10.1} {:>14.2}",
                row.tasks,
                row.placement.title(),
                row.work.title(),
                row.peer.title(),
                row.pairs_per_second,
                row.to_best_peer,
                row.median_us,
                row.p99_us,
                row.server_cpu_us_per_pair,
            );
        }
        record::print_targets(&self.targets);
    }

    pub(crate) fn write(&self) -> Outcome<()> {
        record::write("bench-peers.json", self)
    }
}
