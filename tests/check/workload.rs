//! One use of a lock by one task: request, work, nested holds, and the end. That of several locks
//! in one call stands in `sets.rs`.

use std::time::{Duration, Instant};

use redlatch::{Error, Lease, RwLockWriteGuard};
use tokio::time::{sleep, timeout};

use crate::history::{End, EventKind, FailureReason, Mode, NOT_HELD, Time, Verb};
use crate::plan::TTL;
use crate::sets::use_set;
use crate::support::{AnyGuard, AnyLock, Kind, Random};
use crate::worker::Worker;

/// The names of all locks, and their kinds.
pub const LOCKS: [(&str, Kind); 16] = [
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
    // Only used together with others.
    ("set-1", Kind::Mutex),
    ("set-2", Kind::Mutex),
    ("set-3", Kind::Mutex),
    ("set-4", Kind::Reentrant),
    ("set-5", Kind::Write),
    ("set-6", Kind::Write),
];
/// How many of them are used alone.
const ALONE: usize = 10;

/// How often a holder checks its lease.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The time between a reported loss and the late write. If the lock is in fact lost, another task
/// can acquire it and write in this time, and the late write must be refused.
const LATE_WRITE_DELAY: Duration = Duration::from_millis(150);

/// What a task requests, except for the mode and the verb.
#[derive(Clone, Copy)]
pub struct Request {
    pub name: &'static str,
    /// The outer hold of the same owner.
    pub inside: Option<u64>,
    pub is_renewed: bool,
}

impl Request {
    pub fn wants(&self, mode: Mode, owner: String, verb: Verb) -> EventKind {
        let Request { name, inside, is_renewed } = *self;
        EventKind::Wants { lock: name.to_owned(), mode, owner, verb, inside, is_renewed }
    }
}

/// A granted hold without its guard.
pub struct Hold<'a> {
    worker: &'a Worker,
    pub number: u64,
    request: Request,
    mode: Mode,
    lease: Lease,
    until: Time,
}

/// A hold and its guard.
struct OwnHold<'a> {
    hold: Hold<'a>,
    guard: AnyGuard,
}

pub fn millis(random: &mut Random, from: u64, to: u64) -> Duration {
    Duration::from_micros(from * 1_000 + random.below((to - from) * 1_000))
}

fn mode(lock: &AnyLock) -> Mode {
    if matches!(lock, AnyLock::Read(..) | AnyLock::SharedRead(_)) { Mode::Shared } else { Mode::Exclusive }
}

pub async fn use_lock(worker: &Worker, random: &mut Random) {
    if random.below(worker.sets) == 0 {
        return use_set(worker, random).await;
    }
    // A third of the requests are for one mutex; and while few holds last long, a sixth are writes
    // of one lock that are hardly ever downgraded: tasks of a worker pass these on.
    let (at, is_passed_on) = match random.below(6) {
        0..2 => (0, true),
        2 if worker.linger >= 100 => (6, true),
        _ => (random.below(ALONE as u64), false),
    };
    let (name, kind) = LOCKS[usize::try_from(at).unwrap()];
    let reads = kind == Kind::Write && !is_passed_on && random.below(3) > 0;
    let kind = if reads { Kind::Read } else { kind };
    // Some leases are not renewed, and their holders only wait for `lost()`: a late report of the
    // end would not show otherwise.
    let overstays = random.below(worker.linger) == 0;
    let lock = match kind.lock(if overstays { &worker.unrenewed } else { &worker.locks }, name) {
        AnyLock::Read(lock, _) if random.below(2) == 0 => AnyLock::SharedRead(lock),
        lock => lock,
    };
    let request = Request { name, inside: None, is_renewed: !overstays };
    let Some(OwnHold { mut hold, mut guard }) = acquire(worker, random, &request, &lock).await else {
        return sleep(millis(random, 0, 10)).await;
    };
    let lingers = random.below(worker.linger) == 0;
    let stay = match random.below(200) {
        _ if overstays => 2 * TTL,
        _ if lingers => TTL + millis(random, 0, 1_500),
        1..=30 => millis(random, 5, 40),
        _ => millis(random, 0, 5),
    };
    let mut is_valid =
        if overstays { hold.wait_for_loss(random, stay).await } else { hold.work(random, stay).await };
    let may_nest = matches!(lock, AnyLock::Reentrant(..) | AnyLock::Read(..));
    if is_valid && may_nest && random.below(5) == 0 {
        nest(worker, random, &lock, kind, &mut hold).await;
        is_valid = hold.check_lease();
    }
    if is_valid && let AnyGuard::Write(writing) = guard {
        if random.below(if is_passed_on { 40 } else { 4 }) > 0 {
            guard = AnyGuard::Write(writing);
        } else {
            let Some(reading) = hold.downgrade(writing).await else { return };
            OwnHold { hold, guard } = reading;
            let stay = millis(random, 0, 20);
            hold.work(random, stay).await;
        }
    }
    OwnHold { hold, guard }.end(random).await;
}

