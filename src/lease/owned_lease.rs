//! What an attempt was granted, and the duty to release it: [`AttemptGuard`] from before the first
//! request on, [`OwnedLease`] once there is a lease.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use super::attempt::{Attempt, QueueEntry};
use super::client::Client;
use super::close::OpenCall;
use super::kind::Kind;
use super::lease::{Lease, LeaseEnd};
use super::lock_request::LockRequest;
use super::release::{Decision, ReleaseOutcome, release, retry};
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::{Context, Error, Operation};
use crate::fencing::FencingToken;
use crate::options::Options;
use crate::traces::{Grant, HoldSpan, releasing};
use crate::wire::{Answer, Failure, HoldCount, Votes, WaitFor};

/// How long a release waits for the last answers to earlier requests of its attempt.
const LAST_ANSWERS: Duration = Duration::from_millis(50);

/// Makes sure, from before the first request, that everything an attempt is granted is released: by
/// its owner or, when this is dropped, by the keeper.
pub(super) struct AttemptGuard {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    pub(super) lease: Option<(Lease, HoldCount)>,
    /// How the attempt may be queued, if it may be.
    pub(super) entry: Option<QueueEntry>,
    /// The latest request is the first one that may queue it.
    may_queue_first: bool,
    /// It was queued at some time.
    has_queued: bool,
    /// A request was sent, and its replies are not recorded yet.
    pub(super) is_awaiting_reply: bool,
    /// Nothing is left to release, or the hold is meant to stay.
    is_disarmed: AtomicBool,
    /// Set while the hold is released or converted. Dropped last, when the keeper has what is left
    /// to do.
    pub(super) call: Option<OpenCall>,
}

impl AttemptGuard {
    pub(super) fn new(request: &LockRequest) -> AttemptGuard {
        AttemptGuard {
            client: Arc::clone(&request.client),
            attempt: Arc::new(request.attempt()),
            lease: None,
            entry: None,
            may_queue_first: false,
            has_queued: false,
            is_awaiting_reply: false,
            is_disarmed: AtomicBool::new(false),
            call: None,
        }
    }

    /// To be called before a request is sent: from then on it must be undone.
    pub(super) fn before_send(&mut self, entry: Option<&QueueEntry>) {
        self.is_awaiting_reply = true;
        self.has_queued |= entry.is_some();
        self.may_queue_first = self.entry.is_none();
        if self.may_queue_first {
            self.entry = entry.cloned();
        }
    }

    /// Records the replies to a request. If a majority has decided, the attempt has a lease, which
    /// is released on all nodes.
    pub(super) fn record(&mut self, votes: &Votes, has_decided: bool) {
        self.is_awaiting_reply = false;
        // A node that has not answered may still grant the lock, unnoticed.
        if !has_decided && votes.rest.is_some() {
            self.attempt.in_flight.mark_unknown();
        }
    }

    /// Records when the attempt was queued first, on the clock of the only server.
    pub(super) fn note_queued(&self, time: u64) {
        if self.entry.is_some() && self.client.nodes.deployment.decides_alone() {
            self.attempt.note_queued(time);
        }
    }

    /// The attempt was granted, by all nodes or by a majority: from now on its lease is renewed.
    pub(super) fn granted(mut self, lease: Lease, is_unanimous: bool) -> OwnedLease {
        // A granted attempt has left the queue; only a late delivery could queue it again.
        if is_unanimous && !self.attempt.in_flight.is_indeterminate() {
            self.entry = None;
        }
        self.client.keeper.keep(&lease, is_unanimous, self.entry.clone());
        if self.attempt.kind.has_owner {
            self.client.local_queues.announce_grant(&self.attempt.name, &self.attempt.owner());
        }
        self.lease = Some((lease.clone(), self.client.nodes.count_hold()));
        OwnedLease { guard: self, lease, hold: HoldSpan::default() }
    }

    /// Releases a grant that cannot be used.
    pub(super) fn abandon(self) {
        self.attempt.in_flight.mark_unknown();
    }

