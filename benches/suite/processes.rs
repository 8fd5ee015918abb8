//! Clients in processes of their own, beside as many in one process: at one lock, and at many.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::Outcome;
use super::markdown::{bold, paragraph};
use super::plan::Plan;
use super::plot::thousands;
use super::program::Program;
use super::record::Target;
use super::samples::median;
use super::server::Server;

/// The program that measures redlatch and rslock.
const PROGRAM: &str = "rust";

/// How many tasks all processes have together, and how many names they share.
const TASKS: usize = 256;
const NAMES: usize = 64;

/// The default delay of rslock, in milliseconds.
const DELAY: u64 = 200;

/// How many processes pass one name on among their tasks, and how many tasks each has.
const PASSING: (usize, usize) = (4, 64);

const ONE_NAME: &str = "One contended lock of redlatch, with as many clients in one process and in several:";

const MANY_NAMES: &str = "\
256 tasks in all processes together, with a name for each task, or 64 names that all tasks take in \
turn. Each process is one client. rslock has its default delay of 200 ms.

In several processes, fewer requests share a call. Where tasks of several processes meet at a name, \
each lock is handed over: that costs the server several times as much, and keeps waits short. A \
library without a queue lets a task that finds the lock free overtake those that wait.";

#[derive(Debug, Default, Serialize)]
pub(crate) struct Processes {
    one_name: Vec<OneName>,
    passed: Vec<Passed>,
    many_names: Vec<ManyNames>,
}

#[derive(Debug, Serialize)]
struct OneName {
    clients: usize,
    in_processes: f64,
    in_one_process: f64,
}

/// One name for all tasks of several processes.
#[derive(Debug, Serialize)]
struct Passed {
    turns_per_second: f64,
    without: f64,
    gain: f64,
    /// Fewest and most turns of a process, in the round with the largest difference.
    fairness: f64,
    longest_ms: f64,
    longest_without_ms: f64,
}

#[derive(Debug, Serialize)]
struct ManyNames {
    library: &'static str,
    processes: usize,
    /// Whether processes share the names.
    are_shared: bool,
    pairs_per_second: f64,
    longest_ms: f64,
    server_us: f64,
}

#[derive(Debug, Deserialize)]
struct Turns {
    seconds: f64,
    acquisitions: u64,
    overlaps: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Shared {
    pub(super) seconds: f64,
    pub(super) pairs: u64,
    pub(super) longest_ms: f64,
    pub(super) overlaps: u64,
}

impl Processes {
    pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Processes> {
        let mut processes = Processes::default();
        for clients in [2, 16, 64] {
            processes.one_name.push(one_name(server, clients, plan).await?);
        }
        processes.passed.push(passed(server, plan).await?);
        for are_shared in [false, true] {
            for count in [1, 4] {
                for library in ["redlatch", "rslock"] {
                    processes.many_names.push(many_names(server, library, count, are_shared, plan).await?);
                }
            }
        }
        Ok(processes)
    }

    pub(crate) fn targets(&self) -> impl Iterator<Item = Target> {
        let (processes, tasks) = PASSING;
        let passed = self.passed.iter().flat_map(move |row| {
            let contenders = format!("{processes} processes with {tasks} tasks each");
            [
                Target::at_least(
                    format!("{contenders}: turns at least 25 times those without passing on"),
                    row.gain,
                    25.0,
                ),
                Target::at_least(
                    format!("{contenders}: fewest/most turns of a process at least 0.9"),
                    row.fairness,
                    0.9,
                ),
            ]
        });
        let one_name = self.one_name.iter().map(|row| {
            let clients = row.clients;
            let limit = format!(
                "{clients} processes: acquisitions/s at least 0.8 x those of {clients} clients in one"
            );
            Target::at_least(limit, row.in_processes / row.in_one_process, 0.8)
        });
        one_name.chain(passed).chain(self.shared_targets())
    }

    /// Those of the names that the tasks of several processes share.
    fn shared_targets(&self) -> Vec<Target> {
        let row = |library: &str| {
            let mut rows = self.many_names.iter().filter(|row| row.are_shared && row.processes == 4);
            rows.find(|row| row.library == library)
        };
        let (Some(ours), Some(theirs)) = (row("redlatch"), row("rslock")) else { return Vec::new() };
        let contenders = format!("{NAMES} names, 4 processes with {} tasks each", TASKS / 4);
        vec![
            Target::at_least(
                format!("{contenders}: pairs/s at least 1.5 x rslock"),
                ours.pairs_per_second / theirs.pairs_per_second,
                1.5,
            ),
            Target::at_most(
                format!("{contenders}: longest wait at most a tenth of that of rslock"),
                ours.longest_ms / theirs.longest_ms,
                0.1,
            ),
        ]
    }

