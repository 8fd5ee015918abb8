//! One round of an acquire: a request to each node, and the outcome of their replies.

use std::sync::Arc;
use std::time::Duration;

use super::attempt_guard::AttemptGuard;
use super::grant_clock::GrantClock;
use super::lease::Lease;
use super::owned_lease::GrantedLease;
use super::reply_tally::{ProposalOutcome, ReplyTally, TokenProposals};
use super::validity::ClockSample;
use crate::clock::Moment;
use crate::deployment::NodeSet;
use crate::error::{Context, Error, Operation};
use crate::wire::{Failure, Votes, WaitFor};

/// The outcome of one round.
pub(super) enum AcquireOutcome {
    Granted(GrantedLease),
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
        return AcquireOutcome::Refused(Error::RuntimeEnded { context: context(guard) });
    }
    let (nodes, subscription) = (&client.nodes, client.wakeups.subscription());
    nodes.open().await;
    let mut proposals = TokenProposals::new(nodes.proposal(), attempt.options.fencing);
    let mut granted_before = NodeSet::of([]);
    loop {
        let proposed = proposals.proposed();
        let call = attempt.acquire(guard.entry.as_ref(), proposals.proposal);
        guard.before_send();
        let mut votes = nodes.ask(&call, nodes.all_nodes(), &attempt.in_flight, WaitFor::Majority(0)).await;
        let mut tally = ReplyTally::new(nodes, &attempt, &votes);
        if tally.is_mixed(proposed) {
            votes.wait().await;
            tally = ReplyTally::new(nodes, &attempt, &votes);
        }
        let agreement = proposals.record(&tally);
        guard.record(
            &votes,
            tally.granted.len() >= nodes.deployment.majority() && agreement != ProposalOutcome::NotGranted,
        );
        let granted = NodeSet::of(tally.granted.iter().map(|(node, _)| *node));
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
                // client's queue does not use it up.
                // Not reached without one: a majority granted it.
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
                let is_unanimous = tally.granted.len() == nodes.deployment.nodes;
                let lease = Lease::new(Arc::clone(&attempt), attempt.token(token), sent, until);
                return AcquireOutcome::Granted(GrantedLease { lease, is_unanimous });
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
    let majority = votes.deployment.majority();
    // This many nodes may refuse although a majority grants the lock.
    let may_miss = tally.replies.saturating_sub(majority);
    let decides = |some: usize| some > may_miss && tally.replies >= majority;
    if decides(tally.unexpected.len())
        && let Some(failure) = tally.unexpected.into_iter().next()
    {
        return not_understood(guard, failure);
    }
    if decides(tally.refused.len())
        && let Some(refusal) =
            tally.refused.iter().find_map(|answer| guard.attempt.refusal(*answer, context(guard)))
    {
        if !tally.granted.is_empty() {
            guard.abandon();
        }
        return AcquireOutcome::Refused(refusal);
    }
    if tally.replies < majority {
        if !tally.granted.is_empty() {
            guard.attempt.in_flight.mark_unknown();
        }
        let failure = votes.failure();
        return if failure.is_transient() {
            AcquireOutcome::Failed(failure)
        } else {
            refused(guard, failure)
        };
    }
    // When a majority of the nodes may be free.
    let mut busy = tally.busy;
    busy.sort_by_key(|busy| busy.free_in);
    let free_in = busy.get(majority - 1).or(busy.last()).map(|busy| Duration::from_millis(busy.free_in));
    let by = NodeSet::of(tally.granted.iter().map(|(node, _)| *node));
    match free_in {
        Some(free_in) if by.is_empty() => {
            if let Some(busy) = busy.first() {
                guard.note_queued(busy.time);
            }
            let clock = busy.first().filter(|_| guard.client.nodes.deployment.has_one_clock);
            let clock = clock.map(|busy| {
                let sample = ClockSample { sent: busy.sent, server: busy.time };
                GrantClock { sample, generation: busy.generation, subscription }
            });
            AcquireOutcome::Busy { free_in, clock }
        }
        _ => AcquireOutcome::NoMajority { by, taken_for: free_in.filter(|_| busy.len() >= majority) },
    }
}

/// A reply outside the contract may mean anything, including a grant.
fn not_understood(guard: &mut AttemptGuard, failure: Failure) -> AcquireOutcome {
    let refused = refused(guard, failure);
    guard.abandon();
    refused
}

/// An earlier request of this attempt may have had an effect, even if the last one had none.
fn refused(guard: &AttemptGuard, failure: Failure) -> AcquireOutcome {
    let failure = failure.with_effect_if(guard.attempt.in_flight.is_indeterminate());
    AcquireOutcome::Refused(guard.client.error(failure, context(guard)))
}

fn context(guard: &AttemptGuard) -> Context {
    guard.client.context(Operation::Acquire, &guard.attempt.name)
}
