//! The server's CPU time for each kind of pair. It limits how many pairs one server can serve.
//!
//! The kinds take turns in several rounds of one run, on one server. They are compared to a bare
//! `SET NX PX` with a compare-and-delete script.

use std::time::Duration;

use redlatch::Options;
use serde::Serialize;

use super::handover::Contenders;
use super::plan::Plan;
use super::samples::median;
use super::server::{Observer, Server};
use super::work::{Bench, Work};
use super::{Outcome, handover, pairs};

/// Tasks of one client, each with a lock name of its own.
const TASKS: usize = 256;

/// Clients that share one lock name.
const CLIENTS: usize = 64;

/// The first round loads the scripts, and is not counted.
const WARM_UP: Duration = Duration::from_millis(100);

/// The first one is the baseline, the second one the baseline in pipelines.
const KINDS: [Kind; 8] = [
    Kind::Pair(Work::SetNx),
    Kind::Pair(Work::SetNxPipelined),
    Kind::Pair(Work::Mutex),
    Kind::Pair(Work::MutexWithoutFencing),
    Kind::Pair(Work::Reentrant),
    Kind::Pair(Work::Read),
    Kind::Pair(Work::Write),
    Kind::HandOver,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// A lock and its release, without other clients.
    Pair(Work),
    /// A release that grants the lock to the next waiter, and the next request of the same client.
    HandOver,
}

impl Kind {
    pub(crate) fn title(self) -> String {
        match self {
            Kind::Pair(work) => work.title().to_owned(),
            Kind::HandOver => format!("hand-over, {CLIENTS} clients"),
        }
    }
}

/// Medians of the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) server_us: f64,
    /// The median divided by that of the baseline. Other load on the machine moves the baseline:
    /// its median was from 3.9 to 5.8 us on two cores.
    pub(crate) to_baseline: f64,
    /// The median divided by that of the baseline in pipelines, which the crate's requests use as
    /// well: that baseline was from 3.3 to 3.7 us in the same runs.
    pub(crate) to_pipelined: f64,
    pub(crate) pairs_per_second: f64,
    /// CPU time of this process, with all tasks and clients in it.
    pub(crate) client_us: f64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut observer = server.observer().await?;
    let mut columns = KINDS.map(|_| Vec::new());
    for round in 0..=plan.rounds {
        let span = if round == 0 { WARM_UP } else { plan.slice };
        for turn in 0..KINDS.len() {
            // No kind always follows the same one.
            let index = (round + turn) % KINDS.len();
            let cost = run(server, &mut observer, KINDS[index], span).await?;
            if round > 0 {
                columns[index].push(cost);
            }
        }
    }
    let (baseline, pipelined) = (server_us(&columns[0]), server_us(&columns[1]));
    Ok(KINDS.into_iter().zip(&columns).map(|(kind, costs)| row(kind, costs, baseline, pipelined)).collect())
}

fn row(kind: Kind, costs: &[Cost], baseline: f64, pipelined: f64) -> Row {
    Row {
        kind,
        server_us: server_us(costs),
        to_baseline: server_us(costs) / baseline,
        to_pipelined: server_us(costs) / pipelined,
        pairs_per_second: median(costs.iter().map(|cost| cost.pairs_per_second).collect()),
        client_us: median(costs.iter().map(|cost| cost.client_us).collect()),
    }
}

fn server_us(costs: &[Cost]) -> f64 {
    median(costs.iter().map(|cost| cost.server_us).collect())
}

/// One kind in one round.
struct Cost {
    server_us: f64,
    pairs_per_second: f64,
    client_us: f64,
}

async fn run(server: &Server, observer: &mut Observer, kind: Kind, span: Duration) -> Outcome<Cost> {
    observer.alone().await?;
    match kind {
        Kind::Pair(work) => {
            let bench = Bench::new(server).await?;
            let tasks = TASKS / work.pairs_at_once();
            let slice = pairs::run(&bench, observer, work, tasks, span).await?;
            let pairs = (slice.samples.len() * work.pairs_at_once()) as f64;
            Ok(Cost {
                server_us: slice.server_cpu.as_secs_f64() * 1e6 / pairs,
                pairs_per_second: pairs / slice.took.as_secs_f64(),
                client_us: slice.client_cpu.as_secs_f64() * 1e6 / pairs,
            })
        }
        Kind::HandOver => {
            let contenders = Contenders::of_one_name(CLIENTS, 1, Options::new());
            let window = handover::window(server, observer, &contenders, span).await?;
            Ok(Cost {
                server_us: window.server_cpu_us,
                pairs_per_second: window.rate,
                client_us: window.client_cpu_us,
            })
        }
    }
}
