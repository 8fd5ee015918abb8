//! What the nodes answer to a renewal.

use crate::wire::{Answer, NodeSet, Nodes, Reply, Vote};

/// Which nodes have a lease: so many have it, and these have it not.
pub(super) struct RenewalTally {
    pub(super) held: usize,
    pub(super) without: NodeSet,
}

/// What the nodes say of a lease.
#[derive(PartialEq)]
pub(super) enum LeaseState {
    /// More than half have it.
    Held,
    /// So many have it not that more than half cannot.
    Lost,
    Unknown,
}

impl RenewalTally {
    pub(super) fn count(nodes: &Nodes, votes: &[Vote]) -> RenewalTally {
        let mut held = 0;
        let mut without = NodeSet::of([]);
        for (node, outcome) in votes {
            match outcome.as_ref().map(Reply::answer) {
                Ok(Ok(Answer::Final(time @ 1..))) => {
                    nodes.node(*node).observe(time.unsigned_abs());
                    held += 1;
                }
                Ok(Ok(Answer::Final(0 | -2))) => without = without.with(*node),
                _ => {}
            }
        }
        RenewalTally { held, without }
    }

    pub(super) fn state(&self, nodes: &Nodes) -> LeaseState {
        if self.held >= nodes.majority() {
            LeaseState::Held
        } else if self.without.len() > nodes.max_failures() {
            LeaseState::Lost
        } else {
            LeaseState::Unknown
        }
    }
}
