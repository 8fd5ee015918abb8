//! [`ReplyTally`]: the nodes' replies to an acquire, by their meaning. [`TokenProposals`]: the
//! token that they are to agree on.

use std::time::Duration;

use super::attempt::Attempt;
use super::validity::ClockSample;
use super::verbs::Proposal;
use crate::clock::Moment;
use crate::deployment::Deployment;
use crate::options::Fencing;
use crate::wire::{Answer, Nodes, Tally, Votes, replies_of};

/// How often an attempt proposes a token in a row. Other attempts may propose larger ones
/// meanwhile.
const PROPOSALS: u32 = 4;

/// By how much a proposal exceeds a token that was accepted, in microseconds.
const PROPOSAL_STEP: u64 = 1_000;

/// The replies to one request, by their meaning.
pub(super) struct ReplyTally {
    pub(super) nodes: Tally,
    deployment: Deployment,
    /// Those that were granted.
    tokens: Vec<u64>,
    /// When the first of the granted requests was written.
    pub(super) granted_since: Option<Moment>,
    pub(super) busy: Vec<Busy>,
    /// The largest token that a refusal named.
    highest: u64,
}

pub(super) struct Busy {
    pub(super) free_in: Duration,
    pub(super) sample: ClockSample,
    pub(super) generation: u64,
}

impl ReplyTally {
    pub(super) fn new(nodes: &Nodes, attempt: &Attempt, votes: &Votes) -> ReplyTally {
        let sets = Tally::of(&votes.received, 0, |refusal| attempt.may_refuse(refusal));
        let mut tally = ReplyTally::empty(nodes.deployment, sets);
        for (node, reply) in replies_of(&votes.received, sets.replied()) {
            match reply.expected() {
                Some(Answer::Final(token @ 0..)) => {
                    tally.tokens.push(token.unsigned_abs());
                    let earlier = tally.granted_since.map_or(reply.sent, |sent| sent.min(reply.sent));
                    tally.granted_since = Some(earlier);
                }
                Some(Answer::Busy(free_in, time)) => {
                    let sample = ClockSample { sent: reply.sent, server: time.unsigned_abs() };
                    nodes.node(node).observe(sample.server);
                    let free_in = Duration::from_millis(free_in.unsigned_abs());
                    tally.busy.push(Busy { free_in, sample, generation: reply.generation });
                }
                Some(Answer::TooLow(highest)) => tally.highest = tally.highest.max(highest.unsigned_abs()),
                Some(Answer::Final(_)) | None => {}
            }
        }
        tally
    }

    fn empty(deployment: Deployment, nodes: Tally) -> ReplyTally {
        ReplyTally {
            nodes,
            deployment,
            tokens: Vec::new(),
            granted_since: None,
            busy: Vec::new(),
            highest: 0,
        }
    }

    pub(super) fn has_majority(&self) -> bool {
        self.deployment.is_majority(self.nodes.positive)
    }

    /// A token above the proposed one that is to be sent to all nodes: that of a majority, or else
    /// the largest that a granting node knows, as the token of the lock (`is_nested`). Several
    /// clients may hold the lock then: this client may use that token once a majority knows it, and
    /// none of them finds it too far ahead of its clock.
    fn known_elsewhere(&self, proposal: Option<u64>, is_nested: bool) -> Option<Proposal> {
        let proposed = proposal.filter(|_| self.has_majority())?;
        let largest = self.tokens.iter().copied().max()?;
        let (token, is_nested) = self.agreed().map_or((largest, true), |token| (token, is_nested));
        Some(Proposal { token, is_nested }).filter(|known| known.token > proposed)
    }

    /// The token that a majority names, so that every later grant has a larger one: the proposed
    /// one, that of the outer hold, or that of other readers.
    fn agreed(&self) -> Option<u64> {
        self.deployment.agreed(&self.tokens).copied().filter(|token| *token > 0)
    }

    /// Whether a larger proposal may be granted.
    fn may_propose_again(&self) -> bool {
        let Tally { positive, too_low, .. } = self.nodes;
        !self.has_majority() && self.deployment.is_majority(positive.union(too_low))
    }

