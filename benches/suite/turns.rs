//! Tasks of one client that pass a mutex on, with and without `Options::local_turn`.

use std::fmt::Write;
use std::time::Duration;

use redlatch::Options;
use serde::Serialize;

use super::Outcome;
use super::handover::{Contenders, Window, window};
use super::plan::Plan;
use super::plot::thousands;
use super::record::Target;
use super::samples::median;
use super::server::Server;

/// The numbers of clients, and of the tasks of each.
const CONTENDERS: [(usize, usize); 3] = [(1, 256), (4, 64), (16, 16)];

/// How many times more turns there must be than without passing on.
const LEAST_GAIN: f64 = 25.0;

/// Where little or nothing is passed on: the clients and the tasks of each, whether each task has a
/// name of its own, and for how many milliseconds it holds the lock.
const UNPASSED: [(usize, usize, bool, u64); 7] = [
    (1, 1, false, 0),
    (1, 64, false, 2),
    (1, 64, true, 0),
    (2, 1, false, 0),
    (16, 1, false, 0),
    (64, 1, false, 0),
    (256, 1, false, 0),
];

/// The least part of the turns without the option that must be left there.
const LEAST_LEFT: f64 = 0.98;

/// How many windows of the other sections one has here. Two hundredths show only in long ones; and
/// in one, each of 16 clients is granted the lock 30 times, so that one grant more or less at its
/// edges is a difference of 6 %.
const LONGER: u32 = 3;

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    clients: usize,
    tasks: usize,
    hold_ms: u64,
    are_apart: bool,
    turns_per_second: f64,
    without: f64,
    /// The median over all rounds of the one rate divided by the other.
    gain: f64,
    /// Of the turns of one client, in the window with the largest difference.
    fairness: f64,
    longest_wait_ms: f64,
    longest_wait_without_ms: f64,
    commands_per_1000_turns: f64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut observer = server.observer().await?;
    let mut rows = Vec::new();
    let passed = CONTENDERS.map(|(clients, tasks)| (clients, tasks, false, 0));
    for case @ (clients, tasks, are_apart, hold_ms) in passed.into_iter().chain(UNPASSED) {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        let span = plan.peer_window * LONGER;
        for round in 0..plan.peer_rounds {
            let off = Options::new().local_turn(Duration::ZERO);
            let mut ways = [(Options::new(), &mut with), (off, &mut without)];
            if round % 2 == 1 {
                ways.reverse(); // what comes second may find a warmer machine
            }
            for (options, windows) in ways {
                observer.alone().await?;
                let hold = Duration::from_millis(hold_ms);
                let contenders = Contenders { clients, tasks, options, hold, are_apart };
                windows.push(window(server, &mut observer, &contenders, span).await?);
            }
        }
        rows.push(Row::of(case, &with, &without));
    }
    Ok(rows)
}

impl Row {
    fn of(
        (clients, tasks, are_apart, hold_ms): (usize, usize, bool, u64),
        with: &[Window],
        without: &[Window],
    ) -> Row {
        let rate = |windows: &[Window]| median(windows.iter().map(|window| window.rate).collect());
        let longest = |windows: &[Window]| {
            let longest = windows.iter().map(|window| window.longest_wait).max().unwrap_or_default();
            longest.as_secs_f64() * 1e3
        };
        Row {
            clients,
            tasks,
            hold_ms,
            are_apart,
            turns_per_second: rate(with),
            without: rate(without),
            gain: median(with.iter().zip(without).map(|(on, off)| on.rate / off.rate).collect()),
            fairness: with.iter().map(Window::fairness).fold(1.0, f64::min),
            longest_wait_ms: longest(with),
            longest_wait_without_ms: longest(without),
            commands_per_1000_turns: 1e3 * median(with.iter().map(|window| window.commands).collect()),
        }
    }

    fn is_passed_on(&self) -> bool {
        self.tasks > 1 && self.hold_ms == 0 && !self.are_apart
    }

    fn contenders(&self) -> String {
        let names = if self.are_apart { ", with names of their own" } else { "" };
        let hold = if self.hold_ms > 0 { format!(", held {} ms", self.hold_ms) } else { String::new() };
        format!("{} clients with {} tasks each{names}{hold}", self.clients, self.tasks)
    }

    pub(crate) fn targets(&self) -> Vec<Target> {
        let contenders = self.contenders();
        if !self.is_passed_on() {
            let limit = format!("{contenders}: at least {LEAST_LEFT} x the turns without passing on");
            return vec![Target::at_least(limit, self.gain, LEAST_LEFT)];
        }
        vec![
            Target::at_least(
                format!("{contenders}: turns at least {LEAST_GAIN} times those without passing on"),
                self.gain,
                LEAST_GAIN,
            ),
            Target::at_least(
                format!("{contenders}: fewest/most turns of a client at least 0.9"),
                self.fairness,
                0.9,
            ),
            Target::at_most(
                format!("{contenders}: longest wait at most that without passing on"),
                self.longest_wait_ms / self.longest_wait_without_ms,
                1.0,
            ),
            Target::at_most(
                format!("{contenders}: at most 50 commands for 1,000 turns"),
                self.commands_per_1000_turns,
                50.0,
            ),
        ]
    }
}

pub(crate) fn print(rows: &[Row]) {
    println!("\ntasks of one client pass a mutex on, for 1 ms; beside it without that");
    println!(
        "{:<54} {:>9} {:>9} {:>6} {:>12} {:>15} {:>10} {:>20}",
        "", "turns/s", "without", "x", "fewest/most", "longest wait ms", "without", "commands/1,000"
    );
    for row in rows {
        println!(
            "{:<54} {:>9.0} {:>9.0} {:>6.2} {:>12.2} {:>15.1} {:>10.1} {:>20.1}",
            row.contenders(),
            row.turns_per_second,
            row.without,
            row.gain,
            row.fairness,
            row.longest_wait_ms,
            row.longest_wait_without_ms,
            row.commands_per_1000_turns,
        );
    }
}

pub(crate) fn table(rows: &[Row], page: &mut String) -> Outcome<()> {
    writeln!(
        page,
        "| one mutex | turns/s | without | x | fewest/most | longest wait | without | commands for 1,000 |"
    )?;
    writeln!(page, "|---|---:|---:|---:|---:|---:|---:|---:|")?;
    for row in rows {
        let (contenders, gain, fairness) = (row.contenders(), row.gain, row.fairness);
        let (with, without) = (thousands(row.turns_per_second), thousands(row.without));
        let (longest, longest_without) = (row.longest_wait_ms, row.longest_wait_without_ms);
        let commands = row.commands_per_1000_turns;
        writeln!(
            page,
            "| {contenders} | {with} | {without} | {gain:.2} | {fairness:.2} | {longest:.1} ms | \
             {longest_without:.1} ms | {commands:.0} |"
        )?;
    }
    Ok(writeln!(page)?)
}
