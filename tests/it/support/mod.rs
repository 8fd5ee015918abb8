//! Private servers in every topology, worker processes, and proxies that break connections.

mod address_rewriter;
mod binary;
mod cluster;
mod deployment;
pub mod events;
mod example;
pub mod failover;
mod idle;
mod latency;
mod lock_state;
mod locks;
mod loss;
mod open;
mod oracle;
mod port;
mod process;
mod proxy;
mod random;
pub mod raw;
mod sentinel;
mod server;
mod setup;
pub mod stopwatch;
mod text_replies;
pub mod tls;

#[allow(unused_imports, reason = "the fault checker chooses the server's binary itself")]
pub use binary::binary;
pub use deployment::{Deployment, Topology, servers};
#[allow(unused_imports, reason = "the fault checker runs no example")]
pub use example::example;
#[allow(unused_imports, reason = "the fault checker has an observer of its own")]
pub use latency::Latency;
pub use lock_state::{Hold, LockState, Oracle};
pub use locks::{AnyGuard, AnyLock, KINDS, Kind};
#[allow(unused_imports, reason = "the fault checker connects to other addresses")]
pub use open::open_at;
pub use port::free_port;
pub use process::{Worker, role};
pub use proxy::Proxy;
pub use random::Random;
pub use sentinel::MASTER;
#[allow(unused_imports, reason = "used by the fault checker: its servers persist all data")]
pub use server::{DURABLE, Environment};
pub use server::{Server, connect, count_waiters};
pub use setup::{Cell, NEVER, Protocol, Setup, Wake, idles, notified_only, patient, ttl};
pub use stopwatch::Stopwatch;

use std::future::Future;
use std::time::{Duration, Instant};

use redlatch::{Lease, Locks};
use tokio::task::JoinHandle;

/// Longer than any step of a test takes, even on a busy machine.
pub const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Polls a condition until it is true, and panics if it is not within [`LONGEST_WAIT`].
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    let start = Instant::now();
    while !ask().await {
        assert!(start.elapsed() < LONGEST_WAIT, "not within {LONGEST_WAIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Starts a task that has to wait for a lock, and returns once each of the counted queues is longer
/// than before.
pub async fn queued<T: Send + 'static>(
    count: impl AsyncFn() -> Vec<u64>,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let before = count().await;
    let task = tokio::spawn(work);
    let more = || async { count().await.iter().zip(&before).all(|(now, before)| now > before) };
    eventually("the waiter queues", more).await;
    task
}

/// Waits until renewals have extended a lease by this time, and panics if it is lost meanwhile.
pub async fn renewed_by(lease: &Lease, span: Duration) {
    let until = lease.valid_until() + span;
    eventually("the lease is renewed", || async {
        assert!(!lease.is_lost(), "not renewed in time");
        lease.valid_until() >= until
    })
    .await;
}

/// Awaits a future, and panics if it takes longer than [`LONGEST_WAIT`].
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONGEST_WAIT, work)
        .await
        .unwrap_or_else(|_| panic!("not within {LONGEST_WAIT:?}: {what}"))
}

/// Makes the client wait for its own lock until it is notified, so that it subscribes at one of the
/// servers.
pub async fn subscribe(locks: &Locks, servers: &[&Server]) {
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    eventually("the client subscribes", || async {
        for server in servers {
            if !server.subscribers().await.is_empty() {
                return true;
            }
        }
        false
    })
    .await;
    guard.release().await.unwrap();
    soon("granted", waiting).await.unwrap().unwrap().release().await.unwrap();
}
