//! How a call waits for its lock, for every kind: first behind the other tasks of this client, then
//! in Redis, where the wait loop asks and sleeps.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::attempt_guard::{AcquireOutcome, AttemptGuard, acquire_round};
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::local_queue::{LocalFront, LockEvent};
use super::lock_request::LockRequest;
use super::owned_lease::OwnedLease;
use super::progress::{
    ContentionBackoff, FIRST_POLL, Found, OutageDeadline, PollBudget, Progress, Waiter, WakeEvent,
};
use crate::deployment::NodeSet;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::wire::Failure;

/// When a task that waits behind others is warned if it waits for itself.
const WAIT_BEFORE_A_WARNING: Duration = Duration::from_secs(1);

/// After how many polls a task is warned if it waits for itself: after about a second, or if it is
/// not notified, after four pauses of its own.
const POLLS_BEFORE_A_WARNING: u32 = 4;

/// A server rounds what is left of a TTL.
const TTL_ROUNDING: Duration = Duration::from_millis(1);

/// Waits in this client, where it receives the hold of another task if that is passed on, and in
/// Redis.
pub(super) async fn wait(request: &LockRequest, progress: &mut Progress) -> Result<OwnedLease, Error> {
    let mut front = None;
    while request.queues_inside() && front.is_none() {
        front = match wait_in_local_queue(request, progress).await? {
            LocalQueueOutcome::Entered(hold) => return Ok(hold),
            LocalQueueOutcome::Front(front) => match OwnedLease::receive(request, front) {
                Ok(hold) if !hold.lease().is_lost() => {
                    progress.woken = WakeReason::Local;
                    return Ok(hold);
                }
                // The client has asked about it, or did not run for as long as it lasts.
                Ok(_lost) => None,
                Err(front) => Some(front),
            },
        };
    }
    // Boxed: its state is large, and a task that receives a hold does not need it.
    Box::pin(wait_in_redis(request, progress, front)).await
}

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

/// Waits in Redis, at the front of the local queue if the kind has one.
pub(super) async fn wait_in_redis(
    request: &LockRequest,
    progress: &mut Progress,
    front: Option<LocalFront>,
) -> Result<OwnedLease, Error> {
    let tokens = front.as_ref().map_or(1, |front| request.tokens(front));
    let waiter = match request.client.wakeups.subscription() {
        Some(_) => Waiter::queued(request, tokens, true),
        None => Waiter::unqueued(request, tokens),
    };
    let wait = Wait {
        request,
        outage_deadline: OutageDeadline::new(request, &mut progress.begun),
        progress,
        tokens,
        waiter,
        backoff: ContentionBackoff::default(),
        budget: PollBudget::new(),
        announced: None,
        front,
    };
    wait.run().await
}

/// The wait loop: asks, and sleeps until there is a reason to ask again.
struct Wait<'a> {
    request: &'a LockRequest,
    progress: &'a mut Progress,
    /// How many tokens its attempts reserve.
    tokens: u32,
    waiter: Waiter,
    outage_deadline: OutageDeadline<'a>,
    backoff: ContentionBackoff,
    budget: PollBudget,
    /// The end of the last hold whose owner was announced, on the server's clock.
    announced: Option<Duration>,
    /// The turn of this task. Dropped after the waiter: what this task had is left to the keeper
    /// before the next one asks.
    front: Option<LocalFront>,
}

