//! What several nodes said to one request, and what is not known of an attempt's requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::mpsc;

use super::batcher::SentFlag;
use super::{Call, Failure, Node, NodeReplies, Reply};

/// Some of the nodes of a quorum, each by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeSet(u32);

impl NodeSet {
    pub(crate) const MOST: usize = 31;

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

/// What is not known of the requests of one attempt: whether all were answered, and none may run again.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    unanswered: AtomicUsize,
    unknown: AtomicBool,
    /// The latest request was given up before it was written.
    withdrawn: AtomicBool,
}

impl InFlight {
    /// Sends a request to the only node.
    ///
    /// # Cancel safety
    /// Dropped, it is known whether the request was written.
    pub(super) async fn ask(&self, node: &Node, call: &Call<'_>) -> Result<Reply, Failure> {
        self.withdrawn.store(false, Ordering::SeqCst);
        self.sent();
        let mut pending = PendingRequest { in_flight: self, sent: SentFlag::default(), is_answered: false };
        let outcome = node.call(call, &pending.sent).await;
        pending.is_answered = true;
        self.record(&outcome);
        outcome
    }

    /// Whether the latest request to the only node was given up before it was written: it has, and
    /// will have, no effect.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::SeqCst)
    }

    /// A request leaves: until its answer is there, nobody knows.
    pub(crate) fn sent(&self) {
        self.unanswered.fetch_add(1, Ordering::SeqCst);
    }

    /// What came of it. One that was never answered, or was sent twice, may yet run.
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

    /// It was answered.
    pub(crate) fn answered(&self) {
        self.unanswered.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whatever came of them: they must be undone.
    pub(crate) fn mark_unknown(&self) {
        self.unknown.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_indeterminate(&self) -> bool {
        self.unknown.load(Ordering::SeqCst) || self.unanswered.load(Ordering::SeqCst) > 0
    }
}

/// A request to the only node. Dropped before it is written, it leaves no doubt.
struct PendingRequest<'a> {
    in_flight: &'a InFlight,
    sent: SentFlag,
    is_answered: bool,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        if !self.is_answered && !self.sent.is_set() {
            self.in_flight.withdrawn.store(true, Ordering::SeqCst);
            self.in_flight.answered();
        }
    }
}

/// What one node said.
pub(crate) type Vote = (usize, Result<Reply, Failure>);

/// What the nodes said that were waited for.
#[derive(Debug)]
pub(crate) struct Votes {
    pub(super) labels: Arc<[String]>,
    pub(super) of: usize,
    /// The least number that is a "yes".
    pub(super) least: i64,
    pub(crate) cast: Vec<Vote>,
    /// Those who have not answered yet.
    pub(crate) rest: Option<Stragglers>,
}

impl Votes {
    /// How many nodes it takes.
    pub(crate) fn majority(&self) -> usize {
        self.of / 2 + 1
    }

    /// How many nodes there are.
    pub(crate) fn of(&self) -> usize {
        self.of
    }

    /// The one answer, or failure, of so many that none of them decides.
    pub(crate) fn failure(self) -> Failure {
        if self.of == 1
            && let Some((_, Err(failure))) = self.cast.first()
        {
            return failure.clone();
        }
        Failure::no_quorum(NodeReplies::of(&self.labels).with_votes(self.least, self.cast))
    }

    /// Among several nodes, "nothing to do" is no answer of one that the request was sent to twice: the first delivery may
    /// have done it.
    pub(crate) fn doubt_negatives(&mut self) {
        if self.of == 1 {
            return;
        }
        for (_, outcome) in &mut self.cast {
            if let Ok(reply) = outcome
                && reply.is_number(0)
                && let Some(resent) = reply.resent.clone()
            {
                *outcome = Err(resent);
            }
        }
    }

    /// Waits for those who have not answered, each of which has its own time limit.
    pub(crate) async fn wait(&mut self) {
        if let Some(mut rest) = self.rest.take() {
            while let Some(vote) = rest.next().await {
                self.cast.push(vote);
            }
        }
    }

    /// Those of whom there is no answer, or not yet.
    pub(crate) fn missing(&self) -> NodeSet {
        let answered = self.cast.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(node, _)| *node);
        NodeSet::first(self.of).without(NodeSet::of(answered))
    }

    /// Those that answered with a positive number.
    pub(crate) fn positives(&self) -> NodeSet {
        let is_yes =
            |outcome: &Result<Reply, Failure>| outcome.as_ref().is_ok_and(|reply| reply.is_number_from(1));
        NodeSet::of(self.cast.iter().filter(|(_, outcome)| is_yes(outcome)).map(|(node, _)| *node))
    }

    /// Those who say that there was nothing to do.
    pub(crate) fn negatives(&self) -> NodeSet {
        let is_no = |outcome: &Result<Reply, Failure>| outcome.as_ref().is_ok_and(|reply| reply.is_number(0));
        NodeSet::of(self.cast.iter().filter(|(_, outcome)| is_no(outcome)).map(|(node, _)| *node))
    }

    /// Those who failed to answer.
    pub(crate) fn failed(&self) -> NodeSet {
        NodeSet::of(self.cast.iter().filter(|(_, outcome)| outcome.is_err()).map(|(node, _)| *node))
    }
}

/// Nodes that answer later than it took to decide.
#[derive(Debug)]
pub(crate) struct Stragglers {
    pub(super) answers: mpsc::Receiver<Vote>,
}

impl Stragglers {
    /// The next answer; `None` once there are no more.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn next(&mut self) -> Option<Vote> {
        self.answers.recv().await
    }
}
