//! [`InFlight`]: requests with an unknown effect. [`LoneRequest`]: one to the only node.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::Notify;

use super::failure::Failure;
use super::script::Reply;
use super::servers::SentFlag;

/// What is unknown of the requests of one attempt: whether all were answered, and none may run
/// again.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    unanswered: AtomicU32,
    is_unknown: AtomicBool,
    /// The latest request was withdrawn before it was written.
    is_withdrawn: AtomicBool,
    /// Notified when all requests were answered.
    all_answered: Notify,
}

impl InFlight {
    /// Whether the latest request to the only node was withdrawn before it was written: it has no
    /// effect, now or later.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.is_withdrawn.load(Ordering::SeqCst)
    }

    /// Records that a request leaves: until its reply arrives, its effect is unknown.
    pub(crate) fn sent(&self) {
        self.is_withdrawn.store(false, Ordering::SeqCst);
        self.unanswered.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the outcome.
    pub(super) fn record(&self, outcome: &Result<Reply, Failure>) {
        if Reply::unknown_effect(outcome).is_some() {
            self.mark_unknown();
        }
        self.answered();
    }

    /// Records that the request was answered.
    pub(crate) fn answered(&self) {
        if self.unanswered.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.all_answered.notify_waiters();
        }
    }

    /// Waits until all requests were answered, whatever the answers were.
    pub(crate) async fn all_answered(&self) {
        let notified = self.all_answered.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if self.unanswered.load(Ordering::SeqCst) > 0 {
            notified.await;
        }
    }

    /// Records that the effects are unknown, whatever the replies were: they must be undone.
    pub(crate) fn mark_unknown(&self) {
        self.is_unknown.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_indeterminate(&self) -> bool {
        self.is_unknown.load(Ordering::SeqCst) || self.unanswered.load(Ordering::SeqCst) > 0
    }
}

/// A request to the only node. Dropped before it is written, it has no effect.
pub(super) struct LoneRequest<'a> {
    in_flight: &'a InFlight,
    pub(super) sent_flag: SentFlag,
    is_answered: bool,
}

impl<'a> LoneRequest<'a> {
    /// Records that the request leaves.
    pub(super) fn new(in_flight: &'a InFlight) -> LoneRequest<'a> {
        in_flight.sent();
        LoneRequest { in_flight, sent_flag: SentFlag::default(), is_answered: false }
    }

    pub(super) fn record(mut self, outcome: &Result<Reply, Failure>) {
        self.is_answered = true;
        self.in_flight.record(outcome);
    }
}

impl Drop for LoneRequest<'_> {
    fn drop(&mut self) {
        if !self.is_answered && !self.sent_flag.is_set() {
            self.in_flight.is_withdrawn.store(true, Ordering::SeqCst);
            self.in_flight.answered();
        }
    }
}