    /// Releases what some nodes granted and waits on. Returns false if the release may run later:
    /// it could revoke what the attempt is granted until then, so the attempt must not continue.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the keeper releases the grants.
    pub(super) async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        self.is_awaiting_reply = true;
        let (call, in_flight) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;
        self.is_awaiting_reply = false;
        !in_flight.is_indeterminate()
    }

    /// Forgets a request that was dropped before it was written: there is nothing to undo.
    pub(super) fn withdraw(&mut self) {
        if self.is_awaiting_reply && self.attempt.in_flight.is_withdrawn() {
            self.is_awaiting_reply = false;
            if self.may_queue_first {
                (self.entry, self.has_queued) = (None, false);
            }
        }
    }

    /// Releases the lock at once if a server grants it to this attempt later. A server that was set
    /// back to an earlier state does that.
    pub(super) fn expect_late_notifications(&self) {
        if self.has_queued {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            self.client.wakeups.expect_late_notifications(attempt.id, move |node| {
                keeper.abandon(Arc::clone(&attempt), false, None, NodeSet::of([node]));
            });
        }
    }

    pub(super) fn disarm(&self) {
        self.is_disarmed.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_disarmed(&self) -> bool {
        self.is_disarmed.load(Ordering::Relaxed)
    }

    /// Whether the server must forget the attempt and refuse requests of it that arrive later.
    pub(super) fn ends_for_good(&self) -> bool {
        self.is_awaiting_reply || self.attempt.in_flight.is_indeterminate()
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.withdraw();
        if self.lease.is_some() && self.call.is_none() {
            // Between the two calls of the keeper below, a close must not find that everything is
            // released.
            self.call = Some(OpenCall::new(&self.client.keeper, &self.attempt.name));
        }
        let end = self.lease.as_ref().map(|(lease, _)| self.client.keeper.forget(lease, LeaseEnd::Released));
        let may_have = self.lease.is_some() || self.ends_for_good();
        // If the client was closed, the keeper already has it.
        let has_nothing_to_undo = end == Some(LeaseEnd::Closed) || !may_have && self.entry.is_none();
        if !self.is_disarmed() {
            self.expect_late_notifications();
        }
        if !self.is_disarmed() && !has_nothing_to_undo {
            let is_final = self.ends_for_good();
            let all_nodes = self.client.nodes.all_nodes();
            self.client.keeper.abandon(Arc::clone(&self.attempt), is_final, self.entry.take(), all_nodes);
        }
    }
}

/// A lease and the duty to release it. Dropped, it is released in the background.
pub(crate) struct OwnedLease {
    guard: AttemptGuard,
    lease: Lease,
    hold: HoldSpan,
}

impl Grant for OwnedLease {
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)> {
        Some((self.lease.fencing_token(), &mut self.hold))
    }
}

impl Grant for Option<OwnedLease> {
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)> {
        self.as_mut()?.granted()
    }
}

impl OwnedLease {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(crate) fn options(&self) -> &Options {
        &self.guard.attempt.options
    }

    /// Releases the lease and waits for the reply.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the release continues in the background.
    pub(crate) async fn release(self) -> Result<(), Error> {
        let attempt = Arc::clone(&self.guard.attempt);
        let what = (&attempt.name, attempt.kind.name, || attempt.owner());
        releasing(attempt.observer(), what, pin!(self.release_untraced())).await
    }

    async fn release_untraced(mut self) -> Result<(), Error> {
        let (client, attempt) = (Arc::clone(&self.guard.client), Arc::clone(&self.guard.attempt));
        let context = || client.context(Operation::Release, &attempt.name);
        self.guard.call = Some(OpenCall::new(&client.keeper, &attempt.name));
        let end = client.keeper.forget(&self.lease, LeaseEnd::Released);
        self.hold.end(end.word());
        if end != LeaseEnd::Released {
            // The server may still hold it: dropped here, it is released in the background.
            return released_after(end, context());
        }
        if !client.nodes.deployment.decides_alone() && !client.nodes.is_failing() {
            // A majority granted the lock, and the others mostly answer at the same time. A release
            // for good would leave a mark on all nodes, and slow down the next attempts.
            let _late = timeout(LAST_ANSWERS, attempt.in_flight.all_answered()).await;
        }
        let is_final = self.guard.ends_for_good();
        let token = self.lease.fencing_token();
        let released = release(&client, &attempt, token, is_final, self.guard.entry.as_ref()).await;
        let error = |failure: Failure| client.error(failure, context());
        let released = released.map_err(error)?;
        self.guard.expect_late_notifications();
        self.guard.disarm();
        match released {
            ReleaseOutcome::Released => Ok(()),
            ReleaseOutcome::NotHeld => Err(Error::NotHeld { context: context() }),
            ReleaseOutcome::Unknown(failure) => {
                Err(Error::Unconfirmed { cause: Box::new(error(failure)), context: context() })
            }
            ReleaseOutcome::Refused(answer, reply) => {
                Err(attempt.refusal(answer, context()).unwrap_or_else(|| error(reply.unexpected())))
            }
        }
    }