    pub(crate) fn print(&self) {
        for row in &self.one_name {
            println!(
                "one lock, {} clients: {:.0} acquisitions/s in processes of their own, {:.0} in one process",
                row.clients, row.in_processes, row.in_one_process
            );
        }
        for row in &self.passed {
            let (processes, tasks) = PASSING;
            println!(
                "one lock, {processes} processes with {tasks} tasks each: {:.0} turns/s, {:.0} without \
                 passing on ({:.1} x), fewest/most {:.2}, longest wait {:.1} and {:.1} ms",
                row.turns_per_second,
                row.without,
                row.gain,
                row.fairness,
                row.longest_ms,
                row.longest_without_ms
            );
        }
        for row in &self.many_names {
            println!(
                "{} processes, {:<8} {:<14} {:>7.0} pairs/s, longest wait {:.0} ms, server CPU {:.1} us",
                row.processes,
                row.library,
                row.names(),
                row.pairs_per_second,
                row.longest_ms,
                row.server_us
            );
        }
    }

    pub(crate) fn write(&self, page: &mut String) -> Outcome<()> {
        paragraph(page, ONE_NAME)?;
        writeln!(
            page,
            "| clients | acquisitions/s in one process | acquisitions/s in processes of their own |"
        )?;
        writeln!(page, "|---:|---:|---:|")?;
        for row in &self.one_name {
            let (one, own) = (thousands(row.in_one_process), thousands(row.in_processes));
            writeln!(page, "| {} | {one} | {own} |", row.clients)?;
        }
        writeln!(page)?;
        for row in &self.passed {
            let (processes, tasks) = PASSING;
            let (with, without) = (thousands(row.turns_per_second), thousands(row.without));
            let (gain, fairness) = (row.gain, row.fairness);
            let (longest, longest_without) = (row.longest_ms, row.longest_without_ms);
            paragraph(
                page,
                &format!(
                    "In {processes} processes with {tasks} tasks each, which pass the lock on, there are \
                     {with} turns/s instead of {without}: {gain:.0} times as many. Fewest/most turns of a \
                     process: {fairness:.2}; longest wait: {longest:.0} ms instead of {longest_without:.0}."
                ),
            )?;
        }
        paragraph(page, MANY_NAMES)?;
        writeln!(page, "| names | processes | library | pairs/s | longest wait | server |")?;
        writeln!(page, "|---|---:|---|---:|---:|---:|")?;
        for row in &self.many_names {
            let library = bold(row.library.to_owned(), row.library == "redlatch");
            let (names, processes, rate) = (row.names(), row.processes, thousands(row.pairs_per_second));
            let (longest, server) = (row.longest_ms, row.server_us);
            writeln!(
                page,
                "| {names} | {processes} | {library} | {rate} | {longest:.0} ms | {server:.1} us |"
            )?;
        }
        Ok(writeln!(page)?)
    }
}

impl ManyNames {
    fn names(&self) -> &'static str {
        if self.are_shared { "64, shared" } else { "one for each task" }
    }
}

/// Clients that contend for one lock: all in one process, then each in its own.
async fn one_name(server: &Server, clients: usize, plan: &Plan) -> Outcome<OneName> {
    let turns = |count: usize| format!("turns redlatch mutex {count} {} 1", plan.peer_window.as_secs_f64());
    let (mut together, mut apart) = (Vec::new(), Vec::new());
    let (mut one, mut programs) = (start(server, 1).await?, start(server, clients).await?);
    for _ in 0..plan.peer_rounds {
        let mut rates = [0.0; 2];
        for (rate, programs, count) in [(0, &mut one, clients), (1, &mut programs, 1)] {
            let runs: Vec<Turns> = at_once(programs, &turns(count)).await?;
            check(runs.iter().map(|run| run.overlaps))?;
            rates[rate] = runs.iter().map(|run| run.acquisitions as f64 / run.seconds).sum();
        }
        together.push(rates[0]);
        apart.push(rates[1]);
    }
    Ok(OneName { clients, in_processes: median(apart), in_one_process: median(together) })
}

