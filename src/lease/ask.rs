//! One request for a lock, sent to each node, and what their answers amount to.

use std::sync::Arc;
use std::time::Duration;

use super::Lease;
use super::attempt::{Proposal, QueueEntry};
use super::held::{Armed, Held};
use super::validity::Sighting;
use crate::clock::Moment;
use crate::error::{Context, Error, Operation};
use crate::options::{Fencing, RestartGuard};
use crate::wire::{Answer, Failure, NodeSet, Nodes, Votes, WaitFor};

/// How often an attempt proposes a token in a row: others may propose larger ones meanwhile.
const PROPOSALS: u32 = 4;

/// By how much to outbid a token that was accepted, in microseconds.
const AHEAD: u64 = 1_000;

/// What one request for the lock brought. The attempt comes back if there is more to be done with it.
pub(super) enum Asked {
    Granted(Held),
    Busy {
        armed: Armed,
        free_in: Duration,
        /// The clock of the server, and through which connection it was seen, if there is one clock.
        dated: Option<(Sighting, u64)>,
    },
    /// Some nodes have granted it, but not more than half, and the others have not, or to others.
    Split {
        armed: Armed,
        by: NodeSet,
        /// Others have more than half of them: when that may end.
        taken_for: Option<Duration>,
    },
    /// Granted, but the answer took longer than the lease lasts. It is given back.
    TooLate,
    /// It may work later.
    Failed(Armed, Failure),
    Refused(Error),
}

/// Sends one request to each node; once more, if the nodes do not agree on a token.
///
/// # Cancel safety
/// Dropped, the attempt is abandoned: what it is granted is given back at once.
pub(super) async fn ask(mut armed: Armed, entry: Option<&QueueEntry>) -> Asked {
    let (client, attempt) = (Arc::clone(&armed.client), Arc::clone(&armed.attempt));
    if client.keeper.has_ended() {
        return Asked::Refused(Error::RuntimeEnded { context: context(&armed) });
    }
    let nodes = &client.nodes;
    nodes.open().await;
    let mut bidding = Bidding::new(
        nodes.proposal(attempt.options.restart_guard == RestartGuard::On),
        attempt.options.fencing,
    );
    let mut granted_before = NodeSet::of([]);
    loop {
        let proposed = bidding.proposed();
        let call = attempt.acquire(entry, bidding.proposal);
        armed.sends(entry);
        let begun = Moment::now();
        let mut votes = nodes.ask(&call, nodes.everyone(), &attempt.in_flight, WaitFor::Majority(0)).await;
        let mut count = Count::new(nodes, &votes);
        if count.is_mixed(proposed) {
            votes.wait().await;
            count = Count::new(nodes, &votes);
        }
        let heard = bidding.hears(&count);
        armed.learns(&votes, count.granted.len() >= nodes.majority() && heard != Heard::NotGranted);
        let granted = NodeSet::of(count.granted.iter().map(|(node, _)| *node));
        match heard {
            Heard::Again => granted_before = granted_before.union(granted),
            Heard::NotGranted => {
                // A node may grant one proposal, and fail or refuse at the next.
                if !granted_before.without(granted).is_empty() {
                    attempt.in_flight.mark_unknown();
                }
                return not_granted(armed, count, votes);
            }
            Heard::Granted(token) => {
                // The time in the client's queue is not the lease's; a majority grants something.
                let sent = count.granted_since.unwrap_or(begun);
                let until = sent + attempt.trusted(attempt.options.ttl);
                if Moment::now() >= until {
                    armed.give_back();
                    return Asked::TooLate;
                }
                if proposed == Some(token) {
                    nodes.accepted(token);
                }
                let unanimous = count.granted.len() == nodes.count();
                let lease = Lease::new(Arc::clone(&attempt), attempt.token(token), sent, until);
                return Asked::Granted(armed.granted(lease, unanimous));
            }
        }
    }
}

