//! Helpers for failovers: held and contended locks that must outlast a server's failure.

use std::time::Duration;

use redlatch::{Error, Lease, Locks, Options};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::{AnyGuard, AnyLock, Kind, Oracle, Server, Stopwatch, eventually, notified_only, soon};

pub const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// The crate's default, and the unit in which the tests measure how long calls take to fail.
pub const NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of waiters that acquire early only if they are notified, and that soon give up a server.
pub fn impatient() -> Options {
    notified_only().node_timeout(NODE_TIMEOUT)
}

/// What calls take beyond the time for which they wait.
pub const SLACK: Duration = Duration::from_secs(1);

pub fn urls(host: &str, servers: &[Server]) -> Vec<String> {
    servers.iter().map(|server| format!("redis://{host}:{}/", server.port())).collect()
}

/// A held lock, and a second client that is queued for it.
pub struct Contention {
    pub lock: AnyLock,
    pub guard: AnyGuard,
    pub rival: AnyLock,
    pub waiting: JoinHandle<Result<AnyGuard, Error>>,
}

impl Contention {
    pub async fn new(
        servers: &impl Oracle,
        kind: Kind,
        name: &str,
        locks: &Locks,
        others: &Locks,
    ) -> Contention {
        let lock = kind.lock(locks, name);
        let rival = kind.rival().lock(others, name);
        let guard = lock.lock().await.unwrap();
        let waiting = tokio::spawn({
            let rival = rival.for_another();
            async move { rival.lock().await }
        });
        eventually("the rival queues", || async { servers.lock_state(lock.name()).await.waiters() == 1 })
            .await;
        Contention { lock, guard, rival, waiting }
    }

    pub async fn of_each_kind(
        servers: &impl Oracle,
        tag: &str,
        locks: &Locks,
        others: &Locks,
    ) -> Vec<Contention> {
        let mut contended = Vec::new();
        for kind in KINDS {
            contended
                .push(Contention::new(servers, kind, &format!("{tag}{}", kind.name()), locks, others).await);
        }
        contended
    }

    /// Checks that client and server agree that the lock is held, and that a rival's try fails. The
    /// server must be reachable.
    pub async fn assert_held(&self, servers: &impl Oracle) {
        assert!(!self.guard.lease().is_lost(), "{:?}", self.guard);
        assert!(servers.lock_state(self.lock.name()).await.is_held_by(&self.guard), "{:?}", self.guard);
        assert!(self.rival.try_lock().await.unwrap().is_none(), "{:?}", self.guard);
    }

    /// Releases the lock, and checks that the queued rival is granted it. Returns how long that
    /// took.
    pub async fn grant_to_waiter(self, servers: &impl Oracle) -> Stopwatch {
        let (token, start) = (self.guard.lease().fencing_token(), Stopwatch::start());
        self.guard.release().await.unwrap();
        let next = soon("the waiter is granted the lock", self.waiting).await.unwrap().unwrap();
        let took = start.stop();
        assert!(next.lease().fencing_token() > token, "{next:?}");
        let state = servers.lock_state(self.lock.name()).await;
        assert!(state.is_held_by(&next), "the server has another holder: {next:?}, {state:?}");
        next.release().await.unwrap();
        took
    }
}

/// Watches how long some leases are still valid, and keeps the shortest time.
pub struct Watch {
    task: JoinHandle<()>,
    least: tokio::sync::watch::Receiver<Duration>,
}

impl Watch {
    pub fn over(leases: Vec<Lease>) -> Watch {
        let (shortest, least) = tokio::sync::watch::channel(Duration::MAX);
        let task = tokio::spawn(async move {
            loop {
                let now = std::time::Instant::now();
                for lease in &leases {
                    let left = lease.valid_until().saturating_duration_since(now);
                    shortest.send_if_modified(|least| {
                        let less = left < *least;
                        *least = left.min(*least);
                        less
                    });
                }
                sleep(Duration::from_millis(10)).await;
            }
        });
        Watch { task, least }
    }

    pub fn least(&self) -> Duration {
        *self.least.borrow()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Tries locks whose server cannot be reached, all at the same time. Returns how long the slowest
/// took to fail.
pub async fn fail_all(locks: impl IntoIterator<Item = AnyLock>) -> Stopwatch {
    let start = Stopwatch::start();
    let mut tries = tokio::task::JoinSet::new();
    for lock in locks {
        tries.spawn(async move { lock.try_lock().await });
    }
    while let Some(outcome) = tries.join_next().await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    }
    start.stop()
}

/// Waits until this many replicas have acknowledged all writes.
pub async fn caught_up(master: &Server, replicas: usize) {
    eventually("the replicas have caught up", || async {
        let info: String = master.run(&["INFO", "replication"]).await;
        let end = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:")).unwrap();
        let offset =
            |line: &str| line.split(',').find_map(|word| word.strip_prefix("offset=")).map(str::to_owned);
        let online = info.lines().filter(|line| line.contains("state=online")).filter_map(offset);
        online.filter(|offset| offset == end.trim()).count() == replicas
    })
    .await;
}

/// Cuts replicas off, so that they miss all later writes until they are resumed.
pub async fn cut_off(master: &Server, replicas: &[&Server]) {
    caught_up(master, replicas.len()).await;
    replicas.iter().for_each(|replica| replica.pause());
    let words = ["CLIENT", "KILL", "TYPE", "replica"];
    assert_eq!(master.run::<usize>(&words).await, replicas.len(), "all replicas are cut off");
}

/// A number of `INFO commandstats`: 0 if the command was never sent.
pub async fn stat(server: &Server, command: &str, key: &str) -> u64 {
    let stats: String = server.run(&["INFO", "commandstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
    let number =
        |line: &str| line.split(',').find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok());
    line.map_or(0, |line| number(line).unwrap())
}