    /// The next proposal: larger than every token that made a node refuse.
    fn next_proposal(&self, proposal: Option<u64>) -> Option<u64> {
        Some((self.highest + PROPOSAL_STEP).max(proposal? + 1))
    }

    /// Whether the nodes that have not replied yet may decide on the token: those that granted the
    /// lock name different ones. Three nodes know 20, 20 and 30, and the first two replies are 20
    /// and 30: the outer hold, or the one inside it, has settled on 20.
    pub(super) fn is_undecided(&self, proposal: Option<u64>) -> bool {
        proposal.is_some() && self.has_majority() && self.agreed().is_none()
    }

    /// Whether a majority granted the lock but did not agree on a token:
    /// - a node still has a hold that has ended elsewhere, or
    /// - a node chose a token itself when it granted the lock to its next waiter.
    fn is_mixed(&self, proposal: Option<u64>) -> bool {
        let Some(proposed) = proposal.filter(|_| self.has_majority()) else { return false };
        !self.has_accepted(proposed) && self.agreed().is_none()
    }

    fn has_accepted(&self, proposed: u64) -> bool {
        self.tokens.iter().filter(|token| **token >= proposed).count() >= self.deployment.majority()
    }

    /// The token of a grant by a majority.
    fn token(&self, proposal: Option<u64>) -> u64 {
        match proposal {
            Some(proposed) => self.agreed().or(self.has_accepted(proposed).then_some(proposed)).unwrap_or(0),
            // The only node chose it.
            None => self.tokens.iter().copied().max().unwrap_or(0),
        }
    }
}

/// The token that is proposed, round after round.
pub(super) struct TokenProposals {
    pub(super) proposal: Option<Proposal>,
    fencing: Fencing,
    tries_left: u32,
    /// A majority was sent the largest token that any node knows.
    has_informed: bool,
}

/// What the replies to a proposal mean.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProposalOutcome {
    /// Another proposal may succeed.
    Again,
    Granted(u64),
    NotGranted,
}

impl TokenProposals {
    pub(super) fn new(token: Option<u64>, fencing: Fencing) -> TokenProposals {
        let proposal = token.map(|token| Proposal { token, is_nested: false });
        TokenProposals { proposal, fencing, tries_left: PROPOSALS, has_informed: false }
    }

    /// The token that the nodes are to agree on. `None` without fencing.
    pub(super) fn proposed(&self) -> Option<u64> {
        self.proposal.map(|proposal| proposal.token).filter(|_| self.fencing == Fencing::On)
    }

