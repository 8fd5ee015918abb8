//! [`Lease`]: a lock that was granted, until a deadline that renewals move.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::attempt::Attempt;
use super::kind::Kind;
use super::lease_end::LeaseEnd;
use super::turn::Caller;
use super::validity::Deadline;
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::events::LossReason;
use crate::fencing::FencingToken;
use crate::name::Name;
use crate::options::{Options, Renewal};

/// The longest time for which a sleeping task may miss a loss, if the machine slept as well: timers
/// stand still then, deadlines do not.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The least that a script takes as a TTL.
const SHORTEST_RENEWAL: Duration = Duration::from_millis(1);

/// A lock that was granted, until a deadline that renewals move.
///
/// A guard's [`lease()`](crate::MutexGuard::lease) returns it; a clone may be given to the work
/// that the lock protects. It holds nothing itself: dropping it releases nothing. Every clone
/// reports [how the lease ended](Lease::end).
///
/// **What it promises**: while [`is_lost`](Lease::is_lost) is false, no other client has a lease on
/// the lock that excludes this one. The deadline counts from before the request was sent, less the
/// [drift](Options::drift), on a clock that keeps counting while the machine sleeps.
///
/// **What it does not**: checking and then acting is never one step. A process may be paused
/// between the two for longer than the lease lasts.
///
/// The lease also depends on the server keeping its data; the guide
/// [promises](crate::guide::promises) lists what makes a server forget a lock. The [fencing
/// token](Lease::fencing_token) covers both.
#[derive(Clone)]
pub struct Lease(pub(super) Arc<LeaseInner>);

pub(super) struct LeaseInner {
    attempt: Arc<Attempt>,
    caller: Caller,
    token: Option<FencingToken>,
    /// The time from which the deadline counts.
    pub(super) counts_from: Moment,
    deadline: Deadline,
    /// The lease of the hold, if this is that of one of its members: its deadline counts, which the
    /// keeper moves.
    pub(super) of_hold: Option<Lease>,
    pub(super) noted: LeaseNotes,
}

/// What becomes known of a lease after its grant.
#[derive(Default)]
pub(super) struct LeaseNotes {
    /// Its place among the keeper's leases. Read and written under the schedule's lock.
    place: AtomicUsize,
    /// Written once: the first of several ends decides.
    end: OnceLock<LeaseEnd>,
    /// Why it was lost, as was found first.
    pub(super) loss_reason: OnceLock<LossReason>,
    pub(super) notify: Notify,
    /// Its loss has been logged.
    pub(super) is_reported: AtomicBool,
    /// Its hold has been measured.
    pub(super) is_measured: AtomicBool,
    /// A renewal was sent in time, and none is confirmed since.
    pub(super) is_renewing: AtomicBool,
    /// Another task of this client has the hold, or may have it.
    is_passed: AtomicBool,
    /// Its members have leases of their own.
    pub(super) is_shared: AtomicBool,
    /// A member has leaked the hold: it is never released.
    is_leaked: AtomicBool,
}

impl Lease {
    pub(super) fn new(
        attempt: Arc<Attempt>,
        token: Option<FencingToken>,
        counts_from: Moment,
        until: Moment,
        of_hold: Option<Lease>,
    ) -> Lease {
        let (caller, deadline) = (Caller::current(), Deadline::new(until));
        let noted = LeaseNotes::default();
        Lease(Arc::new(LeaseInner { attempt, caller, token, counts_from, deadline, of_hold, noted }))
    }

    /// The lease of a grant, by when its request was sent. `None`: it has ended before the reply
    /// came.
    pub(super) fn granted(
        attempt: &Arc<Attempt>,
        token: Option<FencingToken>,
        sent: Moment,
    ) -> Option<Lease> {
        let until = sent + attempt.trusted_span(attempt.options.ttl);
        (Moment::now() < until).then(|| Lease::new(Arc::clone(attempt), token, sent, until, None))
    }

    /// The lease of one more member of this hold.
    pub(super) fn of_member(&self) -> Lease {
        let (attempt, hold) = (Arc::clone(&self.0.attempt), Some(self.clone()));
        Lease::new(attempt, self.0.token, Moment::now(), self.until(), hold)
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.attempt().name
    }