    /// Converts the hold into one of another kind, by a verb that answers as a renewal does. The
    /// old lease ends before the request is sent; the token stays.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, the hold is released in the background, whether it was converted
    /// or not.
    pub(crate) async fn convert(
        mut self,
        verb: &'static str,
        kind: &'static Kind,
        options: Options,
        operation: Operation,
    ) -> Result<OwnedLease, Error> {
        let (client, lease) = (Arc::clone(&self.guard.client), self.lease.clone());
        let context = client.context(operation, lease.name());
        let lost = || Error::Lost { context: context.clone() };
        let closed = || Error::Closed { context: context.clone() };
        let error = |failure: Failure| client.error(failure, context.clone());
        let ended = |end| if end == LeaseEnd::Closed { closed() } else { lost() };
        if let Some(end) = lease.end() {
            return Err(ended(end));
        }
        let trusted_until = lease.until();
        self.guard.call = Some(OpenCall::new(&client.keeper, lease.name()));
        match client.keeper.forget(&lease, LeaseEnd::Released) {
            LeaseEnd::Released => {}
            end => return Err(ended(end)),
        }
        let attempt = Arc::new(self.guard.attempt.converted(kind, Arc::new(options)));
        self.guard.attempt = Arc::clone(&attempt);
        let call = attempt.convert(verb);
        let may_arrive_late = attempt.in_flight.is_indeterminate();
        let sent = Moment::now();
        let Decision { answer, reply, votes } = retry(&client, &attempt, &call).await.map_err(error)?;
        match answer {
            Answer::Final(1..) => {
                let mut until = sent + attempt.trusted_span(attempt.options.ttl);
                if votes.positives().len() < votes.deployment.majority() {
                    // Silent nodes have the old hold, until it expires there; later renewals extend
                    // the new one.
                    until = until.min(trusted_until);
                }
                if Moment::now() >= until {
                    return Err(lost());
                }
                let lease = Lease::new(Arc::clone(&attempt), lease.fencing_token(), sent, until);
                convert_stragglers(&client, verb, &attempt, lease.clone(), &votes, may_arrive_late);
                let span = std::mem::take(&mut self.hold);
                let mut hold = self.guard.granted(lease, client.nodes.deployment.decides_alone());
                hold.hold = span; // the hold goes on
                if client.keeper.closing.has_begun() {
                    return Err(closed()); // dropped here, it is released
                }
                hold.guard.call = None;
                Ok(hold)
            }
            Answer::Final(0) => Err(lost()),
            Answer::Final(answer) => {
                Err(attempt.refusal(answer, context.clone()).unwrap_or_else(|| error(reply.unexpected())))
            }
            Answer::Busy(..) | Answer::TooLow(_) => Err(error(reply.unexpected())),
        }
    }

    /// The lock is never released from now on: it ends with its TTL.
    pub(crate) fn leak(&self) {
        self.guard.disarm();
        self.guard.client.keeper.forget(&self.lease, LeaseEnd::Leaked);
    }
}

/// The result of releasing a guard whose lease had ended. If the client was closed, nothing is left
/// to do: closing reports what could not be released.
pub(super) fn released_after(end: LeaseEnd, context: Context) -> Result<(), Error> {
    match end {
        LeaseEnd::Closed => Ok(()),
        _ => Err(Error::Lost { context }),
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
    let not_yet = move |votes: &Votes| if may_arrive_late { votes.negatives() } else { NodeSet::of([]) };
    let mut left = votes.missing().union(not_yet(votes));
    if left.is_empty() {
        return;
    }
    let (client, attempt) = (Arc::clone(client), Arc::clone(attempt));
    let nodes = Arc::clone(&client.nodes);
    nodes.spawn(async move {
        while !left.is_empty() && !lease.is_lost() {
            let call = attempt.convert(verb);
            let votes = client.nodes.ask(&call, left, &attempt.in_flight, WaitFor::All).await;
            left = votes.failed().union(not_yet(&votes));
            tokio::time::sleep(client.nodes.limit()).await;
        }
    });
}

impl fmt::Debug for OwnedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}
