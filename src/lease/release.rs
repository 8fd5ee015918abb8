//! [`decide`]: a request that takes effect if a majority of the nodes says so. [`release`]: one
//! that is repeated until the outcome of the first request is known on each node.

use std::sync::Arc;

use super::attempt::{Attempt, QueueEntry};
use super::client::Client;
use super::schedule::Abandoned;
use crate::deployment::{Deployment, NodeSet};
use crate::fencing::FencingToken;
use crate::wire::{Answer, Call, Failure, Reply, Stragglers, Together, Votes, WaitFor, replies_of};

/// How often a request is sent: then [`retry`] fails, and the keeper takes over a release.
const REQUEST_TRIES: u32 = 3;

/// The outcome of a request that needs a majority.
pub(crate) struct Decision {
    pub(crate) answer: Answer,
    /// One of the replies with this answer.
    pub(crate) reply: Reply,
    pub(super) votes: Votes,
}

/// Sends a request to all nodes and finds the answer of a majority; a positive number means "yes".
/// A node that gets it twice must give the first answer again: `release` without `force` does not.
/// With `may_trust_silence`, as for a valid lease, nodes that do not respond may have held the
/// lock, provided that a majority responds.
pub(crate) async fn decide(
    client: &Client,
    attempt: &Attempt,
    call: &Arc<Call>,
    may_trust_silence: bool,
) -> Result<Decision, Failure> {
    let (nodes, deployment) = (&client.nodes, client.nodes.deployment);
    let votes = nodes.ask(call, nodes.all_nodes(), &attempt.in_flight, WaitFor::Majority(1)).await;
    let tally = votes.tally();
    let (yes, replied) = (tally.positive, tally.replied());
    let no = replied.without(yes).without(tally.unexpected);
    let has_positive = !yes.is_empty();
    let may_count_silent = may_trust_silence && has_positive && deployment.is_majority(replied);
    let may_be = if may_count_silent { yes.union(nodes.all_nodes().without(replied)) } else { yes };
    let decided = if deployment.is_majority(may_be) {
        replies_of(&votes.received, yes).max_by_key(|(_, reply)| reply.expected())
    } else if deployment.is_blocked_by(no) {
        replies_of(&votes.received, no).next() // the other nodes cannot change that
    } else {
        None
    };
    match decided.map(|(_, reply)| reply.clone()) {
        Some(reply) => Ok(Decision { answer: reply.answer()?, reply, votes }),
        None => Err(votes.failure().with_effect_if(has_positive)),
    }
}

/// Sends a request again while that may help.
pub(super) async fn retry(
    client: &Client,
    attempt: &Attempt,
    call: &Arc<Call>,
    may_trust_silence: bool,
) -> Result<Decision, Failure> {
    let (mut tries_left, mut may_have_run) = (REQUEST_TRIES, false);
    loop {
        tries_left -= 1;
        match decide(client, attempt, call, may_trust_silence).await {
            Err(failure) if failure.is_transient() && tries_left > 0 => {
                may_have_run |= failure.is_indeterminate()
            }
            outcome => return outcome.map_err(|failure| failure.with_effect_if(may_have_run)),
        }
    }
}

/// The outcome of a release.
pub(super) enum ReleaseOutcome {
    Released,
    /// The lock was not held any more.
    NotHeld,
    /// The reply to an earlier request was lost with this failure, and the lock has had another
    /// holder since.
    Unknown(Failure),
    Refused(Reply),
}

/// Each node by its first answer, received or inferred.
#[derive(Default)]
struct ReleaseTally {
    released: NodeSet,
    not_held: NodeSet,
    /// It had nothing to release after a request whose reply was lost: that one may have released
    /// the lock.
    unknown: NodeSet,
    refused: NodeSet,
    /// The first refusal.
    refusal: Option<Reply>,
    /// A request to it had no reply, and may have run.
    unanswered: NodeSet,
    why: Option<Failure>,
}

impl ReleaseTally {
    fn responders(&self) -> NodeSet {
        self.released.union(self.not_held).union(self.unknown).union(self.refused)
    }

    /// Adds the replies. A request that ends the attempt for good is answered alike
    /// when it is delivered again.
    fn add(&mut self, votes: &Votes, is_final: bool) {
        for (node, outcome) in &votes.received {
            if let Some(failure) = Reply::unknown_effect(outcome) {
                self.unanswered = self.unanswered.with(*node);
                self.why.get_or_insert_with(|| failure.clone());
            }
        }
        let tally = votes.tally();
        let may_have_released = if is_final { NodeSet::default() } else { self.unanswered };
        self.released = self.released.union(tally.positive);
        self.unknown = self.unknown.union(tally.negative.and(may_have_released));
        self.not_held = self.not_held.union(tally.negative.without(may_have_released));
        self.refused = self.refused.union(tally.refused);
        if let Some((_, reply)) = replies_of(&votes.received, tally.refused).next() {
            self.refusal.get_or_insert_with(|| reply.clone());
        }
    }

