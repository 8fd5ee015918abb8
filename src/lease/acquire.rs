//! The wait loop: the one way to get a lease, for every kind.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::held::{Armed, Held};
use super::turnstile::Pass;
use super::validity::Sighting;
use super::{Attempt, Client, Kind, LONGEST_SLEEP, Lease, Queue};
use crate::clock::Moment;
use crate::error::Error;
use crate::name::Name;
use crate::options::{Options, Renewal};
use crate::wire::{Answer, Failure, Mailbox, Node, Script};

/// How often a client looks that nobody can tell anything.
const UNTOLD_POLL: Duration = Duration::from_millis(100);

/// The longest between two looks of one who may have got the lock elsewhere while he queues here.
const LONGEST_LOOK: Duration = Duration::from_secs(8);

/// The pauses between tries on a server that fails: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What is wanted, and by whom. Without an owner, each attempt is its own.
pub(crate) struct Target {
    pub(crate) client: Arc<Client>,
    pub(crate) kind: &'static Kind,
    pub(crate) name: Name,
    pub(crate) options: Arc<Options>,
    pub(crate) owner: Option<String>,
}

impl Target {
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt::new(self.kind, self.name.clone(), Arc::clone(&self.options), self.owner.clone())
    }

    fn arm(&self) -> Armed {
        Armed::new(&self.client, self.attempt())
    }

    /// The longest sleep between two looks. Clients differ by up to a quarter, so as not to march in step.
    fn poll(&self, attempt: &Attempt, told: bool) -> Duration {
        // Whom no message reaches must look before his claim is over.
        let cap = if told { attempt.claim() / 2 } else { UNTOLD_POLL }.min(self.options.poll_cap);
        cap.mul_f64(1.0 - f64::from(attempt.id.as_bytes()[0]) / 1024.0)
    }

    fn queues_inside(&self) -> bool {
        match self.kind.queue {
            Queue::Inside => true,
            Queue::InsideUnlessOwned => self.owner.is_none(),
            Queue::InRedis => false,
        }
    }

    fn lost(&self) -> Error {
        Error::Lost { name: self.name.clone() }
    }
}

/// One try. `None`: somebody else has it.
pub(crate) async fn try_acquire(target: &Target) -> Result<Option<Held>, Error> {
    match ask(target.arm(), "").await {
        Asked::Granted(held) => Ok(Some(held)),
        Asked::Busy { .. } => Ok(None),
        Asked::TooLate => Err(target.lost()),
        Asked::Failed(_, failure) => Err(failure.into()),
        Asked::Refused(error) => Err(error),
    }
}

/// Waits for at most `limit`, whatever it is that takes the time.
pub(crate) async fn acquire_within(target: &Target, limit: Duration) -> Result<Held, Error> {
    match timeout(limit, acquire(target)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(match target.client.node.outage() {
            // Nobody had the lock, as far as is known: it was the server that failed.
            Some((_, failure)) => failure.during(&target.kind.acquire).into(),
            None => Error::TimedOut { name: target.name.clone(), limit },
        }),
    }
}

