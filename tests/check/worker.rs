//! A worker process: it acquires locks, uses the resources that they protect, and releases the
//! locks, in every way that the API has.

use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Error, Locks, Options, Renewal, RestartGuard};
use tokio::time::sleep;

use crate::history::Recorder;
use crate::plan::{LOCAL_TURN, NODE_TIMEOUT, POLL_CAP, TTL, WorkerSettings, topology_named};
use crate::resource::Resource;
use crate::support::{Protocol, Random, Wake, open_at};
use crate::workload::use_lock;

/// The number of tasks in a process.
const TASKS: u64 = 8;

/// The state that the tasks of a worker share.
pub struct Worker {
    pub locks: Locks,
    /// The same client, without renewals.
    pub unrenewed: Locks,
    pub resource: Resource,
    pub recorder: Recorder,
    /// One of this many holds lasts longer than a lease.
    pub linger: u64,
    /// One of this many requests is for several locks.
    pub sets: u64,
    number: u32,
    holds: AtomicU64,
    ending: AtomicBool,
}

impl Worker {
    /// Returns a number for another hold, unique in the run.
    pub fn next_hold(&self) -> u64 {
        u64::from(self.number) << 32 | self.holds.fetch_add(1, Ordering::Relaxed)
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }
}

pub fn options(is_guarded: bool) -> Options {
    let options = Options::new().ttl(TTL).poll_cap(POLL_CAP).node_timeout(NODE_TIMEOUT);
    let options = options.local_turn(LOCAL_TURN);
    if is_guarded { options.restart_guard(RestartGuard::On) } else { options }
}

pub fn main(settings: &str) {
    let settings: WorkerSettings = serde_json::from_str(settings).unwrap();
    // Abort at once. Otherwise the panic of a task would show only at the end of the run, or never
    // if a fault kills the worker before.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
    // One thread for all tasks: it can be blocked as a whole.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let worker = Arc::new(open(settings.clone()).await);
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let worker = Arc::clone(&worker);
                let seed = settings.seed ^ (u64::from(settings.number) << 16) ^ (task << 8);
                let mut random = Random::seeded(seed);
                tokio::spawn(async move {
                    while !worker.is_ending() {
                        use_lock(&worker, &mut random).await;
                    }
                })
            })
            .collect();
        run_commands(&worker).await;
        for task in tasks {
            task.await.unwrap();
        }
        worker.locks.settled().await;
    });
}

/// Opens a client. It retries without limit: the process may have started in the middle of a fault.
async fn open(settings: WorkerSettings) -> Worker {
    let topology = topology_named(&settings.topology).unwrap();
    let wake = if settings.is_notified { Wake::Push } else { Wake::Poll };
    let protocol = if settings.number.is_multiple_of(2) { Protocol::Resp3 } else { Protocol::Resp2 };
    let locks = loop {
        let options = options(topology.nodes() > 1);
        match open_at(topology, &settings.host, &settings.ports, protocol, wake, options).await {
            Ok(locks) => break locks,
            Err(Error::Redis { .. } | Error::NoQuorum { .. }) => sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("{error}"),
        }
    };
    Worker {
        unrenewed: locks.with_options(Options::new().renewal(Renewal::Never)).unwrap(),
        locks,
        resource: Resource::open(&settings.resource).await,
        recorder: Recorder::new(&settings.history),
        linger: settings.linger,
        sets: settings.sets,
        number: settings.number,
        holds: AtomicU64::new(0),
        ending: AtomicBool::new(false),
    }
}

/// Runs the commands that the checker sends, a line each, up to `end`.
async fn run_commands(worker: &Arc<Worker>) {
    let (sender, mut lines) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
        std::process::exit(1); // The checker has ended.
    });
    while let Some(line) = lines.recv().await {
        match line.split_once(' ') {
            Some(("block", millis)) => {
                let span = Duration::from_millis(millis.parse().unwrap());
                tokio::spawn(async move { std::thread::sleep(span) });
            }
            _ => {
                worker.ending.store(true, Ordering::Relaxed);
                return;
            }
        }
    }
}
