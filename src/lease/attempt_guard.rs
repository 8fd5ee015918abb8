//! [`AttemptGuard`]: the duty to undo an attempt, from before its first request on. [`Standing`]:
//! what there is to undo.

use std::mem;
use std::sync::Arc;

use super::attempt::{Attempt, QueueEntry};
use super::client::Client;
use super::lease::Lease;
use super::lock_request::LockRequest;
use super::schedule::Abandoned;
use crate::deployment::NodeSet;
use crate::error::{Context, Error, Operation};
use crate::wire::{Failure, Votes, WaitFor};

/// What the nodes may have of an attempt, and so what must be undone when its guard is dropped.
///
/// ```text
///            before_send           record              hold
///  ┌─────┐              ┌───────┐           ┌─────────┐        ┌──────┐
///  │ New │ ───────────► │ Asked │ ────────► │ Waiting │ ─────► │ Held │
///  └──┬──┘              └───┬───┘ ◄──────── └────┬────┘        └───┬──┘
///     │                     │     before_send    │                 │
///     │ undo: nothing       │ undo: release, and │ undo: release   │ undo: release
///     │                     │ refuse requests    │ if queued or    │ leave, leak: nothing
///     │                     │ that arrive later  │ unknown         │
///     ▼                     ▼                    ▼                 ▼
///  ┌──────────────────────────────────────────────────────────────────┐
///  │                               Left                               │
///  └──────────────────────────────────────────────────────────────────┘
/// ```
///
/// A request that was dropped before it was written has no effect: `Asked` is then undone as what
/// it was before, `New` or `Waiting`. A release also refuses what arrives later if the effect of an
/// earlier request is unknown.
enum Standing {
    /// No request was sent.
    New,
    /// A request was sent, and its replies are not recorded yet: it may be granted anything.
    Asked { is_first: bool },
    /// All replies are recorded. It is queued if its requests queue it.
    Waiting,
    /// It has a lease.
    Held { has_queued: bool },
    /// Nothing is left to release, or the hold is meant to stay.
    Left,
}

/// Makes sure, from before the first request, that everything an attempt is granted is released: by
/// its owner or, when this is dropped, by the keeper.
pub(super) struct AttemptGuard {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    /// How its requests queue it, if they do. `None` once it has left the queue.
    pub(super) entry: Option<QueueEntry>,
    /// The nodes that have granted it: all, or a majority.
    pub(super) granted: NodeSet,
    standing: Standing,
}

impl AttemptGuard {
    pub(super) fn new(request: &LockRequest, tokens: u32) -> AttemptGuard {
        let attempt = request.attempt().reserving(tokens);
        let (client, attempt) = (Arc::clone(&request.client), Arc::new(attempt));
        // A single server's grant may arrive as a message, of which no round knows.
        let is_alone = client.nodes.deployment.decides_alone();
        let granted = if is_alone { client.nodes.all_nodes() } else { NodeSet::default() };
        AttemptGuard { client, attempt, entry: None, granted, standing: Standing::New }
    }

    /// To be called before a request is sent: from then on it must be undone.
    pub(super) fn before_send(&mut self) {
        self.standing = Standing::Asked { is_first: matches!(self.standing, Standing::New) };
    }

    /// Records the replies to a request. If a majority has decided, the attempt has a lease, which
    /// is released on all nodes.
    pub(super) fn record(&mut self, votes: &Votes, has_decided: bool) {
        self.standing = Standing::Waiting;
        // A node that has not answered may still grant the lock, unnoticed.
        if !has_decided && votes.rest.is_some() {
            self.attempt.in_flight.mark_unknown();
        }
    }

    /// The attempt was granted, by all nodes or by a majority: from now on its lease is renewed.
    pub(super) fn hold(&mut self, lease: &Lease) {
        let (has_queued, is_unanimous) = (self.has_queued(), self.granted == self.client.nodes.all_nodes());
        // A granted attempt has left the queue; only a late delivery could queue it again.
        if is_unanimous && !self.attempt.in_flight.is_indeterminate() {
            self.entry = None;
        }
        self.attempt.note_token(lease.fencing_token());
        self.attempt.note_held();
        self.client.keeper.keep(lease, is_unanimous, self.entry.clone());
        if self.attempt.kind.has_owner {
            self.client.local_queues.announce_grant(&self.attempt.name, &self.attempt.owner());
        }
        self.standing = Standing::Held { has_queued };
    }

