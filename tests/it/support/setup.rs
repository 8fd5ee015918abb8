//! The parameters of a suite test: a kind, a topology, a way to be woken, and a protocol.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use redlatch::{Error, FencingToken, Lease, Locks, Options, RwLock};
use tokio::task::JoinHandle;

use super::lock_state::companion;
use super::proxy::{DIRECT, PROXIED};
use super::{AnyGuard, AnyLock, Deployment, Kind, Proxy, Server, Topology, eventually, open};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    Push,
    Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Resp2,
    Resp3,
}

/// One cell of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub topology: Topology,
    pub kind: Kind,
    pub wake: Wake,
    pub protocol: Protocol,
}

/// A cell with servers of its own.
pub struct Setup {
    pub kind: Kind,
    pub wake: Wake,
    protocol: Protocol,
    pub deployment: Deployment,
    tasks_before: usize,
    started: Instant,
    /// Dropped after the clients: a client that cannot reach the servers would retry its pending
    /// releases until their TTLs expire.
    proxy: OnceLock<Arc<Proxy>>,
}

impl Setup {
    pub async fn start(cell: Cell) -> Setup {
        let tasks_before = tasks();
        let deployment = Deployment::start_or_reuse(cell.topology).await;
        Setup {
            kind: cell.kind,
            wake: cell.wake,
            protocol: cell.protocol,
            deployment,
            tasks_before,
            started: Instant::now(),
            proxy: OnceLock::new(),
        }
    }

    pub fn topology(&self) -> Topology {
        self.deployment.topology()
    }

    /// The number of nodes that decide about one lock.
    pub fn nodes(&self) -> usize {
        self.topology().nodes()
    }

    /// A new client, as another process would have it.
    pub async fn client(&self) -> Locks {
        self.client_with(patient()).await
    }

    pub async fn client_with(&self, options: Options) -> Locks {
        self.try_client_with(options).await.unwrap()
    }

    pub async fn try_client_with(&self, options: Options) -> Result<Locks, Error> {
        open::open(&self.deployment, DIRECT, self.protocol, self.wake, options).await
    }

    /// Starts the proxy in front of all servers; may be called once.
    pub async fn proxy(&self) -> Arc<Proxy> {
        let proxy = Arc::new(Proxy::before(self.deployment.all().map(Server::port).collect()).await);
        self.proxy.set(Arc::clone(&proxy)).ok().expect("a test has one proxy");
        proxy
    }

    /// Makes the proxy lose the next answer about a lock: one reply, or one of each node of a
    /// quorum. Returns the number of replies.
    pub fn lose_next_answer(&self, proxy: &Proxy) -> usize {
        match self.nodes() {
            // Not one of each server: in a cluster, most servers get no request about the lock.
            1 => proxy.lose_next_reply(),
            _ => proxy.lose_next_replies(),
        }
        self.nodes()
    }

    /// A client that reaches all servers through the proxy.
    pub async fn client_behind(&self, _: &Proxy, options: Options) -> Locks {
        open::open(&self.deployment, PROXIED, self.protocol, self.wake, options).await.unwrap()
    }

    /// A client with this way to be woken.
    pub async fn client_woken(&self, wake: Wake) -> Locks {
        open::open(&self.deployment, DIRECT, self.protocol, wake, patient()).await.unwrap()
    }

    /// A lock of this kind through a new client, which reaches all servers through the proxy.
    pub async fn lock_behind(&self, proxy: &Proxy, name: &str, options: Options) -> AnyLock {
        self.kind.lock(&self.client_behind(proxy, options).await, name)
    }

    /// Whether the call failed because of the servers.
    pub fn failed<T>(&self, outcome: &Result<T, Error>) -> bool {
        self.topology().failed(outcome)
    }

    /// A lock of this kind through a new client.
    pub async fn lock(&self, name: &str) -> AnyLock {
        self.lock_with(name, patient()).await
    }

    pub async fn lock_with(&self, name: &str, options: Options) -> AnyLock {
        self.kind.lock(&self.client_with(options).await, name)
    }

    /// The same lock through a new client, of the kind that this one excludes.
    pub async fn rival(&self, name: &str) -> AnyLock {
        self.rival_with(name, patient()).await
    }

    pub async fn rival_with(&self, name: &str, options: Options) -> AnyLock {
        self.kind.rival().lock(&self.client_with(options).await, name)
    }

    /// The read-write lock "rw" through a new client. Each hold is one on the servers.
    pub async fn rwlock(&self, options: Options) -> RwLock {
        self.client_with(options.local_turn(Duration::ZERO)).await.rwlock("rw").unwrap()
    }

