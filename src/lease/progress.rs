//! [`Progress`]: how far a call has come that waits for a lock.

use std::sync::Arc;
use std::time::Duration;

use super::lock_request::LockRequest;
use crate::clock::Moment;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::traces::WaitSpan;
use crate::wire::{Failure, InFlight};

/// What a call has found last.
#[derive(Default)]
pub(super) enum Found {
    #[default]
    Nothing,
    /// The lock was in use, or another task of this client was at the front.
    Busy,
    /// Its request failed.
    Failed(Failure),
}

/// What is known of a wait, also after it was dropped.
#[derive(Default)]
pub(crate) struct Progress {
    pub(super) found: Found,
    /// What caused the latest request.
    pub(super) woken: WakeReason,
    /// The requests of the latest attempt.
    pub(super) in_flight: Option<Arc<InFlight>>,
    /// Begun once the lock is busy.
    pub(super) wait: WaitSpan,
    /// When the call began, if it has an `outage_limit`.
    pub(super) begun: Option<Moment>,
}

impl Progress {
    /// The error of a wait that was dropped. What it is granted is released.
    ///
    /// If the server failed, or its replicas did, the lock was free as far as is known, unless this
    /// call has found it in use. Many requests that found an outage were those of other tasks;
    /// whether this call sent one is known now.
    pub(super) fn out_of_time(&self, request: &LockRequest, limit: Duration) -> Error {
        let has_sent = self.in_flight.as_ref().is_some_and(|sent| sent.is_indeterminate());
        let others =
            |outage: Option<(Moment, Failure)>| outage.map(|(_, failure)| failure.of_other_request());
        let failure = match &self.found {
            Found::Nothing => others(request.outage()),
            Found::Busy => others(request.silence()),
            Found::Failed(failure) => Some(failure.clone()),
        };
        match failure {
            Some(failure) => request.error(failure.with_effect_if(has_sent)),
            None => request.timed_out(limit, self.wait.has_begun()),
        }
    }
}
