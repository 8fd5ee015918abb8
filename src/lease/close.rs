//! Closing a client: it admits no new calls and releases everything that it has. [`OpenCall`]: a
//! call that a close waits for.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::client::Client;
use super::keeper::Keeper;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::schedule::{Abandoned, Schedule, UnreleasedHolds};
use crate::error::{Error, Operation};
use crate::name::Name;

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
        self.local_queues.end_turns();
        self.joint_queues.end_turns();
        let waiting = pin!(async { timeout(limit, keeper.all_released()).await.is_ok() });
        let is_in_time = self.with_runtime(waiting).await.unwrap_or(false);
        if keeper.has_ended() {
            return Err(Error::RuntimeEnded {
                context: self.context_of_nodes(Operation::Close).with_verdict(false, true),
            });
        }
        match keeper.unreleased(is_in_time) {
            UnreleasedHolds { count: 0, .. } => Ok(()),
            UnreleasedHolds { count, names } => Err(Error::Unreleased { count, names, limit }),
        }
    }
}

impl Client {
    /// Drops this reference, and waits until what was dropped has been released, or was given up:
    /// the keeper of a client that others have gives nothing up.
    pub(crate) async fn into_settled(self: Arc<Client>) {
        let keeper = Arc::clone(&self.keeper);
        drop(self);
        keeper.until(|schedule| schedule.open_releases.is_empty() || keeper.has_ended()).await;
    }
}

impl Keeper {
    fn end_all(&self) {
        self.schedule().unreleased.get_or_insert_default();
        // Before the holds are taken: a lease that comes later finds it.
        let _again = self.closing.begun.set(());
        let leases: Vec<Lease> = {
            let mut schedule = self.schedule();
            let leases: Vec<_> = schedule.leases.iter().cloned().collect();
            for lease in &leases {
                // The lease is not trusted any more: only now may its release be sent. Under the
                // lock: another close, at the same time, must find one or the other.
                let entry = schedule.remove(lease, LeaseEnd::Closed).and_then(|kept| kept.entry);
                let is_final = lease.attempt().in_flight.is_indeterminate();
                let (attempt, nodes) = (Arc::clone(lease.attempt()), self.nodes.all_nodes());
                let has_lease = true;
                self.abandon_in(&mut schedule, Abandoned { attempt, has_lease, is_final, entry, nodes });
            }
            leases
        };
        self.notify.notify_one();
        let reports: Vec<_> = leases.iter().filter_map(Lease::announce).collect();
        reports.into_iter().for_each(|report| report());
    }

    /// Waits until no call is open and every pending release has succeeded or was abandoned.
    async fn all_released(&self) {
        // A call that ends has left what it had to the keeper before, under the schedule's lock.
        let is_quiet = |schedule: &Schedule| {
            schedule.open_releases.is_empty() && self.closing.open_calls.lock().is_empty()
        };
        self.until(|schedule| is_quiet(schedule) || self.has_ended()).await;
    }

    /// The releases that failed, and those that are pending unless all are done. A call that begins
    /// later has nothing to release: it drops a guard whose lease has ended.
    fn unreleased(&self, has_released_all: bool) -> UnreleasedHolds {
        let mut left = UnreleasedHolds::default();
        if !has_released_all {
            self.closing.open_calls.lock().iter().for_each(|(_, name)| left.add(name));
        }
        let schedule = self.schedule();
        if !has_released_all {
            schedule.open_releases.values().for_each(|name| left.add(name));
        }
        if let Some(failed) = &schedule.unreleased {
            failed.names.iter().for_each(|name| left.add(name));
            left.count += failed.count - failed.names.len();
        }
        left
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
        let place = keeper.closing.open_calls.lock().insert(name.clone());
        OpenCall { keeper: Arc::clone(keeper), place }
    }

    pub(super) fn keeper(&self) -> &Arc<Keeper> {
        &self.keeper
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let closing = &self.keeper.closing;
        let name = closing.open_calls.lock().try_remove(self.place);
        drop(name);
        if closing.has_begun() {
            self.keeper.settled.notify_waiters();
        }
    }
}
