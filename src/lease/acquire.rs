//! The wait loop: the one way to get a lease, for every kind.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::acquire_round::{AcquireOutcome, acquire_round};
use super::attempt_guard::AttemptGuard;
use super::close::OpenCall;
use super::grant_clock::GrantClock;
use super::local_queue::{LocalTurn, LockEvent};
use super::lock_request::{LockRequest, unless_closed};
use super::outage_deadline::OutageDeadline;
use super::owned_lease::OwnedLease;
use super::poll_budget::PollBudget;
use super::waiter::{FIRST_POLL, Waiter, WakeEvent};
use crate::deployment::NodeSet;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::traces::{WaitSpan, acquiring};
use crate::wire::{Failure, InFlight};

/// Half of the longest first pause after nodes granted a lock to several attempts at a time. The
/// longest pause doubles with each one, up to 40 ms.
const CONTENTION_PAUSE: Duration = Duration::from_millis(5);

/// How many more times to try without queueing, after nodes granted the lock to several attempts at
/// a time.
const MAX_RETRIES: u32 = 2;

/// A server rounds what is left of a TTL.
const TTL_ROUNDING: Duration = Duration::from_millis(1);

/// One try, and a few more if several attempts split the nodes so that none has a majority. `None`:
/// another client holds the lock.
pub(crate) async fn try_acquire(request: &LockRequest) -> Result<Option<OwnedLease>, Error> {
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let trying = async {
        let outcome = try_once(request).await;
        let woken = matches!(outcome, Ok(Some(_))).then_some(WakeReason::AtOnce);
        (outcome, woken)
    };
    unless_closed(request, pin!(acquiring(request.described(), pin!(trying)))).await
}

async fn try_once(request: &LockRequest) -> Result<Option<OwnedLease>, Error> {
    let (mut guard, mut backoff) = (AttemptGuard::new(request), ContentionBackoff::default());
    loop {
        match acquire_round(guard).await {
            AcquireOutcome::Granted(hold) => return Ok(Some(hold)),
            AcquireOutcome::Busy { .. } => return Ok(None),
            AcquireOutcome::NoMajority { guard: same, by, .. } => {
                guard = same;
                if backoff.pauses == MAX_RETRIES || !guard.release_partial_grant(by).await {
                    guard.abandon();
                    return Ok(None);
                }
                sleep(backoff.pause()).await;
            }
            AcquireOutcome::Expired => return Err(request.lost()),
            AcquireOutcome::Failed(guard, failure) => return Err(failed(request, &guard, failure)),
            AcquireOutcome::Refused(error) => return Err(error),
        }
    }
}

/// Waits for at most `limit`, which covers connecting, waiting and retrying. A limit of zero means
/// one try: the first request would never be answered in time.
pub(crate) async fn acquire_within(request: &LockRequest, limit: Duration) -> Result<OwnedLease, Error> {
    let timed_out = || Error::TimedOut { context: request.context(), limit };
    if limit.is_zero() {
        return try_acquire(request).await?.ok_or_else(timed_out);
    }
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let waiting = async {
        let mut progress = Progress::default();
        let outcome = timeout(limit, wait(request, &mut progress)).await;
        let Progress { replica_failure, woken, in_flight, wait: _ended } = progress;
        // As far as is known the lock was free: the server failed, or its replicas did. Most
        // requests that found the outage were those of other tasks; whether this call sent one is
        // known now that it was dropped. What it is granted is released.
        let outage = || request.outage().map(|(_, failure)| failure.of_other_request());
        let may_have_run = replica_failure.is_some() || in_flight.is_some_and(|sent| sent.is_indeterminate());
        let failed = |failure: Failure| request.error(failure.with_effect_if(may_have_run));
        let outcome =
            outcome.unwrap_or_else(|_| Err(replica_failure.or_else(outage).map_or_else(timed_out, failed)));
        (outcome, Some(woken))
    };
    unless_closed(request, pin!(acquiring(request.described(), pin!(waiting)))).await
}

/// The error of a failed request. An earlier request of the same attempt may have had an effect.
fn failed(request: &LockRequest, guard: &AttemptGuard, failure: Failure) -> Error {
    request.error(failure.with_effect_if(guard.attempt.in_flight.is_indeterminate()))
}

