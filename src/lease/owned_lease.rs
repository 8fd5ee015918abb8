//! [`AttemptGuard`], an attempt that is answered for, and [`OwnedLease`], what it became.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::attempt::QueueEntry;
use super::close::OpenCall;
use super::release::{Released, release};
use super::{Attempt, Client, Kind, Lease, LeaseEnd, ScriptSet, trace};
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::options::Options;
use crate::wire::{Answer, Call, Failure, HoldCount, NodeSet, Reply, Votes, WaitFor};

/// How often an exchange is sent before it fails.
const TRIES: u32 = 3;

/// Answers for an attempt from before its first request: whatever it gets is given back, by
/// [`OwnedLease::release`] or, when this is dropped, by the keeper.
pub(super) struct AttemptGuard {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    lease: Option<(Lease, HoldCount)>,
    /// How the attempt may be queued, if it may.
    entry: Option<QueueEntry>,
    /// The latest request is the first that may queue it.
    queues_first: bool,
    /// It was queued, once.
    queued: bool,
    /// A request has left, and what came of it was not looked at.
    awaits_reply: bool,
    /// A request has left, ever.
    asked: bool,
    /// There is nothing to give back, or it is meant to stay.
    disarmed: AtomicBool,
    /// While it is released or exchanged. Dropped last, when the keeper has what is left to do.
    call: Option<OpenCall>,
}

impl AttemptGuard {
    pub(super) fn new(client: &Arc<Client>, attempt: Attempt) -> AttemptGuard {
        AttemptGuard {
            client: Arc::clone(client),
            attempt: Arc::new(attempt),
            lease: None,
            entry: None,
            queues_first: false,
            queued: false,
            awaits_reply: false,
            asked: false,
            disarmed: AtomicBool::new(false),
            call: None,
        }
    }

    /// To be called before a request leaves: from then on it must be undone.
    pub(super) fn before_send(&mut self, entry: Option<&QueueEntry>) {
        (self.awaits_reply, self.asked) = (true, true);
        self.queued |= entry.is_some();
        self.queues_first = self.entry.is_none();
        if self.queues_first {
            self.entry = entry.cloned();
        }
    }

    /// To be called with what came of the request. What is `decided` is a lease, which all nodes are to give back.
    pub(super) fn record(&mut self, votes: &Votes, decided: bool) {
        self.awaits_reply = false;
        // Else, whoever has not answered may yet grant it, and nobody would know.
        if !decided && votes.rest.is_some() {
            self.attempt.in_flight.mark_unknown();
        }
    }

    /// The attempt was granted, by all nodes or by a majority: from now on its lease is renewed.
    pub(super) fn granted(mut self, lease: Lease, unanimous: bool) -> OwnedLease {
        // What was granted has left the queue; only a late delivery could put it back.
        if unanimous && !self.attempt.in_flight.is_indeterminate() {
            self.entry = None;
        }
        self.client.keeper.keep(&lease, unanimous, self.entry.clone());
        if self.attempt.kind.reenters {
            self.client.local_queues.announce_grant(&self.attempt.name, &self.attempt.owner);
        }
        self.lease = Some((lease.clone(), self.client.nodes.count_hold()));
        OwnedLease { guard: self, lease }
    }

    /// Notes when the attempt was queued first, on the only server's clock.
    pub(super) fn note_queued(&self, time: u64) {
        if self.entry.is_some() && self.client.nodes.single().is_some() {
            self.attempt.note_queued(time);
        }
    }

    /// Gives back what was granted in vain.
    pub(super) fn abandon(self) {
        self.attempt.in_flight.mark_unknown();
    }

    /// Gives back what some nodes have granted, and goes on waiting on the others. False if that may happen later: then
    /// it might take away what this attempt is granted until then, and the attempt must not go on.
    ///
    /// # Cancel safety
    /// Dropped, they are still answered for.
    pub(super) async fn release_partial_grant(&mut self, by: NodeSet) -> bool {
        self.awaits_reply = true;
        let (call, in_flight) = (self.attempt.release(false, None), Arc::default());
        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;
        self.awaits_reply = false;
        !in_flight.is_indeterminate()
    }

    /// Forgets a request that was given up before it was written: there is nothing to undo.
    fn withdraw(&mut self) {
        if self.awaits_reply && self.attempt.in_flight.is_withdrawn() {
            self.awaits_reply = false;
            if self.queues_first {
                (self.entry, self.queued) = (None, false);
            }
        }
    }

    /// Nothing is wanted any more: a server that hands the lock over to it all the same, as one does that was set back, gets
    /// it back at once.
    fn expect_late_notifications(&self) {
        if self.queued {
            let (keeper, attempt) = (Arc::clone(&self.client.keeper), Arc::clone(&self.attempt));
            let for_good = self.client.nodes.resend();
            self.client.wakeups.expect_late_notifications(attempt.id, move |node| {
                keeper.abandon(Arc::clone(&attempt), for_good, None, NodeSet::of([node]));
            });
        }
    }