/// What is proposed, answer after answer.
struct Bidding {
    proposal: Option<Proposal>,
    fencing: Fencing,
    tries_left: u32,
    /// A majority has told the largest token that it knows.
    informed: bool,
}

/// What the nodes' answers to a proposal amount to.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// There is another proposal that may do.
    Again,
    Granted(u64),
    NotGranted,
}

impl Bidding {
    fn new(token: Option<u64>, fencing: Fencing) -> Bidding {
        let proposal = token.map(|token| Proposal { token, for_nested: false });
        Bidding { proposal, fencing, tries_left: PROPOSALS, informed: false }
    }

    /// The token that the nodes are to agree on. Without fencing there is none.
    fn proposed(&self) -> Option<u64> {
        self.proposal.map(|it| it.token).filter(|_| self.fencing == Fencing::On)
    }

    fn hears(&mut self, count: &Count) -> Heard {
        self.tries_left -= 1;
        let proposed = self.proposed();
        let for_nested = self.proposal.is_some_and(|it| it.for_nested);
        let known = count.known_elsewhere(proposed).filter(|_| !self.informed);
        let next = if let Some(token) = known {
            Some(Proposal { token, for_nested })
        } else if count.is_mixed(proposed) {
            count.outbid(proposed).map(|token| Proposal { token, for_nested: true })
        } else if count.may_outbid() {
            count.outbid(proposed).map(|token| Proposal { token, for_nested })
        } else {
            None
        };
        if let Some(next) = next.filter(|_| self.tries_left > 0) {
            self.proposal = Some(next);
            self.informed |= known.is_some();
            return Heard::Again;
        }
        // A token that is smaller than one that a node knows of is nobody's, however often that was tried.
        let granted = count.granted.len() >= count.majority && !count.is_mixed(proposed) && known.is_none();
        if granted { Heard::Granted(count.token(proposed)) } else { Heard::NotGranted }
    }
}

fn not_granted(armed: Armed, count: Count, votes: Votes) -> Asked {
    let majority = votes.majority();
    // So many of those who answer may refuse, and a majority may grant it all the same.
    let may_miss = count.answered.saturating_sub(majority);
    let decides = |some: usize| some > may_miss && count.answered >= majority;
    if decides(count.odd.len())
        && let Some(failure) = count.odd.into_iter().next()
    {
        return not_understood(armed, failure);
    }
    if decides(count.refused.len())
        && let Some(refusal) =
            count.refused.iter().find_map(|answer| armed.attempt.refusal(*answer, context(&armed)))
    {
        if !count.granted.is_empty() {
            armed.give_back();
        }
        return Asked::Refused(refusal);
    }
    if count.answered < majority {
        if !count.granted.is_empty() {
            armed.attempt.in_flight.mark_unknown();
        }
        let failure = votes.failure();
        return if failure.is_transient() { Asked::Failed(armed, failure) } else { refused(&armed, failure) };
    }
    // The soonest that more than half may be free.
    let mut busy = count.busy;
    busy.sort_by_key(|busy| busy.free_in);
    let free_in = busy.get(majority - 1).or(busy.last()).map(|busy| Duration::from_millis(busy.free_in));
    let by = NodeSet::of(count.granted.iter().map(|(node, _)| *node));
    match free_in {
        Some(free_in) if by.is_empty() => {
            let dated = armed.client.nodes.server().and(busy.first());
            if let Some(busy) = busy.first() {
                armed.note_queued(busy.time);
            }
            let dated = dated.map(|busy| (Sighting { sent: busy.sent, server: busy.time }, busy.generation));
            Asked::Busy { armed, free_in, dated }
        }
        _ => Asked::Split { armed, by, taken_for: free_in.filter(|_| busy.len() >= majority) },
    }
}

