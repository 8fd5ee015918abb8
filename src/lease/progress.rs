//! [`Progress`]: how far a call has come that waits for a lock.

use std::sync::Arc;
use std::time::Duration;

use super::lock_request::LockRequest;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::traces::WaitSpan;
use crate::wire::{Failure, InFlight};

/// What is known of a wait, also after it was dropped.
#[derive(Default)]
pub(crate) struct Progress {
    /// Its latest request found the lock in use.
    pub(super) is_busy: bool,
    /// Set while the grant waits for replicas.
    pub(super) replica_failure: Option<Failure>,
    /// What caused the latest request.
    pub(super) woken: WakeReason,
    /// The requests of the latest attempt.
    pub(super) in_flight: Option<Arc<InFlight>>,
    /// Begun once the lock is busy.
    pub(super) wait: WaitSpan,
}

impl Progress {
    /// The error of a wait that was dropped. What it is granted is released.
    ///
    /// If the server failed, or its replicas did, the lock was free as far as is known, unless this
    /// call has found it in use. Most requests that found an outage were those of other tasks;
    /// whether this call sent one is known now.
    pub(super) fn out_of_time(&self, request: &LockRequest, limit: Duration) -> Error {
        let has_sent = self.in_flight.as_ref().is_some_and(|sent| sent.is_indeterminate());
        let may_have_run = self.replica_failure.is_some() || has_sent;
        let found = || if self.is_busy { request.silence() } else { request.outage() };
        let outage = || found().map(|(_, failure)| failure.of_other_request());
        match self.replica_failure.clone().or_else(outage) {
            Some(failure) => request.error(failure.with_effect_if(may_have_run)),
            None => request.timed_out(limit, self.wait.has_begun()),
        }
    }
}
