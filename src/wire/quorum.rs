//! [`Nodes`]: the nodes that decide together, one alone or several by majority
//! ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::error_replies::too_slow;
use super::failure::{Failure, NodeReplies, NodeReply};
use super::handshake::Facts;
use super::in_flight::InFlight;
use super::node::Node;
use super::script::Call;
use super::votes::{Stragglers, Vote, Votes};
use crate::clock::Moment;
use crate::deployment::{Deployment, NodeSet};
use crate::events::Observer;
use crate::traces::Report;

/// How long a negative reply waits for the other nodes: a reply that is known by then needs no
/// undoing.
const GRACE: Duration = Duration::from_millis(50);

/// Which replies to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitFor {
    /// Until a majority has replied with a number of at least this, or cannot any more.
    Majority(i64),
    /// Until all have replied or failed.
    All,
}

/// One node, or several.
pub(crate) struct Nodes {
    pub(crate) deployment: Deployment,
    all: Vec<Arc<Node>>,
    labels: Arc<[String]>,
    runtime: Handle,
    /// The largest proposal of this client that nodes have accepted.
    accepted: AtomicU64,
    /// Whether a majority has been connected to once, so that their clocks are known.
    has_connected: AtomicBool,
    /// The number of locks that the client holds, for logs.
    holds: Arc<AtomicUsize>,
}

impl Nodes {
    /// Must be called on the client's runtime.
    pub(crate) fn new(all: Vec<(Node, String)>, observer: &Arc<Observer>) -> Nodes {
        let holds = Arc::default();
        let named = |(node, label): (Node, String)| (Arc::new(node.named(&label, &holds, observer)), label);
        let (all, labels): (Vec<_>, Vec<_>) = all.into_iter().map(named).unzip();
        let has_cluster = all.iter().any(|node| node.is_cluster());
        let deployment = Deployment {
            nodes: all.len(),
            has_one_clock: matches!(all.as_slice(), [node] if node.is_one_server()),
            has_all_subscribers: !has_cluster,
            has_restart_guard: all.iter().any(|node| node.has_restart_guard()),
        };
        Nodes {
            deployment,
            all,
            labels: labels.into(),
            runtime: Handle::current(),
            accepted: AtomicU64::new(0),
            has_connected: AtomicBool::new(false),
            holds,
        }
    }

    pub(crate) fn has_cluster(&self) -> bool {
        self.all.iter().any(|node| node.is_cluster())
    }

    /// Since when more nodes have failed than a decision allows, and with which failure. Missing
    /// replicas count only if the request requires them.
    pub(crate) fn outage(&self, replicas: u32) -> Option<(Moment, Failure)> {
        if self.deployment.decides_alone() {
            return self.node(0).outage(replicas);
        }
        let outage = |(place, node): (usize, &Arc<Node>)| node.outage(replicas).map(|outage| (outage, place));
        let outages: Vec<_> = self.each_node().filter_map(outage).collect();
        let mut begins: Vec<Moment> = outages.iter().map(|((since, _), _)| *since).collect();
        begins.sort();
        // One node more than may fail.
        let since = *begins.get(self.deployment.max_failures())?;
        let answers = outages.into_iter().fold(self.no_replies(), |answers, ((_, failure), place)| {
            answers.with(place, NodeReply::Failed(failure))
        });
        Some((since, Failure::no_majority(answers)))
    }

    /// Runs a task on the runtime of the connections.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// The generation of the connection to the one clock that dates every grant, if there is one.
    pub(crate) fn clock_generation(&self) -> Option<u64> {
        self.all.first().filter(|_| self.deployment.has_one_clock).map(|node| node.generation())
    }

    /// Reports about nodes from requests that were sent together and were not logged yet.
    pub(crate) fn take_reports(&self) -> Vec<Report> {
        self.all.iter().flat_map(|node| node.take_reports()).collect()
    }

