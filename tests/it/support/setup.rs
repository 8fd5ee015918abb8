//! What a test of the suite is run over: a kind, a topology, and a way to be woken.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use redlatch::{Error, FencingToken, Lease, Locks, Options, RwLock};
use tokio::task::JoinHandle;

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
    /// Stays until the clients have gone: without a way to the servers, one that has something to give back
    /// would try to until its ttl is over.
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

    /// How many nodes decide about one lock.
    pub fn nodes(&self) -> usize {
        self.topology().nodes()
    }

    /// A client of its own, as another process would have it.
    pub async fn client(&self) -> Locks {
        self.client_with(Options::new()).await
    }

    pub async fn client_with(&self, options: Options) -> Locks {
        self.try_client_with(options).await.unwrap()
    }

    pub async fn try_client_with(&self, options: Options) -> Result<Locks, Error> {
        open::open(&self.deployment, DIRECT, self.protocol, self.wake, options).await
    }

    /// A proxy in front of all servers. There is one.
    pub async fn proxy(&self) -> Arc<Proxy> {
        let proxy = Arc::new(Proxy::before(self.deployment.all().map(Server::port).collect()).await);
        self.proxy.set(Arc::clone(&proxy)).ok().expect("it is the first");
        proxy
    }

    /// The next answer about a lock is lost: a reply, or one of each node of a quorum. How many that makes.
    pub fn lose_next_answer(&self, proxy: &Proxy) -> usize {
        match self.nodes() {
            // In a cluster, servers that have nothing to do with the lock may be asked in vain.
            1 => proxy.lose_next_reply(),
            _ => proxy.lose_next_replies(),
        }
        self.nodes()
    }

    /// A client that reaches all servers through the proxy.
    pub async fn client_behind(&self, _: &Proxy, options: Options) -> Locks {
        open::open(&self.deployment, PROXIED, self.protocol, self.wake, options).await.unwrap()
    }

    /// A client that is woken in another way.
    pub async fn client_woken(&self, wake: Wake) -> Locks {
        open::open(&self.deployment, DIRECT, self.protocol, wake, Options::new()).await.unwrap()
    }

    /// A lock of this kind through a client of its own, which reaches all servers through the proxy.
    pub async fn lock_behind(&self, proxy: &Proxy, name: &str, options: Options) -> AnyLock {
        self.kind.lock(&self.client_behind(proxy, options).await, name)
    }

    /// Whether it failed because of the servers.
    pub fn failed<T>(&self, outcome: &Result<T, Error>) -> bool {
        self.topology().failed(outcome)
    }

    /// A lock of this kind through a client of its own.
    pub async fn lock(&self, name: &str) -> AnyLock {
        self.lock_with(name, Options::new()).await
    }

    pub async fn lock_with(&self, name: &str, options: Options) -> AnyLock {
        self.kind.lock(&self.client_with(options).await, name)
    }

    /// The same lock through a client of its own, for somebody whom this kind excludes.
    pub async fn rival(&self, name: &str) -> AnyLock {
        self.rival_with(name, Options::new()).await
    }

    pub async fn rival_with(&self, name: &str, options: Options) -> AnyLock {
        self.kind.rival().lock(&self.client_with(options).await, name)
    }

    /// One read-write lock, through a client of its own.
    pub async fn rwlock(&self, options: Options) -> RwLock {
        self.client_with(options).await.rwlock("rw").unwrap()
    }

    /// Starts something that has to wait for the lock with this key, and waits until it is queued: on all nodes.
    pub async fn queued<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let queue = format!("{{{key}}}:waiters");
        let count = super::count_waiters(&queue);
        super::queued(async || self.deployment.run_at(&queue, &count).await, work).await
    }

    /// Fails unless a majority of the nodes has published a message since then, where waiters are
    /// notified. The time that a waiter waits does not prove it: a waiter that is not notified
    /// polls.
    pub async fn assert_notified(&self, published_before: u64) {
        if self.wake == Wake::Push {
            let messages = self.deployment.published().await - published_before;
            assert!(messages >= self.topology().majority() as u64, "{messages} messages");
        }
    }

    /// Whether a lease to read has the token of the last writer, or a larger one of its own. On one server that is only
    /// if the clock was looked at in between, which clients do in steps of 10 s.
    pub fn reads_after(&self, lease: &Lease, written: Option<FencingToken>) -> bool {
        match self.topology() {
            Topology::Standalone if self.started.elapsed() < Duration::from_secs(9) => {
                lease.fencing_token() == written
            }
            _ => lease.fencing_token() >= written,
        }
    }

    /// A lease is never trusted for longer than the servers keep the lock.
    pub async fn assert_conservative(&self, lock: &AnyLock, guard: &AnyGuard) {
        let until = guard.lease().valid_until();
        let kept = self.deployment.kept_until(lock.key()).await;
        assert!(until <= kept, "trusted for {:?} longer than it is kept", until - kept);
    }

    /// What every test ends with, once it has dropped its clients: nothing is left, neither in the servers
    /// nor here.
    pub async fn finish(self) {
        let own = || self.tasks_before + self.proxy.get().map_or(0, |proxy| proxy.tasks());
        eventually("no task left", || async { tasks() <= own() }).await;
        self.deployment.assert_nothing_left().await;
        self.deployment.leave();
    }
}

/// Waits until a client that is still there is busy with nothing: no lease is kept, no waiter and
/// no queue is left, and nothing is shared. No server shows that.
#[cfg(feature = "simulation")]
pub async fn idles(locks: &Locks) {
    eventually("the client is idle", || async { locks.is_idle() }).await;
}

/// What a client is busy with is seen only through the crate's hook for tests.
#[cfg(not(feature = "simulation"))]
pub async fn idles(_: &Locks) {}

/// Tasks of this runtime: keepers, subscribers, connections.
fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Short leases, for tests that wait for them to end.
pub fn ttl(millis: u64) -> Options {
    Options::new().ttl(Duration::from_millis(millis))
}
