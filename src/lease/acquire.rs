//! The wait loop: the one way to get a lease, for every kind.

use std::pin::pin;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Target;
use super::ask::{Asked, ask};
use super::held::{Armed, Held};
use super::seat::{PollBudget, Seat, Sighted, Woken};
use super::trace::{WakeReason, acquiring};
use super::turnstile::{News, Pass};
use crate::clock::Moment;
use crate::error::Error;
use crate::wire::{Failure, NodeSet};

/// The longest pause after nodes have granted a lock to several at a time; it doubles a few times.
const SPLIT_PAUSE: Duration = Duration::from_millis(5);

/// How often to try again for a lock without waiters, after nodes have granted it to several
/// attempts at a time.
const MORE_TRIES: u32 = 2;

/// The pauses between tries on a server that fails: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// One try, and a few more while several attempts have so many nodes each that none has a majority.
/// `None`: another client holds it.
pub(crate) async fn try_acquire(target: &Target) -> Result<Option<Held>, Error> {
    let trying = async {
        let outcome = try_once(target).await;
        let woken = matches!(outcome, Ok(Some(_))).then_some(WakeReason::AtOnce);
        (outcome, woken)
    };
    acquiring(target, pin!(trying)).await
}

async fn try_once(target: &Target) -> Result<Option<Held>, Error> {
    let (mut armed, mut split) = (target.arm(), Split::default());
    loop {
        match ask(armed, None).await {
            Asked::Granted(held) => return Ok(Some(held)),
            Asked::Busy { .. } => return Ok(None),
            Asked::Split { armed: parted, by, .. } => {
                armed = parted;
                if split.pauses == MORE_TRIES || !armed.let_go(by).await {
                    armed.give_back();
                    return Ok(None);
                }
                sleep(split.pause()).await;
            }
            Asked::TooLate => return Err(target.lost()),
            Asked::Failed(armed, failure) => return Err(failed(target, &armed, failure)),
            Asked::Refused(error) => return Err(error),
        }
    }
}

/// Waits for at most `limit`, whatever it is that takes the time. Without any time, it tries once:
/// the first request would never be answered in time.
pub(crate) async fn acquire_within(target: &Target, limit: Duration) -> Result<Held, Error> {
    let timed_out = || Error::TimedOut { context: target.context(), limit };
    if limit.is_zero() {
        return try_acquire(target).await?.ok_or_else(timed_out);
    }
    let waiting = async {
        let (mut unconfirmed, mut woken) = (None, WakeReason::AtOnce);
        let outcome = timeout(limit, wait(target, &mut unconfirmed, &mut woken)).await;
        // The lock was free, as far as is known: it was the server that failed, or its replicas.
        let failure = || unconfirmed.or_else(|| target.outage().map(|(_, failure)| failure));
        // The request that was dropped may run yet; then it is released.
        let failed = |failure: Failure| target.error(failure.with_effect());
        let outcome = outcome.unwrap_or_else(|_| Err(failure().map_or_else(timed_out, failed)));
        (outcome, Some(woken))
    };
    acquiring(target, pin!(waiting)).await
}

/// The error of a request that failed: an earlier one of the same attempt may have had an effect.
fn failed(target: &Target, armed: &Armed, failure: Failure) -> Error {
    target.error(failure.with_effect_if(armed.attempt.in_flight.is_indeterminate()))
}

/// Waits for as long as it takes.
pub(crate) async fn acquire(target: &Target) -> Result<Held, Error> {
    let waiting = async {
        let mut woken = WakeReason::AtOnce;
        let outcome = wait(target, &mut None, &mut woken).await;
        (outcome, Some(woken))
    };
    acquiring(target, pin!(waiting)).await
}