    /// Counts a hold until the returned value is dropped.
    pub(crate) fn count_hold(&self) -> HoldCount {
        self.holds.fetch_add(1, Ordering::Relaxed);
        HoldCount(Arc::clone(&self.holds))
    }

    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn all_nodes(&self) -> NodeSet {
        NodeSet::first(self.count())
    }

    pub(crate) fn node(&self, place: usize) -> &Node {
        &self.all[place]
    }

    pub(super) fn each_node(&self) -> impl Iterator<Item = (usize, &Arc<Node>)> {
        self.all.iter().enumerate()
    }

    pub(crate) fn labels(&self) -> &Arc<[String]> {
        &self.labels
    }

    /// What each node replied, before any was asked.
    pub(crate) fn no_replies(&self) -> NodeReplies {
        NodeReplies::of(&self.labels, self.deployment.max_failures())
    }

    pub(crate) fn label(&self, place: usize) -> &str {
        &self.labels[place]
    }

    /// How long a node may stay silent after a request was written.
    pub(crate) fn limit(&self) -> Duration {
        self.all.first().map_or(Duration::ZERO, |node| node.limit())
    }

    /// A token that is larger than any the nodes have seen, as far as is known. The nodes of a
    /// quorum need a common proposal, since each would choose its own token.
    pub(crate) fn proposal(&self) -> Option<u64> {
        if self.deployment.decides_alone() {
            return None;
        }
        let clocks = self.all.iter().map(|node| node.clock()).collect();
        let now = median_clock(clocks, self.deployment.majority())?;
        Some(now.max(self.accepted.load(Ordering::Relaxed) + 1))
    }

    /// Whether a node has failed and not answered since.
    pub(crate) fn is_failing(&self) -> bool {
        self.all.iter().any(|node| node.outage(u32::MAX).is_some())
    }

    /// Records an accepted proposal.
    pub(crate) fn accepted(&self, number: u64) {
        self.accepted.fetch_max(number, Ordering::Relaxed);
    }

    /// Connects to all nodes, and returns each one's result.
    pub(crate) async fn connect(&self) -> Vec<Result<(), redis::RedisError>> {
        self.each(|node| async move { node.connect().await }).await
    }

    /// What each node's servers report about themselves, or why they do not reply.
    pub(crate) async fn facts(&self) -> Vec<Result<Vec<Facts>, redis::RedisError>> {
        self.each(|node| async move { node.facts().await }).await
    }

    /// Publishes a message that clients ignore, through each node. `None`: the user has no right to
    /// publish.
    pub(crate) async fn publish_everywhere(
        &self,
        channel: &Arc<str>,
    ) -> Vec<Result<Option<u64>, redis::RedisError>> {
        let publish = |node: Arc<Node>| {
            let channel = Arc::clone(channel);
            async move { node.publish(&channel, "").await }
        };
        self.each(publish).await
    }

    /// Runs `work` for all nodes concurrently, on the runtime of the connections.
    async fn each<T, F>(&self, work: impl Fn(Arc<Node>) -> F) -> Vec<Result<T, redis::RedisError>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, redis::RedisError>> + Send + 'static,
    {
        let tasks: Vec<_> = self.all.iter().map(|node| self.runtime.spawn(work(Arc::clone(node)))).collect();
        let mut outcomes = Vec::new();
        for task in tasks {
            let outcome = task.await.map_err(|error| redis::RedisError::from(std::io::Error::other(error)));
            outcomes.push(outcome.and_then(|outcome| outcome));
        }
        if outcomes.iter().filter(|outcome| outcome.is_ok()).count() >= self.deployment.majority() {
            self.has_connected.store(true, Ordering::Relaxed);
        }
        outcomes
    }

    /// Connects to several nodes before the first proposal. The proposal is made from their clocks;
    /// without a clock it would be smaller than tokens that the nodes have lost. A node that fails
    /// to connect here fails again when the request is sent.
    pub(crate) async fn open(&self) {
        if self.count() > 1 && !self.has_connected.load(Ordering::Relaxed) {
            let _asked_next = self.connect().await;
        }
    }