/// Waits for as long as it takes: the loop.
pub(crate) async fn acquire(target: &Target) -> Result<Held, Error> {
    let client = &target.client;
    let _front = if target.queues_inside() {
        match queue_inside(target).await? {
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
    loop {
        let subscription = client.wakeups.subscription();
        let pause = match ask(seat.armed, &seat.waiter).await {
            Asked::Granted(held) => return Ok(held),
            Asked::Refused(error) => return Err(error),
            Asked::TooLate => {
                seat = Seat::new(target, seat.mailbox.is_some());
                patience.fails(|| target.lost())?
            }
            Asked::Failed(armed, failure) => {
                seat.armed = armed;
                patience.fails(|| failure.into())?
            }
            Asked::Busy { armed, free_in, sighting, generation } => {
                seat.armed = armed;
                seat.sighted =
                    subscription.map(|subscription| Sighted { sighting, generation, subscription });
                patience.restore(!seat.waiter.is_empty());
                if seat.waiter.is_empty() {
                    // First listen, then look again, then sleep.
                    seat = Seat::new(target, client.wakeups.start(seat.poll).await);
                    continue;
                }
                if seat.mailbox.is_some() && client.wakeups.subscription().is_none() {
                    seat = Seat::polling(target);
                    continue;
                }
                (free_in + Duration::from_millis(1)).min(seat.poll)
            }
        };
        if let Some(message) = seat.sleep(pause).await
            && let Some(lease) = seat.handed_over(&message)
        {
            return Ok(seat.armed.granted(lease));
        }
    }
}

enum Inside {
    Front(Pass),
    Entered(Held),
}

/// Queues behind the other tasks of this client. Who may enter a lock that he holds must not wait behind
/// those who wait for him: he looks before he queues, and now and then, should he have got it elsewhere.
async fn queue_inside(target: &Target) -> Result<Inside, Error> {
    if let Some(pass) = target.client.turnstiles.try_enter(&target.name) {
        return Ok(Inside::Front(pass));
    }
    let front = target.client.turnstiles.enter(&target.name);
    tokio::pin!(front);
    let patience = Patience::new(target);
    let may_enter = target.kind.reenters && target.owner.is_some();
    let mut look_at = Moment::now();
    let mut pause = target.options.poll_cap;
    loop {
        if may_enter && Moment::now() >= look_at {
            match ask(target.arm(), "").await {
                Asked::Granted(held) => return Ok(Inside::Entered(held)),
                Asked::Refused(error) => return Err(error),
                Asked::Busy { .. } | Asked::TooLate | Asked::Failed(..) => {}
            }
            look_at = Moment::now() + pause;
            pause = (pause * 2).min(LONGEST_LOOK);
        }
        let until_look = look_at.since(Moment::now()).max(Duration::from_millis(1));
        let nap = if may_enter { until_look.min(LONGEST_SLEEP) } else { LONGEST_SLEEP };
        if let Ok(pass) = timeout(nap, front.as_mut()).await {
            return Ok(Inside::Front(pass));
        }
        // A crowd must not run out of patience one after the other.
        patience.check()?;
    }
}

/// What one request for the lock brought. The attempt comes back if there is more to be done with it.
enum Asked {
    Granted(Held),
    Busy {
        armed: Armed,
        free_in: Duration,
        sighting: Sighting,
        generation: u64,
    },
    /// Granted, but the answer took longer than the lease lasts. It is given back.
    TooLate,
    /// It may work later.
    Failed(Armed, Failure),
    Refused(Error),
}

/// Sends one request.
///
/// # Cancel safety
/// Dropped, the attempt is abandoned: what it is granted is given back at once.
async fn ask(mut armed: Armed, waiter: &str) -> Asked {
    let (client, attempt) = (Arc::clone(&armed.client), Arc::clone(&armed.attempt));
    let call = attempt.acquire(waiter);
    armed.sends(waiter);
    let sent = Moment::now();
    let outcome = client.node.call(&call).await;
    armed.learns(&outcome);
    let reply = match outcome {
        Ok(reply) => reply,
        Err(failure) if failure.is_passing() => return Asked::Failed(armed, failure),
        Err(failure) => return Asked::Refused(failure.into()),
    };
    match reply.answer() {
        Ok(Answer::Final(token @ 0..)) => {
            let until = sent + attempt.trusted(attempt.options.ttl);
            if Moment::now() >= until {
                armed.give_back();
                return Asked::TooLate;
            }
            let token = attempt.token(token.unsigned_abs());
            Asked::Granted(armed.granted(Lease::new(attempt, token, sent, until)))
        }
        Ok(Answer::Busy(free_in, time)) => {
            let server = time.unsigned_abs();
            client.node.observe(server);
            let free_in = Duration::from_millis(free_in.unsigned_abs());
            let generation = reply.generation;
            Asked::Busy { armed, free_in, sighting: Sighting { sent, server }, generation }
        }
        Ok(Answer::Final(answer)) => match attempt.refusal(answer) {
            Some(error) => Asked::Refused(error),
            None => not_understood(armed, reply.unexpected()),
        },
        Err(failure) => not_understood(armed, failure),
    }
}

/// An answer outside the contract may mean anything, a grant as well.
fn not_understood(armed: Armed, failure: Failure) -> Asked {
    armed.give_back();
    Asked::Refused(failure.into())
}

/// How an attempt waits: in the queue or not, told or looking.
struct Seat {
    armed: Armed,
    /// How it stands in the queue; empty: it does not.
    waiter: String,
    claim: Duration,
    poll: Duration,
    mailbox: Option<Mailbox>,
    sighted: Option<Sighted>,
}

/// The server's clock, and through which connections it was seen: behind others there may be another server.
struct Sighted {
    sighting: Sighting,
    generation: u64,
    subscription: u64,
}

impl Seat {
    fn unqueued(target: &Target) -> Seat {
        let armed = target.arm();
        let poll = target.poll(&armed.attempt, false);
        Seat { armed, waiter: String::new(), claim: Duration::ZERO, poll, mailbox: None, sighted: None }
    }

    fn told(target: &Target) -> Seat {
        let mut seat = Seat::unqueued(target);
        seat.poll = target.poll(&seat.armed.attempt, true);
        seat.mailbox = Some(target.client.wakeups.mailbox(seat.armed.attempt.id));
        let channel = target.client.wakeups.channel();
        (seat.waiter, seat.claim) = seat.armed.attempt.waiter(Some(channel), seat.poll);
        seat
    }

    fn new(target: &Target, told: bool) -> Seat {
        if told { Seat::told(target) } else { Seat::polling(target) }
    }

    fn polling(target: &Target) -> Seat {
        let mut seat = Seat::unqueued(target);
        (seat.waiter, seat.claim) = seat.armed.attempt.waiter(None, seat.poll);
        seat
    }

    /// Sleeps until there is a message, or until it is time to look.
    async fn sleep(&self, pause: Duration) -> Option<String> {
        match &self.mailbox {
            None => {
                sleep(pause).await;
                None
            }
            Some(mailbox) => timeout(pause, mailbox.wait()).await.ok().flatten(),
        }
    }

    /// The lease that a message hands over: `token time key`. `None` if it is not certain that most of the
    /// claim is left; then a look finds the lock in this attempt's name, and takes the whole ttl.
    fn handed_over(&self, message: &str) -> Option<Lease> {
        let attempt = &self.armed.attempt;
        let Sighted { sighting, generation, subscription } = self.sighted.as_ref()?;
        let client = &self.armed.client;
        if *generation != client.node.generation() || Some(*subscription) != client.wakeups.subscription() {
            return None;
        }
        // A lease that is never renewed is worth its whole ttl from the start.
        if attempt.options.renewal == Renewal::Never {
            return None;
        }
        let mut words = message.splitn(3, ' ');
        let token = words.next()?.parse().ok()?;
        let time = words.next()?.parse().ok()?;
        if words.next()? != attempt.name.key() {
            return None;
        }
        let now = Moment::now();
        let granted = sighting.earliest(time, attempt.options.drift, now)?;
        let trusted = attempt.trusted(self.claim);
        if now.since(granted) > trusted / 2 {
            return None;
        }
        Some(Lease::new(Arc::clone(attempt), attempt.token(token), granted, granted + trusted))
    }
}

/// How long a server may fail before a waiter gives up on it: a newcomer soon, one who has queued
/// after a ttl, since nothing of what he waited for can have outlasted that.
struct Patience<'a> {
    node: &'a Node,
    script: &'static Script,
    newcomers: Duration,
    queued: Duration,
    has_queued: bool,
    failing_since: Option<Moment>,
    pause: Duration,
}

impl Patience<'_> {
    fn new(target: &Target) -> Patience<'_> {
        let node = &*target.client.node;
        let newcomers = 2 * node.limit();
        let queued = newcomers.max(target.options.ttl);
        Patience {
            node,
            script: &target.kind.acquire,
            newcomers,
            queued,
            has_queued: false,
            failing_since: None,
            pause: PAUSES.0,
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
        let since = self.node.outage().map_or(since, |(earlier, _)| earlier.min(since));
        let limit = if self.has_queued { self.queued } else { self.newcomers };
        if now.since(since) >= limit {
            return Err(error());
        }
        let pause = self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        Ok(pause)
    }

    /// The failure that others have met with for as long as a newcomer is patient.
    fn check(&self) -> Result<(), Error> {
        match self.node.outage() {
            Some((since, failure)) if Moment::now().since(since) >= self.newcomers => {
                Err(failure.during(self.script).into())
            }
            _ => Ok(()),
        }
    }
}