/// The loop. While too few replicas confirm what it is granted, that is why it waits:
/// `unconfirmed`. What made it send the latest request is `woken`.
async fn wait(
    target: &Target,
    unconfirmed: &mut Option<Failure>,
    woken: &mut WakeReason,
) -> Result<Held, Error> {
    let client = &target.client;
    let front = if target.queues_inside() {
        match queue_inside(target, woken).await? {
            Inside::Front(pass) => Some(pass),
            Inside::Entered(held) => return Ok(held),
        }
    } else {
        None
    };
    let mut seat = match client.wakeups.subscription() {
        Some(_) => Seat::told(target),
        None => Seat::unqueued(target),
    };
    let mut patience = Patience::new(target);
    let mut split = Split::default();
    let mut budget = PollBudget::new();
    loop {
        let subscription = client.wakeups.subscription();
        let pause = match ask(seat.armed, seat.entry.as_ref()).await {
            Asked::Granted(held) => return Ok(held),
            Asked::Refused(error) => return Err(error),
            Asked::TooLate => {
                seat = Seat::new(target, seat.mailbox.is_some());
                patience.fails(|| target.lost())?
            }
            Asked::Failed(armed, failure) => {
                target.client.turnstiles.announce(&target.name, News::Failing);
                seat.armed = armed;
                if failure.replicas().is_some() {
                    // It was granted, and others may have it until enough replicas are there. They
                    // may never be: the server answers, so nothing is gained by outwaiting a lease.
                    *unconfirmed = Some(failure.clone());
                    patience.has_queued = false;
                    if !seat.armed.let_go(client.nodes.everyone()).await {
                        seat.armed.give_back();
                        seat = Seat::new(target, seat.mailbox.is_some());
                    }
                }
                patience.fails(|| failed(target, &seat.armed, failure))?
            }
            Asked::Split { armed, by, taken_for } => {
                patience.restore(seat.entry.is_some());
                seat.armed = armed;
                let mut is_queued = seat.entry.is_some();
                if !is_queued {
                    seat.armed.give_back();
                    seat = Seat::new(target, client.wakeups.start(seat.poll).await);
                } else if (taken_for.is_some() || split.lets_go(by)) && !seat.armed.let_go(by).await {
                    seat.armed.give_back();
                    seat = Seat::new(target, seat.mailbox.is_some());
                    is_queued = false;
                }
                match taken_for {
                    // Nobody tells who does not queue.
                    Some(free_in) if is_queued => free_in.min(seat.poll),
                    _ => split.pause(),
                }
            }
            Asked::Busy { armed, free_in, dated } => {
                *unconfirmed = None;
                seat.armed = armed;
                seat.sighted = match (subscription, dated) {
                    (Some(subscription), Some((sighting, generation))) => {
                        Some(Sighted { sighting, generation, subscription })
                    }
                    _ => None,
                };
                patience.restore(seat.entry.is_some());
                if seat.entry.is_none() {
                    // First listen, then look again, then sleep.
                    seat = Seat::new(target, client.wakeups.start(seat.poll).await);
                    continue;
                }
                if seat.mailbox.is_some() && client.wakeups.subscription().is_none() {
                    seat = Seat::polling(target);
                    continue;
                }
                if let Some(front) = &front {
                    announce_holder(target, front).await;
                }
                (free_in + Duration::from_millis(1)).min(seat.poll)
            }
        };
        *woken = match seat.sleep(pause, &mut budget).await {
            Woken::HandedOver(lease) => {
                *woken = WakeReason::Notified;
                return Ok(seat.armed.granted(lease, true)); // by the one server that there is
            }
            Woken::Notified => WakeReason::Notified,
            Woken::Polls => WakeReason::Polled,
        };
    }
}

enum Inside {
    Front(Pass),
    Entered(Held),
}

/// Queues behind the other tasks of this client. A task whose owner holds the lock must not wait
/// behind those that wait for that owner: it tries once before it waits, and whenever it learns
/// that its owner has been granted the lock.
async fn queue_inside(target: &Target, woken: &mut WakeReason) -> Result<Inside, Error> {
    let may_enter = target.may_enter();
    let visitor = match target.client.turnstiles.visit(&target.name, may_enter).try_pass() {
        Ok(pass) => return Ok(Inside::Front(pass)),
        Err(visitor) => visitor,
    };
    *woken = WakeReason::Local;
    let (front, mut news) = visitor.waits();
    tokio::pin!(front);
    let patience = Patience::new(target);
    let mut is_held = may_enter;
    loop {
        if is_held {
            match ask(target.arm(), None).await {
                Asked::Granted(held) => return Ok(Inside::Entered(held)),
                Asked::Refused(error) => return Err(error),
                Asked::Split { armed, .. } => armed.give_back(),
                Asked::Busy { .. } | Asked::TooLate | Asked::Failed(..) => {}
            }
        }
        let heard = tokio::select! {
            pass = front.as_mut() => return Ok(Inside::Front(pass)),
            // It never fails: this task's visit keeps the sender.
            _ = news.changed() => news.borrow_and_update().clone(),
        };
        is_held = matches!(heard, News::HeldBy(owner) if target.owner.as_ref() == Some(&owner));
        // A crowd must not run out of patience one after the other.
        patience.check()?;
    }
}