pub fn failed(error: &Error) -> FailureReason {
    FailureReason::Failed(text(error))
}

/// Why a release failed.
pub fn unreleased(error: &Error) -> String {
    if matches!(error, Error::NotHeld { .. }) { NOT_HELD.to_owned() } else { text(error) }
}

/// The text of an error and of its sources.
fn text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// Requests a lock with `try_lock`, `lock_timeout`, or `lock`, which it may drop before it returns.
async fn acquire<'a>(
    worker: &'a Worker,
    random: &mut Random,
    request: &Request,
    lock: &AnyLock,
) -> Option<OwnHold<'a>> {
    let (number, note) = (worker.next_hold(), &worker.recorder);
    let owner = match lock {
        AnyLock::Reentrant(_, owner) | AnyLock::Read(_, owner) => owner.to_string(),
        AnyLock::Mutex(_) | AnyLock::SharedRead(_) | AnyLock::Write(_) => number.to_string(),
    };
    let (way, limit) = (random.below(20), millis(random, 5, 1_500));
    let verb = match way {
        0..=2 => Verb::Try,
        3..=6 => Verb::Timeout,
        _ => Verb::Lock,
    };
    note.note(number, request.wants(mode(lock), owner, verb));
    let outcome = match verb {
        Verb::Try => lock.try_lock().await.transpose(),
        Verb::Timeout => Some(lock.lock_timeout(limit).await),
        // The future is dropped at any await: soon after it began, or while it waits.
        _ if request.inside.is_none() && way < 10 => {
            match timeout(limit / if way == 7 { 100 } else { 4 }, lock.lock()).await {
                Ok(outcome) => Some(outcome),
                Err(_) => {
                    note.note(number, EventKind::NotGranted(FailureReason::Cancelled));
                    return None;
                }
            }
        }
        _ => Some(lock.lock().await),
    };
    let why = match outcome {
        Some(Ok(guard)) => return Some(OwnHold::granted(worker, number, request, guard)),
        None => FailureReason::Busy,
        Some(Err(Error::TimedOut { .. })) => FailureReason::TimedOut,
        Some(Err(Error::WouldDeadlock { .. })) => FailureReason::WouldDeadlock,
        Some(Err(error)) => failed(&error),
    };
    note.note(number, EventKind::NotGranted(why));
    None
}

/// Acquires a lock again that the owner already holds. A reader may request an upgrade instead.
async fn nest(worker: &Worker, random: &mut Random, lock: &AnyLock, kind: Kind, outer: &mut Hold<'_>) {
    let request = Request { inside: Some(outer.number), ..outer.request };
    let inner_lock = match lock {
        AnyLock::Read(lock, owner) if random.below(2) == 0 => {
            let number = worker.next_hold();
            let wants = request.wants(Mode::Exclusive, owner.to_string(), Verb::Timeout);
            worker.recorder.note(number, wants);
            let why = match lock.with_owner(owner).write_timeout(millis(random, 1, 300)).await {
                Ok(guard) => {
                    let mut inner = OwnHold::granted(worker, number, &request, AnyGuard::Write(guard));
                    let stay = millis(random, 0, 20);
                    inner.hold.work(random, stay).await;
                    return inner.end(random).await;
                }
                Err(Error::TimedOut { .. }) => FailureReason::TimedOut,
                Err(Error::WouldDeadlock { .. }) => FailureReason::WouldDeadlock,
                Err(error) => failed(&error),
            };
            return worker.recorder.note(number, EventKind::NotGranted(why));
        }
        _ => lock,
    };
    let Some(mut inner) = acquire(worker, random, &request, inner_lock).await else { return };
    let stay = millis(random, 0, 20);
    if inner.hold.work(random, stay).await && kind == Kind::Reentrant {
        inner.count(inner_lock, 2).await;
    }
    inner.end(random).await;
}