    /// The run id of a node.
    pub(crate) async fn run_id(&self, place: usize) -> Result<Option<Arc<str>>, redis::RedisError> {
        self.node(place).run_id().await
    }

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
            let outcome = node.ask(call, in_flight).await;
            return self.votes(vec![(0, outcome)], wait_for);
        }
        let (mut sender, more) = oneshot::channel();
        let mut rest = Stragglers { more: Some(more) };
        let mut pending = Vec::with_capacity(among.len());
        for (place, node) in self.each_node().filter(|(place, _)| among.contains(*place)) {
            in_flight.sent();
            let (node, call, in_flight) = (Arc::clone(node), Arc::clone(call), Arc::clone(in_flight));
            pending.push(Box::pin(async move {
                let outcome = node.vote(&call).await;
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
        let replicas = call.replicas.map_or(0, |(count, _)| count);
        let mut votes = self.votes(Vec::new(), wait_for);
        let grace = sleep(Duration::MAX);
        tokio::pin!(grace);
        let mut refused = false;
        loop {
            let pending = among.len() - votes.received.len();
            if let WaitFor::Majority(least) = wait_for {
                let yes = votes
                    .received
                    .iter()
                    .filter(|(_, vote)| vote.as_ref().is_ok_and(|reply| reply.is_number_from(least)))
                    .count();
                if yes >= self.deployment.majority() {
                    break;
                }
                // If too few reply, each node's failure is reported; none takes longer than its
                // node's time limit.
                let answered = votes.received.iter().filter(|(_, vote)| vote.is_ok()).count();
                if yes + pending < self.deployment.majority()
                    && answered >= self.deployment.majority()
                    && !refused
                {
                    refused = true;
                    // A node that has failed before will not reply soon.
                    let replied = NodeSet::of(votes.received.iter().map(|(place, _)| *place));
                    let pending = |place: &usize| among.contains(*place) && !replied.contains(*place);
                    if (0..self.count())
                        .filter(pending)
                        .all(|place| self.all[place].outage(replicas).is_some())
                    {
                        break;
                    }
                    grace.as_mut().reset(tokio::time::Instant::now() + GRACE.min(self.limit() / 4));
                }
            }
            tokio::select! {
                answers = rest.next() => match answers {
                    Some(mut answers) => votes.received.append(&mut answers),
                    None => {
                        // Tasks that ended without a reply: their runtime has shut down.
                        let ended = among.without(NodeSet::of(votes.received.iter().map(|(place, _)| *place)));
                        let ended = (0..self.count()).filter(|place| ended.contains(*place));
                        votes.received.extend(ended.map(|place| (place, Err(Failure::runtime_ended()))));
                        break;
                    }
                },
                () = &mut grace, if refused => break,
            }
        }
        if votes.received.len() < among.len() {
            votes.rest = Some(rest);
        }
        votes
    }

    /// Sends many requests, each to some of the nodes, one pipeline per node, and waits for all of
    /// them, at most `limit` for each node.
    pub(crate) async fn call_all(&self, calls: Vec<(Arc<Call>, NodeSet)>, limit: Duration) -> Vec<Vec<Vote>> {
        if let [node] = self.all.as_slice() {
            let calls: Vec<&Arc<Call>> = calls.iter().map(|(call, _)| call).collect();
            return node
                .call_all(&calls, limit)
                .await
                .into_iter()
                .map(|outcome| vec![(0, outcome)])
                .collect();
        }
        let calls = Arc::new(calls);
        let mut tasks = Vec::new();
        for (place, node) in self.each_node() {
            let (node, calls) = (Arc::clone(node), Arc::clone(&calls));
            tasks.push(self.runtime.spawn(async move {
                let (numbers, node_calls): (Vec<usize>, Vec<&Arc<Call>>) = calls
                    .iter()
                    .enumerate()
                    .filter(|(_, (_, among))| among.contains(place))
                    .map(|(number, (call, _))| (number, call))
                    .unzip();
                if node_calls.is_empty() {
                    return Vec::new();
                }
                let limit = limit.min(node.limit());
                match timeout(limit, node.call_all(&node_calls, limit)).await {
                    Ok(outcomes) => numbers.into_iter().zip(outcomes).collect(),
                    Err(_) => {
                        let late = node_calls.iter().map(|_| Err(Failure::indeterminate(too_slow())));
                        numbers.into_iter().zip(late).collect()
                    }
                }
            }));
        }
        let mut votes: Vec<Vec<Vote>> = calls.iter().map(|_| Vec::new()).collect();
        for (place, task) in tasks.into_iter().enumerate() {
            // A join fails only if the runtime shuts down.
            for (number, outcome) in task.await.unwrap_or_default() {
                votes[number].push((place, outcome));
            }
        }
        votes
    }

    fn votes(&self, received: Vec<Vote>, wait_for: WaitFor) -> Votes {
        let least = if let WaitFor::Majority(least) = wait_for { least } else { 1 };
        Votes { labels: Arc::clone(&self.labels), deployment: self.deployment, least, received, rest: None }
    }
}

/// A counted hold.
pub(crate) struct HoldCount(Arc<AtomicUsize>);

impl Drop for HoldCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The median of the clocks, not the latest: a clock that is far ahead must not be believed.
pub(crate) fn median_clock(mut clocks: Vec<u64>, majority: usize) -> Option<u64> {
    clocks.sort_unstable();
    clocks.get(majority - 1).copied()
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

#[cfg(test)]
mod tests {
    use super::super::servers::Endpoint;
    use super::*;

    const DAY: u64 = 86_400_000_000;
    const NOW: u64 = 20_000 * DAY;

    /// Nodes to which nothing is sent, as if their clocks had been read at these times.
    fn with_clocks(clocks: &[Option<u64>]) -> Nodes {
        let node = |clock: &Option<u64>| {
            let client = redis::Client::open("redis://127.0.0.1:1/").unwrap();
            let node = Node::new(Endpoint::Server(client), Duration::from_secs(1), false, None, None);
            if let Some(clock) = clock {
                node.observe(*clock);
            }
            (node, String::new())
        };
        Nodes::new(clocks.iter().map(node).collect(), &Arc::default())
    }

    #[tokio::test]
    async fn proposal_does_not_trust_a_minority_of_the_clocks() {
        let (now, ahead, behind, unknown) = (Some(NOW), Some(NOW + 2 * DAY), Some(NOW - 2 * DAY), None);
        for clocks in [
            &[now, now, now][..],
            &[ahead, now, now],
            &[now, ahead, now],
            &[behind, now, now],
            &[behind, now, ahead],
            &[unknown, now, ahead],
            &[ahead, now, now, now],
            &[unknown, ahead, now, now],
            &[ahead, now, now, ahead, now],
            &[behind, now, behind, now, now],
            &[ahead, unknown, now, now, unknown],
        ] {
            let proposal = with_clocks(clocks).proposal().unwrap();
            let near = NOW..NOW + DAY / 24; // the clocks advance meanwhile
            assert!(near.contains(&proposal), "{proposal} of {clocks:?}");
        }
    }

    #[tokio::test]
    async fn a_proposal_is_larger_than_what_was_accepted() {
        let nodes = with_clocks(&[Some(NOW); 3]);
        nodes.accepted(NOW + DAY);
        nodes.accepted(NOW);
        assert_eq!(nodes.proposal(), Some(NOW + DAY + 1));
        assert_eq!(with_clocks(&[Some(NOW)]).proposal(), None, "one server makes its tokens itself");
    }
}
