//! One run: servers, proxies in front of them, workers, fault injectors and an observer.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use crate::faults::{self, Pauses, Scene, connections, servers};
use crate::history::Time;
use crate::leftovers;
use crate::observer::{Observation, Observations, ReaderEnds, observe};
use crate::plan::{Fault, Lane, Plan, TTL};
use crate::resource::Resource;
use crate::support::{DURABLE, Deployment, Proxy, Random, Server, Topology};
use crate::worker_processes::{CommonSettings, WORKERS, WorkerProblems, Workers, host};
use crate::workload::LOCKS;

/// One fault, from its start to its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    pub fault: Fault,
    /// The place of the worker that was hit. `None`: servers were hit.
    pub place: Option<usize>,
    pub start: Time,
    pub end: Time,
    /// The effect that was measured.
    pub effect: Option<String>,
    /// Set if servers lost data that they had confirmed: the first time at which that may be
    /// visible, and the last at which a grant may still be lost.
    pub lost: Option<(Time, Time)>,
    /// The locks that were lost: those of one master of a cluster. `None`: all.
    pub of: Option<Vec<String>>,
    /// When what was hit did not reply: a server, or nodes of a quorum.
    pub away: Option<(Time, Time)>,
}

/// All that the judge gets of a run, beside the histories of the workers.
#[derive(Serialize, Deserialize)]
pub struct Record {
    pub windows: Vec<Window>,
    pub observations: Vec<Observation>,
    pub reader_ends: ReaderEnds,
    /// For each lock, the final value of the number without comparison.
    pub numbers: Vec<(String, u64)>,
    /// When the faults had ended, just before the command to the workers to end.
    pub end: Time,
    /// Workers that ended before the command to end.
    pub died: Vec<String>,
    /// What was left behind.
    pub left: Vec<String>,
    /// When the machine ran other work: time limits do not apply then.
    pub stalls: Vec<(Time, Time)>,
    /// When its disk was busy. The servers wait for it after each write, so limits for their
    /// replies do not apply then; those for clients do.
    #[serde(default)]
    pub disk_stalls: Vec<(Time, Time)>,
    /// Whether the servers' clock could be set.
    pub may_set_clock: bool,
}

impl Record {
    /// Of a run without faults that ended at once.
    pub fn of_nothing(end: Time) -> Record {
        Record {
            windows: Vec::new(),
            observations: Vec::new(),
            reader_ends: Vec::new(),
            numbers: Vec::new(),
            end,
            died: Vec::new(),
            left: Vec::new(),
            stalls: Vec::new(),
            disk_stalls: Vec::new(),
            may_set_clock: false,
        }
    }
}

/// The time without faults at the start of a run, to compare with.
const CALM: Duration = Duration::from_secs(3);

/// A pause of all threads that is longer than this makes requests exceed their limits.
pub const STALL: Duration = Duration::from_millis(100);

/// How long the workers may take to finish their holds at the end of a run.
const FINISH_LIMIT: Duration = Duration::from_secs(30);

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
    let resource_server = Server::start().await;
    let resource = Resource::open(&resource_server.url()).await;
    let mut workers = Workers::start(CommonSettings {
        seed: plan.seed,
        topology: plan.topology,
        ports: deployment.entrances().iter().map(Server::port).collect(),
        resource: resource_server.url(),
        directory: directory.to_owned(),
        linger: plan.linger,
        sets: plan.sets,
    });

    let (stop, stopped) = watch::channel(false);
    let data: Vec<(u16, String)> = deployment.data().map(|server| (server.port(), server.url())).collect();
    let watching = watch(stopped.clone(), || Ok(()));
    let mut file = tempfile::tempfile().unwrap(); // on the disk of the servers
    let watching_disk = watch(stopped.clone(), move || file.write_all(b".").and_then(|()| file.sync_data()));
    let observing = tokio::spawn(observe(data, stopped));
    let windows = Mutex::new(Vec::new());
    let end = Instant::now() + Duration::from_secs(plan.seconds);
    sleep(CALM).await;
    let pauses = Pauses::until(end, Lane::ALL.len());
    let lane = |lane: Lane| {
        let random = Random::seeded(plan.seed ^ (lane as u64 + 1) << 32);
        Scene { faults: plan.lane(lane), random, pauses: &pauses, pauses_done: 0, end, windows: &windows }
    };
    tokio::join!(
        faults::workers::disturb(lane(Lane::Workers), &mut workers),
        connections::disturb(lane(Lane::Connections), &proxies),
        servers::disturb(lane(Lane::Servers), &mut deployment, &clock),
    );
    sleep_until(end).await;

    let ended = Time::now();
    let WorkerProblems { died, hang: mut left } = workers.end(FINISH_LIMIT).await;
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
    let (stalls, disk_stalls) = (watching.join().unwrap(), watching_disk.join().unwrap());
    let Observations { observations, reader_ends } = observing.await.unwrap();
    let may_set_clock = clock.is_some();
    let end = ended;
    Record {
        windows,
        observations,
        reader_ends,
        numbers,
        end,
        died,
        left,
        stalls,
        disk_stalls,
        may_set_clock,
    }
}

/// Records when a short sleep, or what follows it, took much longer: the scheduler did not run this
/// thread then, or the disk was busy. A write that fails counts as a stall that lasts.
fn watch(
    stopped: watch::Receiver<bool>,
    mut action: impl FnMut() -> std::io::Result<()> + Send + 'static,
) -> std::thread::JoinHandle<Vec<(Time, Time)>> {
    let nap = Duration::from_millis(20);
    std::thread::spawn(move || {
        let (mut stalls, mut since) = (Vec::new(), None);
        while !*stopped.borrow() {
            let start = since.unwrap_or_else(Time::now);
            std::thread::sleep(nap);
            since = action().is_err().then_some(start);
            let end = Time::now();
            if since.is_none() && end.since(start) > nap + STALL {
                stalls.push((start, end));
            }
        }
        stalls.extend(since.map(|start| (start, Time::now())));
        stalls
    })
}

/// Runs the check that ends every test of the suite, and returns its failure.
async fn nothing_left(deployment: Deployment) -> Option<String> {
    let checked = tokio::spawn(async move { deployment.assert_nothing_left().await }).await;
    let panic = checked.err()?.into_panic();
    let text = panic.downcast_ref::<String>().cloned();
    Some(text.unwrap_or_else(|| "something is left".to_owned()))
}
