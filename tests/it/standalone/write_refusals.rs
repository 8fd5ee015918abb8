//! A server that responds but refuses writes for a while.

use std::time::Duration;

use redlatch::{Error, Locks, Renewal};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::{AnyLock, KINDS, Kind, Server, eventually, notified_only, soon};

/// Longer than a test: a lock that is free before was released.
const TTL: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
enum Refusal {
    NoReplicas,
    /// The server cannot save a snapshot.
    Misconf,
    /// Releases still work.
    Oom,
}

impl Refusal {
    async fn begin(self, server: &Server) {
        match self {
            Refusal::NoReplicas => set(server, "min-replicas-to-write", "1").await,
            Refusal::Oom => set(server, "maxmemory", "1").await,
            Refusal::Misconf => {
                let dir: Vec<String> = server.run(&["CONFIG", "GET", "dir"]).await;
                std::fs::create_dir_all(format!("{}/dump.rdb/full", dir[1])).unwrap();
                set(server, "save", "3600 1").await;
                server.run::<()>(&["BGSAVE"]).await;
            }
        }
        let code = match self {
            Refusal::NoReplicas => "NOREPLICAS",
            Refusal::Misconf => "MISCONF",
            Refusal::Oom => "OOM",
        };
        eventually("the server refuses writes", || async {
            let outcome = server.try_run::<()>(&["SET", "written", "1", "PX", "1"]).await;
            outcome.is_err_and(|error| error.code() == Some(code))
        })
        .await;
    }

    async fn end(self, server: &Server) {
        match self {
            Refusal::NoReplicas => set(server, "min-replicas-to-write", "0").await,
            Refusal::Misconf => set(server, "save", "").await,
            Refusal::Oom => set(server, "maxmemory", "0").await,
        }
    }
}

async fn set(server: &Server, name: &str, value: &str) {
    server.run::<()>(&["CONFIG", "SET", name, value]).await;
}

/// The connections that have sent scripts.
async fn connections(server: &Server) -> Vec<String> {
    let list: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    let scripts = list.lines().filter(|line| line.contains(" cmd=eval"));
    scripts.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
}

async fn held(locks: &Locks, kind: Kind, what: &str) -> (AnyLock, crate::support::AnyGuard) {
    let lock = kind.lock(locks, &format!("{what}-{}", kind.name()));
    let guard = lock.lock().await.unwrap();
    (lock, guard)
}

async fn releases_after_refusal(refusal: Refusal) {
    let server = Server::start().await;
    let locks = server.locks_with(notified_only().ttl(TTL)).await;
    let (mut released, mut dropped) = (Vec::new(), Vec::new());
    for kind in KINDS {
        released.push(held(&locks, kind, "released").await);
        dropped.push(held(&locks, kind, "dropped").await);
    }
    let used = connections(&server).await;
    assert_eq!(used.len(), 1);
    refusal.begin(&server).await;
    let start = Instant::now();
    let mut freed = Vec::new();
    for (lock, guard) in released {
        let outcome = guard.release().await;
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        freed.push(lock);
    }
    let before = server.scripts_run().await;
    for (lock, guard) in dropped {
        drop(guard);
        freed.push(lock);
    }
    eventually("every request was refused", || async { server.scripts_run().await >= before + 8 }).await;
    assert_eq!(
        connections(&server).await,
        used,
        "the client reconnected although a new connection would be refused, too"
    );
    refusal.end(&server).await;
    soon("all locks are released", locks.settled()).await;
    println!("{refusal:?}: released after {:?}", start.elapsed());
    for lock in freed {
        assert!(!server.is_locked(&lock).await, "{lock:?}");
    }
    drop(locks);
    server.assert_nothing_left().await;
}

async fn acquires_after_refusal(refusal: Refusal) {
    let server = Server::start().await;
    // Unqueued calls retry for two node timeouts.
    let patient = notified_only().ttl(TTL).node_timeout(Duration::from_secs(10));
    let (locks, others) = (server.locks_with(patient).await, server.locks().await);
    let short =
        others.with_options(notified_only().ttl(Duration::from_secs(5)).renewal(Renewal::Never)).unwrap();
    let mut waiting = JoinSet::new();
    let mut expire = Vec::new();
    for kind in KINDS {
        let lock = kind.rival().lock(&short, &format!("queued-{}", kind.name()));
        expire.push(lock.lock().await.unwrap());
        let waiter = kind.lock(&locks, &format!("queued-{}", kind.name()));
        waiting.spawn(async move { waiter.lock().await });
        eventually("the waiter queues", || async { server.queued_for(&lock).await == 1 }).await;
    }
    refusal.begin(&server).await;
    for guard in &expire {
        soon("the lease expires", guard.lease().lost()).await;
    }
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("new-{}", kind.name()));
        waiting.spawn(async move { lock.lock().await });
    }
    let before = server.scripts_run().await;
    eventually("every request is refused", || async { server.scripts_run().await >= before + 8 }).await;
    refusal.end(&server).await;
    while let Some(outcome) = soon("all waiters are granted their locks", waiting.join_next()).await {
        outcome.unwrap().unwrap().release().await.unwrap();
    }
    drop((locks, others, short, expire));
    server.assert_nothing_left().await;
}

/// During the refusal, queued calls are dropped and a writer downgrades. Leaving the queue is
/// retried, and the downgrade returns the error.
async fn leaves_queues_after_refusal(refusal: Refusal) {
    let server = Server::start().await;
    let (locks, others) =
        (server.locks_with(notified_only().ttl(TTL)).await, server.locks_with(notified_only()).await);
    let written = locks.rwlock("downgraded").unwrap().write().await.unwrap();
    let mut contended = Vec::new();
    for kind in KINDS {
        let lock = kind.rival().lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        let waiter = kind.lock(&others, kind.name());
        let waiting = tokio::spawn(async move { waiter.lock().await });
        eventually("the waiter queues", || async { server.queued_for(&lock).await == 1 }).await;
        contended.push((lock, guard, waiting));
    }
    refusal.begin(&server).await;
    let before = server.scripts_run().await;
    for (_, _, waiting) in &contended {
        waiting.abort();
    }
    eventually("every request was refused", || async { server.scripts_run().await >= before + 4 }).await;
    let outcome = written.downgrade().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    refusal.end(&server).await;
    soon("settled() returns", others.settled()).await;
    for (lock, guard, _) in contended {
        assert_eq!(server.queued_for(&lock).await, 0, "{lock:?}");
        guard.release().await.unwrap();
    }
    soon("settled() returns", locks.settled()).await;
    assert!(!server.is_locked(&Kind::Write.lock(&locks, "downgraded")).await);
    drop((locks, others));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_queue_removals_are_retried() {
    for refusal in [Refusal::NoReplicas, Refusal::Misconf] {
        leaves_queues_after_refusal(refusal).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_releases_are_retried() {
    for refusal in [Refusal::NoReplicas, Refusal::Misconf] {
        releases_after_refusal(refusal).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_succeeds_after_a_refusal_ends() {
    for refusal in [Refusal::NoReplicas, Refusal::Misconf, Refusal::Oom] {
        acquires_after_refusal(refusal).await;
    }
}
