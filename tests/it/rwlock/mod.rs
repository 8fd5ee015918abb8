//! Read-write locks on one server: the behaviour and the cost of the scripts. The suite tests which
//! holds exclude each other.

mod batches;
mod expiry;
mod many_readers;
mod shared_polls;
mod tokens;

use std::future::Future;
use std::time::Duration;

use redlatch::{Options, RwLock};
use tokio::task::JoinHandle;

use crate::support::{NEVER, Oracle, Server, notified_only};

/// The scores of waiting readers are smaller by this.
const READ_LANE: i64 = 1 << 52;

/// The lock through a new client, as another process would have it. Each hold is one on the server.
async fn client(server: &Server, options: Options) -> RwLock {
    server.locks_with(options.local_turn(Duration::ZERO)).await.rwlock("rw").unwrap()
}

/// Starts a task that has to wait for the lock, and returns once it is queued.
async fn queued<T: Send + 'static>(
    server: &Server,
    lock: &RwLock,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let waiters = async || vec![server.lock_state(lock.name()).await.waiters()];
    crate::support::queued(waiters, work).await
}