impl<'a> Hold<'a> {
    pub fn granted(worker: &'a Worker, number: u64, request: Request, mode: Mode, lease: &Lease) -> Hold<'a> {
        let until = Time::of(lease.valid_until());
        let hold = Hold { worker, number, request, mode, lease: lease.clone(), until };
        hold.note(EventKind::Granted { token: hold.token(), until });
        hold
    }

    fn token(&self) -> u64 {
        self.lease.fencing_token().expect("fencing is on").get()
    }

    pub fn note(&self, what: EventKind) {
        self.worker.recorder.note(self.number, what);
    }

    /// Reads and records whether the lease is valid, and its deadline.
    pub fn check_lease(&mut self) -> bool {
        let lease = &self.lease;
        let (until, now) = (lease.valid_until(), Instant::now());
        if lease.is_lost() {
            return false;
        }
        // The lease may have been renewed between the two reads. One millisecond is allowed, since
        // each `valid_until` reads two clocks and varies a little.
        if now > until && lease.valid_until() < until + Duration::from_millis(1) {
            self.note(EventKind::TrustsTooLong { until: Time::of(until) });
        }
        self.until = Time::of(until);
        self.note(EventKind::Trusts { until: self.until });
        true
    }

    /// Uses the resources for a while, or until the lease is lost. Returns whether it is still
    /// valid.
    pub async fn work(&mut self, random: &mut Random, stay: Duration) -> bool {
        let start = Instant::now();
        loop {
            if !self.check_lease() {
                break;
            }
            if self.mode == Mode::Exclusive {
                let since = Time::now();
                self.worker.resource.add(self.request.name, millis(random, 0, 3)).await;
                self.note(EventKind::Added { since });
            }
            self.write().await;
            let left = stay.saturating_sub(start.elapsed());
            if left.is_zero() {
                return self.check_lease();
            }
            tokio::select! {
                _ = self.lease.lost() => break,
                () = sleep(left.min(CHECK_INTERVAL)) => {}
            }
        }
        self.write_late().await;
        false
    }

    /// Waits for `lost()`, without checking the lease. Returns true if that has not returned within
    /// `longest`, and the lease is still valid.
    async fn wait_for_loss(&mut self, random: &mut Random, longest: Duration) -> bool {
        if !self.work(random, Duration::ZERO).await {
            return false;
        }
        let is_reported = timeout(longest, self.lease.lost()).await.is_ok();
        if !is_reported && self.check_lease() {
            return true;
        }
        self.write_late().await;
        false
    }

    /// Writes after the loss, like a holder that does not check its lease: the resource must refuse
    /// the token if it has seen a larger one.
    async fn write_late(&self) {
        self.note(EventKind::Lost { until: self.until });
        sleep(LATE_WRITE_DELAY).await;
        self.write().await;
    }

    async fn write(&self) {
        let since = Time::now();
        let is_accepted = self.worker.resource.write(self.request.name, self.token(), self.number).await;
        self.note(EventKind::Wrote { since, is_accepted });
    }

    /// Turns a write hold into a read hold.
    async fn downgrade(self, writing: RwLockWriteGuard) -> Option<OwnHold<'a>> {
        let (worker, number) = (self.worker, self.worker.next_hold());
        self.note(EventKind::Ends(End::Downgrade));
        let request = Request { inside: Some(self.number), ..self.request };
        worker.recorder.note(number, request.wants(Mode::Shared, self.number.to_string(), Verb::Downgrade));
        match writing.downgrade().await {
            Ok(reading) => Some(OwnHold::granted(worker, number, &request, AnyGuard::Read(reading))),
            Err(error) => {
                worker.recorder.note(number, EventKind::NotGranted(failed(&error)));
                None
            }
        }
    }
}

impl<'a> OwnHold<'a> {
    fn granted(worker: &'a Worker, number: u64, request: &Request, guard: AnyGuard) -> OwnHold<'a> {
        let mode = if matches!(guard, AnyGuard::Read(_)) { Mode::Shared } else { Mode::Exclusive };
        let hold = Hold::granted(worker, number, *request, mode, guard.lease());
        OwnHold { hold, guard }
    }

    /// Records the owner's count on the server, if the lease is valid before and after.
    async fn count(&mut self, lock: &AnyLock, expected: u64) {
        let AnyGuard::Reentrant(guard) = &self.guard else { return };
        let owner = guard.owner().to_string();
        let Ok(seen) = lock.inspect().await else { return };
        let seen = seen.holders.iter().find(|holder| holder.owner == owner).map_or(0, |holder| holder.count);
        if self.hold.check_lease() {
            self.hold.note(EventKind::Counted { expected, seen });
        }
    }

    /// Releases, drops or leaks the guard.
    async fn end(self, random: &mut Random) {
        let end = match random.below(100) {
            0 => End::Leak,
            1..30 => End::Drop,
            _ => End::Release,
        };
        self.hold.note(EventKind::Ends(end));
        match end {
            End::Leak => self.guard.leak(),
            End::Release => {
                let outcome = self.guard.release().await.map_err(|error| unreleased(&error));
                self.hold.note(EventKind::Released(outcome));
            }
            End::Drop | End::Downgrade => drop(self.guard),
        }
    }
}
