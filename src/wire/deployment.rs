//! [`Deployment`]: what a deployment can do.

/// What a deployment can do: all that `lease` knows about the topology.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deployment {
    /// How many nodes decide together.
    pub(crate) nodes: usize,
    /// One clock dates every grant.
    pub(crate) has_one_clock: bool,
    /// A request may be sent again unseen.
    pub(crate) may_resend: bool,
    /// `PUBLISH` counts all subscribers, not only those of the server that runs it.
    pub(crate) counts_all_subscribers: bool,
}

impl Deployment {
    /// Whether one node's reply is the decision.
    pub(crate) fn decides_alone(self) -> bool {
        self.nodes == 1
    }

    pub(crate) fn majority(self) -> usize {
        majority_of(self.nodes)
    }

    /// The maximum number of failed nodes with which the others still decide.
    pub(crate) fn max_failures(self) -> usize {
        self.nodes - self.majority()
    }
}

/// How many of these nodes form a majority.
pub(super) fn majority_of(nodes: usize) -> usize {
    nodes / 2 + 1
}
