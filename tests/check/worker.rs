//! A worker process: it takes locks, works on what they protect, and gives them back, in every way that there is.

use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Error, Locks, Options, Renewal, RestartGuard};
use tokio::time::sleep;

use crate::history::Recorder;
use crate::plan::{Duty, NODE_TIMEOUT, POLL_CAP, TTL, topology_named};
use crate::resource::Resource;
use crate::support::{Protocol, Random, Wake, open_at};
use crate::workload::visit;

/// How many tasks of a process want locks at a time.
const TASKS: u64 = 8;

/// What the tasks of a worker share.
pub struct Worker {
    pub locks: Locks,
    /// Whose leases are not renewed.
    pub unrenewed: Locks,
    pub resource: Resource,
    pub recorder: Recorder,
    /// One of so many holds lasts longer than a lease.
    pub linger: u64,
    number: u32,
    holds: AtomicU64,
    ending: AtomicBool,
}

impl Worker {
    /// The number of another hold, which nobody else in the run has.
    pub fn next_hold(&self) -> u64 {
        u64::from(self.number) << 32 | self.holds.fetch_add(1, Ordering::Relaxed)
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }
}

pub fn options(guarded: bool) -> Options {
    let options = Options::new().ttl(TTL).poll_cap(POLL_CAP).node_timeout(NODE_TIMEOUT);
    if guarded { options.restart_guard(RestartGuard::On) } else { options }
}

pub fn main(duty: &str) {
    let duty: Duty = serde_json::from_str(duty).unwrap();
    // A task that panics would only be missed at the end, if its worker is not killed before.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
    // One thread for all tasks: it can be blocked as a whole.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let worker = Arc::new(open(duty.clone()).await);
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let worker = Arc::clone(&worker);
                let mut random = Random::seeded(duty.seed ^ (u64::from(duty.number) << 16) ^ (task << 8));
                tokio::spawn(async move {
                    while !worker.is_ending() {
                        visit(&worker, &mut random).await;
                    }
                })
            })
            .collect();
        obey(&worker).await;
        for task in tasks {
            task.await.unwrap();
        }
        worker.locks.settled().await;
    });
}

/// Opens a client, however long that takes: it may begin in the middle of a fault.
async fn open(duty: Duty) -> Worker {
    let topology = topology_named(&duty.topology).unwrap();
    let wake = if duty.pushed { Wake::Push } else { Wake::Poll };
    let protocol = if duty.number.is_multiple_of(2) { Protocol::Resp3 } else { Protocol::Resp2 };
    let locks = loop {
        let options = options(topology.nodes() > 1);
        match open_at(topology, &duty.host, &duty.ports, protocol, wake, options).await {
            Ok(locks) => break locks,
            Err(Error::Redis { .. } | Error::NoQuorum { .. }) => sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("{error}"),
        }
    };
    Worker {
        unrenewed: locks.with_options(Options::new().renewal(Renewal::Never)).unwrap(),
        locks,
        resource: Resource::open(&duty.resource).await,
        recorder: Recorder::new(&duty.history),
        linger: duty.linger,
        number: duty.number,
        holds: AtomicU64::new(0),
        ending: AtomicBool::new(false),
    }
}

/// Does what the lines from the one who started it say, until the last.
async fn obey(worker: &Arc<Worker>) {
    let (told, mut lines) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if told.blocking_send(line).is_err() {
                return;
            }
        }
        std::process::exit(1); // nobody is there to be told what happens
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
