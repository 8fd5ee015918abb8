//! [`Votes`]: the replies of the nodes to one request. [`Stragglers`]: those still to come.

use std::sync::Arc;

use redis::Value;
use tokio::sync::oneshot;

use super::failure::{Failure, NodeReplies, NodeReply};
use super::script::Reply;
use crate::deployment::{Deployment, NodeSet};

/// The place of a node, and its reply.
pub(crate) type Vote = (usize, Result<Reply, Failure>);

/// The replies of the nodes that were waited for.
#[derive(Debug)]
pub(crate) struct Votes {
    pub(super) labels: Arc<[String]>,
    pub(crate) deployment: Deployment,
    /// The least number that is a positive reply.
    pub(super) least: i64,
    pub(crate) received: Vec<Vote>,
    /// The nodes that have not replied yet.
    pub(crate) rest: Option<Stragglers>,
}

impl Votes {
    /// The only node's failure, or that of a quorum without a decision.
    pub(crate) fn failure(self) -> Failure {
        if self.deployment.decides_alone()
            && let Some((_, Err(failure))) = self.received.first()
        {
            return failure.clone();
        }
        Failure::no_majority(
            NodeReplies::of(&self.labels, self.deployment.max_failures())
                .with_votes(self.least, self.received),
        )
    }

    /// In a quorum, discards the negative reply of a node that received the request twice: the
    /// first delivery may have done it.
    pub(crate) fn mark_negatives_unknown(&mut self) {
        if self.deployment.decides_alone() {
            return;
        }
        for (_, outcome) in &mut self.received {
            if let Ok(reply) = outcome
                && reply.is_number(0)
                && let Some(failure) = reply.first_failure.clone()
            {
                *outcome = Err(failure);
            }
        }
    }

    /// Waits for the remaining nodes, each with its own time limit.
    pub(crate) async fn wait(&mut self) {
        if let Some(mut rest) = self.rest.take() {
            while let Some(mut votes) = rest.next().await {
                self.received.append(&mut votes);
            }
        }
    }

    /// The nodes without a reply, so far.
    pub(crate) fn missing(&self) -> NodeSet {
        let answered = self.received.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(node, _)| *node);
        NodeSet::first(self.deployment.nodes).without(NodeSet::of(answered))
    }

    /// The nodes with a positive reply.
    pub(crate) fn positives(&self) -> NodeSet {
        let is_yes =
            |outcome: &Result<Reply, Failure>| outcome.as_ref().is_ok_and(|reply| reply.is_number_from(1));
        NodeSet::of(self.received.iter().filter(|(_, outcome)| is_yes(outcome)).map(|(node, _)| *node))
    }

    /// The nodes that had nothing to do.
    pub(crate) fn negatives(&self) -> NodeSet {
        let is_no = |outcome: &Result<Reply, Failure>| outcome.as_ref().is_ok_and(|reply| reply.is_number(0));
        NodeSet::of(self.received.iter().filter(|(_, outcome)| is_no(outcome)).map(|(node, _)| *node))
    }

    /// The nodes that failed to reply.
    pub(crate) fn failed(&self) -> NodeSet {
        NodeSet::of(self.received.iter().filter(|(_, outcome)| outcome.is_err()).map(|(node, _)| *node))
    }
}

/// Nodes that have not replied yet. Their next replies come with the nodes that remain then: one
/// small message, where a queue would have room for many.
#[derive(Debug)]
pub(crate) struct Stragglers {
    pub(super) more: Option<oneshot::Receiver<(Vec<Vote>, Stragglers)>>,
}

impl Stragglers {
    /// Returns the next replies; `None` after the last ones.
    ///
    /// # Cancel safety
    /// Cancel safe: no reply is lost.
    pub(crate) async fn next(&mut self) -> Option<Vec<Vote>> {
        let (votes, rest) = self.more.as_mut()?.await.ok()?;
        *self = rest;
        Some(votes)
    }
}

impl NodeReplies {
    /// Records the nodes' replies to one request, where a positive reply is a number of at least
    /// `least`, or a longer reply.
    pub(crate) fn with_votes(self, least: i64, votes: Vec<Vote>) -> NodeReplies {
        votes.into_iter().fold(self, |answers, (node, outcome)| {
            let answer = match outcome {
                Ok(reply) => node_reply(&reply, least),
                Err(failure) => NodeReply::Failed(failure),
            };
            answers.with(node, answer)
        })
    }
}

fn node_reply(reply: &Reply, least: i64) -> NodeReply {
    match &reply.value {
        Value::Int(number) if *number >= least => NodeReply::Granted,
        // What a script reports of a lock. A busy lock has a reply of two integers.
        Value::Array(items) if items.len() > 2 && items.first() == Some(&Value::Int(1)) => NodeReply::Granted,
        Value::Int(_) | Value::Array(_) => NodeReply::Refused,
        _ => NodeReply::Failed(reply.unexpected()),
    }
}
