//! The part of `docs/benchmarks.md` on locks without waiters.

use std::fmt::Write;

use super::Outcome;
use super::markdown::{bold, or_dash, paragraph};
use super::peers::{PairsRow, Peers, Subject, TASKS, subjects};
use super::plot::thousands;

const PAIRS: &str = "\
A *pair* is an acquisition and its release. Each task repeats pairs, with a lock name of its own; all \
tasks share one client in one process. The TTL is 30 s.

*x rslock* is the median of the ratios of the rounds, so it can differ by some percent from the ratio \
of the rates shown. In these two tables, the server is pinned to one core and all clients to the other.

*Server* and *client* are microseconds of CPU time for one pair, with 256 tasks. redlatch sends up to \
128 locks of one client in one call; a pair of `SET NX PX` in pipelines takes the server less than any \
of them.";

const SIDES: &str =
    "The same for the sides of read-write locks, divided by the rate of rlock for the same side.";

const SHARED: &str = "\
With server and client on both cores, threads of a client displace the server, and rates vary from \
slice to slice: those of one process with 64 tasks by a third.";

pub(crate) fn write(page: &mut String, peers: &Peers) -> Outcome<()> {
    paragraph(page, PAIRS)?;
    table(page, &peers.pairs, true, &TASKS)?;
    paragraph(page, SIDES)?;
    table(page, &peers.pairs, false, &TASKS[..3])?;
    paragraph(page, SHARED)?;
    table(page, &peers.on_shared_cores, true, &TASKS[1..])?;
    table(page, &peers.on_shared_cores, false, &TASKS[1..3])
}

pub(crate) fn pairs_of<'a>(rows: &'a [PairsRow], subject: &Subject, tasks: usize) -> Option<&'a PairsRow> {
    rows.iter().find(|row| row.subject == *subject && row.tasks == tasks)
}

fn table(page: &mut String, rows: &[PairsRow], exclusive: bool, sizes: &[usize]) -> Outcome<()> {
    let reference = if exclusive { "rslock" } else { "rlock" };
    write!(page, "| pairs/s, tasks:")?;
    sizes.iter().try_for_each(|tasks| write!(page, " | {tasks}"))?;
    sizes.iter().try_for_each(|tasks| write!(page, " | x {reference}, {tasks}"))?;
    writeln!(page, " | server | client |\n|---|{}", "---:|".repeat(2 * sizes.len() + 2))?;
    let all = rows.iter().map(|row| &row.subject).filter(|subject| subject.is_exclusive() == exclusive);
    for subject in subjects(all) {
        write!(page, "| {}", bold(subject.title(), subject.is_ours()))?;
        for tasks in sizes {
            let rate = pairs_of(rows, subject, *tasks).map(|row| thousands(row.pairs_per_second));
            write!(page, " | {}", or_dash(rate))?;
        }
        for tasks in sizes {
            let ratio = pairs_of(rows, subject, *tasks).map(|row| row.to_reference);
            write!(
                page,
                " | {}",
                or_dash(ratio.filter(|ratio| ratio.is_finite()).map(|ratio| format!("{ratio:.2}")))
            )?;
        }
        let row = pairs_of(rows, subject, 256);
        let server = or_dash(row.map(|row| format!("{:.1}", row.server_us)));
        let client = or_dash(row.map(|row| format!("{:.0}", row.client_us)));
        writeln!(page, " | {server} | {client} |")?;
    }
    Ok(writeln!(page)?)
}