/// Waits without a limit.
pub(crate) async fn acquire(request: &LockRequest) -> Result<OwnedLease, Error> {
    let _open = OpenCall::new(&request.client.keeper, &request.name);
    let waiting = async {
        let mut progress = Progress::default();
        let outcome = wait(request, &mut progress).await;
        (outcome, Some(progress.woken))
    };
    unless_closed(request, pin!(acquiring(request.described(), pin!(waiting)))).await
}

/// What is known of a wait, also after it was dropped.
#[derive(Default)]
struct Progress {
    /// Set while the grant waits for replicas.
    replica_failure: Option<Failure>,
    /// What caused the latest request.
    woken: WakeReason,
    /// The requests of the latest attempt.
    in_flight: Option<Arc<InFlight>>,
    /// Begun once the lock is busy.
    wait: WaitSpan,
}

/// The wait loop.
async fn wait(request: &LockRequest, progress: &mut Progress) -> Result<OwnedLease, Error> {
    let client = &request.client;
    let front = if request.queues_inside() {
        match wait_in_local_queue(request, progress).await? {
            LocalQueueOutcome::Front(turn) => Some(turn),
            LocalQueueOutcome::Entered(hold) => return Ok(hold),
        }
    } else {
        None
    };
    let mut waiter = match client.wakeups.subscription() {
        Some(_) => Waiter::notified(request),
        None => Waiter::unqueued(request),
    };
    let mut outage_deadline = OutageDeadline::new(request);
    let mut backoff = ContentionBackoff::default();
    let mut budget = PollBudget::new();
    // The end of the last hold whose owner was announced, on the server's clock.
    let mut announced: Option<Duration> = None;
    loop {
        let subscription = client.wakeups.subscription();
        progress.in_flight = Some(Arc::clone(&waiter.guard.attempt.in_flight));
        let mut is_busy = false;
        let pause = match acquire_round(waiter.guard).await {
            AcquireOutcome::Granted(hold) => return Ok(hold),
            AcquireOutcome::Refused(error) => return Err(error),
            AcquireOutcome::Expired => {
                waiter = Waiter::new(request, waiter.mailbox.is_some());
                outage_deadline.fails(|| request.lost())?
            }
            AcquireOutcome::Failed(guard, failure) => {
                request.client.local_queues.announce(&request.name, LockEvent::Failing);
                announced = None; // a waiter may have missed the event before this one
                waiter.guard = guard;
                if failure.replicas().is_some() {
                    // The lock was granted, but other clients may hold it until the required
                    // replicas have the grant. They may never have it: the server responds, so
                    // waiting for a lease to expire gains nothing.
                    progress.replica_failure = Some(failure.clone());
                    outage_deadline.has_queued = false;
                    if !waiter.guard.release_partial_grant(client.nodes.all_nodes()).await {
                        waiter.guard.abandon();
                        waiter = Waiter::new(request, waiter.mailbox.is_some());
                    }
                }
                outage_deadline.fails(|| failed(request, &waiter.guard, failure))?
            }
            AcquireOutcome::NoMajority { guard, by, taken_for } => {
                waiter.guard = guard;
                let mut is_queued = waiter.guard.entry.is_some();
                outage_deadline.restore(is_queued);
                if !is_queued {
                    waiter.guard.abandon();
                    waiter = Waiter::new(request, client.wakeups.start(waiter.poll).await);
                } else if (taken_for.is_some() || backoff.releases_partial_grant(by))
                    && !waiter.guard.release_partial_grant(by).await
                {
                    waiter.guard.abandon();
                    waiter = Waiter::new(request, waiter.mailbox.is_some());
                    is_queued = false;
                }
                match taken_for {
                    // An attempt that is not queued is not notified.
                    Some(free_in) if is_queued => free_in.min(waiter.poll),
                    _ => backoff.pause(),
                }
            }
            AcquireOutcome::Busy { guard, free_in, clock_sample } => {
                progress.replica_failure = None;
                waiter.guard = guard;
                waiter.grant_clock = match (subscription, clock_sample) {
                    (Some(subscription), Some((sample, generation))) => {
                        Some(GrantClock { sample, generation, subscription })
                    }
                    _ => None,
                };
                outage_deadline.restore(waiter.guard.entry.is_some());
                if waiter.guard.entry.is_none() {
                    // Subscribe, ask again, then sleep: a release in between would be missed.
                    waiter = Waiter::new(request, client.wakeups.start(waiter.poll).await);
                    continue;
                }
                if waiter.mailbox.is_some() && client.wakeups.subscription().is_none() {
                    waiter = Waiter::polling(request);
                    continue;
                }
                // The hold ends at another time once another owner has the lock, or has renewed it.
                let ends = clock_sample.map(|(sample, _)| Duration::from_micros(sample.server) + free_in);
                let is_known =
                    ends.zip(announced).is_some_and(|(ends, known)| ends.abs_diff(known) <= TTL_ROUNDING);
                if let Some(front) = front.as_ref().filter(|_| !is_known)
                    && announce_holder(request, front).await
                {
                    announced = ends;
                }
                is_busy = true;
                progress.wait.begin(&request.name, request.kind.name);
                waiter.polls += 1;
                (free_in + Duration::from_millis(1)).min(waiter.pause(waiter.polls))
            }
        };
        progress.woken = match waiter.sleep(pause, is_busy, &mut budget).await {
            WakeEvent::Granted(lease) => {
                progress.woken = WakeReason::Notified;
                progress.wait.woken(progress.woken);
                return Ok(OwnedLease::new(waiter.guard, lease, true)); // there is one server
            }
            WakeEvent::Notified => WakeReason::Notified,
            WakeEvent::PollDue => WakeReason::Polled,
        };
        progress.wait.woken(progress.woken);
    }
}

