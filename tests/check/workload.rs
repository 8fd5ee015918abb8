//! One visit of one task: from wanting a lock to having given it back.

use std::time::{Duration, Instant};

use redlatch::Error;
use tokio::time::{sleep, timeout};

use crate::history::{End, Mode, NOT_HELD, Time, Verb, What, Why};
use crate::plan::TTL;
use crate::support::{AnyGuard, AnyLock, Kind, Random};
use crate::worker::Worker;

/// The names of all locks, and their kinds.
pub const LOCKS: [(&str, Kind); 10] = [
    ("mutex-1", Kind::Mutex),
    ("mutex-2", Kind::Mutex),
    ("mutex-3", Kind::Mutex),
    ("reentrant-1", Kind::Reentrant),
    ("reentrant-2", Kind::Reentrant),
    ("reentrant-3", Kind::Reentrant),
    ("rwlock-1", Kind::Write),
    ("rwlock-2", Kind::Write),
    ("rwlock-3", Kind::Write),
    ("rwlock-4", Kind::Write),
];

/// How often a holder looks at its lease.
const GLANCE: Duration = Duration::from_millis(50);

/// How long a hold that was told of its loss stays, so that others see whether it was lost.
const AFTERMATH: Duration = Duration::from_millis(150);

/// What is asked for, in whichever way.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    /// The hold of the same owner that it is nested in.
    inside: Option<u64>,
    renewed: bool,
}

impl Place {
    fn wants(&self, mode: Mode, owner: String, verb: Verb) -> What {
        let Place { name, inside, renewed } = *self;
        What::Wants { lock: name.to_owned(), mode, owner, verb, inside, renewed }
    }
}

/// A hold that was granted.
struct Hold<'a> {
    worker: &'a Worker,
    number: u64,
    place: Place,
    guard: AnyGuard,
    until: Time,
}

fn millis(random: &mut Random, from: u64, to: u64) -> Duration {
    Duration::from_micros(from * 1_000 + random.below((to - from) * 1_000))
}

fn mode(lock: &AnyLock) -> Mode {
    if matches!(lock, AnyLock::Read(..)) { Mode::Shared } else { Mode::Exclusive }
}

pub async fn visit(worker: &Worker, random: &mut Random) {
    let (name, kind) = LOCKS[usize::try_from(random.below(LOCKS.len() as u64)).unwrap()];
    let kind = if kind == Kind::Write && random.below(3) > 0 { Kind::Read } else { kind };
    // Some stay until their lease ends: that is how an end comes to light that was told too late.
    let overstays = random.below(worker.linger) == 0;
    let lock = kind.lock(if overstays { &worker.unrenewed } else { &worker.locks }, name);
    let place = Place { name, inside: None, renewed: !overstays };
    let Some(mut hold) = enter(worker, random, &place, &lock).await else {
        return sleep(millis(random, 0, 10)).await;
    };
    let lingers = random.below(worker.linger) == 0;
    let stay = match random.below(200) {
        _ if overstays => 2 * TTL,
        _ if lingers => TTL + millis(random, 0, 1_500),
        1..=30 => millis(random, 5, 40),
        _ => millis(random, 0, 5),
    };
    let mut stands =
        if overstays { hold.overstay(random, stay).await } else { hold.work(random, stay).await };
    if stands && matches!(kind, Kind::Reentrant | Kind::Read) && random.below(5) == 0 {
        nest(worker, random, &lock, kind, &mut hold).await;
        stands = hold.glance();
    }
    if stands && kind == Kind::Write && random.below(4) == 0 {
        let Some(reading) = hold.downgrade().await else { return };
        hold = reading;
        let stay = millis(random, 0, 20);
        hold.work(random, stay).await;
    }
    hold.leave(random).await;
}

fn failed(error: &Error) -> Why {
    Why::Failed(text(error))
}

