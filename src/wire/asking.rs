//! How the [`Nodes`] are asked: one request to some of them until a majority has decided, or many
//! requests in one pipeline for each. [`InFlight`]: requests with an unknown effect.
//! [`LoneRequest`]: one to the only node.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use super::error_replies::too_slow;
use super::failure::{Ability, Failure};
use super::nodes::Nodes;
use super::script::{Call, Reply};
use super::servers::SentFlag;
use super::votes::{Stragglers, Vote, Votes};
use crate::deployment::NodeSet;

/// How long a negative reply waits for the other nodes: a reply that is known by then needs no
/// undoing.
const GRACE: Duration = Duration::from_millis(50);

/// What is unknown of the requests of one attempt: whether all were answered, and none may run
/// again.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    unanswered: AtomicU32,
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

    /// Records the outcome.
    pub(super) fn record(&self, outcome: &Result<Reply, Failure>) {
        if Reply::unknown_effect(outcome).is_some() {
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

/// A request to the only node. Dropped before it is written, it has no effect.
pub(super) struct LoneRequest<'a> {
    in_flight: &'a InFlight,
    pub(super) sent_flag: SentFlag,
    is_answered: bool,
}

impl<'a> LoneRequest<'a> {
    /// Records that the request leaves.
    pub(super) fn new(in_flight: &'a InFlight) -> LoneRequest<'a> {
        in_flight.sent();
        LoneRequest { in_flight, sent_flag: SentFlag::default(), is_answered: false }
    }

    pub(super) fn record(mut self, outcome: &Result<Reply, Failure>) {
        self.is_answered = true;
        self.in_flight.record(outcome);
    }
}

impl Drop for LoneRequest<'_> {
    fn drop(&mut self) {
        if !self.is_answered && !self.sent_flag.is_set() {
            self.in_flight.is_withdrawn.store(true, Ordering::SeqCst);
            self.in_flight.answered();
        }
    }
}

/// Which replies to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitFor {
    /// Until a majority has replied with a number of at least this, or cannot any more.
    Majority(i64),
    /// Until all have replied or failed.
    All,
}

impl Nodes {
    /// Sends a request to some nodes concurrently, each with its own time limit.
    ///
    /// # Cancel safety
    /// Not cancel safe: requests that were written continue, and `in_flight` records them; for a
    /// single node also whether one was written.
    pub(crate) async fn ask(
        &self,
        call: &Arc<Call>,
        among: NodeSet,
        in_flight: &Arc<InFlight>,
        wait_for: WaitFor,
    ) -> Votes {
        if let [node] = self.all.as_slice() {
            let request = LoneRequest::new(in_flight);
            let outcome = node.send(call, &request.sent_flag).await;
            request.record(&outcome);
            return self.votes(vec![(0, outcome)], wait_for);
        }
        let rest = self.send_to_several(call, among, in_flight);
        self.gather(self.votes(Vec::new(), wait_for), rest, call, among, wait_for).await
    }

    /// Sends a request to nodes of a quorum. Their votes arrive once a majority has voted, and then
    /// one by one.
    fn send_to_several(&self, call: &Arc<Call>, among: NodeSet, in_flight: &Arc<InFlight>) -> Stragglers {
        let (mut sender, more) = oneshot::channel();
        let rest = Stragglers { more: Some(more) };
        let mut pending = Vec::with_capacity(among.len());
        for (place, node) in self.all.iter().enumerate().filter(|(place, _)| among.contains(*place)) {
            in_flight.sent();
            let (node, call, in_flight) = (Arc::clone(node), Arc::clone(call), Arc::clone(in_flight));
            pending.push(Box::pin(async move {
                let outcome = node.send(&call, &SentFlag::default()).await;
                in_flight.record(&outcome);
                (place, outcome)
            }));
        }
        // One task for all nodes: switching between tasks costs more than polling the requests. No
        // vote decides before a majority has voted, so none wakes the caller before.
        let (mut held_back, mut missing) = (Vec::with_capacity(among.len()), self.deployment.majority());
        self.runtime.spawn(async move {
            while let Some(vote) = next_ready(&mut pending).await {
                held_back.push(vote);
                missing = missing.saturating_sub(1);
                if missing == 0 || pending.is_empty() {
                    let (next, more) = oneshot::channel();
                    let rest = Stragglers { more: Some(more).filter(|_| !pending.is_empty()) };
                    let _decided_without_it = sender.send((std::mem::take(&mut held_back), rest));
                    sender = next;
                }
            }
        });
        rest
    }

    /// Whether each of these nodes has failed before, so that it will not reply soon.
    fn are_failing(&self, nodes: NodeSet, call: &Call) -> bool {
        let mut some = self.all.iter().enumerate().filter(|(place, _)| nodes.contains(*place));
        some.all(|(_, node)| node.outage(call.first_key(), Ability::Reply).is_some())
    }

