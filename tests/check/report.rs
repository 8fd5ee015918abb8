//! Runs what the arguments ask for, and prints the results.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::Arguments;
use crate::history_files;
use crate::judge::{LostWindow, Verdict, judge};
use crate::mutants;
use crate::plan::{Fault, Plan, TOPOLOGIES, topology_name};
use crate::run;

/// How many violations of each rule are printed for a run.
const SHOWN: usize = 4;

/// The totals of all runs.
#[derive(Default)]
struct Sum {
    seeds: Vec<u64>,
    /// The duration of the longest run.
    seconds: u64,
    acquisitions: usize,
    violations: usize,
    invalid: usize,
    /// The planned faults, and how often each had an effect.
    windows: BTreeMap<Fault, usize>,
    lost: Vec<LostWindow>,
    /// Why the runs together are invalid.
    incomplete: Vec<String>,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    if arguments.list {
        list();
        return ExitCode::SUCCESS;
    }
    if arguments.tested_mutants {
        return mutants::run_test_mutants(&arguments.chosen_test_mutants);
    }
    if arguments.mutants || !arguments.chosen.is_empty() {
        return mutants::run(&arguments.chosen);
    }
    if let Some(directory) = &arguments.judge {
        return judge_again(directory, arguments);
    }
    let scratch = match &arguments.keep {
        Some(directory) => directory.clone(),
        None => std::env::temp_dir().join(format!("redlatch-check-{}", std::process::id())),
    };
    let mut sum = Sum::default();
    for seed in arguments.seed..arguments.seed + arguments.seeds {
        let plan = Plan::new(arguments, seed);
        if plan.faults.is_empty() {
            println!("seed {seed}: none of these faults exists on {}", topology_name(plan.topology));
            continue;
        }
        let directory = scratch.join(format!("seed-{seed}"));
        // Otherwise the histories of an earlier run would be judged with this one.
        let _ = std::fs::remove_dir_all(&directory);
        if let Err(error) = std::fs::create_dir_all(&directory) {
            eprintln!("{}: {error}", directory.display());
            return ExitCode::from(2);
        }
        let Some(verdict) = check(&plan, &directory) else {
            println!("interrupted; replay: {}", plan.replay(&arguments.faults));
            if arguments.keep.is_none() {
                let _ = std::fs::remove_dir_all(&scratch);
            }
            return ExitCode::from(130);
        };
        let good = verdict.violations.is_empty() && verdict.invalid.is_empty();
        show(&plan, &verdict);
        if !good {
            println!("  replay: {}", plan.replay(&arguments.faults));
            println!("  histories: {}", directory.display());
        } else if arguments.keep.is_none() {
            // Best effort: a directory that stays does no harm.
            let _ = std::fs::remove_dir_all(&directory);
        }
        sum.add(&plan, &verdict);
    }
    sum.end(arguments)
}

