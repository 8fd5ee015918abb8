//! [`OwnedLease`]: what an attempt was granted, and the duty to release it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::attempt::Attempt;
use super::attempt_guard::AttemptGuard;
use super::client::Client;
use super::cohort::{Cohort, PassedHold};
use super::keeper::OpenCall;
use super::kind::Kind;
use super::lease::Lease;
use super::lease_end::LeaseEnd;
use super::local_queue::LocalFront;
use super::lock_request::LockRequest;
use super::release::{Decision, ReleaseOutcome, release, retry};
use super::turn::Turn;
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::{Context, Error, Operation};
use crate::events::LossReason;
use crate::fencing::FencingToken;
use crate::options::Options;
use crate::traces::{HoldSpan, releasing};
use crate::wire::{Answer, Failure, HoldCount, Tally, Together, Votes, WaitFor};

/// How long a release waits for the last answers to earlier requests of its attempt.
const LAST_ANSWERS: Duration = Duration::from_millis(50);

/// Less than this part of what the server granted is not passed on: the next task would hardly have
/// time for its work, nor the keeper for a renewal.
const LEAST_PART: u32 = 3;

/// A lease and the duty to release it. Dropped, it is released in the background.
pub(crate) struct OwnedLease {
    guard: AttemptGuard,
    lease: Lease,
    pub(super) span: HoldSpan,
    _count: HoldCount,
    /// If tasks of this client compete for the lock.
    cohort: Option<Arc<Cohort>>,
    /// Set while the hold is released or converted. Dropped last, when the keeper has what is left
    /// to do.
    call: Option<OpenCall>,
}

impl OwnedLease {
    pub(super) fn new(mut guard: AttemptGuard, lease: Lease) -> OwnedLease {
        guard.hold(&lease);
        let _count = guard.client.nodes.count_hold();
        let (span, cohort, call) = (HoldSpan::default(), None, None);
        OwnedLease { guard, lease, span, _count, cohort, call }
    }

    /// The server has granted the lock to the task at the front: for a short time, the tasks behind
    /// it may have the hold.
    pub(super) fn begin_cohort(&mut self, request: &LockRequest, front: LocalFront) {
        let turn = request.local_turn();
        if turn.is_zero() {
            return;
        }
        if self.guard.attempt.reserved().is_some() || front.is_contended() {
            let token = self.lease.fencing_token().map_or(0, FencingToken::get);
            request.client.local_queues.note_token(&request.name, token);
        }
        if !front.is_contended() {
            return;
        }
        // From its receipt: a late message must not use the turn up. Its lease, which may be as
        // short as a claim, is not due for renewal in that time.
        let (now, deadline) = (Moment::now(), self.lease.until());
        let until = now + turn.min(deadline.since(now) / 4);
        let least = deadline.since(self.lease.counts_from()) / LEAST_PART;
        let may_pass = self.guard.attempt.reserved().is_some()
            && !request.client.nodes.is_failing(&request.name)
            && deadline.since(now) >= least;
        let cohort = Cohort::begin(&request.client, (until, least), front, may_pass);
        // In this order: a revocation after the question finds the turn.
        if request.client.local_queues.may_be_revoked(&request.name, self.lease.counts_from()) {
            cohort.end();
        }
        self.cohort = Some(cohort);
    }

    /// The hold that another task of this client has passed on; returns the front if there is none.
    pub(super) fn receive(request: &LockRequest, front: LocalFront) -> Result<OwnedLease, LocalFront> {
        let Some(cohort) = Cohort::left_to(&front) else { return Err(front) };
        let PassedHold { guard, until, call } = cohort.receive(request, front)?;
        let attempt = Arc::clone(&guard.attempt);
        attempt.note_idle(false);
        let token = attempt.next_token();
        let now = Moment::now();
        let longest = attempt.options.max_hold.map(|longest| now + attempt.trusted_span(longest));
        let until = longest.map_or(until, |longest| until.min(longest));
        let lease = Lease::new(attempt, token, now, until, None);
        let mut hold = OwnedLease::new(guard, lease);
        drop(call);
        if let Some(token) = token {
            request.client.nodes.accepted(token.get());
        }
        hold.cohort = Some(cohort);
        Ok(hold)
    }

