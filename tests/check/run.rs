//! What one run consists of: servers, proxies before them, workers, and somebody who looks.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use crate::faults::{Rests, Scene, connections, servers, workers};
use crate::history::Time;
use crate::leftovers;
use crate::observer::{Observation, ReaderEnds, Seen, observe};
use crate::plan::{Fault, Lane, Plan, TTL};
use crate::resource::Resource;
use crate::support::{DURABLE, Deployment, Proxy, Random, Server, Topology};
use crate::workers::{Crew, Ended, Terms, WORKERS, host};
use crate::workload::LOCKS;

/// From when a fault was done until it was undone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    pub fault: Fault,
    /// The worker that was hit; `None`: servers.
    pub place: Option<usize>,
    pub start: Time,
    pub end: Time,
    /// What shows that it had an effect.
    pub effect: Option<String>,
    /// When servers lost what they had answered: from when that may be seen, and until when what was granted may be lost.
    pub lost: Option<(Time, Time)>,
    /// Which locks that concerns: those of one master of a cluster. `None`: all.
    pub of: Option<Vec<String>>,
    /// When nobody answered for what was hit: a server was away, or so many nodes that the others do not decide.
    pub away: Option<(Time, Time)>,
}

/// All that a run left to be judged, beside the histories of the workers.
#[derive(Serialize, Deserialize)]
pub struct Record {
    pub windows: Vec<Window>,
    pub observations: Vec<Observation>,
    pub reader_ends: ReaderEnds,
    /// The numbers that were added to, at the end.
    pub numbers: Vec<(String, u64)>,
    /// From when no fault was done, and nobody wanted a lock.
    pub end: Time,
    /// Which workers ended before they were told to.
    pub died: Vec<String>,
    /// What was wrong at the end.
    pub left: Vec<String>,
    /// When the machine did something else: nobody can be in time then.
    pub stalls: Vec<(Time, Time)>,
    /// Whether the servers' clock could be set.
    pub sets_clock: bool,
}

/// Nothing happens for so long after a run has begun, so that there is something to compare with.
const CALM: Duration = Duration::from_secs(3);

/// A machine that lets nobody run for so long is too slow for the time limits of requests.
pub const STALL: Duration = Duration::from_millis(100);

/// How long the workers may take for what they are about.
const LAST_ORDERS: Duration = Duration::from_secs(30);

pub async fn run(plan: &Plan, directory: &Path) -> Record {
    let arguments = [&DURABLE[..], &servers::debuggable()].concat();
    let (environment, clock) = crate::clock::shim(plan, directory);
    let mut deployment = match plan.topology {
        Topology::Standalone => Deployment::of(Server::start_in(&arguments, &environment).await),
        topology => Deployment::start_with(topology, &arguments).await,
    };
    let ports: Vec<u16> = deployment.all().map(Server::port).collect();
    let mut proxies = Vec::new();
    for place in 0..WORKERS {
        proxies.push(Proxy::at(&host(place), ports.clone()).await);
    }
    if plan.topology.nodes() > 1 {
        servers::admit(&deployment).await;
    }
    let kept = Server::start().await;
    let resource = Resource::open(&kept.url()).await;
    let mut crew = Crew::start(Terms {
        seed: plan.seed,
        topology: plan.topology,
        ports: deployment.entrances().iter().map(Server::port).collect(),
        resource: kept.url(),
        directory: directory.to_owned(),
        linger: plan.linger,
    });

    let (stop, stopped) = watch::channel(false);
    let data: Vec<(u16, String)> = deployment.data().map(|server| (server.port(), server.url())).collect();
    let watching = watch_machine(stopped.clone());
    let observing = tokio::spawn(observe(data, stopped));
    let windows = Mutex::new(Vec::new());
    let end = Instant::now() + Duration::from_secs(plan.seconds);
    sleep(CALM).await;
    let rests = Rests::until(end, Lane::ALL.len());
    let lane = |lane: Lane| {
        let random = Random::seeded(plan.seed ^ (lane as u64 + 1) << 32);
        Scene { faults: plan.lane(lane), random, rests: &rests, rested: 0, end, windows: &windows }
    };
    tokio::join!(
        workers::disturb(lane(Lane::Workers), &mut crew),
        connections::disturb(lane(Lane::Connections), &proxies),
        servers::disturb(lane(Lane::Servers), &mut deployment, &clock),
    );
    sleep_until(end).await;

    let ended = Time::now();
    let Ended { died, hang: mut left } = crew.end(LAST_ORDERS).await;
    sleep(TTL).await;
    let proxies: Vec<Arc<Proxy>> = proxies.into_iter().map(Arc::new).collect();
    drop(proxies);
    let windows = windows.into_inner().unwrap();
    leftovers::forget_old_queues(&deployment, &windows).await;
    left.extend(leftovers::overdue(&deployment, plan).await);
    left.extend(nothing_left(deployment).await);
    stop.send_replace(true);
    let mut numbers = Vec::new();
    for (lock, _) in LOCKS {
        numbers.push((lock.to_owned(), resource.number(lock).await));
    }
    let stalls = watching.join().unwrap();
    let Seen { observations, reader_ends } = observing.await.unwrap();
    let sets_clock = clock.is_some();
    Record { windows, observations, reader_ends, numbers, end: ended, died, left, stalls, sets_clock }
}

/// Whoever sleeps longer than he wanted to was not let run.
fn watch_machine(stopped: watch::Receiver<bool>) -> std::thread::JoinHandle<Vec<(Time, Time)>> {
    let nap = Duration::from_millis(20);
    std::thread::spawn(move || {
        let mut stalls = Vec::new();
        while !*stopped.borrow() {
            let start = Time::now();
            std::thread::sleep(nap);
            let end = Time::now();
            if end.since(start) > nap + STALL {
                stalls.push((start, end));
            }
        }
        stalls
    })
}

/// What every test of the suite ends with as well.
async fn nothing_left(deployment: Deployment) -> Option<String> {
    let looked = tokio::spawn(async move { deployment.assert_nothing_left().await }).await;
    let panic = looked.err()?.into_panic();
    let text = panic.downcast_ref::<String>().cloned();
    Some(text.unwrap_or_else(|| "something is left".to_owned()))
}
