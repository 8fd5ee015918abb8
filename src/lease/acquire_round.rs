//! One round of an acquire: a request to each node, and the outcome of their replies.

use std::sync::Arc;
use std::time::Duration;

use super::attempt_guard::AttemptGuard;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::reply_tally::{Busy, ProposalOutcome, ReplyTally, TokenProposals};
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::Error;
use crate::wire::{Failure, Reply, Tally, Votes, WaitFor, replies_of};

/// The outcome of one round.
pub(super) enum AcquireOutcome {
    Granted(Lease),
    Busy {
        free_in: Duration,
        /// If there is one clock.
        clock: Option<GrantClock>,
    },
    /// Some nodes granted the lock, but no majority; the others refused, or granted it to other
    /// attempts.
    NoMajority {
        by: NodeSet,
        /// If other attempts hold a majority: for how much longer, at most.
        taken_for: Option<Duration>,
    },
    /// Granted, but the reply took longer than the lease lasts. The grant is released.
    Expired,
    /// A later round may succeed.
    Failed(Failure),
    Refused(Error),
}

/// Sends one request to each node, and another one if the nodes do not agree on a token.
///
/// # Cancel safety
/// Dropped, the attempt is abandoned: what it was granted is released at once.
pub(super) async fn acquire_round(guard: &mut AttemptGuard) -> AcquireOutcome {
    let (client, attempt) = (Arc::clone(&guard.client), Arc::clone(&guard.attempt));
    if client.keeper.has_ended() {
        return AcquireOutcome::Refused(Error::RuntimeEnded { context: guard.context() });
    }
    let (nodes, subscription) = (&client.nodes, client.wakeups.subscription());
    nodes.open().await;
    let mut proposals = TokenProposals::new(nodes.proposal(), attempt.options.fencing);
    let mut granted_before = NodeSet::default();
    loop {
        let proposed = proposals.proposed();
        let call = attempt.acquire(guard.entry.as_ref(), proposals.proposal);
        guard.before_send();
        let mut votes = nodes.ask(&call, nodes.all_nodes(), &attempt.in_flight, WaitFor::Majority(0)).await;
        let mut tally = ReplyTally::new(nodes, &attempt, &votes);
        if tally.is_undecided(proposed) {
            nodes.wait_for_rest(&mut votes, &call).await;
            tally = ReplyTally::new(nodes, &attempt, &votes);
        }
        let agreement = proposals.record(&tally);
        guard.record(&votes, tally.has_majority() && agreement != ProposalOutcome::NotGranted);
        let granted = tally.nodes.positive;
        match agreement {
            ProposalOutcome::Again => granted_before = granted_before.union(granted),
            ProposalOutcome::NotGranted => {
                // A node may grant one proposal, and fail or refuse at the next.
                if !granted_before.without(granted).is_empty() {
                    attempt.in_flight.mark_unknown();
                }
                return not_granted(guard, tally, votes, subscription);
            }
            ProposalOutcome::Granted(token) => {
                // The lease counts from when the first granted request was written: the time in the
                // client's queue does not use it up. A majority granted it, so there is one.
                let Some(sent) = tally.granted_since else {
                    return not_granted(guard, tally, votes, subscription);
                };
                let until = sent + attempt.trusted_span(attempt.options.ttl);
                if Moment::now() >= until {
                    guard.abandon();
                    return AcquireOutcome::Expired;
                }
                if proposed == Some(token) {
                    nodes.accepted(token);
                }
                guard.granted = granted;
                let lease = Lease::new(Arc::clone(&attempt), attempt.token(token), sent, until, None);
                return AcquireOutcome::Granted(lease);
            }
        }
    }
}

fn not_granted(
    guard: &mut AttemptGuard,
    tally: ReplyTally,
    votes: Votes,
    subscription: Option<u64>,
) -> AcquireOutcome {
    let (deployment, majority) = (votes.deployment, votes.deployment.majority());
    let Tally { positive: by, refused, unexpected, .. } = tally.nodes;
    let replied = tally.nodes.replied();
    // Whether without these nodes, the others that replied cannot grant the lock.
    let is_decided_by =
        |some: NodeSet| deployment.is_majority(replied) && !deployment.is_majority(replied.without(some));
    if is_decided_by(unexpected)
        && let Some((_, reply)) = replies_of(&votes.received, unexpected).next()
    {
        // A reply outside the contract may mean anything, including a grant.
        let error = guard.error(reply.unexpected());
        guard.abandon();
        return AcquireOutcome::Refused(error);
    }
    let refusal = |(_, reply): (usize, &Reply)| guard.attempt.refusal_in(reply, guard.context());
    if is_decided_by(refused)
        && let Some(refusal) = replies_of(&votes.received, refused).find_map(refusal)
    {
        if !by.is_empty() {
            guard.abandon();
        }
        return AcquireOutcome::Refused(refusal);
    }
    if !deployment.is_majority(replied) {
        if !by.is_empty() {
            guard.attempt.in_flight.mark_unknown();
        }
        return match votes.failure() {
            failure if failure.is_transient() => AcquireOutcome::Failed(failure),
            failure => AcquireOutcome::Refused(guard.error(failure)),
        };
    }
    // When a majority of the nodes may be free.
    let mut busy = tally.busy;
    busy.sort_by_key(|busy| busy.free_in);
    let free_in = busy.get(majority - 1).or(busy.last()).map(|busy| busy.free_in);
    match (free_in, busy.first()) {
        (Some(free_in), Some(Busy { sample, generation, .. })) if by.is_empty() => {
            if guard.entry.is_some() && votes.deployment.decides_alone() {
                guard.attempt.note_queued(sample.server);
            }
            let clock = GrantClock { sample: *sample, generation: *generation, subscription };
            AcquireOutcome::Busy { free_in, clock: votes.deployment.has_one_clock.then_some(clock) }
        }
        _ => AcquireOutcome::NoMajority { by, taken_for: free_in.filter(|_| busy.len() >= majority) },
    }
}
