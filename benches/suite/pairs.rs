//! Locks that nobody else wants: how much more they cost than bare round trips.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redlatch::ReentrantGuard;
use serde::Serialize;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::Outcome;
use super::plan::Plan;
use super::samples::{Samples, median};
use super::server::{Observer, Server};
use super::work::{Bench, Pair, Work};

const TASKS: [usize; 3] = [1, 64, 256];

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) tasks: usize,
    pub(crate) work: Work,
    pub(crate) pairs: usize,
    pub(crate) pairs_per_second: f64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The median of this median by that of the floor, round by round.
    pub(crate) to_floor: f64,
    pub(crate) server_cpu_us_per_pair: f64,
}

impl Row {
    /// The one that there is a target for.
    pub(crate) fn is_main(&self) -> bool {
        self.tasks == 1 && self.work == Work::Mutex
    }
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let bench = Bench::new(server).await?;
    let mut observer = server.observer().await?;
    let mut rows = Vec::new();
    for tasks in TASKS {
        rows.extend(compare(&bench, &mut observer, tasks, plan.pairs).await?);
    }
    Ok(rows)
}

/// Measures every kind in turn, again and again: what disturbs one of them disturbs all of them.
async fn compare(bench: &Bench, observer: &mut Observer, tasks: usize, span: Duration) -> Outcome<Vec<Row>> {
    // Long enough for several pairs of every task, and as short as that allows.
    let slice = Duration::from_millis(if tasks == 1 { 20 } else { 200 });
    let rounds = (span.as_millis() / slice.as_millis()) as usize;
    let mut tallies = Work::ALL.map(|_| Tally::default());
    for round in 0..=rounds {
        let mut slices = Vec::new();
        for turn in 0..Work::ALL.len() {
            // Nobody comes always after the same one.
            let index = (round + turn) % Work::ALL.len();
            slices.push((index, run(bench, observer, Work::ALL[index], tasks, slice).await?));
        }
        // The first round loads scripts and makes the keys.
        if round > 0 {
            slices.sort_by_key(|(index, _)| *index);
            let floor = slices[0].1.samples.median();
            for (index, slice) in slices {
                tallies[index].add(slice, floor);
            }
        }
    }
    Ok(Work::ALL.into_iter().zip(tallies).map(|(work, tally)| tally.row(work, tasks)).collect())
}

/// What some tasks did with one kind of pair for a short while.
struct Slice {
    samples: Samples,
    took: Duration,
    server_cpu: Duration,
}

async fn run(
    bench: &Bench,
    observer: &mut Observer,
    work: Work,
    tasks: usize,
    span: Duration,
) -> Outcome<Slice> {
    let gate = Arc::new(Barrier::new(tasks + 1));
    let mut running = JoinSet::new();
    for task in 0..tasks {
        running.spawn(repeat(bench.pair(work, task)?, Arc::clone(&gate), span));
    }
    gate.wait().await; // all are prepared, and none has begun
    let cpu = observer.cpu().await?;
    let start = Instant::now();
    gate.wait().await;
    let (mut samples, mut outer) = (Samples::default(), Vec::new());
    while let Some(done) = running.join_next().await {
        let (some, guard) = done??;
        samples.append(some);
        outer.extend(guard);
    }
    let (took, server_cpu) = (start.elapsed(), observer.cpu().await?.saturating_sub(cpu));
    for guard in outer {
        guard.release().await?;
    }
    Ok(Slice { samples, took, server_cpu })
}

/// One task. It returns the outer hold, if it has one, so that its release is not measured.
async fn repeat(
    mut pair: Pair,
    gate: Arc<Barrier>,
    span: Duration,
) -> Outcome<(Samples, Option<ReentrantGuard>)> {
    let outer = pair.outer().await;
    // Whatever happens, everybody comes to the gate: the others wait there.
    gate.wait().await;
    gate.wait().await;
    let outer = outer?;
    let mut samples = Samples::default();
    let start = Instant::now();
    let mut before = start;
    while before.duration_since(start) < span {
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
    to_floor: Vec<f64>,
    server_cpu: Duration,
}

impl Tally {
    fn add(&mut self, mut slice: Slice, floor: f64) {
        self.rates.push(slice.samples.len() as f64 / slice.took.as_secs_f64());
        self.to_floor.push(slice.samples.median() / floor);
        self.server_cpu += slice.server_cpu;
        self.samples.append(slice.samples);
    }

    fn row(mut self, work: Work, tasks: usize) -> Row {
        let pairs = self.samples.len();
        Row {
            tasks,
            work,
            pairs,
            pairs_per_second: median(self.rates),
            median_us: self.samples.median(),
            p99_us: self.samples.quantile(0.99),
            to_floor: median(self.to_floor),
            server_cpu_us_per_pair: self.server_cpu.as_secs_f64() * 1e6 / pairs as f64,
        }
    }
}
