//! The replies to a renewal.

use crate::wire::{Answer, NodeSet, Nodes, Reply, Vote};

/// How many nodes have the lease, and which have it not.
pub(super) struct RenewalTally {
    pub(super) held: usize,
    pub(super) without: NodeSet,
}

/// What the nodes say about the lease.
#[derive(PartialEq)]
pub(super) enum LeaseState {
    /// A majority has it.
    Held,
    /// More than `max_failures` nodes do not have it.
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
        if self.held >= nodes.deployment.majority() {
            LeaseState::Held
        } else if self.without.len() > nodes.deployment.max_failures() {
            LeaseState::Lost
        } else {
            LeaseState::Unknown
        }
    }
}
