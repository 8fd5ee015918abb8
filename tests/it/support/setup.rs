//! What a test of the suite is run over: a kind, a topology, and a way to be woken.

use std::time::{Duration, Instant};

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Locks, Options};

use super::{AnyGuard, AnyLock, Kind, Server, eventually};

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

/// One cell of the matrix, with servers of its own.
pub struct Setup {
    pub kind: Kind,
    pub wake: Wake,
    protocol: Protocol,
    pub server: Server,
    tasks_before: usize,
}

impl Setup {
    pub async fn standalone(kind: Kind, wake: Wake, protocol: Protocol) -> Setup {
        let server = Server::start().await;
        Setup { kind, wake, protocol, server, tasks_before: tasks() }
    }

    /// A client of its own, as another process would have it.
    pub async fn client(&self) -> Locks {
        self.client_with(Options::new()).await
    }

    pub async fn client_with(&self, options: Options) -> Locks {
        self.client_at(&self.server.url(), options).await
    }

    /// A client that reaches the server by another way.
    pub async fn client_at(&self, url: &str, options: Options) -> Locks {
        let url = match self.protocol {
            Protocol::Resp2 => format!("{url}?protocol=resp2"),
            Protocol::Resp3 => format!("{url}?protocol=resp3"),
        };
        open(&url, options, self.wake).await
    }

    /// A client that is woken in another way.
    pub async fn client_woken(&self, wake: Wake) -> Locks {
        open(&self.server.url(), Options::new(), wake).await
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

    /// How many scripts the server has run.
    pub async fn scripts_run(&self) -> u64 {
        let stats: String = self.server.run(&["INFO", "commandstats"]).await;
        let count = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(count).sum()
    }

    /// A lease is never trusted for longer than the server keeps the lock.
    pub async fn assert_conservative(&self, lock: &AnyLock, guard: &AnyGuard) {
        let until = guard.lease().valid_until();
        let pttl: i64 = self.server.run(&["PTTL", lock.key()]).await;
        let kept = Instant::now() + Duration::from_millis(u64::try_from(pttl).expect("it is held"));
        assert!(until <= kept, "trusted for {:?} longer than it is kept", until - kept);
    }

    /// What every test ends with, once it has dropped its clients: nothing is left, neither in the server
    /// nor here.
    pub async fn finish(self) {
        eventually("no task left", || async { tasks() <= self.tasks_before }).await;
        self.server.assert_nothing_left().await;
    }
}

async fn open(url: &str, options: Options, wake: Wake) -> Locks {
    match wake {
        Wake::Push => Locks::open_with(url, options).await.unwrap(),
        Wake::Poll => {
            let pool = Config::from_url(url).create_pool(Some(Runtime::Tokio1)).unwrap();
            Locks::from_pool_with(pool, options).await.unwrap()
        }
    }
}

/// Waits until a client that is still there is busy with nothing: no lease in the keeper's book, nobody
/// waiting, no queue, nothing shared.
pub async fn idles(locks: &Locks) {
    let idle = "Client { kept: 0, waiting: 0, queues: 0, shared: 0 }";
    eventually("the client is idle", || async { format!("{locks:?}").contains(idle) }).await;
}

/// Tasks of this runtime: keepers, subscribers, connections.
fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Short leases, for tests that wait for them to end.
pub fn ttl(millis: u64) -> Options {
    Options::new().ttl(Duration::from_millis(millis))
}
