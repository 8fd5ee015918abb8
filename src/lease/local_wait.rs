//! The wait behind the other tasks of this client.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::acquire_round::{AcquireOutcome, acquire_round};
use super::attempt_guard::AttemptGuard;
use super::local_queue::{LocalFront, LockEvent};
use super::lock_request::LockRequest;
use super::outage_deadline::OutageDeadline;
use super::owned_lease::OwnedLease;
use super::progress::{Found, Progress};
use super::waiter::FIRST_POLL;
use crate::error::Error;
use crate::measure::WakeReason;

/// When a task that waits is warned if it waits for itself.
const WAIT_BEFORE_A_WARNING: Duration = Duration::from_secs(1);

pub(super) enum LocalQueueOutcome {
    Front(LocalFront),
    Entered(OwnedLease),
}

/// Queues behind the other tasks of this client. If its owner holds the lock, a task must not wait
/// behind tasks that wait for that owner. So it tries once before it waits, and again each time
/// that its owner is granted the lock.
pub(super) async fn wait_in_local_queue(
    request: &LockRequest,
    progress: &mut Progress,
) -> Result<LocalQueueOutcome, Error> {
    let may_enter = request.may_enter();
    let local_waiter = match request.local_queues().join(&request.name, may_enter) {
        Ok(turn) => return Ok(LocalQueueOutcome::Front(turn)),
        Err(local_waiter) => local_waiter,
    };
    let (front, mut events) = local_waiter.split();
    tokio::pin!(front);
    let outage_deadline = OutageDeadline::new(request, &mut progress.begun);
    let (mut is_held, mut waits) = (may_enter, false);
    let warning = sleep(WAIT_BEFORE_A_WARNING);
    tokio::pin!(warning);
    let mut has_warned = false;
    loop {
        let mut has_failed = false;
        if is_held {
            let mut guard = AttemptGuard::new(request, 1);
            progress.in_flight = Some(Arc::clone(&guard.attempt.in_flight));
            match Box::pin(acquire_round(&mut guard)).await {
                AcquireOutcome::Granted(lease) => {
                    return Ok(LocalQueueOutcome::Entered(OwnedLease::new(guard, lease)));
                }
                AcquireOutcome::Refused(error) => return Err(error),
                AcquireOutcome::NoMajority { .. } => guard.abandon(),
                AcquireOutcome::Busy { .. } | AcquireOutcome::Expired => {}
                AcquireOutcome::Failed(failure) => {
                    (progress.found, has_failed) = (Found::Failed(failure), true);
                }
            }
        }
        if !has_failed && (is_held || !waits) {
            progress.found = Found::Busy;
        }
        // A nested hold that enters at once has not waited.
        if !waits {
            waits = true;
            progress.woken = WakeReason::Local;
            progress.wait.begin(&request.name, request.kind.name);
        }
        let event = tokio::select! {
            turn = front.as_mut() => return Ok(LocalQueueOutcome::Front(turn)),
            // It never fails: this task's queue entry keeps the sender.
            _ = events.changed() => events.borrow_and_update().clone(),
            // No event follows before the lock changes hands.
            () = sleep(FIRST_POLL), if has_failed => {
                outage_deadline.check()?;
                continue;
            }
            () = warning.as_mut(), if !has_warned => {
                has_warned = true;
                request.warn_of_waiting_for_itself();
                is_held = has_failed; // it would have been tried again soon
                continue;
            }
        };
        // Tasks in a queue must not wait for the full outage deadline one after the other.
        if matches!(event, LockEvent::Failing) {
            progress.found = Found::Nothing;
            outage_deadline.check()?;
        }
        let is_own = |by: &str| request.owner.as_ref().is_some_and(|own| *own.0 == *by);
        is_held = matches!(event, LockEvent::HeldBy(by) if is_own(&by));
    }
}