    /// Passes the hold to the task of this client that has waited longest, if one waits and the
    /// time for that is not over.
    fn pass(&mut self) -> bool {
        let Some(cohort) = self.cohort.take() else { return false };
        let (client, attempt) = (&self.guard.client, &self.guard.attempt);
        let Some(front) = cohort.leave() else {
            if cohort.has_time() {
                client.local_queues.note_quick(&attempt.name);
            }
            return false;
        };
        // From here on the next task comes to the front, whatever it finds there.
        let until = self.lease.until();
        let may_pass = cohort.has_time()
            && attempt.may_pass()
            && !attempt.in_flight.is_indeterminate()
            && !client.nodes.is_failing(self.lease.name())
            && !client.keeper.has_ended()
            && !client.keeper.closing.has_begun()
            && !client.keeper.may_be_another_grant(&self.lease);
        if !may_pass || !front.has_waiters_behind() {
            return false;
        }
        let call = self.call.take().unwrap_or_else(|| OpenCall::new(&client.keeper, &attempt.name));
        let end = client.keeper.forget(&self.lease, LeaseEnd::Released);
        if end != LeaseEnd::Released || self.lease.is_renewing() {
            self.call = Some(call); // a close must not find that everything is released
            return false;
        }
        attempt.note_idle(true);
        self.lease.note_passed(true); // before the next task has a lease of this attempt
        match cohort.pass(PassedHold { guard: self.guard.hand_over(), until, call }, front) {
            None => true,
            Some(PassedHold { guard, call, .. }) => {
                self.lease.note_passed(false);
                guard.attempt.note_idle(false);
                self.guard = guard;
                self.call = Some(call);
                false
            }
        }
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(super) fn client(&self) -> &Arc<Client> {
        &self.guard.client
    }

    /// Releases the lease and waits for the reply; or passes the hold to another task of this
    /// client, without a request. The request may leave `together` with others.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub(crate) async fn release(self, together: Option<&Together>) -> Result<(), Error> {
        let attempt = Arc::clone(&self.guard.attempt);
        let what = (&attempt.name, attempt.kind.name, || attempt.owner());
        let client = Arc::clone(&self.guard.client);
        let release = pin!(self.release_untraced(together));
        let traced = pin!(releasing(&attempt.origin.observer, what, release));
        client.run(traced, || client.context(Operation::Release, &attempt.name)).await
    }

    async fn release_untraced(mut self, together: Option<&Together>) -> Result<(), Error> {
        let doubt = self.guard.client.keeper.confirm(&self.lease).await.err();
        if self.pass() {
            self.span.end(LeaseEnd::Released.word());
            return Ok(());
        }
        // Boxed: its state is large, and a guard that passes its hold on does not need it.
        Box::pin(self.release_on_server(together, doubt)).await
    }

    /// `doubt`: the server could not be asked whether the hold is a later grant.
    async fn release_on_server(
        mut self,
        together: Option<&Together>,
        doubt: Option<Failure>,
    ) -> Result<(), Error> {
        let (client, attempt) = (Arc::clone(&self.guard.client), Arc::clone(&self.guard.attempt));
        let context = || client.context(Operation::Release, &attempt.name);
        self.call = Some(OpenCall::new(&client.keeper, &attempt.name));
        let end = client.keeper.forget(&self.lease, LeaseEnd::Released);
        self.span.end(end.word());
        if end != LeaseEnd::Released {
            self.keep_reserved(); // a revocation has given nothing back
            // The server may still hold it: dropped here, it is released in the background.
            return released_after(&self.lease, end, context());
        }
        if !client.nodes.deployment.decides_alone() && !client.nodes.is_failing(&attempt.name) {
            // A majority granted the lock, and the others mostly answer at the same time. A release
            // for good would leave a mark on all nodes, and slow down the next attempts.
            let _late = timeout(LAST_ANSWERS, attempt.in_flight.all_answered()).await;
        }
        let is_final = attempt.in_flight.is_indeterminate();
        let token = self.lease.fencing_token();
        let entry = self.guard.entry.as_ref();
        let released = release(&client, &attempt, token, is_final, entry, together).await;
        let error = |failure: Failure| client.error(failure, context());
        let released = released.map_err(error)?;
        self.guard.leave();
        let unconfirmed =
            |failure| Error::Unconfirmed { cause: Box::new(error(failure)), context: context() };
        match released {
            ReleaseOutcome::Released => doubt.map_or(Ok(()), |failure| Err(unconfirmed(failure))),
            ReleaseOutcome::NotHeld => Err(Error::NotHeld { context: context() }),
            ReleaseOutcome::Unknown(failure) => Err(unconfirmed(failure)),
            ReleaseOutcome::Refused(reply) => Err(client.refusal(&attempt, &reply, context())),
        }
    }

