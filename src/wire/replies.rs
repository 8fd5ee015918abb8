//! [`Reply`]: the reply of one node. [`Votes`]: the replies of several. [`Deployment`]: how many of
//! them decide. [`InFlight`]: requests with an unknown effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use redis::Value;
use tokio::sync::{Notify, mpsc};

use super::failure::{Failure, NodeReplies, NodeReply};
use super::script::Script;
use crate::clock::Moment;
use crate::shorten::shortened;

/// A set of nodes of a quorum, by their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// What is unknown of the requests of one attempt: whether all were answered, and none may run
/// again.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    unanswered: AtomicUsize,
    is_unknown: AtomicBool,
    /// The latest request was withdrawn before it was written.
    is_withdrawn: AtomicBool,
    /// Notified when all requests were answered.
    all_answered: Notify,
}

impl InFlight {
    /// Whether the latest request to the only node was withdrawn before it was written: it has no
    /// effect, now or later.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.is_withdrawn.load(Ordering::SeqCst)
    }

    /// Records that a request leaves: until its reply arrives, its effect is unknown.
    pub(crate) fn sent(&self) {
        self.is_withdrawn.store(false, Ordering::SeqCst);
        self.unanswered.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that the latest request was dropped before it was written.
    pub(super) fn withdraw(&self) {
        self.is_withdrawn.store(true, Ordering::SeqCst);
        self.answered();
    }

    /// Records the outcome. A request that was never answered, or was sent twice, may yet run.
    pub(super) fn record(&self, outcome: &Result<Reply, Failure>) {
        let doubtful = match outcome {
            Ok(reply) => reply.resent.is_some(),
            Err(failure) => failure.is_indeterminate(),
        };
        if doubtful {
            self.mark_unknown();
        }
        self.answered();
    }

    /// Records that the request was answered.
    pub(crate) fn answered(&self) {
        if self.unanswered.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.all_answered.notify_waiters();
        }
    }

    /// Waits until all requests were answered, whatever the answers were.
    pub(crate) async fn all_answered(&self) {
        let notified = self.all_answered.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if self.unanswered.load(Ordering::SeqCst) > 0 {
            notified.await;
        }
    }

    /// Records that the effects are unknown, whatever the replies were: they must be undone.
    pub(crate) fn mark_unknown(&self) {
        self.is_unknown.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_indeterminate(&self) -> bool {
        self.is_unknown.load(Ordering::SeqCst) || self.unanswered.load(Ordering::SeqCst) > 0
    }
}

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
    pub(crate) fn doubt_negatives(&mut self) {
        if self.deployment.decides_alone() {
            return;
        }
        for (_, outcome) in &mut self.received {
            if let Ok(reply) = outcome
                && reply.is_number(0)
                && let Some(resent) = reply.resent.clone()
            {
                *outcome = Err(resent);
            }
        }
    }

    /// Waits for the remaining nodes, each with its own time limit.
    pub(crate) async fn wait(&mut self) {
        if let Some(mut rest) = self.rest.take() {
            while let Some(vote) = rest.next().await {
                self.received.push(vote);
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

/// Nodes that reply after the decision.
#[derive(Debug)]
pub(crate) struct Stragglers {
    pub(super) answers: mpsc::Receiver<Vote>,
}

impl Stragglers {
    /// Returns the next reply; `None` after the last one.
    ///
    /// # Cancel safety
    /// Cancel safe: no reply is lost.
    pub(crate) async fn next(&mut self) -> Option<Vote> {
        self.answers.recv().await
    }
}

/// The first of two numbers in a refusal; the second is an accepted token that is at least as large
/// as the proposed one.
const TOO_LOW: i64 = -8;

/// Refuses a request that arrives after its `grant_before`, or an attempt that has ended.
pub(super) const LATE: i64 = -1;

/// Refuses a request at a node that was not admitted to its quorum.
pub(super) const NOT_ADMITTED: i64 = -9;

/// The reply of a script.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(super) script: &'static Script,
    pub(super) value: Value,
    /// A time before the request was written: what it was granted counts from then.
    pub(crate) sent: Moment,
    /// The generation of the connection that it came through.
    pub(crate) generation: u64,
    /// The request was sent again after its connection broke with this failure: it may have run
    /// twice, or may run again later.
    pub(crate) resent: Option<Failure>,
}

impl Reply {
    /// The answer of a verb: one integer, or the two of a busy lock.
    pub(crate) fn answer(&self) -> Result<Answer, Failure> {
        match &self.value {
            Value::Int(number) => Ok(Answer::Final(*number)),
            Value::Array(items) => match items.as_slice() {
                [Value::Int(TOO_LOW), Value::Int(highest)] => Ok(Answer::TooLow(*highest)),
                [Value::Int(free_in), Value::Int(time)] => Ok(Answer::Busy(*free_in, *time)),
                _ => Err(self.unexpected()),
            },
            _ => Err(self.unexpected()),
        }
    }

    /// The items of a longer reply, as text.
    pub(crate) fn texts(&self) -> Result<Vec<String>, Failure> {
        let Value::Array(items) = &self.value else { return Err(self.unexpected()) };
        let text = |item: &Value| match item {
            Value::Int(number) => Some(number.to_string()),
            // Other libraries hold locks under tokens of any bytes.
            Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        };
        items.iter().map(text).collect::<Option<_>>().ok_or_else(|| self.unexpected())
    }

    pub(crate) fn unexpected(&self) -> Failure {
        Failure::reply(self.script.name(), describe(&self.value))
    }

    pub(super) fn is_number(&self, number: i64) -> bool {
        self.value == Value::Int(number)
    }

    /// Whether the reply is one integer of at least `least`.
    pub(super) fn is_number_from(&self, least: i64) -> bool {
        matches!(self.value, Value::Int(number) if number >= least)
    }
}

/// Describes a reply that no script gives, for the text of an error. Items of an array may name a
/// holder, which a log must not show in full.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(describe_item).collect::<Vec<_>>().join(", "))
        }
        other => format!("{other:?}"),
    }
}

