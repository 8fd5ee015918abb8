//! Grants that count only once replicas have them.

use std::sync::Arc;
use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, Options, Wakeups};
use tokio::time::{Instant, sleep};

use crate::support::failover::{Contended, KINDS, NODE_TIMEOUT, SLACK, caught_up, stat, told, urls};
use crate::support::{AnyLock, Deployment, Kind, Proxy, Server, Topology, eventually, soon, ttl};

pub(super) const PATIENCE: Duration = Duration::from_millis(200);

/// A master with so many replicas that follow it.
pub(super) async fn group(count: usize) -> (Server, Vec<Server>) {
    let master = Server::start_with(&["--repl-diskless-sync-delay", "0"]).await;
    let mut replicas = Vec::new();
    for _ in 0..count {
        let replica = Server::start().await;
        replica.run::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
        replicas.push(replica);
    }
    caught_up(&master, count).await;
    (master, replicas)
}

pub(super) async fn waits(master: &Server) -> u64 {
    stat(master, "wait", "calls").await
}

/// What is told of all kinds, through a client of a master whose replicas the test can stop.
async fn confirms_grants(master: &Server, replicas: &[&Server], locks: &Locks, plain: &Locks) {
    let lock = |locks: &Locks, kind: Kind, what: &str| kind.lock(locks, &format!("{what}-{}", kind.name()));
    // Off unless it is wanted: not for a grant, nor for anything else.
    for kind in KINDS {
        let before = waits(master).await;
        let lock = lock(plain, kind, "plain");
        let guard = lock.lock().await.unwrap();
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
        assert_eq!(waits(master).await, before, "{kind:?}");
    }
    // One of them is enough. One that has just come says nothing for a while.
    caught_up(master, 2).await;
    replicas[1].pause();
    let mut held = Vec::new();
    for kind in KINDS {
        let before = waits(master).await;
        let lock = lock(locks, kind, "held");
        let guard = lock.lock().await.unwrap();
        assert_eq!(waits(master).await, before + 1, "a grant is confirmed: {kind:?}");
        let has = replicas[0].run::<u64>(&["EXISTS", lock.key()]).await;
        assert_eq!(has, 1, "the replica has it: {kind:?}");
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        assert_eq!(waits(master).await, before + 1, "that it is busy is not: {kind:?}");
        held.push((lock, guard));
    }
    // None is too few, and what was granted in vain does not stay.
    replicas[0].pause();
    for kind in KINDS {
        let lock = lock(locks, kind, "refused");
        let start = Instant::now();
        let outcome = lock.try_lock().await;
        let took = start.elapsed();
        assert!(matches!(outcome, Err(Error::TooFewReplicas { have: 0, want: 1, .. })), "{outcome:?}");
        assert!(took >= PATIENCE && took < PATIENCE + SLACK, "{took:?}");
        println!("refused after {took:?}");
        // Seen by one who does not wait for replicas.
        let watcher = self::lock_like(plain, &lock);
        eventually("nothing stays", || async { !master.is_locked(&watcher).await }).await;
        let start = Instant::now();
        let outcome = lock.lock().await;
        assert!(matches!(outcome, Err(Error::TooFewReplicas { .. })), "{outcome:?}");
        println!("given up after {:?}", start.elapsed());
        assert!(start.elapsed() < 3 * NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
        eventually("nothing stays", || async { !master.is_locked(&watcher).await }).await;
    }
    // What is held is renewed and released all the same, at once.
    let (renewals, confirmed) = (stat(master, "evalsha", "calls").await, waits(master).await);
    sleep(Duration::from_millis(2_000)).await;
    assert!(stat(master, "evalsha", "calls").await > renewals, "renewed");
    for (lock, guard) in held {
        assert!(!guard.lease().is_lost() && master.is_held_by(&lock, &guard).await, "{guard:?}");
        let start = Instant::now();
        guard.release().await.unwrap();
        assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    }
    assert_eq!(waits(master).await, confirmed, "only for grants");
    // Whoever waits for a lock waits for a replica as well.
    let mut waiting = Vec::new();
    let (refusals, start) = (waits(master).await, Instant::now());
    for kind in KINDS {
        let lock = lock(locks, kind, "late");
        waiting.push(tokio::spawn(async move { lock.lock().await }));
    }
    eventually("it is refused", || async { waits(master).await >= refusals + 4 }).await;
    replicas[0].resume();
    for task in waiting {
        let guard = soon("a replica is back", task).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    println!("granted {:?} after the first try", start.elapsed());
    // What is handed over is confirmed before it counts.
    for kind in KINDS {
        let holder = lock(plain, kind, "handed");
        let guard = holder.lock().await.unwrap();
        let heir = kind.rival().lock(locks, &format!("handed-{}", kind.name()));
        let heir_waits = tokio::spawn({
            let heir = heir.clone();
            async move { heir.lock().await }
        });
        eventually("it queues", || async { master.queued_for(&holder).await == 1 }).await;
        let (before, start) = (waits(master).await, Instant::now());
        guard.release().await.unwrap();
        let next = soon("handed over", heir_waits).await.unwrap().unwrap();
        println!("handed over after {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(waits(master).await, before + 1, "{kind:?}");
        assert_eq!(replicas[0].run::<u64>(&["EXISTS", heir.key()]).await, 1);
        next.release().await.unwrap();
    }
    replicas[1].resume();
}

/// The same lock through another client.
fn lock_like(locks: &Locks, lock: &AnyLock) -> AnyLock {
    let name = lock.key().strip_prefix("lock:").unwrap();
    match lock {
        AnyLock::Mutex(_) => Kind::Mutex.lock(locks, name),
        AnyLock::Reentrant(..) => Kind::Reentrant.lock(locks, name),
        AnyLock::Read(..) => Kind::Read.lock(locks, name),
        AnyLock::Write(_) => Kind::Write.lock(locks, name),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_confirm_grants() {
    let (master, replicas) = group(2).await;
    let options = told().ttl(Duration::from_millis(1_500));
    let locks = master.locks_with(options.clone().replicas(1, PATIENCE)).await;
    let plain = master.locks_with(options).await;
    let both: Vec<&Server> = replicas.iter().collect();
    confirms_grants(&master, &both, &locks, &plain).await;
    // More than there are.
    caught_up(&master, 2).await;
    let many = locks.with_options(ttl(1_500).replicas(3, PATIENCE)).unwrap();
    let outcome = many.mutex("many").unwrap().try_lock().await;
    assert!(matches!(outcome, Err(Error::TooFewReplicas { have: 2, want: 3, .. })), "{outcome:?}");
    // A replica must be answered by within the time that any request may take.
    let slow = Options::new().replicas(1, 2 * NODE_TIMEOUT);
    let refused = |error: &ConfigError| matches!(error, ConfigError::Span { option: "replica_timeout", .. });
    assert!(locks.with_options(slow.clone()).is_err_and(|error| refused(&error)));
    let outcome = Locks::builder().server(master.url()).options(slow).connect().await;
    assert!(matches!(&outcome, Err(Error::Config(error)) if refused(error)), "{outcome:?}");
    drop((locks, plain, many));
    master.assert_nothing_left().await;
}

/// Who listens to a replica, as to a master that was demoted, is not counted by the master. He is
/// passed over, so he must not hear that he has the lock.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_tell_nobody_what_he_does_not_get() {
    let (master, replicas) = group(1).await;
    let locks = master.locks_with(told()).await;
    let config = redlatch::deadpool_redis::Config::from_url(master.url());
    let pool = config.create_pool(Some(redlatch::deadpool_redis::Runtime::Tokio1)).unwrap();
    let messages = Proxy::at("127.0.0.3", vec![master.port()]).await;
    let builder = Locks::builder().pool(pool).subscriber(messages.url()).options(told());
    let others = builder.connect().await.unwrap();
    messages.lead_to(replicas[0].port());
    messages.cut();
    eventually("it listens to the replica", || async { replicas[0].subscribers().await.len() == 1 }).await;
    let contended = Contended::of_each_kind(&master, "", &locks, &others).await;
    let master = Arc::new(master);
    let mut handed = tokio::task::JoinSet::new();
    for it in contended {
        let master = Arc::clone(&master);
        handed.spawn(async move { it.hand_over(&*master).await });
    }
    while let Some(took) = handed.join_next().await {
        println!("found after {:?}", took.unwrap());
    }
    drop((locks, others));
    messages.outlive_clients().await;
    master.assert_nothing_left().await;
}

/// That replicas are too few is nothing to those who do not ask for so many.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_missed_by_some_are_no_outage_for_others() {
    let (master, replicas) = group(1).await;
    let (plain, holder) = (master.locks_with(told()).await, master.locks().await);
    let more = plain.with_options(told().replicas(2, PATIENCE)).unwrap();
    let one = plain.with_options(told().replicas(1, PATIENCE)).unwrap();
    for kind in KINDS {
        let busy = Kind::Mutex.lock(&holder, &format!("busy-{}", kind.name()));
        let guard = busy.lock().await.unwrap();
        for locks in [&plain, &one] {
            let waiter = Kind::Mutex.lock(locks, &format!("busy-{}", kind.name()));
            let waiting =
                tokio::spawn(async move { waiter.lock_timeout(Duration::from_millis(1_000)).await });
            eventually("it queues", || async { master.queued_for(&busy).await == 1 }).await;
            let mut refusals = 0;
            while !waiting.is_finished() {
                // Each time another one: what is given back may be there for a moment.
                let outcome = kind.lock(&more, &format!("{}-{refusals}", kind.name())).try_lock().await;
                assert!(matches!(outcome, Err(Error::TooFewReplicas { want: 2, .. })), "{outcome:?}");
                refusals += 1;
            }
            assert!(refusals > 0);
            let outcome = waiting.await.unwrap();
            assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{kind:?}: {outcome:?}");
        }
        guard.release().await.unwrap();
    }
    drop((plain, one, more, holder, replicas));
    master.assert_nothing_left().await;
}

/// A waiter that is granted the lock, and has too few replicas, does not keep it from others
/// meanwhile, nor wait for them for as long as for a server.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_missed_by_a_waiter_keep_the_lock_from_nobody() {
    let master = Server::start().await;
    let plain = master.locks_with(told()).await;
    let (confirmed, others) = (told().replicas(1, PATIENCE), master.locks().await);
    let confirmed = master.locks_with(confirmed).await;
    for kind in KINDS {
        let name = format!("kept-{}", kind.name());
        let held = kind.rival().lock(&plain, &name);
        let guard = held.lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = kind.lock(&confirmed, &name);
            async move { lock.lock().await }
        });
        eventually("it queues", || async { master.queued_for(&held).await == 1 }).await;
        let next = tokio::spawn({
            let lock = kind.rival().lock(&others, &name);
            async move { lock.lock().await }
        });
        eventually("another one queues", || async { master.queued_for(&held).await == 2 }).await;
        guard.release().await.unwrap();
        let next = soon("the other one has it", next).await.unwrap().unwrap();
        assert!(!waiting.is_finished(), "{kind:?}: the waiter kept the lock until it failed");
        next.release().await.unwrap();
        let outcome = soon("it fails", waiting).await.unwrap();
        assert!(matches!(outcome, Err(Error::TooFewReplicas { have: 0, want: 1, .. })), "{outcome:?}");
    }
    drop((plain, confirmed, others));
    master.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_sentinel_confirm_grants() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let sentinels = urls("127.0.0.1", deployment.sentinels());
    let options = told().ttl(Duration::from_millis(1_500));
    let confirmed = options.clone().replicas(1, PATIENCE);
    let locks = Locks::builder().sentinel(&sentinels, "mymaster").options(confirmed).connect().await.unwrap();
    let plain = Locks::builder().sentinel(&sentinels, "mymaster").options(options).connect().await.unwrap();
    let both: Vec<&Server> = deployment.replicas().iter().collect();
    confirms_grants(&deployment.masters()[0], &both, &locks, &plain).await;
    // The new master's replicas confirm as well, once they follow it.
    deployment.fail_over(0).await;
    let master = &deployment.masters()[0];
    caught_up(master, 2).await;
    let start = Instant::now();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("after-{}", kind.name()));
        let guard = lock.lock().await;
        println!("goes on after {:?}: {guard:?}", start.elapsed());
        guard.unwrap().release().await.unwrap();
    }
    println!("goes on after {:?}", start.elapsed());
    assert!(waits(master).await >= 4, "confirmed there");
    drop((locks, plain));
    deployment.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_cluster_is_refused() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let urls = urls("127.0.0.1", deployment.masters());
    let wanted = Options::new().replicas(1, PATIENCE);
    let outcome = Locks::builder().cluster(&urls).options(wanted.clone()).connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::ReplicasOfCluster))), "{outcome:?}");
    let locks = Locks::builder().cluster(&urls).connect().await.unwrap();
    assert!(matches!(locks.with_options(wanted.clone()), Err(ConfigError::ReplicasOfCluster)));
    let config = redlatch::deadpool_redis::cluster::Config::from_urls(urls);
    let pool = config.create_pool(Some(redlatch::deadpool_redis::Runtime::Tokio1)).unwrap();
    let outcome = Locks::builder().cluster_pool(pool).options(wanted.wakeups(Wakeups::Poll)).connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::ReplicasOfCluster))), "{outcome:?}");
}