/// An error and what caused it.
fn text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// Asks for a lock, in one of the ways there are.
async fn enter<'a>(
    worker: &'a Worker,
    random: &mut Random,
    place: &Place,
    lock: &AnyLock,
) -> Option<Hold<'a>> {
    let (number, note) = (worker.next_hold(), &worker.recorder);
    let owner = match lock {
        AnyLock::Reentrant(_, owner) | AnyLock::Read(_, owner) => owner.to_string(),
        AnyLock::Mutex(_) | AnyLock::Write(_) => number.to_string(),
    };
    let (way, limit) = (random.below(20), millis(random, 5, 1_500));
    let verb = match way {
        0..=2 => Verb::Try,
        3..=6 => Verb::Timeout,
        _ => Verb::Lock,
    };
    note.note(number, place.wants(mode(lock), owner, verb));
    let outcome = match verb {
        Verb::Try => lock.try_lock().await.transpose(),
        Verb::Timeout => Some(lock.lock_timeout(limit).await),
        // Dropped at any await, soon after it began or while it waits.
        _ if place.inside.is_none() && way < 10 => {
            match timeout(limit / if way == 7 { 100 } else { 4 }, lock.lock()).await {
                Ok(outcome) => Some(outcome),
                Err(_) => {
                    note.note(number, What::NotGranted(Why::Cancelled));
                    return None;
                }
            }
        }
        _ => Some(lock.lock().await),
    };
    let why = match outcome {
        Some(Ok(guard)) => return Some(Hold::granted(worker, number, place, guard)),
        None => Why::Busy,
        Some(Err(Error::TimedOut { .. })) => Why::TimedOut,
        Some(Err(Error::WouldDeadlock { .. })) => Why::WouldDeadlock,
        Some(Err(error)) => failed(&error),
    };
    note.note(number, What::NotGranted(why));
    None
}

/// Enters again what is held already; a reader perhaps to write.
async fn nest(worker: &Worker, random: &mut Random, lock: &AnyLock, kind: Kind, outer: &mut Hold<'_>) {
    let place = Place { inside: Some(outer.number), ..outer.place };
    let inner_lock = match lock {
        AnyLock::Read(lock, owner) if random.below(2) == 0 => {
            let number = worker.next_hold();
            let wants = place.wants(Mode::Exclusive, owner.to_string(), Verb::Timeout);
            worker.recorder.note(number, wants);
            let why = match lock.with_owner(owner).write_timeout(millis(random, 1, 300)).await {
                Ok(guard) => {
                    let mut hold = Hold::granted(worker, number, &place, AnyGuard::Write(guard));
                    let stay = millis(random, 0, 20);
                    hold.work(random, stay).await;
                    return hold.leave(random).await;
                }
                Err(Error::TimedOut { .. }) => Why::TimedOut,
                Err(Error::WouldDeadlock { .. }) => Why::WouldDeadlock,
                Err(error) => failed(&error),
            };
            return worker.recorder.note(number, What::NotGranted(why));
        }
        _ => lock,
    };
    let Some(mut inner) = enter(worker, random, &place, inner_lock).await else { return };
    let stay = millis(random, 0, 20);
    if inner.work(random, stay).await && kind == Kind::Reentrant {
        inner.count(inner_lock, 2).await;
    }
    inner.leave(random).await;
}