    /// Starts a task that has to wait for the lock with this key, and returns once it is queued on
    /// all nodes.
    pub async fn queued<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let queue = format!("{{{key}}}:waiters");
        let count = super::count_waiters(&queue);
        super::queued(async || self.deployment.run_at(&queue, &count).await, work).await
    }

    /// Waits until all nodes have what this lock's call was granted: a grant does not wait for the
    /// slowest nodes of a quorum.
    pub async fn is_held_on_all_nodes(&self, lock: &AnyLock) {
        self.deployment.has_everywhere(lock.key()).await;
        // Each node replies in the order of the requests: no further proposal of a token follows.
        lock.inspect().await.unwrap();
    }

    /// How many scripts may run after a grant although no call sends a request: the client soon
    /// repairs a grant that the slowest nodes of a quorum had not confirmed.
    pub fn repairs(&self) -> u64 {
        if self.nodes() == 1 { 0 } else { self.nodes() as u64 }
    }

    /// Waits until the only waiter of all clients has polled three times. Its next pause takes two
    /// seconds: until then, it acquires only if it is notified.
    pub async fn pauses_have_grown(&self) {
        let polled = self.deployment.scripts_run().await + 3 * self.topology().nodes() as u64;
        eventually("the waiter's pauses grow", || async { self.deployment.scripts_run().await >= polled })
            .await;
    }

    /// The number of messages published, once the lock with this key has waiters on all nodes,
    /// which are notified unless they only poll.
    pub async fn published_before_grant(&self, key: &str) -> u64 {
        for server in self.deployment.homes(key).await {
            match self.wake {
                Wake::Push => server.all_notified(key).await,
                Wake::Poll => {
                    let queue = companion(key, "waiters");
                    eventually("a waiter queues", || async { server.waiters(&queue).await > 0 }).await;
                }
            }
        }
        self.deployment.published().await
    }

    /// Fails unless a majority of the nodes has published a message since then, if waiters are
    /// notified. The waiting time proves no notification: a waiter that is not notified polls.
    pub async fn assert_notified(&self, published_before: u64) {
        if self.wake == Wake::Push {
            let messages = self.deployment.published().await - published_before;
            assert!(messages >= self.topology().majority() as u64, "{messages} messages");
        }
    }

    /// Whether a read lease has the token of the last writer, or a larger one of its own. On one
    /// server, the token is larger only if the client has read the server's clock in between, which
    /// clients do in steps of 10 s.
    pub fn reads_after(&self, lease: &Lease, written: Option<FencingToken>) -> bool {
        match self.topology() {
            Topology::Standalone if self.started.elapsed() < Duration::from_secs(9) => {
                lease.fencing_token() == written
            }
            _ => lease.fencing_token() >= written,
        }
    }

    /// Checks that the lease ends no later than the servers' hold.
    pub async fn assert_conservative(&self, lock: &AnyLock, guard: &AnyGuard) {
        let until = guard.lease().valid_until();
        let kept = self.deployment.kept_until(lock.key()).await;
        assert!(until <= kept, "the lease outlasts the servers' hold by {:?}", until - kept);
    }

    /// Ends a test that has dropped its clients: checks that the servers and this runtime have
    /// nothing left of them.
    pub async fn finish(self) {
        let own = || self.tasks_before + self.proxy.get().map_or(0, |proxy| proxy.tasks());
        eventually("no task left", || async { tasks() <= own() }).await;
        self.deployment.assert_nothing_left().await;
        if let Some(proxy) = self.proxy.get() {
            proxy.close().await; // the next test with these servers listens on the same ports
        }
        self.deployment.leave();
    }
}

/// Waits until a client that still exists is idle: it has no lease, no open call and no pending
/// release. The servers do not show that.
pub async fn idles(locks: &Locks) {
    eventually("the client is idle", || async { locks.is_idle() }).await;
}

/// The number of tasks of this runtime: keepers, subscribers, connections.
fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Options of a test that is not about the node timeout. Machines are shared: a server that replies
/// after a second is slow, not away.
pub fn patient() -> Options {
    Options::new().node_timeout(Duration::from_secs(15))
}

/// A `poll_cap` longer than any wait: a waiter polls after half a claim, at most a second and a
/// half.
pub const NEVER: Duration = Duration::from_secs(10);

/// Options of waiters that acquire early only if they are notified.
pub fn notified_only() -> Options {
    patient().poll_cap(NEVER)
}

/// Short leases, for tests that wait for them to end.
pub fn ttl(millis: u64) -> Options {
    patient().ttl(Duration::from_millis(millis))
}