impl Wait<'_> {
    async fn run(mut self) -> Result<OwnedLease, Error> {
        loop {
            self.progress.in_flight = Some(Arc::clone(&self.waiter.guard.attempt.in_flight));
            let mut is_busy = false;
            let pause = match acquire_round(&mut self.waiter.guard).await {
                AcquireOutcome::Granted(lease) => return Ok(self.granted(lease)),
                AcquireOutcome::Refused(error) => return Err(error),
                AcquireOutcome::Expired => {
                    self.try_anew();
                    self.outage_deadline.fails(|| self.request.lost())?
                }
                AcquireOutcome::Failed(failure) => self.on_failed(failure).await?,
                AcquireOutcome::NoMajority { by, taken_for } => self.on_no_majority(by, taken_for).await,
                AcquireOutcome::Busy { free_in, clock } => {
                    is_busy = true;
                    match self.on_busy(free_in, clock).await {
                        Some(pause) => pause,
                        None => continue,
                    }
                }
            };
            let event = self.waiter.sleep(pause, is_busy, &mut self.budget).await;
            let is_notified = !matches!(event, WakeEvent::PollDue);
            self.progress.woken = if is_notified { WakeReason::Notified } else { WakeReason::Polled };
            self.progress.wait.woken(self.progress.woken);
            if let WakeEvent::Granted(lease) = event {
                return Ok(self.granted(lease));
            }
        }
    }

    /// The hold of this task, and for a short time of the tasks behind it.
    fn granted(self, lease: Lease) -> OwnedLease {
        let mut hold = OwnedLease::new(self.waiter.guard, lease);
        if let Some(front) = self.front {
            hold.begin_cohort(self.request, front);
        }
        hold
    }

    /// A request failed. Returns how long to pause.
    async fn on_failed(&mut self, failure: Failure) -> Result<Duration, Error> {
        let client = &self.request.client;
        self.request.local_queues().announce(&self.request.name, LockEvent::Failing);
        self.progress.found = Found::Failed(failure.clone());
        self.announced = None; // a waiter may have missed the event before this one
        if failure.replicas().is_some() {
            // The lock was granted, but other clients may hold it until the required replicas have
            // the grant. They may never have it: the server responds, so waiting for a lease to
            // expire gains nothing.
            self.outage_deadline.has_queued = false;
            self.release_partial_grant(client.nodes.all_nodes()).await;
        }
        self.outage_deadline.fails(|| self.waiter.guard.error(failure))
    }

    /// Some nodes granted the lock, but no majority. Returns how long to pause.
    async fn on_no_majority(&mut self, by: NodeSet, taken_for: Option<Duration>) -> Duration {
        let mut is_queued = self.waiter.guard.entry.is_some();
        self.outage_deadline.restore(is_queued);
        if !is_queued {
            self.waiter.guard.abandon();
            self.queue().await;
        } else if taken_for.is_some() || self.backoff.releases_partial_grant(by) {
            is_queued = self.release_partial_grant(by).await;
        }
        match taken_for {
            // An attempt that is not queued is not notified.
            Some(free_in) if is_queued => free_in.min(self.waiter.longest_pause),
            _ => self.backoff.pause(),
        }
    }

    /// Another client holds the lock. Returns how long to pause; `None`: ask again at once.
    async fn on_busy(&mut self, free_in: Duration, clock: Option<GrantClock>) -> Option<Duration> {
        let is_queued = self.waiter.guard.entry.is_some();
        let ends = clock.as_ref().map(|clock| Duration::from_micros(clock.sample.server) + free_in);
        self.waiter.grant_clock = clock;
        self.progress.found = Found::Busy;
        self.outage_deadline.restore(is_queued);
        if !is_queued {
            // Subscribe, ask again, then sleep: a release in between would be missed.
            self.queue().await;
            return None;
        }
        let is_notified = self.request.client.wakeups.subscription().is_some();
        if self.waiter.mailbox.is_some() != is_notified {
            self.queue_again(is_notified);
            return None;
        }
        self.announce_holder(ends).await;
        self.progress.wait.begin(&self.request.name, self.request.kind.name);
        self.waiter.polls += 1;
        if self.waiter.polls == POLLS_BEFORE_A_WARNING {
            self.request.warn_of_waiting_for_itself();
        }
        Some((free_in + Duration::from_millis(1)).min(self.waiter.pause(self.waiter.polls)))
    }

    /// Goes on with an attempt that is queued, and is notified if messages arrive.
    async fn queue(&mut self) {
        let is_notified = self.request.client.wakeups.start(self.waiter.longest_pause).await;
        self.waiter = Waiter::queued(self.request, self.tokens, is_notified);
    }

    /// Goes on with another attempt at the place of this one: the subscription is lost, and a
    /// release would take this waiter for dead; or there is one again.
    fn queue_again(&mut self, is_notified: bool) {
        let place = self.waiter.guard.attempt.queued_at.get().copied();
        self.waiter = Waiter::queued(self.request, self.tokens, is_notified);
        place.into_iter().for_each(|place| self.waiter.guard.attempt.note_queued(place));
    }

    /// Goes on with another attempt, which waits like the one before.
    fn try_anew(&mut self) {
        self.waiter = Waiter::queued(self.request, self.tokens, self.waiter.mailbox.is_some());
    }

    /// Releases what some nodes granted. Returns false if the attempt had to end, and goes on with
    /// another one.
    async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        let may_continue = self.waiter.guard.release_partial_grant(by).await;
        if !may_continue {
            self.waiter.guard.abandon();
            self.try_anew();
        }
        may_continue
    }

    /// Notifies the local waiters whose owner holds the lock, for instance through another client.
    /// Without a request of their own they would not notice before all tasks ahead of them had
    /// their turn. The hold ends at another time once another owner has the lock, or has renewed
    /// it.
    async fn announce_holder(&mut self, ends: Option<Duration>) {
        let is_known = |known| ends.is_some_and(|ends| ends.abs_diff(known) <= TTL_ROUNDING);
        let LockRequest { client, name, .. } = self.request;
        if let Some(front) = self.front.as_ref().filter(|_| !self.announced.is_some_and(is_known))
            && client.local_queues.has_nested_waiters_behind(name, front)
            && let Some(owner) = self.request.holder().await
        {
            client.local_queues.announce(name, LockEvent::HeldBy(owner));
            self.announced = ends;
        }
    }
}
