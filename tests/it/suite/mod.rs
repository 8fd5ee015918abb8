//! The behaviour that every lock has, in every kind, topology and way to be woken.
//!
//! A behaviour is written once, as a function of a [`Setup`]; `matrix!` makes a test of it for each
//! cell. A test is named `suite::<kind>_<topology>_<wake>_<protocol>::<behaviour>`.

mod downgrades;
mod election;
mod exclusion;
mod fairness;
mod faults;
mod late_readers;
pub mod local_turns;
mod matrix;
mod minimum_hold;
mod nesting;
mod readers;
mod release;
mod renewing;
mod run;
mod rw_modes;
mod several;
pub mod shared_reads;
mod tickets;
mod unknown_outcomes;
mod upgrades;
mod waiting;

use std::pin::Pin;
use std::time::Duration;

use redlatch::RwLock;
use tokio::task::JoinHandle;

use crate::support::{Cell, Setup};
use matrix::matrix;

type Behaviour = fn(Setup) -> Pin<Box<dyn Future<Output = ()>>>;

/// Runs a behaviour in a cell.
fn run(cell: Cell, behaviour: Behaviour) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { behaviour(Setup::start(cell).await).await });
}

/// Starts a task that has to wait for the read-write lock, and waits until it is queued on all
/// nodes. The inspection first is answered by all nodes, so this client's earlier requests have
/// arrived there.
async fn queued<T: Send + 'static>(
    setup: &Setup,
    lock: &RwLock,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    lock.inspect().await.unwrap();
    setup.queued(lock.name().key(), work).await
}

/// TTLs of nested holds, in seconds: so far apart that a slow test takes none for another one.
const TTLS: [u64; 3] = [30, 60, 90];

/// The TTL of which this time is left.
fn ttl_of(remaining: Duration) -> u64 {
    let ttl = TTLS.into_iter().find(|ttl| remaining <= Duration::from_secs(*ttl));
    ttl.unwrap_or_else(|| panic!("{remaining:?} is longer than all TTLs"))
}

// Every behaviour runs in every topology, and for every kind on one server. The core of them runs
// in every pair of kind and topology. Protocols and wake-ups are independent of most behaviours, so
// they are spread over the cells.
//
// The rest of the matrix takes more than an hour.
matrix! { all;
    mutex_standalone_push_resp2 = Standalone(Mutex, Push, Resp2);
    reentrant_standalone_poll_resp3 = Standalone(Reentrant, Poll, Resp3);
    read_standalone_push_resp3 = Standalone(Read, Push, Resp3);
    write_standalone_push_resp2 = Standalone(Write, Push, Resp2);
}

matrix! { wide;
    mutex_cluster_push_resp2 = Cluster(Mutex, Push, Resp2);
    reentrant_sentinel_push_resp3 = Sentinel(Reentrant, Push, Resp3);
    write_quorum3_push_resp2 = Quorum3(Write, Push, Resp2);
    mutex_quorum5_push_resp3 = Quorum5(Mutex, Push, Resp3);
}

matrix! { core;
    mutex_standalone_poll_resp3 = Standalone(Mutex, Poll, Resp3);
    reentrant_standalone_push_resp2 = Standalone(Reentrant, Push, Resp2);
    read_standalone_poll_resp2 = Standalone(Read, Poll, Resp2);
    write_standalone_poll_resp3 = Standalone(Write, Poll, Resp3);
    reentrant_cluster_poll_resp3 = Cluster(Reentrant, Poll, Resp3);
    read_cluster_push_resp3 = Cluster(Read, Push, Resp3);
    write_cluster_push_resp2 = Cluster(Write, Push, Resp2);
    mutex_sentinel_poll_resp2 = Sentinel(Mutex, Poll, Resp2);
    read_sentinel_push_resp2 = Sentinel(Read, Push, Resp2);
    write_sentinel_push_resp3 = Sentinel(Write, Push, Resp3);
    mutex_quorum3_push_resp3 = Quorum3(Mutex, Push, Resp3);
    reentrant_quorum3_poll_resp2 = Quorum3(Reentrant, Poll, Resp2);
    read_quorum3_push_resp2 = Quorum3(Read, Push, Resp2);
    reentrant_quorum5_push_resp2 = Quorum5(Reentrant, Push, Resp2);
    read_quorum5_poll_resp3 = Quorum5(Read, Poll, Resp3);
    write_quorum5_push_resp3 = Quorum5(Write, Push, Resp3);
}