    fn disarm(&self) {
        self.disarmed.store(true, Ordering::Relaxed);
    }

    fn is_disarmed(&self) -> bool {
        self.disarmed.load(Ordering::Relaxed)
    }

    /// Whether the server must forget the attempt and refuse what may yet arrive of it.
    fn ends_for_good(&self) -> bool {
        self.awaits_reply || self.attempt.in_flight.is_indeterminate() || self.client.nodes.resend()
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.withdraw();
        if self.lease.is_some() && self.call.is_none() {
            // Between the keeper's two steps below, a close must not find that all is released.
            self.call = Some(OpenCall::new(&self.client.keeper, &self.attempt.name));
        }
        let end = self.lease.as_ref().map(|(lease, _)| self.client.keeper.forget(lease, LeaseEnd::Released));
        // Sent again unseen, it may yet be granted after "busy" was answered.
        let resent = self.asked && self.client.nodes.resend();
        let may_have =
            self.lease.is_some() || self.awaits_reply || resent || self.attempt.in_flight.is_indeterminate();
        // Where the client was closed, the keeper has it already.
        let nothing_to_undo = end == Some(LeaseEnd::Closed) || !may_have && self.entry.is_none();
        if !self.is_disarmed() {
            self.expect_late_notifications();
        }
        if !self.is_disarmed() && !nothing_to_undo {
            let for_good = self.ends_for_good();
            let everyone = self.client.nodes.everyone();
            self.client.keeper.abandon(Arc::clone(&self.attempt), for_good, self.entry.take(), everyone);
        }
    }
}

/// A lease and the duty to give it back. Dropped, it is given back in the background.
pub(crate) struct OwnedLease {
    guard: AttemptGuard,
    lease: Lease,
}

impl OwnedLease {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(crate) fn options(&self) -> &Options {
        &self.guard.attempt.options
    }

    /// Gives the lease back and waits for the answer.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub(crate) async fn release(self) -> Result<(), Error> {
        let attempt = Arc::clone(&self.guard.attempt);
        trace::releasing(&attempt, pin!(self.release_untraced())).await
    }

    async fn release_untraced(mut self) -> Result<(), Error> {
        let (client, attempt) = (Arc::clone(&self.guard.client), Arc::clone(&self.guard.attempt));
        let context = client.context(Operation::Release, &attempt.name);
        if let Some(end) = self.lease.ended() {
            // The server may keep it for a while yet: dropped here, it is given back in the background.
            return released_after(end, context);
        }
        self.guard.call = Some(OpenCall::new(&client.keeper, &attempt.name));
        let end = client.keeper.forget(&self.lease, LeaseEnd::Released);
        if end != LeaseEnd::Released {
            return released_after(end, context); // it has ended in between
        }
        let for_good = self.guard.ends_for_good();
        let token = self.lease.fencing_token();
        let released = release(&client, &attempt, token, for_good, self.guard.entry.as_ref()).await;
        let error = |failure: Failure| client.error(failure, context.clone());
        let released = released.map_err(error)?;
        self.guard.expect_late_notifications();
        self.guard.disarm();
        match released {
            Released::Yes => Ok(()),
            Released::NotHeld => Err(Error::NotHeld { context }),
            Released::Unknown(failure) => {
                Err(Error::Unconfirmed { cause: Box::new(error(failure)), context })
            }
            Released::Refused(answer, reply) => {
                Err(attempt.refusal(answer, context.clone()).unwrap_or_else(|| error(reply.unexpected())))
            }
        }
    }

    /// Makes the hold one of another kind, by a script that answers as a renewal does. The old lease is over
    /// before the request leaves; the token stays.
    ///
    /// # Cancel safety
    /// Dropped, the hold is given back in the background, of whichever kind it is by then.
    pub(crate) async fn convert(
        mut self,
        scripts: &'static ScriptSet,
        kind: &'static Kind,
        options: Options,
    ) -> Result<OwnedLease, Error> {
        let (client, lease) = (Arc::clone(&self.guard.client), self.lease.clone());
        let context = client.context(Operation::Downgrade, lease.name());
        let lost = || Error::Lost { context: context.clone() };
        let closed = || Error::Closed { context: context.clone() };
        let error = |failure: Failure| client.error(failure, context.clone());
        let ended = |end| if end == LeaseEnd::Closed { closed() } else { lost() };
        if let Some(end) = lease.ended() {
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
        let call = attempt.convert(scripts);
        let late = attempt.in_flight.is_indeterminate();
        let sent = Moment::now();
        let Decision { answer, reply, votes } = retry(&client, &attempt, &call).await.map_err(error)?;
        match answer {
            Answer::Final(1..) => {
                let mut until = sent + attempt.trusted(attempt.options.ttl);
                if votes.positives().len() < votes.majority() {
                    // Silent nodes keep it as it was, for no longer than they did: until renewals
                    // have made it more.
                    until = until.min(trusted_until);
                }
                if Moment::now() >= until {
                    return Err(lost());
                }
                let lease = Lease::new(Arc::clone(&attempt), lease.fencing_token(), sent, until);
                convert_stragglers(&client, scripts, &attempt, lease.clone(), &votes, late);
                let mut held = self.guard.granted(lease, client.nodes.single().is_some());
                if client.keeper.closing.has_begun() {
                    return Err(closed()); // dropped here, it is given back
                }
                held.guard.call = None;
                Ok(held)
            }
            Answer::Final(0) => Err(lost()),
            Answer::Final(answer) => {
                Err(attempt.refusal(answer, context.clone()).unwrap_or_else(|| error(reply.unexpected())))
            }
            Answer::Busy(..) | Answer::TooLow(_) => Err(error(reply.unexpected())),
        }
    }

    /// From now on this is never released: once it is dropped, it ends with its ttl.
    pub(crate) fn leak(&self) {
        self.guard.disarm();
        self.guard.client.keeper.forget(&self.lease, LeaseEnd::Leaked);
    }
}

