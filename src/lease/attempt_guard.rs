//! [`AttemptGuard`]: releases what an attempt was granted, whatever becomes of its caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::attempt::{Attempt, QueueEntry};
use super::client::Client;
use super::close::OpenCall;
use super::lease::{Lease, LeaseEnd};
use crate::wire::{HoldCount, NodeSet, Votes, WaitFor};

/// Makes sure, from before the first request, that everything an attempt is granted is released: by
/// its owner or, when this is dropped, by the keeper.
pub(super) struct AttemptGuard {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    pub(super) lease: Option<(Lease, HoldCount)>,
    /// How the attempt may be queued, if it may be.
    pub(super) entry: Option<QueueEntry>,
    /// The latest request is the first one that may queue it.
    may_queue_first: bool,
    /// It was queued at some time.
    has_queued: bool,
    /// A request was sent, and its replies are not recorded yet.
    pub(super) awaits_reply: bool,
    /// A request was sent at some time.
    pub(super) has_sent: bool,
    /// Nothing is left to release, or the hold is meant to stay.
    is_disarmed: AtomicBool,
    /// Set while the hold is released or converted. Dropped last, when the keeper has what is left
    /// to do.
    pub(super) call: Option<OpenCall>,
}

impl AttemptGuard {
    pub(super) fn new(client: &Arc<Client>, attempt: Attempt) -> AttemptGuard {
        AttemptGuard {
            client: Arc::clone(client),
            attempt: Arc::new(attempt),
            lease: None,
            entry: None,
            may_queue_first: false,
            has_queued: false,
            awaits_reply: false,
            has_sent: false,
            is_disarmed: AtomicBool::new(false),
            call: None,
        }
    }

    /// To be called before a request is sent: from then on it must be undone.
    pub(super) fn before_send(&mut self, entry: Option<&QueueEntry>) {
        (self.awaits_reply, self.has_sent) = (true, true);
        self.has_queued |= entry.is_some();
        self.may_queue_first = self.entry.is_none();
        if self.may_queue_first {
            self.entry = entry.cloned();
        }
    }

    /// Records the replies to a request. If they `decided`, the attempt has a lease, which is
    /// released on all nodes.
    pub(super) fn record(&mut self, votes: &Votes, decided: bool) {
        self.awaits_reply = false;
        // A node that has not answered may still grant the lock, unnoticed.
        if !decided && votes.rest.is_some() {
            self.attempt.in_flight.mark_unknown();
        }
    }

    /// Records when the attempt was queued first, on the clock of the only server.
    pub(super) fn note_queued(&self, time: u64) {
        if self.entry.is_some() && self.client.nodes.deployment.decides_alone() {
            self.attempt.note_queued(time);
        }
    }

    /// Releases a grant that is of no use.
    pub(super) fn abandon(self) {
        self.attempt.in_flight.mark_unknown();
    }

    /// Releases what some nodes granted and waits on. Returns false if the release may run later:
    /// it could revoke what the attempt is granted until then, so the attempt must not continue.
    ///
    /// # Cancel safety
    /// Dropped, the grants are still released.
    pub(super) async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        self.awaits_reply = true;
        let (call, in_flight) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;
        self.awaits_reply = false;
        !in_flight.is_indeterminate()
    }

    /// Forgets a request that was dropped before it was written: there is nothing to undo.
    pub(super) fn withdraw(&mut self) {
        if self.awaits_reply && self.attempt.in_flight.is_withdrawn() {
            self.awaits_reply = false;
            if self.may_queue_first {
                (self.entry, self.has_queued) = (None, false);
            }
        }
    }

    /// Releases the lock at once if a server grants it to this attempt later. A server that was set
    /// back to an earlier state does that.
    pub(super) fn expect_late_notifications(&self) {
        if self.has_queued {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            let for_good = self.client.nodes.deployment.may_resend;
            self.client.wakeups.expect_late_notifications(attempt.id, move |node| {
                keeper.abandon(Arc::clone(&attempt), for_good, None, NodeSet::of([node]));
            });
        }
    }

    pub(super) fn disarm(&self) {
        self.is_disarmed.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_disarmed(&self) -> bool {
        self.is_disarmed.load(Ordering::Relaxed)
    }

    /// Whether the server must forget the attempt and refuse requests of it that arrive later.
    pub(super) fn ends_for_good(&self) -> bool {
        self.awaits_reply
            || self.attempt.in_flight.is_indeterminate()
            || self.client.nodes.deployment.may_resend
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.withdraw();
        if self.lease.is_some() && self.call.is_none() {
            // Between the two calls of the keeper below, a close must not find that everything is
            // released.
            self.call = Some(OpenCall::new(&self.client.keeper, &self.attempt.name));
        }
        let end = self.lease.as_ref().map(|(lease, _)| self.client.keeper.forget(lease, LeaseEnd::Released));
        // A cluster's client may send a request again unseen; it may be granted after "busy" was
        // answered.
        let resent = self.has_sent && self.client.nodes.deployment.may_resend;
        let may_have =
            self.lease.is_some() || self.awaits_reply || resent || self.attempt.in_flight.is_indeterminate();
        // If the client was closed, the keeper already has it.
        let nothing_to_undo = end == Some(LeaseEnd::Closed) || !may_have && self.entry.is_none();
        if !self.is_disarmed() {
            self.expect_late_notifications();
        }
        if !self.is_disarmed() && !nothing_to_undo {
            let for_good = self.ends_for_good();
            let all_nodes = self.client.nodes.all_nodes();
            self.client.keeper.abandon(Arc::clone(&self.attempt), for_good, self.entry.take(), all_nodes);
        }
    }
}