/// What the nodes said to one request, sorted.
struct Count {
    granted: Vec<(usize, u64)>,
    /// Before the first of the requests was written that were granted.
    granted_since: Option<Moment>,
    busy: Vec<Busy>,
    /// The largest token for which a proposal was refused, and how often that was.
    too_low: (u64, usize),
    refused: Vec<i64>,
    /// Outside the contract.
    odd: Vec<Failure>,
    answered: usize,
    majority: usize,
}

struct Busy {
    free_in: u64,
    time: u64,
    sent: Moment,
    generation: u64,
}

impl Count {
    fn new(nodes: &Nodes, votes: &Votes) -> Count {
        let mut count = Count {
            granted: Vec::new(),
            granted_since: None,
            busy: Vec::new(),
            too_low: (0, 0),
            refused: Vec::new(),
            odd: Vec::new(),
            answered: 0,
            majority: nodes.majority(),
        };
        for (node, outcome) in &votes.cast {
            let Ok(reply) = outcome else { continue };
            count.answered += 1;
            match reply.answer() {
                Ok(Answer::Final(token @ 0..)) => {
                    count.granted.push((*node, token.unsigned_abs()));
                    let earlier = count.granted_since.map_or(reply.sent, |sent| sent.min(reply.sent));
                    count.granted_since = Some(earlier);
                }
                Ok(Answer::Final(refusal)) if is_known(refusal) => count.refused.push(refusal),
                Ok(Answer::Final(_)) => count.odd.push(reply.unexpected()),
                Ok(Answer::Busy(free_in, time)) => {
                    let (free_in, time) = (free_in.unsigned_abs(), time.unsigned_abs());
                    nodes.node(*node).observe(time);
                    let (sent, generation) = (reply.sent, reply.generation);
                    count.busy.push(Busy { free_in, time, sent, generation });
                }
                Ok(Answer::TooLow(highest)) => {
                    count.too_low = (count.too_low.0.max(highest.unsigned_abs()), count.too_low.1 + 1);
                }
                Err(failure) => count.odd.push(failure),
            }
        }
        count
    }

    /// A token that a node knows of and that is larger than the one proposed, where others may hold the lock as well and
    /// all is granted: once more than half know it, it is this one's.
    fn known_elsewhere(&self, proposal: Option<u64>) -> Option<u64> {
        let proposed = proposal.filter(|_| self.granted.len() >= self.majority)?;
        self.granted.iter().map(|(_, token)| *token).filter(|token| *token > proposed).max()
    }

    /// Whether more may bring the lock than what was proposed.
    fn may_outbid(&self) -> bool {
        let too_low = self.too_low.1;
        too_low > 0 && self.granted.len() < self.majority && self.granted.len() + too_low >= self.majority
    }

    /// What to propose instead: more than what has kept nodes from accepting.
    fn outbid(&self, proposal: Option<u64>) -> Option<u64> {
        Some((self.too_low.0 + AHEAD).max(proposal? + 1))
    }

    /// Neither has a majority accepted the token that was proposed, nor is the lock nested for a majority in a hold with one
    /// earlier one: some node remembers a hold that is over elsewhere, or has chosen a number for a hold that it handed over.
    fn is_mixed(&self, proposal: Option<u64>) -> bool {
        let Some(proposed) = proposal.filter(|_| self.granted.len() >= self.majority) else { return false };
        !self.has_accepted(proposed) && self.nested(proposed).is_none()
    }

    fn has_accepted(&self, proposed: u64) -> bool {
        self.granted.iter().filter(|(_, token)| *token >= proposed).count() >= self.majority
    }

    /// The token of the hold that this one is nested in: the same for a majority, so that whoever comes later has a larger
    /// one.
    fn nested(&self, proposed: u64) -> Option<u64> {
        let earlier =
            self.granted.iter().map(|(_, token)| *token).filter(|token| (1..proposed).contains(token));
        let told = |token: &u64| self.granted.iter().filter(|(_, it)| it == token).count();
        earlier.filter(|token| told(token) >= self.majority).max()
    }

