//! Closing a client: it admits no new calls and releases everything that it has.

use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::client::Client;
use super::keeper::Keeper;
use super::lease::LeaseEnd;
use super::lock_request::LockRequest;
use crate::error::{Error, MAX_NAMES, Operation};
use crate::name::Name;

/// Whether a client is being closed, and the calls that may yet acquire or release something.
#[derive(Default)]
pub(super) struct Closing {
    begun: AtomicBool,
    notify: Notify,
    open_calls: Mutex<Slab<Name>>,
}

impl Closing {
    fn open_calls(&self) -> MutexGuard<'_, Slab<Name>> {
        self.open_calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::SeqCst)
    }

    /// Waits until the client is being closed.
    async fn wait_until_begun(&self) {
        let notify = self.notify.notified();
        tokio::pin!(notify);
        notify.as_mut().enable();
        if !self.has_begun() {
            notify.await;
        }
    }
}

/// A call that may acquire or release something until this is dropped. What it leaves to the keeper
/// must be there by then: closing waits for both, and a gap between them would hide a hold.
pub(super) struct OpenCall {
    keeper: Arc<Keeper>,
    place: usize,
}

impl OpenCall {
    pub(super) fn new(keeper: &Arc<Keeper>, name: &Name) -> OpenCall {
        let place = keeper.closing.open_calls().insert(name.clone());
        OpenCall { keeper: Arc::clone(keeper), place }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let closing = &self.keeper.closing;
        let name = closing.open_calls().try_remove(self.place);
        drop(name);
        if closing.has_begun() {
            self.keeper.settled.notify_waiters();
        }
    }
}

/// What a close could not release.
#[derive(Default)]
pub(super) struct Unreleased {
    pub(super) count: usize,
    names: Vec<Name>,
}

impl Unreleased {
    pub(super) fn add(&mut self, name: &Name) {
        self.count += 1;
        if self.names.len() < MAX_NAMES && !self.names.contains(name) {
            self.names.push(name.clone());
        }
    }
}

/// Runs a call that acquires. When the client is closed, the call is dropped, as its caller may
/// drop it at any time: that releases what it was granted and leaves the queue.
///
/// The caller has an [`OpenCall`], from before this checks whether the client is closed. `close`
/// works in the reverse order, so one of the two notices the other. An async function stores an
/// argument twice, so the call, which is large, is borrowed; it is dropped before its `OpenCall`.
pub(super) async fn unless_closed<T>(
    request: &LockRequest,
    mut call: Pin<&mut impl Future<Output = Result<T, Error>>>,
) -> Result<T, Error> {
    let keeper = &request.client.keeper;
    let outcome = tokio::select! {
        biased;
        () = keeper.closing.wait_until_begun() => None,
        outcome = &mut call => Some(outcome),
    };
    match outcome {
        // A lease that was granted after `close` took all leases is dropped here.
        Some(outcome) if !keeper.closing.has_begun() => outcome,
        _ => Err(Error::Closed { context: request.context() }),
    }
}

impl Client {
    /// Ends all leases and all calls that wait for a lock, and waits for at most `limit` until the
    /// servers have released them.
    ///
    /// # Cancel safety
    /// All leases have ended once this was polled; dropped, the releases continue in the
    /// background.
    pub(crate) async fn close(&self, limit: Duration) -> Result<(), Error> {
        let keeper = &self.keeper;
        keeper.end_all();
        let in_time = timeout(limit, keeper.all_released()).await.is_ok();
        if keeper.has_ended() {
            return Err(Error::RuntimeEnded {
                context: self.context_of_nodes(Operation::Close).judged(false, true),
            });
        }
        match keeper.unreleased(in_time) {
            Unreleased { count: 0, .. } => Ok(()),
            Unreleased { count, names } => Err(Error::Unreleased { count, names, limit }),
        }
    }
}

impl Keeper {
    fn end_all(&self) {
        let held = {
            let mut schedule = self.schedule();
            self.closing.begun.store(true, Ordering::SeqCst);
            schedule.unreleased.get_or_insert_default();
            let held = mem::take(&mut schedule.held);
            for (lease, _) in held.values() {
                schedule.remove(lease, LeaseEnd::Closed);
            }
            held
        };
        self.closing.notify.notify_waiters();
        let mut reports = Vec::new();
        for (lease, entry) in held.into_values() {
            // The lease is not trusted any more: only now may its release be sent.
            reports.extend(lease.announce());
            let attempt = lease.attempt();
            let for_good = attempt.in_flight.is_indeterminate() || self.nodes.deployment.may_resend;
            self.abandon(Arc::clone(attempt), for_good, entry, self.nodes.all_nodes());
        }
        reports.into_iter().for_each(|report| report());
    }

    /// Waits until no call is open and every pending release has succeeded or was abandoned.
    async fn all_released(&self) {
        loop {
            let notify = self.settled.notified();
            tokio::pin!(notify);
            notify.as_mut().enable();
            // In this order: a call that ends has left what it had to the keeper before.
            let is_quiet = self.closing.open_calls().is_empty() && self.schedule().awaited.is_empty();
            if is_quiet || self.has_ended() {
                return;
            }
            notify.await;
        }
    }

    /// The releases that failed, and those that are pending unless all are done. A call that begins
    /// later has nothing to release: it drops a guard whose lease has ended.
    fn unreleased(&self, all_released: bool) -> Unreleased {
        let mut left = Unreleased::default();
        if !all_released {
            self.closing.open_calls().iter().for_each(|(_, name)| left.add(name));
        }
        let schedule = self.schedule();
        if !all_released {
            schedule.awaited.values().for_each(|name| left.add(name));
        }
        if let Some(failed) = &schedule.unreleased {
            failed.names.iter().for_each(|name| left.add(name));
            left.count += failed.count - failed.names.len();
        }
        left
    }
}
