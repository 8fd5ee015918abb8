//! Quorums: independent servers, of which a majority decides. Some of them hang, die, lose their
//! data or reply late.

mod combined_calls;
mod contention;
mod inspection;
mod late_requests;
mod leases;
#[cfg(feature = "tracing")]
mod logs;
mod lost_leases;
mod nested_tokens;
mod node_failures;
mod nodes;
mod queue;
mod refusals;
mod rejoin;
mod restart_guard;
mod slow_nodes;
mod status;
mod tokens;

use std::time::Duration;

use redlatch::{Error, Locks, NodeOutcome, NodeStatus, Options};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::support::{AnyGuard, AnyLock, KINDS, Kind, Proxy, Server, count_waiters, eventually, servers};

/// The exclusive kinds: one holder at a time.
const ALONE: [Kind; 3] = [Kind::Mutex, Kind::Reentrant, Kind::Write];

/// The node timeout, which tests wait for whenever a node hangs. On a busy machine, a node may need
/// a good part of it to reply.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How soon after its return a node must have released what was abandoned meanwhile: far less than
/// a TTL.
const CLEANED: Duration = Duration::from_secs(4);

/// How many tests of this folder run at a time: more would slow each other down.
static TURNS: Semaphore = Semaphore::const_new(4);

fn options() -> Options {
    Options::new().node_timeout(TIMEOUT)
}

/// The servers of a quorum. A server is named by its index; a set of servers is a bit mask.
struct Quorum {
    servers: Vec<Server>,
    _turn: SemaphorePermit<'static>,
}

/// The indices in a set.
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

    /// Starts nodes that lose no acknowledged write in a restart.
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

    /// Opens a new client, with connections of its own, as another process would.
    async fn client(&self, options: Options) -> Locks {
        self.client_of(self.all(), options).await
    }

    /// Opens a client of these nodes alone.
    async fn client_of(&self, set: u32, options: Options) -> Locks {
        let urls = places(set).map(|place| self.servers[place].url());
        Locks::builder().quorum(urls).options(options).connect().await.unwrap()
    }

    /// Opens a lock through a new client.
    async fn lock(&self, kind: Kind, name: &str, options: Options) -> AnyLock {
        kind.lock(&self.client(options).await, name)
    }

    /// Starts a proxy before each server.
    async fn proxies(&self) -> Vec<Proxy> {
        let mut proxies = Vec::new();
        for server in &self.servers {
            proxies.push(Proxy::start(server.port()).await);
        }
        proxies
    }

    /// Opens a client that connects through the proxies.
    async fn client_behind(&self, proxies: &[Proxy], options: Options) -> Locks {
        Locks::builder().quorum(proxies.iter().map(Proxy::url)).options(options).connect().await.unwrap()
    }

    /// The names of these nodes in errors.
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

    /// Restarts these nodes, and returns once all of them serve again.
    async fn restart(&mut self, set: u32) {
        places(set).for_each(|place| self.servers[place].restart_unseen());
        for place in places(set) {
            self.servers[place].is_back().await;
        }
    }

    /// Runs a command on these nodes.
    async fn run<T: redis::FromRedisValue>(&self, set: u32, words: &[&str]) -> Vec<T> {
        let mut answers = Vec::new();
        for place in places(set) {
            answers.push(self.servers[place].run(words).await);
        }
        answers
    }

    /// How many scripts each node has run.
    async fn scripts_run(&self) -> Vec<u64> {
        let mut counts = Vec::new();
        for server in &self.servers {
            counts.push(server.scripts_run().await);
        }
        counts
    }

    /// Which of these nodes have the key, as a set.
    async fn having(&self, among: u32, key: &str) -> u32 {
        let there: Vec<u32> = self.run(among, &["EXISTS", key]).await;
        places(among).zip(there).map(|(place, there)| there << place).sum()
    }

    /// Waits until, among these nodes, exactly the `having` ones have the lock.
    async fn wait_for(&self, among: u32, having: u32, lock: &AnyLock) {
        let key = lock.key();
        let what = format!("of nodes {among:b}, {having:b} have {key}");
        eventually(&what, || async { self.having(among, key).await == having }).await;
    }

    /// Acquires a free lock and waits until all nodes have it, so that the next client queues on
    /// every node.
    async fn take(&self, lock: &AnyLock) -> AnyGuard {
        self.wait_for(self.all(), 0, lock).await;
        let guard = lock.lock().await.unwrap();
        self.wait_for(self.all(), self.all(), lock).await;
        guard
    }

    /// Waits until each of these nodes has `count` waiters in its queue, and notifies all of them.
    /// Asks the servers directly, since a client would wait for the nodes that hang.
    async fn queued(&self, among: u32, lock: &AnyLock, count: u64) {
        let queue = format!("{{{}}}:waiters", lock.key());
        let all = || async {
            self.run::<u64>(among, &count_waiters(&queue)).await.iter().all(|queued| *queued == count)
        };
        eventually("the waiters are queued on these nodes", all).await;
        for place in places(among).filter(|_| count > 0) {
            self.servers[place].all_notified(lock.key()).await;
        }
    }

    /// Checks that no server has a key left. Call it once the clients are dropped and all nodes are
    /// up.
    async fn finish(self) {
        for server in &self.servers {
            server.assert_nothing_left().await;
        }
    }

    /// Like `finish`, for clients behind proxies.
    async fn finish_behind(self, proxies: Vec<Proxy>) {
        for proxy in proxies {
            proxy.outlive_clients().await;
        }
        self.finish().await;
    }
}

/// The nodes that `rejoin` has admitted, sorted.
fn admitted(rejoined: Result<Vec<NodeStatus>, Error>) -> Vec<String> {
    let statuses = rejoined.unwrap().into_iter();
    let mut admitted: Vec<_> = statuses.filter(NodeStatus::is_voter).map(|status| status.node).collect();
    admitted.sort();
    admitted
}

/// Takes a `NoQuorum` error apart: how many nodes responded, and which failed.
fn no_quorum<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (usize, Vec<NodeOutcome>) {
    match outcome {
        Err(Error::NoQuorum { nodes, .. }) => {
            let count = nodes.len();
            let failed: Vec<_> = nodes.into_iter().filter(|node| node.answer.error().is_some()).collect();
            (count - failed.len(), failed)
        }
        other => panic!("expected NoQuorum: {other:?}"),
    }
}

/// The nodes of these outcomes, sorted.
fn named(failures: &[NodeOutcome]) -> Vec<String> {
    let mut named: Vec<_> = failures.iter().map(|failure| failure.node.clone()).collect();
    named.sort();
    named
}
