//! [`LockRequest`]: what one call asks for.

use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::client::Client;
use super::kind::{Kind, Queue};
use super::owned_lease::AttemptGuard;
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::name::Name;
use crate::options::Options;
use crate::wire::{Call, Failure, Vote, WaitFor};

/// How often a waiter polls that cannot be notified.
const UNNOTIFIED_POLL: Duration = Duration::from_millis(100);

/// The lock, its kind, the owner and the options of one call. Without an owner, each attempt is its
/// own owner.
pub(crate) struct LockRequest {
    pub(crate) client: Arc<Client>,
    pub(crate) kind: &'static Kind,
    pub(crate) name: Name,
    pub(crate) options: Arc<Options>,
    pub(crate) owner: Option<String>,
}

impl LockRequest {
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt::new(
            &self.client,
            self.kind,
            self.name.clone(),
            Arc::clone(&self.options),
            self.owner.clone(),
        )
    }

    pub(super) fn begin_attempt(&self) -> AttemptGuard {
        AttemptGuard::new(&self.client, self.attempt())
    }

    /// Since when its nodes have failed and how, as far as that matters to this request.
    pub(super) fn outage(&self) -> Option<(Moment, Failure)> {
        self.client.nodes.outage(self.options.wants_replicas().map_or(0, |(count, _)| count))
    }

    /// The longest pause between two polls. Clients differ by up to a quarter, so that they do not
    /// poll at the same moment.
    pub(super) fn poll(&self, attempt: &Attempt, is_notified: bool) -> Duration {
        // A waiter that sends no request for as long as its claim counts as dead.
        let half = attempt.claim() / 2;
        let cap = if is_notified { half } else { UNNOTIFIED_POLL.min(half) }.min(self.options.poll_cap);
        cap.mul_f64(1.0 - f64::from(attempt.id.as_bytes()[0]) / 1024.0)
    }

    pub(super) fn queues_inside(&self) -> bool {
        match self.kind.queue {
            Queue::Inside => true,
            Queue::InsideUnlessOwned => self.owner.is_none(),
            Queue::InRedis => false,
        }
    }

    /// Whether it enters a lock that its owner holds.
    pub(super) fn may_enter(&self) -> bool {
        self.kind.may_reenter && self.owner.is_some()
    }

    /// The owner that holds the lock, if a majority of the nodes name it. For kinds with one owner
    /// at a time.
    pub(super) async fn holder(&self) -> Option<String> {
        let nodes = &self.client.nodes;
        let call = Call::new(&self.kind.inspect, &[self.name.key(), self.name.fence(), self.name.waiters()]);
        let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::All).await;
        let named = |(_, outcome): &Vote| -> Option<String> {
            // Status, last token, waiters, time; then owner, count and milliseconds left.
            let texts = outcome.as_ref().ok()?.texts().ok()?;
            texts.into_iter().nth(4)
        };
        let owners: Vec<String> = votes.received.iter().filter_map(named).collect();
        let naming = |owner: &&String| owners.iter().filter(|other| other == owner).count();
        owners.iter().find(|owner| naming(owner) >= nodes.deployment.majority()).cloned()
    }

    /// The operation, lock and server, for errors.
    pub(super) fn context(&self) -> Context {
        self.client.context(Operation::Acquire, &self.name)
    }

    /// The error for the caller.
    pub(super) fn error(&self, failure: Failure) -> Error {
        self.client.error(failure, self.context())
    }

    pub(super) fn lost(&self) -> Error {
        Error::Lost { context: self.context() }
    }
}