    pub(super) fn record(&mut self, tally: &ReplyTally) -> ProposalOutcome {
        self.tries_left -= 1;
        let proposed = self.proposed();
        let is_nested = self.proposal.is_some_and(|proposal| proposal.is_nested);
        let known = tally.known_elsewhere(proposed, is_nested).filter(|_| !self.has_informed);
        let next = if known.is_some() {
            // The nodes may know three different ones, each made when it granted the lock to its
            // next waiter. If they only noted the largest, the outer hold and a nested one could
            // each settle on a token that the other does not see.
            known
        } else if tally.is_mixed(proposed) {
            tally.next_proposal(proposed).map(|token| Proposal { token, is_nested: true })
        } else if tally.may_propose_again() {
            tally.next_proposal(proposed).map(|token| Proposal { token, is_nested })
        } else {
            None
        };
        if let Some(next) = next.filter(|_| self.tries_left > 0) {
            self.proposal = Some(next);
            self.has_informed |= known.is_some();
            return ProposalOutcome::Again;
        }
        // A token below one that a node knows is never used, however many proposals were made.
        let is_granted = tally.has_majority() && !tally.is_mixed(proposed) && known.is_none();
        if is_granted { ProposalOutcome::Granted(tally.token(proposed)) } else { ProposalOutcome::NotGranted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deployment::NodeSet;

    const THREE: Deployment =
        Deployment { nodes: 3, has_one_clock: false, has_all_subscribers: true, has_restart_guard: false };

    /// The replies of up to three nodes: the tokens that some grant, and those for which others
    /// refuse.
    fn tally(granted: &[u64], too_low: &[u64]) -> ReplyTally {
        let positive = NodeSet::first(granted.len());
        let too_low_at = NodeSet::first(granted.len() + too_low.len()).without(positive);
        let nodes = Tally { positive, too_low: too_low_at, ..Tally::default() };
        let highest = too_low.iter().copied().max().unwrap_or(0);
        ReplyTally { tokens: granted.to_vec(), highest, ..ReplyTally::empty(THREE, nodes) }
    }

    fn proposing(token: u64) -> TokenProposals {
        TokenProposals::new(Some(token), Fencing::On)
    }

    #[test]
    fn a_token_that_one_node_knows_is_sent_to_a_majority() {
        let mut proposals = proposing(10);
        assert_eq!(proposals.record(&tally(&[10, 70, 40], &[])), ProposalOutcome::Again);
        assert_eq!(proposals.proposed(), Some(70));
        // Other clients have read with larger tokens meanwhile; no earlier exclusive
        // holder has a token above 70.
        assert_eq!(proposals.record(&tally(&[70, 90], &[])), ProposalOutcome::Granted(70));
    }

    #[test]
    fn nodes_with_three_tokens_take_the_largest_that_is_known() {
        let mut inner = proposing(10);
        assert_eq!(inner.record(&tally(&[20, 30], &[])), ProposalOutcome::Again);
        assert_eq!(inner.proposal, Some(Proposal { token: 30, is_nested: true }));
        assert_eq!(inner.record(&tally(&[30, 30], &[40])), ProposalOutcome::Granted(30));
        // The outer hold: one node has its own token, the others what they have accepted.
        assert_eq!(proposing(50).record(&tally(&[40, 30, 30], &[])), ProposalOutcome::Granted(30));
        let mut late = proposing(25);
        assert_eq!(late.record(&tally(&[40, 30, 30], &[])), ProposalOutcome::Again);
        assert_eq!(late.proposal, Some(Proposal { token: 30, is_nested: false }));
        assert_eq!(late.record(&tally(&[40, 30, 30], &[])), ProposalOutcome::Granted(30));
        // Its first two replies alone leave it undecided.
        assert!(tally(&[40, 30], &[]).is_undecided(Some(25)));
        assert!(!tally(&[40, 30, 30], &[]).is_undecided(Some(25)));
    }

    #[test]
    fn a_token_that_one_node_knows_is_not_gone_below_when_no_try_is_left() {
        let mut proposals = proposing(10);
        for highest in [20, 3_000, 50_000] {
            assert_eq!(proposals.record(&tally(&[10], &[highest])), ProposalOutcome::Again);
            assert!(proposals.proposed() > Some(highest));
        }
        let proposed = proposals.proposed().unwrap();
        assert_eq!(proposals.record(&tally(&[proposed, proposed + 1], &[])), ProposalOutcome::NotGranted);
        // The same, with no larger token known.
        let mut proposals = TokenProposals { tries_left: 1, ..proposing(proposed) };
        assert_eq!(proposals.record(&tally(&[proposed, proposed], &[])), ProposalOutcome::Granted(proposed));
    }

    #[test]
    fn proposals_end_although_others_always_propose_more() {
        let mut proposals = proposing(10);
        let again = |proposals: &mut TokenProposals| {
            proposals.record(&tally(&[], &[proposals.proposed().unwrap(); 3]))
        };
        for _ in 1..PROPOSALS {
            assert_eq!(again(&mut proposals), ProposalOutcome::Again);
        }
        assert_eq!(again(&mut proposals), ProposalOutcome::NotGranted);
    }

    #[test]
    fn without_fencing_there_is_nothing_to_agree_on() {
        let mut proposals = TokenProposals::new(Some(10), Fencing::Off);
        assert_eq!(proposals.record(&tally(&[0, 70], &[])), ProposalOutcome::Granted(70));
        assert_eq!(proposals.record(&tally(&[0], &[])), ProposalOutcome::NotGranted);
    }
}
