//! [`Votes`]: the replies of the nodes to one request. [`Tally`]: the nodes by what they replied.
//! [`Stragglers`]: those still to come.

use std::sync::Arc;

use redis::Value;
use tokio::sync::oneshot;

use super::failure::{Failure, NodeReplies, NodeReply};
use super::script::{Answer, Reply};
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
    /// The failure of the only node, of which an unexpected reply is one; or that of a quorum
    /// without a decision.
    pub(crate) fn failure(self) -> Failure {
        if self.deployment.decides_alone()
            && let Some((_, outcome)) = self.received.first()
        {
            return outcome.as_ref().map_or_else(Failure::clone, Reply::unexpected);
        }
        let replies = NodeReplies::of(&self.labels, self.deployment.max_failures());
        Failure::no_majority(self.received.into_iter().fold(replies, |replies, (node, outcome)| {
            let reply = outcome.map_or_else(NodeReply::Failed, |reply| node_reply(&reply, self.least));
            replies.with(node, reply)
        }))
    }

    /// The nodes by their replies so far, of which any negative number is a refusal.
    pub(crate) fn tally(&self) -> Tally {
        Tally::of(&self.received, self.least, |_| true)
    }
}

/// The nodes by their replies to one request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// A positive number.
    pub(crate) positive: NodeSet,
    /// 0, where that is not positive: there was nothing to do.
    pub(crate) negative: NodeSet,
    /// A negative number that the verb may answer.
    pub(crate) refused: NodeSet,
    pub(crate) busy: NodeSet,
    pub(crate) too_low: NodeSet,
    /// A reply outside the contract of the scripts.
    pub(crate) unexpected: NodeSet,
    pub(crate) failed: NodeSet,
}

impl Tally {
    /// A positive reply is a number of at least `least`.
    pub(crate) fn of(votes: &[Vote], least: i64, may_refuse: impl Fn(i64) -> bool) -> Tally {
        let mut tally = Tally::default();
        for (node, outcome) in votes {
            let nodes = match outcome.as_ref().map(Reply::expected) {
                Ok(Some(Answer::Final(number))) if number >= least => &mut tally.positive,
                Ok(Some(Answer::Final(0))) => &mut tally.negative,
                Ok(Some(Answer::Final(number))) if may_refuse(number) => &mut tally.refused,
                Ok(Some(Answer::Busy(..))) => &mut tally.busy,
                Ok(Some(Answer::TooLow(_))) => &mut tally.too_low,
                Ok(Some(Answer::Final(_)) | None) => &mut tally.unexpected,
                Err(_) => &mut tally.failed,
            };
            *nodes = nodes.with(*node);
        }
        tally
    }

    /// The nodes with a reply.
    pub(crate) fn replied(self) -> NodeSet {
        let Tally { positive, negative, refused, busy, too_low, unexpected, failed: _ } = self;
        [negative, refused, busy, too_low, unexpected].into_iter().fold(positive, NodeSet::union)
    }
}

/// The replies of these nodes, in the order in which they came.
pub(crate) fn replies_of(votes: &[Vote], nodes: NodeSet) -> impl Iterator<Item = (usize, &Reply)> {
    let replies = votes.iter().filter_map(|(node, outcome)| Some((*node, outcome.as_ref().ok()?)));
    replies.filter(move |(node, _)| nodes.contains(*node))
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

/// A positive reply is a number of at least `least`, or a longer reply.
fn node_reply(reply: &Reply, least: i64) -> NodeReply {
    match &reply.value {
        Value::Int(number) if *number >= least => NodeReply::Granted,
        // What a script reports of a lock. A busy lock has a reply of two integers.
        Value::Array(items) if items.len() > 2 && items.first() == Some(&Value::Int(1)) => NodeReply::Granted,
        Value::Int(_) | Value::Array(_) => NodeReply::Refused,
        _ => NodeReply::Failed(reply.unexpected()),
    }
}