/// Tasks of several processes that contend for one lock, with and without passing it on.
async fn passed(server: &Server, plan: &Plan) -> Outcome<Passed> {
    let (processes, tasks) = PASSING;
    let mut programs = start(server, processes).await?;
    let (mut rates, mut gains, mut longest) = ([Vec::new(), Vec::new()], Vec::new(), [0.0; 2]);
    // Of all rounds: in one of them, processes that begin a little later have fewer.
    let mut turns = vec![0.0; processes];
    for _ in 0..plan.peer_rounds {
        let mut round = [0.0; 2];
        for (way, kind) in ["mutex", "unpassed"].into_iter().enumerate() {
            let seconds = plan.peer_window.as_secs_f64();
            let command = format!("shared redlatch {kind} {tasks} 1 {seconds} {DELAY}");
            let runs: Vec<Shared> = at_once(&mut programs, &command).await?;
            check(runs.iter().map(|run| run.overlaps))?;
            round[way] = runs.iter().map(|run| run.pairs as f64 / run.seconds).sum();
            longest[way] = runs.iter().map(|run| run.longest_ms).fold(longest[way], f64::max);
            if kind == "mutex" {
                turns.iter_mut().zip(&runs).for_each(|(turns, run)| *turns += run.pairs as f64);
            }
            rates[way].push(round[way]);
        }
        gains.push(round[0] / round[1]);
    }
    let fairness = turns.iter().copied().fold(f64::MAX, f64::min) / turns.iter().copied().fold(0.0, f64::max);
    let ([with, without], [longest_ms, longest_without_ms]) = (rates, longest);
    Ok(Passed {
        turns_per_second: median(with),
        without: median(without),
        gain: median(gains),
        fairness,
        longest_ms,
        longest_without_ms,
    })
}

/// Tasks of several processes, each with a name of its own, or with shared names.
async fn many_names(
    server: &Server,
    library: &'static str,
    processes: usize,
    are_shared: bool,
    plan: &Plan,
) -> Outcome<ManyNames> {
    let mut observer = server.observer().await?;
    let mut programs = start(server, processes).await?;
    // Long enough for the longest waits of a library that polls.
    let (names, span, rounds) = match are_shared {
        true => (NAMES, plan.window, 1),
        false => (0, plan.peer_slice, plan.peer_rounds),
    };
    let tasks = TASKS / processes;
    let command = format!("shared {library} mutex {tasks} {names} {} {DELAY}", span.as_secs_f64());
    let (mut rates, mut longest, mut server_us) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        for program in &mut programs {
            program.prepare(&command).await?;
        }
        let cpu = observer.cpu().await?;
        let runs: Vec<Shared> = run(&mut programs).await?;
        let cpu = observer.cpu().await?.saturating_sub(cpu);
        check(runs.iter().map(|run| run.overlaps))?;
        let pairs = runs.iter().map(|run| run.pairs).sum::<u64>() as f64;
        rates.push(runs.iter().map(|run| run.pairs as f64 / run.seconds).sum());
        longest.push(runs.iter().map(|run| run.longest_ms).fold(0.0, f64::max));
        server_us.push(cpu.as_secs_f64() * 1e6 / pairs);
    }
    let (pairs_per_second, longest_ms) = (median(rates), median(longest));
    Ok(ManyNames {
        library,
        processes,
        are_shared,
        pairs_per_second,
        longest_ms,
        server_us: median(server_us),
    })
}

pub(super) async fn start(server: &Server, count: usize) -> Outcome<Vec<Program>> {
    let mut programs = Vec::new();
    for _ in 0..count {
        let url = server.url();
        let program = Program::start(PROGRAM, url.trim_end_matches('/')).await?;
        programs.push(program.ok_or("the program is gone")?);
    }
    Ok(programs)
}

pub(super) async fn at_once<T: serde::de::DeserializeOwned>(
    programs: &mut [Program],
    command: &str,
) -> Outcome<Vec<T>> {
    for program in programs.iter_mut() {
        program.prepare(command).await?;
    }
    run(programs).await
}

/// Runs what was prepared.
async fn run<T: serde::de::DeserializeOwned>(programs: &mut [Program]) -> Outcome<Vec<T>> {
    for program in programs.iter_mut() {
        program.begin().await?;
    }
    let mut runs = Vec::new();
    for program in programs {
        runs.push(program.end::<T>().await?);
    }
    Ok(runs)
}

pub(super) fn check(overlaps: impl Iterator<Item = u64>) -> Outcome<()> {
    if overlaps.sum::<u64>() > 0 { Err("two holders at once".into()) } else { Ok(()) }
}
