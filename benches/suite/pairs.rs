//! Uncontended locks: how much more they cost than bare round trips.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redlatch::ReentrantGuard;
use serde::Serialize;
use tokio::task::JoinSet;

use super::Outcome;
use super::client_cpu::client_cpu;
use super::gate::Gate;
use super::placement::{Cores, Placement};
use super::plan::Plan;
use super::samples::{Samples, median};
use super::server::{Observer, Server};
use super::work::{Bench, Pair, Work};

/// How many tasks, and where. With many tasks on the server's core, a rate depends by up to a third
/// on which thread woke up where.
const RUNS: [(usize, Placement); 4] =
    [(1, Placement::Apart), (1, Placement::Together), (64, Placement::Apart), (256, Placement::Apart)];

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) tasks: usize,
    pub(crate) placement: Placement,
    pub(crate) work: Work,
    pub(crate) pairs: usize,
    pub(crate) pairs_per_second: f64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The median over all rounds of this median divided by that of the baseline.
    pub(crate) to_baseline: f64,
    pub(crate) server_cpu_us_per_pair: f64,
}

impl Row {
    /// Whether there is a target for this kind.
    pub(crate) fn is_main(&self) -> bool {
        self.tasks == 1 && self.work == Work::Mutex
    }
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let bench = Bench::new(server).await?;
    let mut observer = server.observer().await?;
    let cores = Cores::of(server.process());
    let mut rows = Vec::new();
    for (tasks, mut placement) in RUNS {
        match &cores {
            Some(cores) => cores.place(placement)?,
            // The scheduler decides, so there is no second case of one task.
            None if placement == Placement::Together => continue,
            None => placement = Placement::Anywhere,
        }
        rows.extend(compare(&bench, &mut observer, tasks, placement, plan.pairs).await?);
    }
    if let Some(cores) = cores {
        cores.place(Placement::Anywhere)?;
    }
    Ok(rows)
}

/// Measures every kind in turn, in many rounds: a disturbance then affects all kinds alike.
async fn compare(
    bench: &Bench,
    observer: &mut Observer,
    tasks: usize,
    placement: Placement,
    span: Duration,
) -> Outcome<Vec<Row>> {
    // Long enough for several pairs of every task, and as short as that allows.
    let slice = Duration::from_millis(if tasks == 1 { 20 } else { 200 });
    let rounds = (span.as_millis() / slice.as_millis()) as usize;
    let mut tallies = Work::ALL.map(|_| Tally::default());
    for round in 0..=rounds {
        let mut slices = Vec::new();
        for turn in 0..Work::ALL.len() {
            // No kind always follows the same one.
            let index = (round + turn) % Work::ALL.len();
            slices.push((index, run(bench, observer, Work::ALL[index], tasks, slice).await?));
        }
        // The first round loads scripts and makes the keys.
        if round > 0 {
            slices.sort_by_key(|(index, _)| *index);
            let baseline = slices[0].1.samples.median();
            for (index, slice) in slices {
                tallies[index].add(slice, baseline);
            }
        }
    }
    Ok(Work::ALL.into_iter().zip(tallies).map(|(work, tally)| tally.row(work, tasks, placement)).collect())
}

/// The result of some tasks with one kind of pair, for a short time.
pub(crate) struct Slice {
    pub(crate) samples: Samples,
    pub(crate) took: Duration,
    pub(crate) server_cpu: Duration,
    pub(crate) client_cpu: Duration,
}

pub(crate) async fn run(
    bench: &Bench,
    observer: &mut Observer,
    work: Work,
    tasks: usize,
    span: Duration,
) -> Outcome<Slice> {
    let gate = Arc::new(Gate::new(tasks + 1));
    let mut running = JoinSet::new();
    for task in 0..tasks {
        running.spawn(repeat(bench.pair(work, task)?, Arc::clone(&gate), span));
    }
    gate.prepared().await;
    let (cpu, own_cpu) = (observer.cpu().await?, client_cpu());
    let start = gate.start().await;
    let (mut samples, mut outer) = (Samples::default(), Vec::new());
    while let Some(done) = running.join_next().await {
        let (some, guard) = done??;
        samples.append(some);
        outer.extend(guard);
    }
    let (took, client_cpu) = (start.elapsed(), client_cpu().saturating_sub(own_cpu));
    let server_cpu = observer.cpu().await?.saturating_sub(cpu);
    for guard in outer {
        guard.release().await?;
    }
    Ok(Slice { samples, took, server_cpu, client_cpu })
}

/// Runs one task. It returns the outer hold, if it has one, so that its release is not measured.
async fn repeat(
    mut pair: Pair,
    gate: Arc<Gate>,
    span: Duration,
) -> Outcome<(Samples, Option<ReentrantGuard>)> {
    let outer = pair.outer().await;
    // Reaches the gate even after an error: the other tasks wait there.
    gate.prepared().await;
    let start = gate.start().await;
    let outer = outer?;
    let mut samples = Samples::default();
    // A pair without a round trip never yields: a task may begin when the others are done.
    let mut before = Instant::now();
    while samples.len() == 0 || before.duration_since(start) < span {
        pair.run().await?;
        let now = Instant::now();
        samples.push(now.duration_since(before));
        before = now;
    }
    Ok((samples, outer))
}

/// All slices of one kind of pair.
#[derive(Default)]
struct Tally {
    samples: Samples,
    rates: Vec<f64>,
    to_baseline: Vec<f64>,
    server_cpu: Duration,
}

impl Tally {
    fn add(&mut self, mut slice: Slice, baseline: f64) {
        self.rates.push(slice.samples.len() as f64 / slice.took.as_secs_f64());
        self.to_baseline.push(slice.samples.median() / baseline);
        self.server_cpu += slice.server_cpu;
        self.samples.append(slice.samples);
    }

    fn row(mut self, work: Work, tasks: usize, placement: Placement) -> Row {
        let pairs = self.samples.len();
        Row {
            tasks,
            placement,
            work,
            pairs,
            pairs_per_second: median(self.rates),
            median_us: self.samples.median(),
            p99_us: self.samples.quantile(0.99),
            to_baseline: median(self.to_baseline),
            server_cpu_us_per_pair: self.server_cpu.as_secs_f64() * 1e6 / pairs as f64,
        }
    }
}