/// Judges kept runs again.
fn judge_again(directory: &Path, arguments: &Arguments) -> ExitCode {
    let mut sum = Sum::default();
    let judged = history_files::runs(directory).and_then(|runs| {
        runs.iter().try_for_each(|run| {
            let (plan, record) = history_files::read(run)?;
            let verdict = judge(&plan, &record, run);
            show(&plan, &verdict);
            sum.add(&plan, &verdict);
            Ok(())
        })
    });
    match judged {
        Ok(()) => sum.end(arguments),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Executes and judges one run. `None`: a signal ended it, and all servers and workers have ended.
fn check(plan: &Plan, directory: &Path) -> Option<Verdict> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (own_plan, own_directory) = (plan.clone(), directory.to_owned());
    let mut running = runtime.spawn(async move { run::run(&own_plan, &own_directory).await });
    let ended = runtime.block_on(async {
        tokio::select! {
            ended = &mut running => Some(ended),
            () = interrupted() => {
                running.abort();
                let _ = running.await;
                None
            }
        }
    });
    match ended? {
        Ok(record) => {
            history_files::write(plan, &record, directory);
            Some(judge(plan, &record, directory))
        }
        // The run panicked, for example because a server did not restart: nothing is proven.
        Err(error) => {
            Some(Verdict { invalid: vec![format!("the run broke off: {error}")], ..Verdict::default() })
        }
    }
}

async fn interrupted() {
    let mut signals = [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| signal(kind).unwrap());
    let [interrupt, terminate] = &mut signals;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

fn show(plan: &Plan, verdict: &Verdict) {
    let done: usize = verdict.windows.values().map(Vec::len).sum();
    println!(
        "seed {}, {}, {} s: {} acquisitions, {done} faults of {} classes, {} losses reported, {} writes refused, {} additions lost, {} violations",
        plan.seed,
        topology_name(plan.topology),
        plan.seconds,
        verdict.acquisitions,
        verdict.windows.len(),
        verdict.reported_losses,
        verdict.rejected_writes,
        verdict.lost_additions,
        verdict.violations.len(),
    );
    let mut of_rule: BTreeMap<&str, usize> = BTreeMap::new();
    for violation in &verdict.violations {
        let number = of_rule.entry(violation.rule).or_default();
        *number += 1;
        if *number <= SHOWN {
            println!("  violated: {}: {}", violation.rule, violation.text);
        }
    }
    for (rule, number) in of_rule.into_iter().filter(|(_, number)| *number > SHOWN) {
        println!("  ... and {} more of {rule}", number - SHOWN);
    }
    for reason in &verdict.invalid {
        println!("  invalid: {reason}");
    }
    for (failure, number) in &verdict.failures {
        println!("  {number} requests failed: {failure}");
    }
}

fn list() {
    for fault in Fault::ALL {
        let topologies: Vec<&str> =
            TOPOLOGIES.iter().filter(|(topology, _)| fault.is_of(*topology)).map(|(_, name)| *name).collect();
        let state = if fault.keeps_state() { "keeps state" } else { "loses state" };
        println!("{:18} {state}  {}", fault.name(), topologies.join(", "));
    }
}

impl Sum {
    /// Prints the totals.
    fn end(mut self, arguments: &Arguments) -> ExitCode {
        self.incomplete = self.missed();
        if self.acquisitions == 0 {
            self.incomplete.push("no lock was granted".to_owned());
        }
        for reason in &self.incomplete {
            println!("invalid: {reason}");
        }
        if arguments.table {
            self.table();
        }
        let seeds = match (self.seeds.first(), self.seeds.last()) {
            (Some(first), Some(last)) if first != last => format!("seeds {first}-{last}"),
            (first, _) => format!("seed {}", first.unwrap_or(&arguments.seed)),
        };
        let windows: usize = self.windows.values().sum();
        println!(
            "checked {} acquisitions, {windows} fault windows, {} violations, {seeds}",
            self.acquisitions, self.violations
        );
        let valid = self.invalid == 0 && self.incomplete.is_empty();
        if self.violations == 0 && valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn add(&mut self, plan: &Plan, verdict: &Verdict) {
        self.seeds.push(plan.seed);
        self.seconds = self.seconds.max(plan.seconds);
        for fault in &verdict.planned {
            self.windows.entry(*fault).or_default();
        }
        self.acquisitions += verdict.acquisitions;
        self.violations += verdict.violations.len();
        self.invalid += usize::from(!verdict.invalid.is_empty());
        for (fault, windows) in &verdict.windows {
            let effective = windows.iter().filter(|effective| **effective).count();
            *self.windows.entry(*fault).or_default() += effective;
        }
        self.lost.extend(verdict.lost_windows.iter().cloned());
    }

    /// The planned faults that never had an effect, if the runs were long enough to inject all.
    fn missed(&self) -> Vec<String> {
        let long = self.seconds >= 90 || self.seconds >= 5 * self.windows.len() as u64;
        if self.seeds.len() < 5 || !long {
            return Vec::new();
        }
        let without = self.windows.iter().filter(|(_, effective)| **effective == 0);
        without.map(|(fault, _)| format!("{} never had an effect", fault.name())).collect()
    }

    /// Prints a row for each class of faults: what holds under it, how often it had an effect, how
    /// many lost holds were trusted, and for how long.
    fn table(&self) {
        println!(
            "| fault | what holds | windows | holds that a server lost | trusted after it, at most | in the median |"
        );
        println!("|---|---|---|---|---|---|");
        for (fault, windows) in &self.windows {
            let mut spans: Vec<Duration> =
                self.lost.iter().filter(|lost| lost.fault == *fault).map(|lost| lost.span).collect();
            spans.sort();
            let millis = |span: Option<&Duration>| {
                span.map_or("0".to_owned(), |span| format!("{} ms", span.as_millis()))
            };
            println!(
                "| {} | {} | {windows} | {} | {} | {} |",
                fault.name(),
                fault.invariant(),
                spans.len(),
                millis(spans.last()),
                millis(spans.get(spans.len() / 2)),
            );
        }
    }
}
