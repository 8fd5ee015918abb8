//! [`Nodes`]: the nodes that decide together, one alone or several by majority
//! ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)).

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;

use super::facts::Facts;
use super::failure::{Ability, Failure, NodeReplies, NodeReply};
use super::node::Node;
use super::request::have_one_slot;
use super::script::Call;
use crate::clock::Moment;
use crate::deployment::{Deployment, NodeSet};
use crate::name::Name;

/// One node, or several.
pub(crate) struct Nodes {
    pub(crate) deployment: Deployment,
    pub(super) all: Vec<Arc<Node>>,
    pub(crate) labels: Arc<[String]>,
    /// That of the connections.
    pub(crate) runtime: Handle,
    /// The largest proposal of this client that nodes have accepted.
    accepted: AtomicU64,
    /// Whether a majority has been connected to once, so that their clocks are known.
    has_connected: AtomicBool,
    /// The number of locks that the client holds, for logs.
    holds: Arc<AtomicUsize>,
}

impl Nodes {
    /// Must be called on the client's runtime.
    pub(crate) fn new(all: Vec<Node>, holds: Arc<AtomicUsize>) -> Nodes {
        let all: Vec<_> = all.into_iter().map(Arc::new).collect();
        let labels = all.iter().map(|node| node.connection.handshake.label.to_string()).collect();
        let has_cluster = all.iter().any(|node| node.is_cluster());
        let deployment = Deployment {
            nodes: all.len(),
            has_one_clock: matches!(all.as_slice(), [node] if node.connection.endpoint.is_one_server()),
            has_all_subscribers: !has_cluster,
            has_restart_guard: all.iter().any(|node| node.has_restart_guard()),
        };
        Nodes {
            deployment,
            all,
            labels,
            runtime: Handle::current(),
            accepted: AtomicU64::new(0),
            has_connected: AtomicBool::new(false),
            holds,
        }
    }

    /// Whether one call may have both locks.
    pub(crate) fn have_one_slot(&self, one: &Name, other: &Name) -> bool {
        !self.has_cluster() || have_one_slot(one, other)
    }

    pub(crate) fn has_cluster(&self) -> bool {
        self.all.iter().any(|node| node.is_cluster())
    }

    /// Since when more nodes have failed to do this than a decision about the lock allows, and with
    /// which failure.
    pub(crate) fn outage(&self, lock: &Name, needed: Ability) -> Option<(Moment, Failure)> {
        let key = Some(lock.key());
        if self.deployment.decides_alone() {
            return self.node(0).outage(key, needed);
        }
        let outage = |(place, node): (usize, &Arc<Node>)| Some((node.outage(key, needed)?, place));
        let outages: Vec<_> = self.all.iter().enumerate().filter_map(outage).collect();
        let mut begins: Vec<Moment> = outages.iter().map(|((since, _), _)| *since).collect();
        begins.sort();
        // One node more than may fail.
        let since = *begins.get(self.deployment.max_failures())?;
        let answers = outages.into_iter().fold(self.no_replies(), |answers, ((_, failure), place)| {
            answers.with(place, NodeReply::Failed(failure))
        });
        Some((since, Failure::no_majority(answers)))
    }

    /// The generation of the connection to the one clock that dates every grant, if there is one.
    pub(crate) fn clock_generation(&self) -> Option<u64> {
        let node = self.all.first().filter(|_| self.deployment.has_one_clock)?;
        Some(node.connection.current(false).map_or(0, |live| live.generation))
    }

    /// Counts a hold until the returned value is dropped.
    pub(crate) fn count_hold(&self) -> HoldCount {
        self.holds.fetch_add(1, Ordering::Relaxed);
        HoldCount(Arc::clone(&self.holds))
    }

    pub(crate) fn all_nodes(&self) -> NodeSet {
        NodeSet::first(self.deployment.nodes)
    }

    pub(crate) fn node(&self, place: usize) -> &Node {
        &self.all[place]
    }

    /// What each node replied, before any was asked.
    pub(crate) fn no_replies(&self) -> NodeReplies {
        NodeReplies::of(&self.labels, self.deployment.max_failures())
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
        Some(self.clock().max(self.accepted.load(Ordering::Relaxed) + 1))
    }

    /// The servers' clock, as far as it is known.
    pub(crate) fn clock(&self) -> u64 {
        let clocks = self.all.iter().map(|node| node.connection.server_clock.now()).collect();
        median_clock(clocks, self.deployment.majority()).unwrap_or(0)
    }

    /// Whether a node has failed for this lock and not answered since.
    pub(crate) fn is_failing(&self, lock: &Name) -> bool {
        self.all.iter().any(|node| node.outage(Some(lock.key()), Ability::Store).is_some())
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

    /// The rights that the user lacks for the scripts of a lock, each once, as `ACL SETUSER` takes
    /// them.
    pub(crate) async fn missing_rights(&self, lock: &Name) -> BTreeSet<String> {
        let missing = |node: Arc<Node>| {
            let lock = lock.clone();
            async move { node.missing_rights(&lock).await }
        };
        let replies = self.each(missing).await.into_iter().flatten();
        replies.flat_map(|rights| rights.unwrap_or_else(|| vec!["+eval".to_owned()])).collect()
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

    /// Connects to several nodes before the first proposal, which is made from the clocks of a
    /// majority: without them it would be smaller than tokens that the nodes have lost. A node that
    /// fails has failed for the call: it is not sent, since the node may have come back by then.
    pub(crate) async fn open(&self, call: impl Fn() -> Arc<Call>) -> Result<(), Failure> {
        if self.deployment.decides_alone() || self.has_connected.load(Ordering::Relaxed) {
            return Ok(());
        }
        let begun = Moment::now();
        let mut replies = self.no_replies();
        for (place, outcome) in self.connect().await.into_iter().enumerate() {
            if let Err(failure) = outcome.map_err(Failure::unsent) {
                self.node(place).note(begun, &[(&call(), &Err(failure.clone()))]);
                replies = replies.with(place, NodeReply::Failed(failure));
            }
        }
        if self.has_connected.load(Ordering::Relaxed) { Ok(()) } else { Err(Failure::no_majority(replies)) }
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

#[cfg(test)]
mod tests {
    use super::super::servers::Endpoint;
    use super::*;

    const DAY: u64 = 86_400_000_000;
    const NOW: u64 = 20_000 * DAY;

    /// Nodes to which nothing is sent, as if their clocks had been read at these times.
    fn with_clocks(clocks: &[Option<u64>]) -> Nodes {
        let holds = Arc::default();
        let node = |clock: &Option<u64>| {
            let client = redis::Client::open("redis://127.0.0.1:1/").unwrap();
            let (endpoint, limit) = (Endpoint::Server(client), Duration::from_secs(1));
            let node = Node::new(endpoint, limit, false, None, None, &holds, &Arc::default());
            if let Some(clock) = clock {
                node.observe(*clock);
            }
            node
        };
        Nodes::new(clocks.iter().map(node).collect(), Arc::clone(&holds))
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