enum LocalQueueOutcome {
    Front(LocalTurn),
    Entered(OwnedLease),
}

/// Queues behind the other tasks of this client. A task whose owner holds the lock must not wait
/// behind tasks that wait for that owner. It tries once before it waits, and again each time that
/// its owner is granted the lock.
async fn wait_in_local_queue(
    request: &LockRequest,
    progress: &mut Progress,
) -> Result<LocalQueueOutcome, Error> {
    let may_enter = request.may_enter();
    let local_waiter = match request.client.local_queues.join(&request.name, may_enter) {
        Ok(turn) => return Ok(LocalQueueOutcome::Front(turn)),
        Err(local_waiter) => local_waiter,
    };
    let (front, mut events) = local_waiter.split();
    tokio::pin!(front);
    let outage_deadline = OutageDeadline::new(request);
    let (mut is_held, mut waits) = (may_enter, false);
    loop {
        let mut has_failed = false;
        if is_held {
            let guard = AttemptGuard::new(request);
            progress.in_flight = Some(Arc::clone(&guard.attempt.in_flight));
            match acquire_round(guard).await {
                AcquireOutcome::Granted(hold) => return Ok(LocalQueueOutcome::Entered(hold)),
                AcquireOutcome::Refused(error) => return Err(error),
                AcquireOutcome::NoMajority { guard, .. } => guard.abandon(),
                AcquireOutcome::Busy { .. } | AcquireOutcome::Expired => {}
                AcquireOutcome::Failed(..) => has_failed = true,
            }
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
        };
        is_held = matches!(event, LockEvent::HeldBy(owner) if request.owner.as_ref() == Some(&owner));
        // Tasks in a queue must not wait for the full outage deadline one after the other.
        outage_deadline.check()?;
    }
}

/// Notifies the local waiters whose owner holds the lock, for instance through another client.
/// Without a request of their own they would not notice before all tasks ahead of them had their
/// turn. Returns whether it did.
async fn announce_holder(request: &LockRequest, front: &LocalTurn) -> bool {
    let local_queues = &request.client.local_queues;
    if local_queues.has_nested_waiters_behind(&request.name, front)
        && let Some(owner) = request.holder().await
    {
        local_queues.announce(&request.name, LockEvent::HeldBy(owner));
        return true;
    }
    false
}

/// Back-off of an attempt that some nodes granted the lock but not a majority, since other attempts
/// have the rest.
#[derive(Default)]
struct ContentionBackoff {
    rounds: usize,
    pauses: u32,
}

impl ContentionBackoff {
    /// Whether to release the partial grant, so that those nodes grant the lock to their next
    /// waiter. The more nodes an attempt has, the longer it keeps them. A has two of four nodes, B
    /// and C have one each: if all three released at the same moment, they could take turns for
    /// ever, each node at another point of its queue.
    fn releases_partial_grant(&mut self, by: NodeSet) -> bool {
        self.rounds += 1;
        let is_due = !by.is_empty() && self.rounds >= by.len().pow(2) * 2 - 1;
        if is_due {
            self.rounds = 0;
        }
        is_due
    }

    /// A random pause, so that the same attempts do not collide again.
    fn pause(&mut self) -> Duration {
        self.pauses += 1;
        let longest = CONTENTION_PAUSE * (1 << self.pauses.min(3));
        longest.mul_f64(f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 256.0)
    }
}