    /// Waits for the remaining votes, but for those of nodes that have failed before.
    pub(crate) async fn wait_for_rest(&self, votes: &mut Votes, call: &Call) {
        while let Some(mut rest) = votes.rest.take() {
            let replied = NodeSet::of(votes.received.iter().map(|(place, _)| *place));
            let silent = self.all_nodes().without(replied);
            if silent.is_empty() {
                return; // nothing is unknown of the call
            }
            if self.are_failing(silent, call) {
                return votes.rest = Some(rest);
            }
            if let Some(mut more) = rest.next().await {
                votes.received.append(&mut more);
                votes.rest = Some(rest);
            }
        }
    }

    /// Waits for as many votes as are asked for, or until they can no longer come.
    async fn gather(
        &self,
        mut votes: Votes,
        mut rest: Stragglers,
        call: &Call,
        among: NodeSet,
        wait_for: WaitFor,
    ) -> Votes {
        let grace = sleep(Duration::MAX);
        tokio::pin!(grace);
        let mut is_refused = false;
        loop {
            let tally = votes.tally();
            let pending = among.without(tally.replied()).without(tally.failed);
            if let WaitFor::Majority(least) = wait_for {
                if self.deployment.is_majority(tally.positive) {
                    break;
                }
                // If too few reply, each node's failure is reported; none takes longer than its
                // node's time limit.
                let may_grant = self.deployment.is_majority(tally.positive.union(pending));
                if self.deployment.is_majority(tally.replied()) && !is_refused {
                    // An acquire waits for none, even if it could be granted: each of two clients
                    // that have one node would wait for the third one, which hangs, and release its
                    // own at the same moment.
                    if self.are_failing(pending, call) && (!may_grant || least == 0) {
                        break;
                    }
                    if !may_grant {
                        is_refused = true;
                        grace.as_mut().reset(tokio::time::Instant::now() + GRACE.min(self.limit() / 4));
                    }
                }
            }
            tokio::select! {
                answers = rest.next() => match answers {
                    Some(mut answers) => votes.received.append(&mut answers),
                    None => {
                        // Tasks that ended without a reply: their runtime has shut down.
                        let ended = (0..self.deployment.nodes).filter(|place| pending.contains(*place));
                        votes.received.extend(ended.map(|place| (place, Err(Failure::runtime_ended()))));
                        break;
                    }
                },
                () = &mut grace, if is_refused => break,
            }
        }
        if votes.received.len() < among.len() {
            votes.rest = Some(rest);
        }
        votes
    }

    /// Sends many requests, each to some of the nodes, one pipeline per node, and waits for all of
    /// them, at most `limit` for each node.
    pub(crate) async fn ask_ahead(
        &self,
        calls: Vec<(Arc<Call>, NodeSet)>,
        limit: Duration,
    ) -> Vec<Vec<Vote>> {
        if let [node] = self.all.as_slice() {
            let calls: Vec<&Arc<Call>> = calls.iter().map(|(call, _)| call).collect();
            let outcomes = node.send_ahead(&calls, limit).await;
            return outcomes.into_iter().map(|outcome| vec![(0, outcome)]).collect();
        }
        let mut votes: Vec<Vec<Vote>> = calls.iter().map(|_| Vec::new()).collect();
        let calls = Arc::new(calls);
        let mut tasks = Vec::new();
        for (place, node) in self.all.iter().enumerate() {
            let numbers: Vec<usize> =
                (0..calls.len()).filter(|number| calls[*number].1.contains(place)).collect();
            if numbers.is_empty() {
                continue;
            }
            let (node, calls, limit) = (Arc::clone(node), Arc::clone(&calls), limit.min(node.limit()));
            tasks.push(self.runtime.spawn(async move {
                let calls: Vec<&Arc<Call>> = numbers.iter().map(|number| &calls[*number].0).collect();
                let outcomes = timeout(limit, node.send_ahead(&calls, limit)).await.unwrap_or_else(|_| {
                    calls.iter().map(|_| Err(Failure::indeterminate(too_slow()))).collect()
                });
                numbers
                    .into_iter()
                    .zip(outcomes)
                    .map(|(number, outcome)| (number, (place, outcome)))
                    .collect()
            }));
        }
        for task in tasks {
            // A join fails only if the runtime shuts down.
            let replies: Vec<(usize, Vote)> = task.await.unwrap_or_default();
            replies.into_iter().for_each(|(number, vote)| votes[number].push(vote));
        }
        votes
    }

    pub(super) fn votes(&self, received: Vec<Vote>, wait_for: WaitFor) -> Votes {
        let least = if let WaitFor::Majority(least) = wait_for { least } else { 1 };
        Votes { labels: Arc::clone(&self.labels), deployment: self.deployment, least, received, rest: None }
    }
}

/// Returns the output of the future that ends first; `None` after the last one.
async fn next_ready<F: Future>(pending: &mut Vec<Pin<Box<F>>>) -> Option<F::Output> {
    poll_fn(|context| {
        for place in 0..pending.len() {
            if let Poll::Ready(output) = pending[place].as_mut().poll(context) {
                drop(pending.swap_remove(place));
                return Poll::Ready(Some(output));
            }
        }
        if pending.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}
