//! Tasks of one or several processes at one name, beside rslock with the delay that suits it best.

use std::fmt::Write;

use serde::Serialize;

use super::Outcome;
use super::markdown::paragraph;
use super::peers::POLLS;
use super::plan::Plan;
use super::plot::{self, Series, thousands};
use super::processes::{Shared, at_once, check, start};
use super::program::Program;
use super::record::Target;
use super::samples::median;
use super::server::Server;

/// The numbers of processes, and of the tasks of each.
const CONTENDERS: [(usize, usize); 3] = [(1, 256), (4, 64), (16, 16)];

/// How many times as many turns as rslock redlatch is to have.
const LEAST: f64 = 100.0;

const ONE_NAME: &str = "\
Tasks of one process and of several at one name. rslock has the delay in brackets, in milliseconds, \
with which it had most turns:";

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    processes: usize,
    tasks: usize,
    turns_per_second: f64,
    rslock: f64,
    /// The delay of rslock between two attempts, in milliseconds.
    poll_ms: u64,
    /// The median over all rounds of the one rate divided by the other.
    ratio: f64,
    longest_ms: f64,
    rslock_longest_ms: f64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut rows = Vec::new();
    for (processes, tasks) in CONTENDERS {
        let mut programs = start(server, processes).await?;
        let poll_ms = best_poll(&mut programs, tasks, plan).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..plan.peer_rounds {
            let mut ways = [("redlatch", &mut ours), ("rslock", &mut theirs)];
            if round % 2 == 1 {
                ways.reverse(); // what comes second may find a warmer machine
            }
            for (library, windows) in ways {
                windows.push(window(&mut programs, library, tasks, poll_ms, plan).await?);
            }
        }
        rows.push(Row::of((processes, tasks), poll_ms, &ours, &theirs));
    }
    Ok(rows)
}

/// The delay with which rslock has most turns.
async fn best_poll(programs: &mut [Program], tasks: usize, plan: &Plan) -> Outcome<u64> {
    let mut best = (POLLS[0], 0.0);
    for poll in POLLS {
        let (rate, _) = window(programs, "rslock", tasks, poll, plan).await?;
        if rate > best.1 {
            best = (poll, rate);
        }
    }
    Ok(best.0)
}

/// The turns a second of all processes together, and the longest wait in milliseconds.
async fn window(
    programs: &mut [Program],
    library: &str,
    tasks: usize,
    poll_ms: u64,
    plan: &Plan,
) -> Outcome<(f64, f64)> {
    let command = format!("shared {library} mutex {tasks} 1 {} {poll_ms}", plan.peer_window.as_secs_f64());
    let runs: Vec<Shared> = at_once(programs, &command).await?;
    check(runs.iter().map(|run| run.overlaps))?;
    let rate = runs.iter().map(|run| run.pairs as f64 / run.seconds).sum();
    Ok((rate, runs.iter().map(|run| run.longest_ms).fold(0.0, f64::max)))
}

impl Row {
    fn of(
        (processes, tasks): (usize, usize),
        poll_ms: u64,
        ours: &[(f64, f64)],
        theirs: &[(f64, f64)],
    ) -> Row {
        let rate = |windows: &[(f64, f64)]| median(windows.iter().map(|(rate, _)| *rate).collect());
        let longest = |windows: &[(f64, f64)]| windows.iter().map(|(_, wait)| *wait).fold(0.0, f64::max);
        Row {
            processes,
            tasks,
            turns_per_second: rate(ours),
            rslock: rate(theirs),
            poll_ms,
            ratio: median(ours.iter().zip(theirs).map(|((ours, _), (theirs, _))| ours / theirs).collect()),
            longest_ms: longest(ours),
            rslock_longest_ms: longest(theirs),
        }
    }

    pub(crate) fn target(&self) -> Target {
        let Row { processes, tasks, .. } = self;
        let limit = format!(
            "one name, processes: {processes}, tasks of each: {tasks}: turns/s at least {LEAST} x rslock \
             with its best delay"
        );
        Target::at_least(limit, self.ratio, LEAST)
    }
}

pub(crate) fn print(rows: &[Row]) {
    for row in rows {
        println!(
            "one name, {} processes with {} tasks each: {:.0} turns/s, rslock {:.0} with {} ms ({:.1} x), \
             longest wait {:.1} and {:.1} ms",
            row.processes,
            row.tasks,
            row.turns_per_second,
            row.rslock,
            row.poll_ms,
            row.ratio,
            row.longest_ms,
            row.rslock_longest_ms
        );
    }
}

/// The turns of both by the number of processes.
pub(crate) fn plot(rows: &[Row]) -> String {
    let series = |label: &str, is_ours, value: fn(&Row) -> f64| Series {
        label: label.to_owned(),
        is_ours,
        values: rows.iter().map(|row| Some(value(row))).collect(),
    };
    let series = [
        series("redlatch mutex", true, |row| row.turns_per_second),
        series("rslock, best delay", false, |row| row.rslock),
    ];
    let processes: Vec<usize> = rows.iter().map(|row| row.processes).collect();
    let title = "One mutex, 256 tasks: turns a second (logarithmic)";
    plot::lines(title, ("processes that the tasks are in", &processes), &series, true)
}

pub(crate) fn write(rows: &[Row], page: &mut String) -> Outcome<()> {
    paragraph(page, ONE_NAME)?;
    writeln!(page, "| processes | tasks of each | turns/s | rslock | x rslock | longest wait | rslock |")?;
    writeln!(page, "|---:|---:|---:|---:|---:|---:|---:|")?;
    for row in rows {
        let Row { processes, tasks, poll_ms, ratio, longest_ms, rslock_longest_ms, .. } = row;
        let (ours, theirs) = (thousands(row.turns_per_second), thousands(row.rslock));
        writeln!(
            page,
            "| {processes} | {tasks} | {ours} | {theirs} ({poll_ms}) | {ratio:.0} | {longest_ms:.0} ms | \
             {rslock_longest_ms:.0} ms |"
        )?;
    }
    Ok(writeln!(page)?)
}