impl<'a> Hold<'a> {
    fn granted(worker: &'a Worker, number: u64, place: &Place, guard: AnyGuard) -> Hold<'a> {
        let until = Time::of(guard.lease().valid_until());
        worker.recorder.note(number, What::Granted { token: guard.token(), until });
        Hold { worker, number, place: *place, guard, until }
    }

    fn note(&self, what: What) {
        self.worker.recorder.note(self.number, what);
    }

    /// Whether the lease is to be trusted, as it says itself.
    fn glance(&mut self) -> bool {
        let lease = self.guard.lease();
        let (until, now) = (lease.valid_until(), Instant::now());
        if lease.is_lost() {
            return false;
        }
        // Not if it was renewed in between. Each look at it reads two clocks, and says a little more or less.
        if now > until && lease.valid_until() < until + Duration::from_millis(1) {
            self.note(What::TrustsTooLong { until: Time::of(until) });
        }
        self.until = Time::of(until);
        self.note(What::Trusts { until: self.until });
        true
    }

    /// Uses what the lock protects for a while, or until the lease is lost. Whether it still stands.
    async fn work(&mut self, random: &mut Random, stay: Duration) -> bool {
        let start = Instant::now();
        loop {
            if !self.glance() {
                break;
            }
            if !matches!(self.guard, AnyGuard::Read(_)) {
                let since = Time::now();
                self.worker.resource.add(self.place.name, millis(random, 0, 3)).await;
                self.note(What::Added { since });
            }
            self.write().await;
            let left = stay.saturating_sub(start.elapsed());
            if left.is_zero() {
                return self.glance();
            }
            tokio::select! {
                _ = self.guard.lease().lost() => break,
                () = sleep(left.min(GLANCE)) => {}
            }
        }
        self.goes_on().await;
        false
    }

    /// Stays until it is told of the end of its lease, without ever looking. Whether it was not told.
    async fn overstay(&mut self, random: &mut Random, longest: Duration) -> bool {
        if !self.work(random, Duration::ZERO).await {
            return false;
        }
        let told = timeout(longest, self.guard.lease().lost()).await.is_ok();
        if !told && self.glance() {
            return true;
        }
        self.goes_on().await;
        false
    }

    async fn goes_on(&self) {
        self.note(What::Lost { until: self.until });
        sleep(AFTERMATH).await;
        // As somebody does who has not looked: the token is what stops him.
        self.write().await;
    }

    async fn write(&self) {
        let since = Time::now();
        let accepted = self.worker.resource.write(self.place.name, self.guard.token(), self.number).await;
        self.note(What::Wrote { since, accepted });
    }

    /// What the server counts, if the lease stands before and after.
    async fn count(&mut self, lock: &AnyLock, expected: u64) {
        let AnyGuard::Reentrant(guard) = &self.guard else { return };
        let owner = guard.owner().to_string();
        let Ok(seen) = lock.inspect().await else { return };
        let seen = seen.holders.iter().find(|holder| holder.owner == owner).map_or(0, |holder| holder.count);
        if self.glance() {
            self.note(What::Counted { expected, seen });
        }
    }

    /// The hold to read that it becomes.
    async fn downgrade(self) -> Option<Hold<'a>> {
        let AnyGuard::Write(guard) = self.guard else { return None };
        let (worker, number) = (self.worker, self.worker.next_hold());
        worker.recorder.note(self.number, What::Ends(End::Downgrade));
        let place = Place { inside: Some(self.number), ..self.place };
        worker.recorder.note(number, place.wants(Mode::Shared, self.number.to_string(), Verb::Downgrade));
        match guard.downgrade().await {
            Ok(guard) => Some(Hold::granted(worker, number, &place, AnyGuard::Read(guard))),
            Err(error) => {
                worker.recorder.note(number, What::NotGranted(failed(&error)));
                None
            }
        }
    }

    async fn leave(self, random: &mut Random) {
        let end = match random.below(100) {
            0 => End::Leak,
            1..30 => End::Drop,
            _ => End::Release,
        };
        self.note(What::Ends(end));
        match end {
            End::Leak => self.guard.leak(),
            End::Release => {
                let (worker, number) = (self.worker, self.number);
                let outcome = self.guard.release().await.map_err(|error| match error {
                    Error::NotHeld { .. } => NOT_HELD.to_owned(),
                    error => text(&error),
                });
                worker.recorder.note(number, What::Released(outcome));
            }
            End::Drop | End::Downgrade => drop(self.guard),
        }
    }
}