/// What a guard's release comes to whose lease has ended before: if the client was closed, there is
/// nothing to be done, and closing reports what could not be released.
pub(super) fn released_after(end: LeaseEnd, context: Context) -> Result<(), Error> {
    match end {
        LeaseEnd::Closed => Ok(()),
        _ => Err(Error::Lost { context }),
    }
}

/// What a request came to that needs a majority.
pub(crate) struct Decision {
    pub(crate) answer: Answer,
    /// One of those who answered like this.
    pub(crate) reply: Reply,
    votes: Votes,
}

/// Sends a request to all nodes, and finds out what more than half of them say, "yes" being a
/// positive number. If it `trusts_silence`, as for a lease that is valid, nodes that do not answer
/// while more than half do may have held it.
pub(crate) async fn decide(
    client: &Client,
    attempt: &Attempt,
    call: &Call<'_>,
    trusts_silence: bool,
) -> Result<Decision, Failure> {
    let nodes = &client.nodes;
    let mut votes = nodes.ask(call, nodes.everyone(), &attempt.in_flight, WaitFor::Majority(1)).await;
    votes.doubt_negatives();
    let (mut yes, mut no) = (Vec::new(), Vec::new());
    for (index, (_, outcome)) in votes.cast.iter().enumerate() {
        match outcome.as_ref().map(Reply::answer) {
            Ok(Ok(answer @ Answer::Final(1..))) => yes.push((index, answer)),
            Ok(Ok(answer)) => no.push((index, answer)),
            Ok(Err(failure)) if votes.of() == 1 => return Err(failure),
            _ => {}
        }
    }
    let some_did = !yes.is_empty();
    let (silent, answered) = (votes.missing().len(), votes.of() - votes.missing().len());
    let may_stand = trusts_silence && some_did && answered >= votes.majority();
    let decided = if yes.len() >= votes.majority() || may_stand && yes.len() + silent >= votes.majority() {
        yes.into_iter().max_by_key(|(_, answer)| if let Answer::Final(number) = answer { *number } else { 0 })
    } else if no.len() > votes.of() - votes.majority() {
        no.into_iter().next() // whatever the others would say
    } else {
        None
    };
    match decided {
        Some((index, answer)) => match votes.cast[index].1.clone() {
            Ok(reply) => Ok(Decision { answer, reply, votes }),
            Err(failure) => Err(failure),
        },
        // Where it was done, a second delivery may find nothing to do.
        None if some_did => Err(votes.failure().with_effect()),
        None => Err(votes.failure()),
    }
}

/// Sends a request again where that may help.
async fn retry(client: &Client, attempt: &Attempt, call: &Call<'_>) -> Result<Decision, Failure> {
    let (mut tries_left, mut unknown) = (TRIES, false);
    loop {
        tries_left -= 1;
        match decide(client, attempt, call, true).await {
            Err(failure) if failure.is_transient() && tries_left > 0 => unknown |= failure.is_indeterminate(),
            outcome => return outcome.map_err(|failure| failure.with_effect_if(unknown)),
        }
    }
}

/// Repeats an exchange on a minority of the nodes that have not answered, until they do: they would keep the hold as
/// what it was, and renewals would prolong it. If what it was may arrive there `late`, until they have it.
fn convert_stragglers(
    client: &Arc<Client>,
    scripts: &'static ScriptSet,
    attempt: &Arc<Attempt>,
    lease: Lease,
    votes: &Votes,
    late: bool,
) {
    let not_yet = move |votes: &Votes| if late { votes.negatives() } else { NodeSet::of([]) };
    let mut left = votes.missing().union(not_yet(votes));
    if left.is_empty() {
        return;
    }
    let (client, attempt) = (Arc::clone(client), Arc::clone(attempt));
    let nodes = Arc::clone(&client.nodes);
    nodes.spawn(async move {
        while !left.is_empty() && !lease.is_lost() {
            let call = attempt.convert(scripts);
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
