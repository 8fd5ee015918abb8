//! Read-write locks on one server: what its scripts do and cost. Who may enter beside whom, and when, is in the suite.

mod crowds;
mod doubts;
mod downgrades;
mod ends;

use std::future::Future;

use redlatch::{Options, RwLock};
use tokio::task::JoinHandle;

use crate::support::{NEVER, Oracle, Server, told};

/// The places of readers are less by this.
const READ_LANE: i64 = 1 << 52;

/// The lock through a client of its own, as another process would have it.
async fn client(server: &Server, options: Options) -> RwLock {
    server.locks_with(options).await.rwlock("rw").unwrap()
}

/// Starts something that has to wait, and waits until it is queued.
async fn queued<T: Send + 'static>(
    server: &Server,
    lock: &RwLock,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let waiters = async || vec![server.lock_state(lock.name()).await.waiters()];
    crate::support::queued(waiters, work).await
}
