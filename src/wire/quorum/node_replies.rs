//! The failures of nodes: [`NodeReplies`] of several that did not agree, and since when nodes fail.

use std::sync::Arc;

use redis::Value;

use super::super::votes::Vote;
use super::super::{Failure, Node, Reply};
use super::Nodes;
use crate::clock::Moment;
use crate::error::{Context, NodeAnswer, NodeOutcome};

/// What each node of a quorum came to, by its address.
#[derive(Clone, Debug)]
pub(crate) struct NodeReplies(Vec<(String, NodeReply)>);

#[derive(Clone, Debug)]
pub(crate) enum NodeReply {
    Granted,
    Refused,
    /// It was not asked, or its answer was not waited for.
    Pending,
    Failed(Failure),
}

impl NodeReplies {
    /// Of these nodes, nobody has been asked yet.
    pub(crate) fn of(labels: &[String]) -> NodeReplies {
        NodeReplies(labels.iter().map(|label| (label.clone(), NodeReply::Pending)).collect())
    }

    pub(crate) fn with(mut self, node: usize, answer: NodeReply) -> NodeReplies {
        if let Some((_, before)) = self.0.get_mut(node) {
            *before = answer;
        }
        self
    }

    /// Takes what nodes said to one request, where a "yes" is a number of at least `least`, or a
    /// longer answer.
    pub(crate) fn with_votes(self, least: i64, votes: Vec<Vote>) -> NodeReplies {
        votes.into_iter().fold(self, |answers, (node, outcome)| {
            let answer = match outcome {
                Ok(reply) => answered(&reply, least),
                Err(failure) => NodeReply::Failed(failure),
            };
            answers.with(node, answer)
        })
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.0.iter().filter_map(|(_, answer)| match answer {
            NodeReply::Failed(failure) => Some(failure),
            _ => None,
        })
    }

    /// So many may fail, and the others decide.
    pub(crate) fn max_failures(&self) -> usize {
        self.0.len().saturating_sub(1) / 2
    }

    /// The same for the caller of an operation.
    pub(crate) fn outcomes(self, context: &Context) -> Vec<NodeOutcome> {
        let outcome = |(node, answer): (String, NodeReply)| {
            let answer = match answer {
                NodeReply::Granted => NodeAnswer::Granted,
                NodeReply::Refused => NodeAnswer::Refused,
                NodeReply::Pending => NodeAnswer::Pending,
                NodeReply::Failed(failure) => NodeAnswer::failed(failure.error(context.clone().on(&node))),
            };
            NodeOutcome { node, answer }
        };
        self.0.into_iter().map(outcome).collect()
    }
}

impl Nodes {
    /// Since when so many have failed that the others cannot decide, and how, if they have, to who
    /// wants so many replicas.
    pub(crate) fn outage(&self, replicas: u32) -> Option<(Moment, Failure)> {
        if let Some(node) = self.single() {
            return node.outage(replicas);
        }
        let outage = |(place, node): (usize, &Arc<Node>)| node.outage(replicas).map(|it| (it, place));
        let outages: Vec<_> = self.all.iter().enumerate().filter_map(outage).collect();
        let mut begins: Vec<Moment> = outages.iter().map(|((since, _), _)| *since).collect();
        begins.sort();
        // One more than may fail.
        let since = *begins.get(self.max_failures())?;
        let answers =
            outages.into_iter().fold(NodeReplies::of(&self.labels), |answers, ((_, failure), place)| {
                answers.with(place, NodeReply::Failed(failure))
            });
        Some((since, Failure::no_quorum(answers)))
    }
}

fn answered(reply: &Reply, least: i64) -> NodeReply {
    match &reply.value {
        Value::Int(number) if *number >= least => NodeReply::Granted,
        // What a script sees of a lock; a busy lock is answered with two integers.
        Value::Array(items) if items.len() > 2 && items.first() == Some(&Value::Int(1)) => NodeReply::Granted,
        Value::Int(_) | Value::Array(_) => NodeReply::Refused,
        _ => NodeReply::Failed(reply.unexpected()),
    }
}