    /// Releases a grant that cannot be used: the attempt has ended.
    pub(super) fn abandon(&mut self) {
        self.attempt.in_flight.mark_unknown();
        self.undo();
    }

    /// Releases what some nodes granted and waits on. Returns false if the release may run later:
    /// it could revoke what the attempt is granted until then, so the attempt must not continue.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the keeper releases the grants.
    pub(super) async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        self.before_send();
        let (call, in_flight) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;
        self.standing = Standing::Waiting;
        !in_flight.is_indeterminate()
    }

    /// Nothing is left to release.
    pub(super) fn leave(&mut self) {
        self.expect_late_notifications();
        self.standing = Standing::Left;
    }

    /// Gives the duty to another guard.
    pub(super) fn hand_over(&mut self) -> AttemptGuard {
        let (client, attempt) = (Arc::clone(&self.client), Arc::clone(&self.attempt));
        let standing = mem::replace(&mut self.standing, Standing::Left);
        AttemptGuard { client, attempt, entry: self.entry.take(), granted: self.granted, standing }
    }

    /// The hold is meant to stay, until its TTL ends it.
    pub(super) fn leak(&mut self) {
        self.standing = Standing::Left;
        let nodes = self.client.nodes.all_nodes().without(self.granted);
        if nodes.is_empty() || !self.client.nodes.deployment.is_majority(self.granted) {
            return;
        }
        // It may still wait on the others: no release would follow what one of them grants it.
        if let Some(entry) = self.entry.take() {
            let (attempt, entry) = (Arc::clone(&self.attempt), Some(entry));
            let (has_lease, is_final) = (false, true);
            self.client.keeper.abandon(Abandoned { attempt, has_lease, is_final, entry, nodes });
        }
    }

    /// The operation, lock and server, for errors.
    pub(super) fn context(&self) -> Context {
        self.client.context(Operation::Acquire, &self.attempt.name)
    }

    /// The error of a request. An earlier request may have had an effect, even if this one had
    /// none.
    pub(super) fn error(&self, failure: Failure) -> Error {
        let failure = failure.with_effect_if(self.attempt.in_flight.is_indeterminate());
        self.client.error(failure, self.context())
    }

    /// Whether it was queued at some time.
    fn has_queued(&self) -> bool {
        match self.standing {
            Standing::New | Standing::Left => false,
            Standing::Asked { .. } | Standing::Waiting => self.entry.is_some(),
            Standing::Held { has_queued } => has_queued,
        }
    }

    /// Releases the lock at once if a server grants it to this attempt later. A server that was set
    /// back to an earlier state does that.
    fn expect_late_notifications(&self) {
        if self.has_queued() {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            self.client.wakeups.expect_late_notifications(attempt.id, move |node| {
                let (attempt, nodes) = (Arc::clone(&attempt), NodeSet::of([node]));
                let (has_lease, is_final, entry) = (false, false, None);
                keeper.abandon(Abandoned { attempt, has_lease, is_final, entry, nodes });
            });
        }
    }

    /// Has the keeper undo what the nodes may have of the attempt.
    fn undo(&mut self) {
        let is_unknown = self.attempt.in_flight.is_indeterminate();
        let is_withdrawn = self.attempt.in_flight.is_withdrawn();
        // What to release, if anything: `true` if requests that arrive later must be refused.
        let is_final = match self.standing {
            Standing::New | Standing::Left => return,
            Standing::Asked { is_first: true } if is_withdrawn => return,
            Standing::Asked { .. } if !is_withdrawn => Some(true),
            Standing::Asked { .. } | Standing::Waiting => {
                (self.entry.is_some() || is_unknown).then_some(is_unknown)
            }
            Standing::Held { .. } => Some(is_unknown),
        };
        let has_lease = matches!(self.standing, Standing::Held { .. });
        self.leave();
        if let Some(is_final) = is_final {
            let (attempt, entry) = (Arc::clone(&self.attempt), self.entry.take());
            let nodes = self.client.nodes.all_nodes();
            self.client.keeper.abandon(Abandoned { attempt, has_lease, is_final, entry, nodes });
        }
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.undo();
    }
}
