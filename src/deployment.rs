//! [`Deployment`]: what several nodes, or one, can do together. [`NodeSet`]: some of them.

/// What a deployment can do: all that `lease` knows about the topology.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deployment {
    /// How many nodes decide together.
    pub(crate) nodes: usize,
    /// One clock dates every grant.
    pub(crate) has_one_clock: bool,
    /// `PUBLISH` counts all subscribers, not only those of the server that runs it.
    pub(crate) has_all_subscribers: bool,
    /// A node that restarted has no vote until it is admitted again.
    pub(crate) has_restart_guard: bool,
}

impl Deployment {
    /// Whether one node's reply is the decision.
    pub(crate) fn decides_alone(self) -> bool {
        self.nodes == 1
    }

    /// How many nodes form a majority.
    pub(crate) fn majority(self) -> usize {
        self.nodes / 2 + 1
    }

    /// The maximum number of failed nodes with which the others still decide.
    pub(crate) fn max_failures(self) -> usize {
        self.nodes - self.majority()
    }

    /// Whether these nodes decide.
    pub(crate) fn is_majority(self, nodes: NodeSet) -> bool {
        nodes.len() >= self.majority()
    }

    /// What a majority says alike.
    pub(crate) fn agreed<T: PartialEq>(self, said: &[T]) -> Option<&T> {
        let count = |value: &T| said.iter().filter(|other| *other == value).count();
        said.iter().find(|value| count(value) >= self.majority())
    }

    /// Whether the other nodes cannot decide.
    pub(crate) fn is_blocked_by(self, nodes: NodeSet) -> bool {
        nodes.len() > self.max_failures()
    }
}

/// A set of nodes of a quorum, by their places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeSet(u32);

impl NodeSet {
    pub(crate) const MAX_COUNT: usize = 31;

    pub(crate) fn first(count: usize) -> NodeSet {
        NodeSet((1 << count) - 1)
    }

    pub(crate) fn of(nodes: impl IntoIterator<Item = usize>) -> NodeSet {
        NodeSet(nodes.into_iter().fold(0, |set, node| set | 1 << node))
    }

    pub(crate) fn with(self, node: usize) -> NodeSet {
        NodeSet(self.0 | 1 << node)
    }

    pub(crate) fn union(self, others: NodeSet) -> NodeSet {
        NodeSet(self.0 | others.0)
    }

    pub(crate) fn without(self, others: NodeSet) -> NodeSet {
        NodeSet(self.0 & !others.0)
    }

    pub(crate) fn and(self, others: NodeSet) -> NodeSet {
        NodeSet(self.0 & others.0)
    }

    pub(crate) fn contains(self, node: usize) -> bool {
        self.0 & (1 << node) != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }
}
