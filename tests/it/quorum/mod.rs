//! Independent servers, of which more than half decide: what each of them may do, and what it costs.

mod contention;
mod inspection;
mod late_requests;
mod leases;
#[cfg(feature = "tracing")]
mod logs;
mod nested_tokens;
mod node_failures;
mod nodes;
mod queue;
mod refusals;
mod rejoin;
mod restart_guard;
mod status;
mod tokens;

use std::time::Duration;

use redlatch::{Error, Locks, NodeOutcome, NodeStatus, Options};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::support::{AnyGuard, AnyLock, Kind, Proxy, Server, count_waiters, eventually, servers};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// Those of whom there is one at a time.
const ALONE: [Kind; 3] = [Kind::Mutex, Kind::Reentrant, Kind::Write];

/// What one request to one node may take. Short, since hanging nodes make tests wait for it.
const TIMEOUT: Duration = Duration::from_millis(300);

/// How soon after it is back a node must have nothing of what was given up meanwhile: far less than a ttl.
const CLEANED: Duration = Duration::from_secs(4);

/// More at a time would be in each other's way.
static TURNS: Semaphore = Semaphore::const_new(3);

fn options() -> Options {
    Options::new().node_timeout(TIMEOUT)
}

/// Servers, each named by its place; some of them are a number with a bit for each.
struct Quorum {
    servers: Vec<Server>,
    _turn: SemaphorePermit<'static>,
}

/// The places in a set.
fn places(set: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |place| set >> place & 1 == 1)
}

impl Quorum {
    async fn start(nodes: usize) -> Quorum {
        Quorum::start_with(nodes, &[]).await
    }

    async fn start_with(nodes: usize, arguments: &[&str]) -> Quorum {
        let turn = TURNS.acquire().await.unwrap();
        Quorum { servers: servers(nodes, arguments).await, _turn: turn }
    }

    /// Nodes that forget nothing that they have answered.
    async fn durable(nodes: usize) -> Quorum {
        Quorum::start_with(nodes, &["--appendonly", "yes", "--appendfsync", "always"]).await
    }

    fn count(&self) -> usize {
        self.servers.len()
    }

    fn majority(&self) -> usize {
        self.count() / 2 + 1
    }

    fn all(&self) -> u32 {
        (1 << self.count()) - 1
    }

    fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Server::url).collect()
    }

    /// A client of its own, as another process would have it.
    async fn client(&self, options: Options) -> Locks {
        Locks::builder().quorum(self.urls()).options(options).connect().await.unwrap()
    }

    /// A lock through a client of its own.
    async fn lock(&self, kind: Kind, name: &str, options: Options) -> AnyLock {
        kind.lock(&self.client(options).await, name)
    }

    /// A way to each server that can be closed.
    async fn proxies(&self) -> Vec<Proxy> {
        let mut proxies = Vec::new();
        for server in &self.servers {
            proxies.push(Proxy::start(server.port()).await);
        }
        proxies
    }

    /// A client that goes that way.
    async fn client_behind(&self, proxies: &[Proxy], options: Options) -> Locks {
        Locks::builder().quorum(proxies.iter().map(Proxy::url)).options(options).connect().await.unwrap()
    }

    /// What errors call these nodes.
    fn labels(&self, set: u32) -> Vec<String> {
        let mut labels: Vec<_> =
            places(set).map(|place| format!("127.0.0.1:{}", self.servers[place].port())).collect();
        labels.sort();
        labels
    }

    fn hang(&self, set: u32) {
        places(set).for_each(|place| self.servers[place].pause());
    }

    fn resume(&self, set: u32) {
        places(set).for_each(|place| self.servers[place].resume());
    }

    fn kill(&mut self, set: u32) {
        places(set).for_each(|place| self.servers[place].kill());
    }

    /// Returns once all of them serve again.
    async fn restart(&mut self, set: u32) {
        places(set).for_each(|place| self.servers[place].restart_unseen());
        for place in places(set) {
            self.servers[place].is_back().await;
        }
    }

    /// Runs a command on some of them.
    async fn run<T: redis::FromRedisValue>(&self, set: u32, words: &[&str]) -> Vec<T> {
        let mut answers = Vec::new();
        for place in places(set) {
            answers.push(self.servers[place].run(words).await);
        }
        answers
    }

    /// Which of these nodes have the key.
    async fn having(&self, among: u32, key: &str) -> u32 {
        let there: Vec<u32> = self.run(among, &["EXISTS", key]).await;
        places(among).zip(there).map(|(place, there)| there << place).sum()
    }

    /// Takes a free lock on all nodes, so that whoever comes next finds it taken on each and queues there.
    async fn take(&self, lock: &AnyLock) -> AnyGuard {
        eventually("free", || async { self.having(self.all(), lock.key()).await == 0 }).await;
        let guard = lock.lock().await.unwrap();
        eventually("taken", || async { self.having(self.all(), lock.key()).await == self.all() }).await;
        guard
    }

    /// Waits until so many stand in the queue of each of these nodes. Asked of the nodes, since a client would wait
    /// for those that hang.
    async fn queued(&self, among: u32, lock: &AnyLock, count: u64) {
        let queue = format!("{{{}}}:waiters", lock.key());
        let all = || async {
            self.run::<u64>(among, &count_waiters(&queue)).await.iter().all(|queued| *queued == count)
        };
        eventually("queued", all).await;
    }

    /// What every test ends with, once its clients are gone and all nodes are back.
    async fn finish(self) {
        for server in &self.servers {
            server.assert_nothing_left().await;
        }
    }

    /// The same, behind proxies.
    async fn finish_behind(self, proxies: Vec<Proxy>) {
        for proxy in proxies {
            proxy.outlive_clients().await;
        }
        self.finish().await;
    }
}

/// Of those who had no vote: who has one now.
fn admitted(rejoined: Result<Vec<NodeStatus>, Error>) -> Vec<String> {
    let statuses = rejoined.unwrap().into_iter();
    let mut admitted: Vec<_> = statuses.filter(NodeStatus::is_voter).map(|status| status.node).collect();
    admitted.sort();
    admitted
}

/// Of an error: how many nodes did not fail, and the others.
fn no_quorum<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (usize, Vec<NodeOutcome>) {
    match outcome {
        Err(Error::NoQuorum { nodes, .. }) => {
            let count = nodes.len();
            let failed: Vec<_> = nodes.into_iter().filter(|node| node.answer.error().is_some()).collect();
            (count - failed.len(), failed)
        }
        other => panic!("not for want of a quorum: {other:?}"),
    }
}

/// Whom they are about.
fn named(failures: &[NodeOutcome]) -> Vec<String> {
    let mut named: Vec<_> = failures.iter().map(|failure| failure.node.clone()).collect();
    named.sort();
    named
}
