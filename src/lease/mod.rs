//! What every held lock is: a lease with a deadline, waited for, renewed and given back in one way.
//!
//! Nothing here names a kind of lock: a [`Kind`] is data, and what differs is in its scripts.

mod acquire;
mod ask;
mod attempt;
mod book;
mod client;
mod held;
mod keeper;
mod seat;
mod shared;
mod target;
mod turnstile;
mod validity;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;

pub(crate) use acquire::{acquire, acquire_within, try_acquire};
pub(crate) use attempt::Attempt;
pub(crate) use client::Client;
pub(crate) use held::{Held, settle};
pub(crate) use shared::Shared;
pub(crate) use target::Target;

use crate::clock::Moment;
use crate::error::Error;
use crate::fencing::FencingToken;
use crate::name::Name;
use crate::options::{Options, Renewal};
use crate::wire::Script;
use validity::Deadline;

/// A kind of lock: its name, its scripts, and what the wait loop must know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// What its key holds, for people.
    pub(crate) found: &'static str,
    /// An owner that holds it may enter again, past everybody who waits.
    pub(crate) reenters: bool,
    /// Its requests name an owner.
    pub(crate) has_owner: bool,
    pub(crate) queue: Queue,
    /// How many may hold it or wait for it at a time, where several may.
    pub(crate) crowd: Option<fn(&Options) -> u32>,
    pub(crate) acquire: ScriptSet,
    pub(crate) renew: Script,
    pub(crate) release: Script,
    pub(crate) force: Script,
    pub(crate) inspect: Script,
}

/// A verb that has a script of its own for quorums.
pub(crate) struct ScriptSet {
    /// For one server, servers behind sentinels, and a cluster.
    pub(crate) server: Script,
    /// The client proposes the token.
    pub(crate) quorum: Script,
}

impl ScriptSet {
    fn pick(&'static self, for_quorum: bool) -> &'static Script {
        if for_quorum { &self.quorum } else { &self.server }
    }
}

/// Where the tasks of one client wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Inside the client, where one of them waits in Redis for all.
    Inside,
    /// Inside, unless there is an owner: he may hold what those before him wait for.
    InsideUnlessOwned,
    /// Each in Redis, since one release may let in all of them.
    InRedis,
}

/// The longest that a loss goes unnoticed by those who sleep, should the machine have slept as well:
/// timers stand still then, deadlines do not.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// A lock that was granted, until a deadline that renewals move.
///
/// From [`lease()`](crate::MutexGuard::lease) of a guard; a clone may be given to the work that the lock
/// protects. It holds nothing itself: dropping it releases nothing, and it says "lost" once the guard
/// has been released.
///
/// **What it promises**: while [`is_lost`](Lease::is_lost) is false, nobody else has a lease on the lock
/// that excludes this one. The deadline counts from before the request left, less the
/// [drift](Options::drift), on a clock that keeps counting while the machine sleeps.
///
/// **What it does not**: checking and then acting is never one step. A process may be paused between
/// the two for longer than the lease lasts. It also rests on the server keeping what it granted; the
/// README says what can make it forget. The [fencing token](Lease::fencing_token) covers both.
#[derive(Clone)]
pub struct Lease(Arc<Granted>);

struct Granted {
    attempt: Arc<Attempt>,
    entry: book::Entry,
    token: Option<FencingToken>,
    at: Moment,
    deadline: Deadline,
    bell: Notify,
}

impl Lease {
    fn new(attempt: Arc<Attempt>, token: Option<FencingToken>, at: Moment, until: Moment) -> Lease {
        let deadline = Deadline::new(until);
        let entry = book::Entry::default();
        Lease(Arc::new(Granted { attempt, entry, token, at, deadline, bell: Notify::new() }))
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.0.attempt.name
    }

    /// The number of this lease, larger than those of all earlier leases on this lock, or, of one that others may
    /// hold beside it, at least that of the last lease which nobody held beside it; `None` if
    /// [fencing](Options::fencing) is off, or, on one server, was for the hold that this one is nested in.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.0.token
    }

    /// Until when the lease may be trusted, as far as it has been renewed. In the past once it is lost.
    pub fn valid_until(&self) -> Instant {
        self.0.deadline.get().map_or_else(Instant::now, Moment::to_instant)
    }

    /// Whether the lease may not be trusted any more: its deadline has passed, the server said that it
    /// ended, or it was released. Once true, always true. Asks nobody.
    pub fn is_lost(&self) -> bool {
        self.0.deadline.has_passed()
    }

    /// Waits until the lease may not be trusted any more.
    ///
    /// # Cancel safety
    /// Safe to drop and to call again.
    pub async fn lost(&self) {
        loop {
            let told = self.0.bell.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            let Some(until) = self.0.deadline.get() else { return };
            if self.is_lost() {
                return;
            }
            // A tick more than is left: a timer may fire early by its resolution.
            let left = until.since(Moment::now()) + Duration::from_millis(1);
            tokio::select! {
                () = told => {}
                () = sleep(left.min(LONGEST_SLEEP)) => {}
            }
        }
    }

    /// Runs `work` for as long as the lease may be trusted.
    ///
    /// ```no_run
    /// # async fn run(guard: redlatch::MutexGuard) -> Result<(), redlatch::Error> {
    /// let rows = guard.lease().while_held(async { 42 }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`] if the lease ended first. `work` is then dropped at the await where it stands,
    /// and what it had begun elsewhere goes on: that is what the fencing token is for.
    ///
    /// # Cancel safety
    /// Dropping it drops `work`.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        let lost = || Error::Lost { name: self.name().clone() };
        tokio::select! {
            biased;
            () = self.lost() => Err(lost()),
            output = work => if self.is_lost() { Err(lost()) } else { Ok(output) },
        }
    }

    /// Moves the deadline to what a renewal that left at `sent` promises. False if it is too late.
    fn extend(&self, sent: Moment, ttl: Duration) -> bool {
        let extended = self.0.deadline.extend(sent + self.0.attempt.trusted(ttl));
        self.0.bell.notify_waiters();
        extended
    }

    /// Ends the trust, for whatever reason.
    fn end(&self) {
        self.0.deadline.end();
        self.0.bell.notify_waiters();
    }

    /// Its deadline; now, if it is over.
    fn until(&self) -> Moment {
        self.0.deadline.get().unwrap_or_else(Moment::now)
    }

    /// For how long to renew next; `None` if it is not renewed (any more).
    fn next_ttl(&self, now: Moment) -> Option<Duration> {
        let options = &self.0.attempt.options;
        if options.renewal == Renewal::Never {
            return None;
        }
        let left =
            options.max_hold.map_or(options.ttl, |longest| longest.saturating_sub(now.since(self.0.at)));
        let ttl = options.ttl.min(left);
        (ttl >= Duration::from_millis(1)).then_some(ttl)
    }

    /// As the server knows it.
    pub(crate) fn owner(&self) -> &str {
        &self.0.attempt.owner
    }

    fn options(&self) -> &Options {
        &self.0.attempt.options
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("kind", &self.0.attempt.kind.name)
            .field("fencing_token", &self.0.token)
            .field("lost", &self.is_lost())
            .finish()
    }
}