fn describe_item(item: &Value) -> String {
    match item {
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => format!("{:?}", shortened(&String::from_utf8_lossy(bytes))),
        Value::SimpleString(text) => format!("{:?}", shortened(text)),
        other => describe(other),
    }
}

/// The answer of a verb, as specified in `lua/README.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Positive: done. 0: not done. Negative: refused.
    Final(i64),
    /// Busy: the milliseconds until the lock is free at the latest, and the server's clock in
    /// microseconds.
    Busy(i64, i64),
    /// Refused: this accepted number is at least as large as the proposal.
    TooLow(i64),
}

impl NodeReplies {
    /// Records the nodes' replies to one request, where a positive reply is a number of at least
    /// `least`, or a longer reply.
    pub(crate) fn with_votes(self, least: i64, votes: Vec<Vote>) -> NodeReplies {
        votes.into_iter().fold(self, |answers, (node, outcome)| {
            let answer = match outcome {
                Ok(reply) => answered(&reply, least),
                Err(failure) => NodeReply::Failed(failure),
            };
            answers.with(node, answer)
        })
    }
}

fn answered(reply: &Reply, least: i64) -> NodeReply {
    match &reply.value {
        Value::Int(number) if *number >= least => NodeReply::Granted,
        // What a script reports of a lock. A busy lock has a reply of two integers.
        Value::Array(items) if items.len() > 2 && items.first() == Some(&Value::Int(1)) => NodeReply::Granted,
        Value::Int(_) | Value::Array(_) => NodeReply::Refused,
        _ => NodeReply::Failed(reply.unexpected()),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unexpected_answer_does_not_show_a_holder() {
        let name = "8743c9c0-0795-4907-87fd-6c719a6b4586";
        let holder = Value::Array(vec![Value::BulkString(name.into()), Value::Int(7)]);
        let text = describe(&Value::Array(vec![Value::Int(1), Value::SimpleString(name.into()), holder]));
        assert_eq!(text, "[1, \"8743c9c0…\", [\"8743c9c0…\", 7]]");
    }
}
