//! Helpers for failovers: held and contended locks that must outlast a server's failure.

use std::time::{Duration, Instant};

use redlatch::{Error, Lease, Locks, Options};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::events::logged_with;
use super::lock_state::companion;
use super::{AnyGuard, AnyLock, KINDS, Kind, Oracle, Server, Stopwatch, count_waiters};
use super::{eventually, notified_only, soon};

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
        let waiting = rival.for_another().lock_in_task();
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

    /// Waits until the waiter would be notified: its place in the queue on `home`, the server of
    /// the lock, names a channel to which its client is subscribed at one of these servers. Its
    /// first place names none if the subscription takes longer than it may wait.
    pub async fn is_notified_at(&self, home: &Server, places: &[&Server]) {
        let queue = companion(self.lock.key(), "waiters");
        let [_, queue, first, last] = count_waiters(&queue);
        eventually("the waiter is subscribed there", || async {
            let entries: Vec<String> = home.run(&["ZRANGEBYSCORE", queue, first, last]).await;
            let channel = entries.first().and_then(|entry| entry.split(' ').nth(3)).unwrap_or_default();
            let mut subscribed = 0;
            for place in places {
                subscribed += place.run::<(String, u64)>(&["PUBSUB", "NUMSUB", channel]).await.1;
            }
            subscribed == 1
        })
        .await;
    }

    /// Checks that client and server agree that the lock is held, and that a rival is refused. A
    /// server that stands still answers its first tries with errors.
    pub async fn assert_held(&self, servers: &impl Oracle) {
        assert!(!self.guard.lease().is_lost(), "{:?}", self.guard);
        assert!(servers.lock_state(self.lock.name()).await.is_held_by(&self.guard), "{:?}", self.guard);
        eventually("the rival is answered", || async {
            let answer = self.rival.try_lock().await;
            assert!(!matches!(answer, Ok(Some(_))), "{answer:?} beside {:?}", self.guard);
            answer.is_ok()
        })
        .await;
    }

    /// Releases the lock, and checks that the queued rival is granted it. Returns how long that
    /// took.
    pub async fn grant_to_waiter(self, servers: &impl Oracle) -> Stopwatch {
        let (token, start) = (self.guard.lease().fencing_token(), Stopwatch::start());
        let outcome = self.guard.release().await;
        // If its reply is late, it is sent again: the waiter has the lock by then.
        assert!(matches!(outcome, Ok(()) | Err(Error::Unconfirmed { .. })), "{outcome:?}");
        let next = soon("the waiter is granted the lock", self.waiting).await.unwrap().unwrap();
        let took = start.stop();
        assert!(next.lease().fencing_token() > token, "{next:?}");
        let state = servers.lock_state(self.lock.name()).await;
        assert!(state.is_held_by(&next), "the server has another holder: {next:?}, {state:?}");
        next.release().await.unwrap();
        took
    }
}

/// Whether a message woke a waiter of these locks, as its client says. That of one lock may poll
/// just before its message arrives. All names begin like this, and have
/// [`TRACED`](super::events::TRACED) in them.
pub fn was_one_notified(names: &str) -> bool {
    let granted = logged_with(&format!("acquired lock={names}"));
    granted.iter().any(|event| event.contains("woken=\"notified\""))
}

/// The ends of leases at some moment.
pub struct Ends(Vec<(Lease, Instant)>);

impl Ends {
    pub fn of<'a>(guards: impl IntoIterator<Item = &'a AnyGuard>) -> Ends {
        let leases = guards.into_iter().map(AnyGuard::lease);
        Ends(leases.map(|lease| (lease.clone(), lease.valid_until())).collect())
    }

    /// Waits until renewals have extended all leases, and panics if one is lost meanwhile.
    pub async fn are_extended(self) {
        let is_extended = |(lease, end): &(Lease, Instant)| {
            assert!(!lease.is_lost(), "{lease:?} is not renewed in time");
            lease.valid_until() > *end
        };
        eventually("the leases are renewed", || async { self.0.iter().all(is_extended) }).await;
    }
}

/// Watches how long some leases are still valid, and how long their server serves nothing
/// meanwhile: that delays a renewal as well.
pub struct Watch {
    task: JoinHandle<()>,
    /// The shortest rest of a lease, and the longest time without an answer of the server.
    seen: tokio::sync::watch::Receiver<(Duration, Duration)>,
}

impl Watch {
    pub async fn over(guards: &[AnyGuard], server: &Server) -> Watch {
        let leases: Vec<Lease> = guards.iter().map(|guard| guard.lease().clone()).collect();
        let (found, seen) = tokio::sync::watch::channel((Duration::MAX, Duration::ZERO));
        let mut connection = server.connection().await;
        let task = tokio::spawn(async move {
            let mut served = Instant::now();
            loop {
                // Refused like a renewal, if the server takes too many others for failed.
                let mut ask = redis::cmd("EXISTS");
                let answer: redis::RedisResult<u64> =
                    ask.arg(leases[0].name().key()).query_async(&mut connection).await;
                let now = Instant::now();
                let unserved = now - served;
                if answer.is_ok() {
                    served = now;
                }
                let rest = |lease: &Lease| lease.valid_until().saturating_duration_since(now);
                let shortest = leases.iter().map(rest).min().unwrap();
                found.send_modify(|(least, longest)| {
                    (*least, *longest) = (shortest.min(*least), unserved.max(*longest));
                });
                sleep(Duration::from_millis(10)).await;
            }
        });
        Watch { task, seen }
    }

    /// Checks that no renewal has waited for another server: that takes a node timeout. With a TTL
    /// of two of them, a renewal waits for its own reply for at most half of one.
    pub fn assert_prompt(&self, ttl: Duration) {
        let (least, unserved) = *self.seen.borrow();
        println!("valid for at least {least:?}, and unserved for {unserved:?} at most");
        let expected = ttl - ttl / 3 - NODE_TIMEOUT * 3 / 4;
        assert!(least + unserved > expected, "a renewal was late: {least:?} left, unserved {unserved:?}");
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