    /// The token of what a majority has granted: the one proposed, unless it is nested in a hold with an earlier one.
    fn token(&self, proposal: Option<u64>) -> u64 {
        match proposal {
            Some(proposed) if self.has_accepted(proposed) => proposed,
            Some(proposed) => self.nested(proposed).unwrap_or(0),
            // The only node has chosen it.
            None => self.granted.iter().map(|(_, token)| *token).max().unwrap_or(0),
        }
    }
}

/// Refusals that mean something to an attempt.
fn is_known(refusal: i64) -> bool {
    matches!(refusal, -7 | -6 | -4..=-2) // not -5, which says that this client is wrong
}

/// An answer outside the contract may mean anything, a grant as well.
fn not_understood(armed: Armed, failure: Failure) -> Asked {
    let refused = refused(&armed, failure);
    armed.give_back();
    refused
}

/// An earlier request of this attempt may have had an effect, even if the last one had none.
fn refused(armed: &Armed, failure: Failure) -> Asked {
    let failure = failure.with_effect_if(armed.attempt.in_flight.is_indeterminate());
    Asked::Refused(armed.client.error(failure, context(armed)))
}

fn context(armed: &Armed) -> Context {
    armed.client.context(Operation::Acquire, &armed.attempt.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What so many of three nodes grant, and for how large a token others refuse.
    fn count(granted: &[u64], too_low: &[u64]) -> Count {
        Count {
            granted: granted.iter().copied().enumerate().collect(),
            granted_since: None,
            busy: Vec::new(),
            too_low: (too_low.iter().copied().max().unwrap_or(0), too_low.len()),
            refused: Vec::new(),
            odd: Vec::new(),
            answered: granted.len() + too_low.len(),
            majority: 2,
        }
    }

    fn proposing(token: u64) -> Bidding {
        Bidding::new(Some(token), Fencing::On)
    }

    #[test]
    fn a_token_that_one_node_knows_is_told_to_a_majority() {
        let mut bidding = proposing(10);
        assert_eq!(bidding.hears(&count(&[10, 70, 40], &[])), Heard::Again);
        assert_eq!(bidding.proposed(), Some(70));
        // Others have read with larger ones meanwhile; what was written before is not larger than this one.
        assert_eq!(bidding.hears(&count(&[70, 90], &[])), Heard::Granted(70));
    }

    #[test]
    fn a_token_that_one_node_knows_is_not_gone_below_when_no_try_is_left() {
        let mut bidding = proposing(10);
        for highest in [20, 3_000, 50_000] {
            assert_eq!(bidding.hears(&count(&[10], &[highest])), Heard::Again);
            assert!(bidding.proposed() > Some(highest));
        }
        let proposed = bidding.proposed().unwrap();
        assert_eq!(bidding.hears(&count(&[proposed, proposed + 1], &[])), Heard::NotGranted);
        // The same, with nothing larger known.
        let mut bidding = Bidding { tries_left: 1, ..proposing(proposed) };
        assert_eq!(bidding.hears(&count(&[proposed, proposed], &[])), Heard::Granted(proposed));
    }

    #[test]
    fn proposals_end_although_others_always_propose_more() {
        let mut bidding = proposing(10);
        let again = |bidding: &mut Bidding| bidding.hears(&count(&[], &[bidding.proposed().unwrap(); 3]));
        for _ in 1..PROPOSALS {
            assert_eq!(again(&mut bidding), Heard::Again);
        }
        assert_eq!(again(&mut bidding), Heard::NotGranted);
    }

    #[test]
    fn without_fencing_there_is_nothing_to_agree_on() {
        let mut bidding = Bidding::new(Some(10), Fencing::Off);
        assert_eq!(bidding.hears(&count(&[0, 70], &[])), Heard::Granted(70));
        assert_eq!(bidding.hears(&count(&[0], &[])), Heard::NotGranted);
    }
}
