//! [`Locks::nodes`]: reports which nodes vote, and why the others do not.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use super::Locks;
use crate::error::{Error, NO_VOTE, Operation, ReasonChain};
use crate::name::node_key;
use crate::options::RestartGuard;
use crate::wire::{Call, Failure, Reply, Script, WaitFor};

pub(super) static NODE: Script = Script::new(include_str!("../../lua/node.lua"));

/// The state of a node, as it replied. Human-readable, for logs and dashboards.
#[non_exhaustive]
#[derive(Debug)]
pub struct NodeStatus {
    /// The node's address.
    ///
    /// For a Sentinel group: the name of the master. For a cluster: `cluster`. For a pool, which
    /// does not reveal its address: `pool`.
    pub node: String,
    /// Whether the node votes.
    pub state: NodeState,
}

/// Whether a node votes.
#[non_exhaustive]
#[derive(Debug)]
pub enum NodeState {
    /// It replies, and votes.
    Voter,
    /// It replies, but has no vote: it is new in its [guarded](RestartGuard) quorum, has restarted
    /// or has lost data. See [`Locks::rejoin`].
    NotAdmitted,
    /// It does not reply, or must not vote.
    Failed(Error),
}

impl NodeStatus {
    /// Returns whether the node votes.
    pub fn is_voter(&self) -> bool {
        matches!(self.state, NodeState::Voter)
    }
}

/// One line: `10.0.0.1:6379: votes`, or why the node does not vote.
impl fmt::Display for NodeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeStatus { node, state } = self;
        match state {
            NodeState::Voter => write!(f, "{node}: votes"),
            NodeState::NotAdmitted => write!(f, "{node}: {NO_VOTE}"),
            NodeState::Failed(error) => write!(f, "{node}: {}", ReasonChain(error)),
        }
    }
}

/// The nodes' replies to `node/survey`, and what follows from all of them.
#[derive(Default)]
pub(super) struct Survey {
    /// The nodes, by their indexes.
    pub(super) nodes: BTreeMap<usize, NodeState>,
    /// Of the nodes without a vote: the server's run id, or an empty one if it has none.
    pub(super) not_admitted: BTreeMap<usize, String>,
    /// The largest token that a node knows.
    pub(super) highest: u64,
    /// The longest lease that a node has granted, in milliseconds.
    pub(super) longest_ttl: u64,
    pub(super) clocks: Vec<u64>,
}

impl Survey {
    pub(super) fn voters(&self) -> impl Iterator<Item = usize> {
        self.nodes.iter().filter(|(_, node)| matches!(node, NodeState::Voter)).map(|(place, _)| *place)
    }
}

impl Locks {
    /// Queries all nodes of a quorum for whether they vote, in the order in which they were named.
    /// Other topologies are one node, which votes if it replies; in a cluster, one of its masters
    /// is queried.
    ///
    /// A quorum grants locks as long as a majority of its nodes are [voters](NodeState::Voter).
    ///
    /// ```no_run
    /// # async fn run(locks: redlatch::Locks) {
    /// for node in locks.nodes().await {
    ///     println!("{node}"); // 10.0.0.1:6379: votes
    /// }
    /// # }
    /// ```
    pub async fn nodes(&self) -> Vec<NodeStatus> {
        let Some(survey) = self.client.with_runtime(pin!(self.survey())).await else {
            let ended = |node: &String| NodeStatus {
                node: node.clone(),
                state: NodeState::Failed(Error::RuntimeEnded {
                    context: self.client.context_of_nodes(Operation::ListNodes).on(node),
                }),
            };
            return self.client.nodes.labels.iter().map(ended).collect();
        };
        self.statuses(survey).map(|(_, status)| status).collect()
    }

    /// Returns the public status of each node in the survey.
    pub(super) fn statuses(&self, survey: Survey) -> impl Iterator<Item = (usize, NodeStatus)> {
        let node = |place: usize| self.client.nodes.labels[place].clone();
        survey.nodes.into_iter().map(move |(place, state)| (place, NodeStatus { node: node(place), state }))
    }

    pub(super) async fn survey(&self) -> Survey {
        let nodes = &self.client.nodes;
        let key = node_key(&self.options.prefix);
        let call = Arc::new(Call::about_node(&NODE, "node/survey", &key));
        let votes = nodes.ask(&call, nodes.all_nodes(), &Arc::default(), WaitFor::All).await;
        let mut survey = Survey::default();
        for (place, outcome) in votes.received {
            let state = self.read_reply(place, outcome, &mut survey).await.unwrap_or_else(NodeState::Failed);
            survey.nodes.insert(place, state);
        }
        survey
    }

    async fn read_reply(
        &self,
        place: usize,
        outcome: Result<Reply, Failure>,
        survey: &mut Survey,
    ) -> Result<NodeState, Error> {
        let node = &self.client.nodes.labels[place];
        let error = |failure: Failure| {
            let context = self.client.context_of_nodes(Operation::ListNodes).on(node);
            self.client.error(failure.of_other_request(), context)
        };
        let reply = outcome.map_err(error)?;
        let texts = reply.texts().map_err(error)?;
        let numbers: Option<Vec<u64>> = texts.iter().skip(1).map(|text| text.parse().ok()).collect();
        let (Some(admitted), Some([highest, ttl, time])) = (texts.first(), numbers.as_deref()) else {
            return Err(error(reply.unexpected()));
        };
        survey.highest = survey.highest.max(*highest);
        survey.longest_ttl = survey.longest_ttl.max(*ttl);
        survey.clocks.push(*time);
        if self.options.restart_guard == RestartGuard::Off {
            return Ok(NodeState::Voter);
        }
        match self.client.nodes.node(place).run_id().await {
            Ok(Some(run)) if *run == **admitted => Ok(NodeState::Voter),
            Ok(run) => {
                survey.not_admitted.insert(place, run.as_deref().unwrap_or_default().to_owned());
                Ok(NodeState::NotAdmitted)
            }
            Err(cause) => Err(error(Failure::unsent(cause))),
        }
    }
}