/// Wakes the tasks behind the front whose owner holds the lock, for instance through another
/// client: without a request of its own, none of them would find out before all those ahead of it
/// have had their turn.
async fn announce_holder(target: &Target, front: &Pass) {
    let turnstiles = &target.client.turnstiles;
    if turnstiles.await_owners(&target.name, front)
        && let Some(owner) = target.holder().await
    {
        turnstiles.announce(&target.name, News::HeldBy(owner));
    }
}

/// How an attempt behaves that some nodes have granted the lock, but no majority, since other
/// attempts have the rest.
#[derive(Default)]
struct Split {
    looks: usize,
    pauses: u32,
}

impl Split {
    /// Whether to leave those nodes to the next in their queues. Who has many of them holds on for
    /// longer, until those who have few have let go: if all did the same, they might take turns for
    /// ever, each node at another point.
    fn lets_go(&mut self, by: NodeSet) -> bool {
        self.looks += 1;
        let enough = !by.is_empty() && self.looks >= by.len().pow(2) * 2 - 1;
        if enough {
            self.looks = 0;
        }
        enough
    }

    /// A random one, so that those who are in each other's way do not meet again.
    fn pause(&mut self) -> Duration {
        self.pauses += 1;
        let longest = SPLIT_PAUSE * (1 << self.pauses.min(3));
        longest.mul_f64(f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 256.0)
    }
}

/// How long a server may fail before a waiter gives up on it: a newcomer soon, one who has queued
/// after a ttl, since nothing of what he waited for can have outlasted that.
struct Patience<'a> {
    target: &'a Target,
    newcomers: Duration,
    queued: Duration,
    has_queued: bool,
    failing_since: Option<Moment>,
    pause: Duration,
    /// When the caller began, if the option says how long it outlasts an outage: one that has
    /// lasted for an hour already must not fail a call that is to wait for ten minutes.
    begun: Option<Moment>,
}

impl Patience<'_> {
    fn new(target: &Target) -> Patience<'_> {
        let newcomers = 2 * target.client.nodes.limit();
        let queued = newcomers.max(target.options.ttl);
        let limit = target.options.outage_limit;
        Patience {
            target,
            newcomers: limit.unwrap_or(newcomers),
            queued: limit.unwrap_or(queued),
            has_queued: false,
            failing_since: None,
            pause: PAUSES.0,
            begun: limit.map(|_| Moment::now()),
        }
    }

    fn restore(&mut self, queued: bool) {
        self.has_queued |= queued;
        self.failing_since = None;
        self.pause = PAUSES.0;
    }

    /// How long to pause, or the error once patience is over.
    fn fails(&mut self, error: impl FnOnce() -> Error) -> Result<Duration, Error> {
        let now = Moment::now();
        let since = *self.failing_since.get_or_insert(now);
        // Others may have found out before.
        let since = self.target.outage().map_or(since, |(earlier, _)| self.counts_from(earlier).min(since));
        let limit = if self.has_queued { self.queued } else { self.newcomers };
        if now.since(since) >= limit {
            return Err(error());
        }
        let pause = self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        Ok(pause)
    }

    /// From when an outage counts that began then.
    fn counts_from(&self, outage: Moment) -> Moment {
        self.begun.map_or(outage, |begun| outage.max(begun))
    }

    /// The failure that others have met with for as long as a newcomer is patient.
    fn check(&self) -> Result<(), Error> {
        match self.target.outage() {
            Some((since, failure)) if Moment::now().since(self.counts_from(since)) >= self.newcomers => {
                Err(self.target.error(failure.of_another()))
            }
            _ => Ok(()),
        }
    }
}