matrix! { full;
    mutex_standalone_poll_resp2 = Standalone(Mutex, Poll, Resp2);
    reentrant_standalone_poll_resp2 = Standalone(Reentrant, Poll, Resp2);
    read_standalone_push_resp2 = Standalone(Read, Push, Resp2);
    write_standalone_poll_resp2 = Standalone(Write, Poll, Resp2);
    mutex_standalone_push_resp3 = Standalone(Mutex, Push, Resp3);
    reentrant_standalone_push_resp3 = Standalone(Reentrant, Push, Resp3);
    write_standalone_push_resp3 = Standalone(Write, Push, Resp3);
    read_standalone_poll_resp3 = Standalone(Read, Poll, Resp3);
    mutex_cluster_push_resp3 = Cluster(Mutex, Push, Resp3);
    mutex_cluster_poll_resp2 = Cluster(Mutex, Poll, Resp2);
    mutex_cluster_poll_resp3 = Cluster(Mutex, Poll, Resp3);
    reentrant_cluster_push_resp2 = Cluster(Reentrant, Push, Resp2);
    reentrant_cluster_push_resp3 = Cluster(Reentrant, Push, Resp3);
    reentrant_cluster_poll_resp2 = Cluster(Reentrant, Poll, Resp2);
    read_cluster_push_resp2 = Cluster(Read, Push, Resp2);
    read_cluster_poll_resp2 = Cluster(Read, Poll, Resp2);
    read_cluster_poll_resp3 = Cluster(Read, Poll, Resp3);
    write_cluster_push_resp3 = Cluster(Write, Push, Resp3);
    write_cluster_poll_resp2 = Cluster(Write, Poll, Resp2);
    write_cluster_poll_resp3 = Cluster(Write, Poll, Resp3);
    mutex_sentinel_push_resp2 = Sentinel(Mutex, Push, Resp2);
    mutex_sentinel_push_resp3 = Sentinel(Mutex, Push, Resp3);
    mutex_sentinel_poll_resp3 = Sentinel(Mutex, Poll, Resp3);
    reentrant_sentinel_push_resp2 = Sentinel(Reentrant, Push, Resp2);
    reentrant_sentinel_poll_resp2 = Sentinel(Reentrant, Poll, Resp2);
    reentrant_sentinel_poll_resp3 = Sentinel(Reentrant, Poll, Resp3);
    read_sentinel_push_resp3 = Sentinel(Read, Push, Resp3);
    read_sentinel_poll_resp2 = Sentinel(Read, Poll, Resp2);
    read_sentinel_poll_resp3 = Sentinel(Read, Poll, Resp3);
    write_sentinel_push_resp2 = Sentinel(Write, Push, Resp2);
    write_sentinel_poll_resp2 = Sentinel(Write, Poll, Resp2);
    write_sentinel_poll_resp3 = Sentinel(Write, Poll, Resp3);
    mutex_quorum3_push_resp2 = Quorum3(Mutex, Push, Resp2);
    mutex_quorum3_poll_resp2 = Quorum3(Mutex, Poll, Resp2);
    mutex_quorum3_poll_resp3 = Quorum3(Mutex, Poll, Resp3);
    reentrant_quorum3_push_resp2 = Quorum3(Reentrant, Push, Resp2);
    reentrant_quorum3_push_resp3 = Quorum3(Reentrant, Push, Resp3);
    reentrant_quorum3_poll_resp3 = Quorum3(Reentrant, Poll, Resp3);
    read_quorum3_push_resp3 = Quorum3(Read, Push, Resp3);
    read_quorum3_poll_resp2 = Quorum3(Read, Poll, Resp2);
    read_quorum3_poll_resp3 = Quorum3(Read, Poll, Resp3);
    write_quorum3_push_resp3 = Quorum3(Write, Push, Resp3);
    write_quorum3_poll_resp2 = Quorum3(Write, Poll, Resp2);
    write_quorum3_poll_resp3 = Quorum3(Write, Poll, Resp3);
    mutex_quorum5_push_resp2 = Quorum5(Mutex, Push, Resp2);
    mutex_quorum5_poll_resp2 = Quorum5(Mutex, Poll, Resp2);
    mutex_quorum5_poll_resp3 = Quorum5(Mutex, Poll, Resp3);
    reentrant_quorum5_push_resp3 = Quorum5(Reentrant, Push, Resp3);
    reentrant_quorum5_poll_resp2 = Quorum5(Reentrant, Poll, Resp2);
    reentrant_quorum5_poll_resp3 = Quorum5(Reentrant, Poll, Resp3);
    read_quorum5_push_resp2 = Quorum5(Read, Push, Resp2);
    read_quorum5_push_resp3 = Quorum5(Read, Push, Resp3);
    read_quorum5_poll_resp2 = Quorum5(Read, Poll, Resp2);
    write_quorum5_push_resp2 = Quorum5(Write, Push, Resp2);
    write_quorum5_poll_resp2 = Quorum5(Write, Poll, Resp2);
    write_quorum5_poll_resp3 = Quorum5(Write, Poll, Resp3);
}