    /// Returns the fencing token of this lease.
    ///
    /// On a lock with one holder it is larger than the tokens of all earlier leases. A lease that
    /// others may hold beside it, such as that of a reader, has at least the token of the last
    /// exclusive one. It is `None` if [fencing](Options::fencing) is off or, on one server, was off
    /// for the outer hold of a nested one.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.0.token
    }

    /// Returns until when the lease is valid, as far as it has been renewed; a time that is not
    /// in the future once it has ended.
    pub fn valid_until(&self) -> Instant {
        self.deadline().map_or_else(Instant::now, Moment::to_instant)
    }

    /// Returns whether the lease has [ended](Lease::end): its deadline has passed, the server
    /// said that it ended, or it was released. Once true, always true. It sends no request.
    pub fn is_lost(&self) -> bool {
        self.end().is_some()
    }

    /// Returns how the lease ended; `None` while it is valid. It sends no request.
    ///
    /// ```no_run
    /// # fn run(lease: &redlatch::Lease) {
    /// use redlatch::LeaseEnd;
    /// match lease.end() {
    ///     None => println!("valid"),
    ///     Some(LeaseEnd::Released | LeaseEnd::Closed) => println!("the work was finished"),
    ///     Some(end) => println!("another client may have the lock: {end:?}"),
    /// }
    /// # }
    /// ```
    pub fn end(&self) -> Option<LeaseEnd> {
        let decided = |end| *self.0.noted.end.get_or_init(|| end);
        let ended = || match &self.0.of_hold {
            Some(hold) => hold.end().map(decided),
            None => self.0.deadline.has_passed().then(|| decided(LeaseEnd::Lost)),
        };
        self.0.noted.end.get().copied().or_else(ended)
    }

    /// Waits until the lease has ended, and returns how: a task that has a clone can distinguish a
    /// lease that was [released](LeaseEnd::Released) from one that was [lost](LeaseEnd::Lost).
    ///
    /// # Cancel safety
    /// Cancel safe: it can be dropped and called again.
    pub async fn lost(&self) -> LeaseEnd {
        if Handle::try_current().is_ok() {
            return self.wait_for_end().await;
        }
        // The caller has no timers. Once the client's runtime has ended, nothing renews the lease.
        let (lease, mut waiting) = (self.clone(), JoinSet::new()); // aborted if this is dropped
        waiting.spawn_on(async move { lease.wait_for_end().await }, &self.attempt().origin.runtime);
        let end = waiting.join_next().await.and_then(Result::ok);
        end.unwrap_or_else(|| self.end_as(LeaseEnd::Lost))
    }

    async fn wait_for_end(&self) -> LeaseEnd {
        loop {
            let notified = self.0.noted.notify.notified();
            let hold = self.0.of_hold.as_ref().map_or(&self.0.noted.notify, |hold| &hold.0.noted.notify);
            let hold_notified = hold.notified();
            tokio::pin!(notified, hold_notified);
            notified.as_mut().enable();
            hold_notified.as_mut().enable();
            if let Some(end) = self.end() {
                return end;
            }
            let Some(until) = self.deadline() else { continue };
            // One tick more than is left: a timer may fire early by its resolution.
            let left = until.since(Moment::now()) + Duration::from_millis(1);
            tokio::select! {
                () = notified => {}
                () = hold_notified => {}
                () = sleep(left.min(LONGEST_SLEEP)) => {}
            }
        }
    }

    /// Runs `work` while the lease is valid.
    ///
    /// ```no_run
    /// # async fn run(guard: redlatch::MutexGuard) -> Result<(), redlatch::Error> {
    /// let rows = guard.lease().while_held(async { 42 }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// If the lease ends first, `work` is dropped at its current await. What it has begun
    /// elsewhere, as in `spawn_blocking`, continues: the fencing token is for that.
    ///
    /// # Errors
    /// - [`Error::Lost`]: the lease was [lost](LeaseEnd::Lost) or [revoked](LeaseEnd::Revoked).
    /// - [`Error::Released`]: its guard was [released](LeaseEnd::Released) or
    ///   [leaked](LeaseEnd::Leaked).
    /// - [`Error::Closed`]: the client was [closed](crate::Locks::close).
    ///
    /// # Cancel safety
    /// Cancel safe: dropping it drops `work`.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        tokio::select! {
            biased;
            end = self.lost() => Err(self.error(Operation::Hold, end)),
            output = work => self.end().map_or(Ok(output), |end| Err(self.error(Operation::Hold, end))),
        }
    }

    /// The operation, lock and server, for errors.
    pub(crate) fn context(&self, operation: Operation) -> Context {
        self.attempt().origin.on_server(Context::of(operation, self.name()))
    }

    /// Moves the deadline to what a renewal promises that was sent at `sent`, and never beyond the
    /// longest hold. False if it is too late. It wakes no task, so it may be called under a lock;
    /// [`wake_waiters`](Lease::wake_waiters) follows.
    ///
    /// A is to renew for the last 100 ms of its longest hold, but sends that request 50 ms late.
    /// The next one is for what is left then, and makes the key expire where the longest hold ends:
    /// the deadline of the first one would be 50 ms after that, while B may acquire the lock.
    pub(super) fn extend(&self, sent: Moment, ttl: Duration) -> bool {
        let until = sent + self.attempt().trusted_span(ttl);
        let until = self.longest_until().map_or(until, |longest| until.min(longest));
        let extended = self.0.deadline.extend(until);
        if extended {
            self.0.noted.is_renewing.store(false, Ordering::Relaxed);
        }
        extended
    }

    /// Those that wait for its end see the new deadline. Not under a lock: a waker may poll the
    /// task, which may use this client.
    pub(super) fn wake_waiters(&self) {
        self.0.noted.notify.notify_waiters();
    }

    /// A renewal is sent: if it is in time, a loss is not the fault of this process. Called under
    /// the lock of the schedule, before the lease has ended: its hold is not passed on then, since
    /// the next task would not learn of the reply.
    pub(super) fn note_renewing(&self) {
        if !self.is_lost() {
            self.0.noted.is_renewing.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a renewal was sent of which the reply is not known.
    pub(super) fn is_renewing(&self) -> bool {
        self.0.noted.is_renewing.load(Ordering::Relaxed)
    }

    /// Another task of this client has the hold.
    pub(super) fn note_passed(&self, is_passed: bool) {
        self.0.noted.is_passed.store(is_passed, Ordering::Relaxed);
    }

    pub(crate) fn is_passed(&self) -> bool {
        self.0.noted.is_passed.load(Ordering::Relaxed)
    }

    /// Ends the lease, and returns how it ended: it may have ended before. It wakes no task, so it
    /// may be called under a lock; [`announce`](Lease::announce) follows.
    pub(super) fn end_as(&self, how: LeaseEnd) -> LeaseEnd {
        let end = self.end().unwrap_or_else(|| *self.0.noted.end.get_or_init(|| how));
        self.0.deadline.end();
        end
    }

    /// Its members have leases of their own.
    pub(super) fn note_shared(&self) {
        self.0.noted.is_shared.store(true, Ordering::Relaxed);
    }

    pub(super) fn note_leaked(&self) {
        self.0.noted.is_leaked.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_leaked(&self) -> bool {
        self.0.noted.is_leaked.load(Ordering::Relaxed)
    }

    /// Its deadline; now, if it has ended.
    pub(super) fn until(&self) -> Moment {
        self.deadline().unwrap_or_else(Moment::now)
    }

    /// Its deadline; `None` if it has ended.
    fn deadline(&self) -> Option<Moment> {
        match &self.0.of_hold {
            Some(hold) => hold.deadline().filter(|_| self.0.noted.end.get().is_none()),
            None => self.0.deadline.get(),
        }
    }

    /// For how long to renew it next; `None` if it is not renewed (any more). One that is never
    /// renewed is due only to ask about it: it keeps its end.
    pub(super) fn next_ttl(&self, now: Moment) -> Option<Duration> {
        let options = &self.attempt().options;
        if options.renewal == Renewal::Never {
            let left = self.until().since(now);
            return Some(left).filter(|left| !self.attempt().kind.has_owner && *left >= SHORTEST_RENEWAL);
        }
        self.renewable_ttl(now)
    }

    /// For how long a renewal extends it; `None` once it has reached its longest hold.
    pub(super) fn renewable_ttl(&self, now: Moment) -> Option<Duration> {
        let (options, held) = (self.options(), now.since(self.0.counts_from));
        let left = options.max_hold.map_or(options.ttl, |longest| longest.saturating_sub(held));
        let ttl = options.ttl.min(left);
        (ttl >= SHORTEST_RENEWAL).then_some(ttl)
    }

    /// For how long it is valid after a confirmation: at first, a grant by a message is one for its
    /// claim only.
    pub(super) fn span(&self) -> Duration {
        self.until().since(self.0.counts_from).min(self.options().ttl)
    }

    /// Where its longest hold ends.
    pub(super) fn longest_until(&self) -> Option<Moment> {
        let attempt = &self.0.attempt;
        attempt.options.max_hold.map(|longest| self.0.counts_from + attempt.trusted_span(longest))
    }

    /// Whether this task or thread was granted it.
    pub(super) fn is_of(&self, caller: Caller) -> bool {
        self.0.caller == caller && !self.0.noted.is_shared.load(Ordering::Relaxed)
    }

    /// Whether both are the same lease, not only of the same lock.
    pub(super) fn is_same(&self, other: &Lease) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The owner as the server knows it.
    pub(crate) fn owner(&self) -> Cow<'_, str> {
        self.attempt().owner()
    }

    pub(crate) fn kind(&self) -> &'static Kind {
        self.attempt().kind
    }

    pub(super) fn attempt(&self) -> &Arc<Attempt> {
        &self.0.attempt
    }

    /// Its place among the keeper's leases, if it was ever there.
    pub(super) fn place(&self) -> usize {
        self.0.noted.place.load(Ordering::Relaxed)
    }

    pub(super) fn note_place(&self, place: usize) {
        self.0.noted.place.store(place, Ordering::Relaxed);
    }

    /// The time from which its deadline counts.
    pub(super) fn counts_from(&self) -> Moment {
        self.0.counts_from
    }

    pub(super) fn options(&self) -> &Options {
        &self.attempt().options
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("kind", &self.kind().name)
            .field("fencing_token", &self.0.token)
            .field("end", &self.end())
            .finish()
    }
}