    /// The outcome, if the answers decide. A silent node may have held the lock: the lease was
    /// valid, so a majority held it, unless too many nodes deny it.
    fn outcome(&self, deployment: Deployment, silent: NodeSet) -> Option<ReleaseOutcome> {
        let is_heard = deployment.is_majority(self.responders());
        let may_be = if is_heard { self.released.union(silent) } else { self.released };
        if deployment.is_majority(may_be) {
            Some(ReleaseOutcome::Released)
        } else if deployment.is_blocked_by(self.not_held) {
            Some(ReleaseOutcome::NotHeld)
        } else {
            let refusal = self.refusal.clone().filter(|_| deployment.is_blocked_by(self.refused));
            refusal.map(ReleaseOutcome::Refused)
        }
    }
}

/// Releases a hold whose lease was valid when the first request was sent. That request may leave
/// together with those for other locks. The keeper releases what a minority of the nodes may still
/// hold.
///
/// If a reply is lost, the next request finds nothing to release. If no larger token was granted,
/// the lock has had no other holder since: the first request released it.
///
/// # Cancel safety
/// Requests that were sent continue, and the attempt's in-flight record includes them.
pub(super) async fn release(
    client: &Arc<Client>,
    attempt: &Arc<Attempt>,
    token: Option<FencingToken>,
    is_final: bool,
    entry: Option<&QueueEntry>,
    together: Option<&Together>,
) -> Result<ReleaseOutcome, Failure> {
    let nodes = &client.nodes;
    // Made anew for each try: what is left of the least time to hold the lock counts from its
    // arrival.
    let call = || attempt.release(is_final, entry);
    let (mut tally, mut tries_left) = (ReleaseTally::default(), REQUEST_TRIES);
    let mut votes = nodes.ask_together(together, &call(), &attempt.in_flight, WaitFor::Majority(1)).await;
    let rest = votes.rest.take();
    loop {
        tries_left -= 1;
        tally.add(&votes, is_final);
        check_for_later_holders(client, attempt, token, &mut tally).await;
        let silent = nodes.all_nodes().without(tally.responders());
        if let Some(released) = tally.outcome(nodes.deployment, silent) {
            release_stragglers(client, attempt, entry.cloned(), silent, rest);
            return Ok(released);
        }
        let failure = votes.failure();
        if tries_left == 0 || silent.is_empty() || !failure.is_transient() {
            let may_be = tally.released.union(tally.unknown).union(silent);
            let may_be_released = !tally.unknown.is_empty() && nodes.deployment.is_majority(may_be);
            return match tally.why {
                Some(why) if may_be_released => {
                    release_stragglers(client, attempt, entry.cloned(), silent, None);
                    Ok(ReleaseOutcome::Unknown(why))
                }
                _ => Err(failure.with_effect_if(!tally.unanswered.is_empty())),
            };
        }
        votes = nodes.ask(&call(), silent, &attempt.in_flight, WaitFor::All).await;
    }
}

/// A node has had no other holder since if its last token is that of this lease: what was reserved
/// beside it has been given back by then.
async fn check_for_later_holders(
    client: &Client,
    attempt: &Attempt,
    token: Option<FencingToken>,
    tally: &mut ReleaseTally,
) {
    let Some(token) = token.filter(|_| !tally.unknown.is_empty()) else { return };
    let call = attempt.inspect();
    let votes = client.nodes.ask(&call, tally.unknown, &Arc::default(), WaitFor::All).await;
    for (node, outcome) in votes.received {
        let texts = outcome.and_then(|reply| reply.texts()).unwrap_or_default();
        if texts.get(1).and_then(|last| last.parse().ok()).is_some_and(|last: u64| last == token.get()) {
            tally.unknown = tally.unknown.without(NodeSet::of([node]));
            tally.released = tally.released.with(node);
        }
    }
}

/// Has the keeper release the hold on nodes that have not answered, or not yet.
fn release_stragglers(
    client: &Arc<Client>,
    attempt: &Arc<Attempt>,
    entry: Option<QueueEntry>,
    silent: NodeSet,
    rest: Option<Stragglers>,
) {
    let (owned, attempt) = (Arc::clone(client), Arc::clone(attempt));
    let abandon = move |nodes: NodeSet| {
        if !nodes.is_empty() {
            let has_lease = false; // a majority has released it
            owned.keeper.abandon(Abandoned { attempt, has_lease, is_final: true, entry, nodes });
        }
    };
    let Some(mut rest) = rest else { return abandon(silent) };
    client.nodes.runtime.spawn(async move {
        let mut silent = silent;
        while let Some(votes) = rest.next().await {
            let answered = votes.iter().filter(|(_, outcome)| outcome.is_ok());
            silent = silent.without(NodeSet::of(answered.map(|(node, _)| *node)));
        }
        abandon(silent);
    });
}
