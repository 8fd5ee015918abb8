//! Slices of all peers in turn, and their sums.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;

use crate::pair::{Bench, Pair, Peer, Work};
use crate::suite::Outcome;
use crate::suite::gate::Gate;
use crate::suite::placement::{Cores, Placement};
use crate::suite::plan::Plan;
use crate::suite::samples::{Samples, median};
use crate::suite::server::{Observer, Server};

/// Enough tasks to keep the server and the clients busy all the time: the placement of their
/// threads does not matter then.
const TASKS: [usize; 3] = [64, 256, 1024];

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) tasks: usize,
    pub(crate) placement: Placement,
    pub(crate) work: Work,
    pub(crate) peer: Peer,
    pub(crate) pairs: usize,
    pub(crate) pairs_per_second: f64,
    /// The median over all rounds of this rate divided by that of the fastest other library.
    pub(crate) to_best_peer: f64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) server_cpu_us_per_pair: f64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let bench = Bench::new(server).await?;
    let mut observer = server.observer().await?;
    let mut rows = alone(server, &bench, &mut observer, plan).await?;
    for tasks in TASKS {
        for work in Work::ALL.into_iter().filter(|work| tasks < 1024 || *work == Work::Mutex) {
            rows.extend(compare(&bench, &mut observer, work, tasks, Placement::Anywhere, plan.pairs).await?);
        }
    }
    Ok(rows)
}

/// Measures one task, with the server on its core and on another one, where that can be chosen.
async fn alone(server: &Server, bench: &Bench, observer: &mut Observer, plan: &Plan) -> Outcome<Vec<Row>> {
    let cores = Cores::of(server.process());
    let placements = match cores {
        Some(_) => &[Placement::Apart, Placement::Together][..],
        None => &[Placement::Anywhere],
    };
    let mut rows = Vec::new();
    for placement in placements {
        if let Some(cores) = &cores {
            cores.place(*placement)?;
        }
        for work in Work::ALL.into_iter().filter(|work| !work.is_shared()) {
            rows.extend(compare(bench, observer, work, 1, *placement, plan.pairs).await?);
        }
    }
    if let Some(cores) = &cores {
        cores.place(Placement::Anywhere)?;
    }
    Ok(rows)
}

/// Measures every peer in turn, in many rounds: a disturbance then affects all peers alike.
async fn compare(
    bench: &Bench,
    observer: &mut Observer,
    work: Work,
    tasks: usize,
    placement: Placement,
    span: Duration,
) -> Outcome<Vec<Row>> {
    // Long enough for several pairs of every task, and as short as that allows.
    let slice = Duration::from_millis(if tasks == 1 { 20 } else { 200 });
    let rounds = (span.as_millis() / slice.as_millis()) as usize;
    let peers = Peer::of(work);
    let mut tallies: Vec<_> = peers.iter().map(|peer| (*peer, Tally::default())).collect();
    for round in 0..=rounds {
        let mut slices = Vec::new();
        for turn in 0..peers.len() {
            // No peer always follows the same one.
            let index = (round + turn) % peers.len();
            slices.push((index, run(bench, observer, peers[index], work, tasks, slice).await?));
        }
        // The first round loads scripts and makes the keys.
        if round > 0 {
            slices.sort_by_key(|(index, _)| *index);
            let others = slices.iter().filter(|(index, _)| peers[*index].is_other_library());
            let best = others.map(|(_, slice)| slice.rate()).fold(f64::NAN, f64::max);
            for (index, slice) in slices {
                tallies[index].1.add(slice, best);
            }
        }
    }
    Ok(tallies.into_iter().map(|(peer, tally)| tally.row(peer, work, tasks, placement)).collect())
}

/// The result of some tasks with one peer's locks, for a short time.
struct Slice {
    samples: Samples,
    took: Duration,
    server_cpu: Duration,
}

impl Slice {
    fn rate(&self) -> f64 {
        self.samples.len() as f64 / self.took.as_secs_f64()
    }
}

async fn run(
    bench: &Bench,
    observer: &mut Observer,
    peer: Peer,
    work: Work,
    tasks: usize,
    span: Duration,
) -> Outcome<Slice> {
    let gate = Arc::new(Gate::new(tasks + 1));
    let mut running = JoinSet::new();
    for task in 0..tasks {
        running.spawn(repeat(bench.pair(peer, work, task)?, Arc::clone(&gate), span));
    }
    gate.prepared().await;
    let cpu = observer.cpu().await?;
    let start = gate.start().await;
    let mut samples = Samples::default();
    while let Some(done) = running.join_next().await {
        samples.append(done??);
    }
    let (took, server_cpu) = (start.elapsed(), observer.cpu().await?.saturating_sub(cpu));
    Ok(Slice { samples, took, server_cpu })
}

/// Runs one task.
async fn repeat(mut pair: Pair, gate: Arc<Gate>, span: Duration) -> Outcome<Samples> {
    gate.prepared().await;
    let start = gate.start().await;
    let mut samples = Samples::default();
    let mut before = Instant::now();
    while samples.len() == 0 || before.duration_since(start) < span {
        pair.run().await?;
        let now = Instant::now();
        samples.push(now.duration_since(before));
        before = now;
    }
    Ok(samples)
}

/// All slices of one peer.
#[derive(Default)]
struct Tally {
    samples: Samples,
    rates: Vec<f64>,
    to_best_peer: Vec<f64>,
    server_cpu: Duration,
}

impl Tally {
    fn add(&mut self, slice: Slice, best: f64) {
        self.rates.push(slice.rate());
        self.to_best_peer.push(slice.rate() / best);
        self.server_cpu += slice.server_cpu;
        self.samples.append(slice.samples);
    }

    fn row(mut self, peer: Peer, work: Work, tasks: usize, placement: Placement) -> Row {
        let pairs = self.samples.len();
        Row {
            tasks,
            placement,
            work,
            peer,
            pairs,
            pairs_per_second: median(self.rates),
            to_best_peer: median(self.to_best_peer),
            median_us: self.samples.median(),
            p99_us: self.samples.quantile(0.99),
            server_cpu_us_per_pair: self.server_cpu.as_secs_f64() * 1e6 / pairs as f64,
        }
    }
}
