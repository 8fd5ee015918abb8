//! The wait loop: how a call waits for its lock in Redis, for every kind.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::acquire_round::{AcquireOutcome, acquire_round};
use super::attempt_guard::AttemptGuard;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::local_queue::{LocalFront, LockEvent};
use super::local_wait::{LocalQueueOutcome, wait_in_local_queue};
use super::lock_request::LockRequest;
use super::outage_deadline::OutageDeadline;
use super::owned_lease::OwnedLease;
use super::poll_budget::PollBudget;
use super::progress::{Found, Progress};
use super::waiter::{Waiter, WakeEvent};
use crate::deployment::NodeSet;
use crate::error::Error;
use crate::measure::WakeReason;
use crate::wire::Failure;

/// Half of the longest first pause after nodes granted a lock to several attempts at a time. The
/// longest pause doubles with each one, up to 40 ms.
const CONTENTION_PAUSE: Duration = Duration::from_millis(5);

/// How many more times to try without queueing, after nodes granted the lock to several attempts at
/// a time.
const MAX_RETRIES: u32 = 2;

/// After how many polls a task is warned if it waits for itself: after about a second, or if it is
/// not notified, after four pauses of its own.
const POLLS_BEFORE_A_WARNING: u32 = 4;

/// A server rounds what is left of a TTL.
const TTL_ROUNDING: Duration = Duration::from_millis(1);

/// One try, and a few more if several attempts split the nodes so that none has a majority. `None`:
/// another client holds the lock.
pub(super) async fn try_once(request: &LockRequest) -> Result<Option<OwnedLease>, Error> {
    let (mut guard, mut backoff) = (AttemptGuard::new(request, 1), ContentionBackoff::default());
    loop {
        match acquire_round(&mut guard).await {
            AcquireOutcome::Granted(lease) => return Ok(Some(OwnedLease::new(guard, lease))),
            AcquireOutcome::Busy { .. } => return Ok(None),
            AcquireOutcome::NoMajority { by, .. } => {
                if backoff.pauses == MAX_RETRIES || !guard.release_partial_grant(by).await {
                    guard.abandon();
                    return Ok(None);
                }
                sleep(backoff.pause()).await;
            }
            AcquireOutcome::Expired => return Err(request.lost()),
            AcquireOutcome::Failed(failure) => return Err(guard.error(failure)),
            AcquireOutcome::Refused(error) => return Err(error),
        }
    }
}

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