    /// Converts the hold into one of another kind, by a verb that answers as a renewal does. The
    /// old lease ends before the request is sent; the token stays.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background, whether it was converted
    /// or not.
    pub(super) async fn convert(
        mut self,
        verb: &'static str,
        kind: &'static Kind,
        options: Arc<Options>,
    ) -> Result<OwnedLease, Error> {
        self.cohort.take().into_iter().for_each(|cohort| cohort.end());
        let (client, lease) = (Arc::clone(&self.guard.client), self.lease.clone());
        let context = client.context(Operation::Downgrade, lease.name());
        let lost = || lease.lost_error(context.clone());
        let closed = || Error::Closed { context: context.clone() };
        let error = |failure: Failure| client.error(failure, context.clone());
        client.keeper.confirm(&lease).await.map_err(error)?;
        let ended = |end| if end == LeaseEnd::Closed { closed() } else { lost() };
        if let Some(end) = lease.end() {
            return Err(ended(end));
        }
        let trusted_until = lease.until();
        self.call = Some(OpenCall::new(&client.keeper, lease.name()));
        match client.keeper.forget(&lease, LeaseEnd::Released) {
            LeaseEnd::Released => {}
            end => return Err(ended(end)),
        }
        let attempt = Arc::new(self.guard.attempt.converted(kind, options));
        self.guard.attempt = Arc::clone(&attempt);
        let call = attempt.convert(verb);
        let may_arrive_late = attempt.in_flight.is_indeterminate();
        let sent = Moment::now();
        let Decision { answer, reply, votes } = retry(&client, &attempt, &call, true).await.map_err(error)?;
        match answer {
            Answer::Final(1..) => {
                let mut until = sent + attempt.trusted_span(attempt.options.ttl);
                if !votes.deployment.is_majority(votes.tally().positive) {
                    // Silent nodes have the old hold, until it expires there; later renewals extend
                    // the new one.
                    until = until.min(trusted_until);
                }
                if Moment::now() >= until {
                    return Err(lost());
                }
                self.lease = Lease::new(Arc::clone(&attempt), lease.fencing_token(), sent, until, None);
                convert_stragglers(&client, verb, &attempt, self.lease.clone(), &votes, may_arrive_late);
                // Of a quorum, a majority has replied: the others are repaired soon.
                self.guard.is_unanimous = client.nodes.deployment.decides_alone();
                self.guard.hold(&self.lease);
                if client.keeper.closing.has_begun() {
                    return Err(closed()); // dropped here, it is released
                }
                self.call = None;
                Ok(self)
            }
            Answer::Final(0) => Err(Error::Lost { context, reason: Some(LossReason::Revoked) }),
            _ => Err(client.refusal(&attempt, &reply, context.clone())),
        }
    }

    /// A release gives back what was reserved and not used, and this hold ends in another way: no
    /// block is reserved before the server's clock has passed this one.
    fn keep_reserved(&self) {
        if let Some(last) = self.guard.attempt.last_own_token(self.lease.fencing_token()) {
            self.guard.client.local_queues.note_token(self.lease.name(), last);
        }
    }

    /// The lock is never released from now on: it ends with its TTL. Returns how the lease ended,
    /// which may have been before: then what is left of it is released.
    pub(crate) fn leak(&self) -> LeaseEnd {
        self.keep_reserved();
        self.cohort.iter().for_each(|cohort| cohort.end());
        self.guard.client.keeper.forget(&self.lease, LeaseEnd::Leaked)
    }
}

impl Drop for OwnedLease {
    fn drop(&mut self) {
        if self.pass() {
            self.guard.attempt.report_release();
            return;
        }
        let keeper = &self.guard.client.keeper;
        // The guard is dropped after this: until then, a close must not find that everything is
        // released.
        self.call.get_or_insert_with(|| OpenCall::new(keeper, &self.guard.attempt.name));
        match keeper.forget(&self.lease, LeaseEnd::Released) {
            LeaseEnd::Leaked => self.guard.leak(),
            LeaseEnd::Closed => self.guard.leave(), // the keeper has it
            LeaseEnd::Released | LeaseEnd::Lost | LeaseEnd::Revoked => {}
        }
    }
}

/// The result of releasing a guard whose lease had ended. If the client was closed, nothing is left
/// to do: closing reports what could not be released.
pub(super) fn released_after(lease: &Lease, end: LeaseEnd, context: Context) -> Result<(), Error> {
    match end {
        LeaseEnd::Closed => Ok(()),
        _ => Err(lease.lost_error(context)),
    }
}

/// Repeats a conversion on a minority of the nodes until they answer: they would keep the old hold,
/// and renewals would prolong it. If requests of the old kind may arrive `late`, it is repeated
/// until the nodes have the new one.
fn convert_stragglers(
    client: &Arc<Client>,
    verb: &'static str,
    attempt: &Arc<Attempt>,
    lease: Lease,
    votes: &Votes,
    may_arrive_late: bool,
) {
    let not_yet = move |tally: Tally| if may_arrive_late { tally.negative } else { NodeSet::default() };
    let tally = votes.tally();
    let mut left = client.nodes.all_nodes().without(tally.replied()).union(not_yet(tally));
    if left.is_empty() {
        return;
    }
    let (client, attempt) = (Arc::clone(client), Arc::clone(attempt));
    let nodes = Arc::clone(&client.nodes);
    nodes.runtime.spawn(async move {
        while !left.is_empty() && !lease.is_lost() {
            let call = attempt.convert(verb);
            let votes = client.nodes.ask(&call, left, &attempt.in_flight, WaitFor::All).await;
            left = votes.tally().failed.union(not_yet(votes.tally()));
            tokio::time::sleep(client.nodes.limit()).await;
        }
    });
}
