//! Grants with the required replicas, with fewer, and while some replicas are missing.

use std::sync::Arc;
use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, Options};
use tokio::time::Instant;

use crate::support::failover::{Contention, NODE_TIMEOUT, SLACK, caught_up, impatient, stat, urls};
use crate::support::{
    Deployment, KINDS, Kind, Proxy, Server, Stopwatch, Topology, eventually, renewed_by, soon, ttl,
};

pub(super) const TIMEOUT: Duration = Duration::from_millis(500);

/// Starts a master with this many replicas.
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

/// Checks grants of all kinds with one replica required. `replicas` are two, which it pauses.
async fn confirms_grants(master: &Server, replicas: &[&Server], locks: &Locks, plain: &Locks) {
    let lock = |locks: &Locks, kind: Kind, what: &str| kind.lock(locks, &format!("{what}-{}", kind.name()));
    // Without the option, nothing waits for replicas.
    for kind in KINDS {
        let before = waits(master).await;
        let lock = lock(plain, kind, "plain");
        let guard = lock.lock().await.unwrap();
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
        assert_eq!(waits(master).await, before, "{kind:?}");
    }
    // One of two replicas suffices. A new replica acknowledges nothing for a while, so wait first.
    caught_up(master, 2).await;
    replicas[1].pause();
    let mut held = Vec::new();
    for kind in KINDS {
        let before = waits(master).await;
        let lock = lock(locks, kind, "held");
        let guard = lock.lock().await.unwrap();
        assert_eq!(waits(master).await, before + 1, "a grant waits for replicas: {kind:?}");
        let has = replicas[0].run::<u64>(&["EXISTS", lock.key()]).await;
        assert_eq!(has, 1, "the replica has it: {kind:?}");
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        assert_eq!(waits(master).await, before + 1, "a refused try does not: {kind:?}");
        held.push((lock, guard));
    }
    // Without any replica the calls fail, and the unconfirmed grant is released.
    replicas[0].pause();
    for kind in KINDS {
        let lock = lock(locks, kind, "refused");
        let start = Stopwatch::start();
        let outcome = lock.try_lock().await;
        let took = start.stop();
        assert!(
            matches!(outcome, Err(Error::TooFewReplicas { confirmed: 0, required: 1, .. })),
            "{outcome:?}"
        );
        assert!(took.elapsed() >= TIMEOUT && took.undisturbed() < TIMEOUT + SLACK, "{took:?}");
        println!("refused after {took:?}");
        eventually("the grant is released", || async { !master.is_locked(&lock).await }).await;
        let start = Stopwatch::start();
        let outcome = lock.lock().await;
        assert!(matches!(outcome, Err(Error::TooFewReplicas { .. })), "{outcome:?}");
        println!("failed after {:?}", start.elapsed());
        assert!(start.undisturbed() < 3 * NODE_TIMEOUT + SLACK, "{start:?}");
        eventually("the grant is released", || async { !master.is_locked(&lock).await }).await;
    }
    // Renewals and releases of held locks still succeed, without waiting.
    let confirmed = waits(master).await;
    for (_, guard) in &held {
        renewed_by(guard.lease(), Duration::from_secs(1)).await;
    }
    for (lock, guard) in held {
        assert!(!guard.lease().is_lost() && master.is_held_by(&lock, &guard).await, "{guard:?}");
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        assert!(start.undisturbed() < TIMEOUT / 2, "{start:?}");
    }
    assert_eq!(waits(master).await, confirmed, "only grants wait for replicas");
    // `lock` retries until a replica confirms, unless the client knows the outage for long.
    replicas[0].resume();
    let again = lock(locks, KINDS[0], "again");
    let confirmed = async || match again.try_lock().await {
        Ok(Some(guard)) => guard.release().await.is_ok(),
        _ => false,
    };
    eventually("a replica confirms again", confirmed).await;
    caught_up(master, 1).await;
    replicas[0].pause();
    let mut waiting = Vec::new();
    let (refusals, start) = (waits(master).await, Instant::now());
    for kind in KINDS {
        let lock = lock(locks, kind, "late");
        waiting.push(tokio::spawn(async move { lock.lock().await }));
    }
    eventually("each call was refused once", || async { waits(master).await >= refusals + 4 }).await;
    replicas[0].resume();
    for task in waiting {
        let guard = soon("the grant is confirmed", task).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    println!("granted {:?} after the first try", start.elapsed());
    // A grant to a waiter is confirmed before it counts.
    for kind in KINDS {
        let holder = lock(plain, kind, "handed");
        let guard = holder.lock().await.unwrap();
        let waiter = kind.rival().lock(locks, &format!("handed-{}", kind.name()));
        let waiting = waiter.lock_in_task();
        eventually("the waiter queues", || async { master.queued_for(&holder).await == 1 }).await;
        let (before, start) = (waits(master).await, Stopwatch::start());
        guard.release().await.unwrap();
        let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        println!("granted to the waiter after {:?}", start.elapsed());
        assert!(start.undisturbed() < Duration::from_millis(500), "{start:?}");
        assert_eq!(waits(master).await, before + 1, "{kind:?}");
        assert_eq!(replicas[0].run::<u64>(&["EXISTS", waiter.key()]).await, 1);
        next.release().await.unwrap();
    }
    replicas[1].resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_grants_wait_for_replicas() {
    let (master, replicas) = group(2).await;
    let options = impatient().ttl(Duration::from_secs(3));
    let locks = master.locks_with(options.clone().replicas(1, TIMEOUT)).await;
    let plain = master.locks_with(options).await;
    let both: Vec<&Server> = replicas.iter().collect();
    confirms_grants(&master, &both, &locks, &plain).await;
    // More replicas than the master has.
    caught_up(&master, 2).await;
    let many = locks.with_options(ttl(1_500).replicas(3, TIMEOUT).node_timeout(NODE_TIMEOUT)).unwrap();
    let outcome = many.mutex("many").unwrap().try_lock().await;
    assert!(matches!(outcome, Err(Error::TooFewReplicas { confirmed: 2, required: 3, .. })), "{outcome:?}");
    // The replica timeout must not exceed the node timeout.
    let slow = Options::new().replicas(1, 2 * NODE_TIMEOUT);
    let refused =
        |error: &Error| error.to_string() == "replica_timeout is 2s; it must be at most node_timeout, 1s";
    assert!(locks.with_options(slow.clone()).is_err_and(|error| refused(&error)));
    let outcome = Locks::builder().server(master.url()).options(slow).connect().await;
    assert!(outcome.as_ref().is_err_and(refused), "{outcome:?}");
    drop((locks, plain, many));
    master.assert_nothing_left().await;
}

/// A client is subscribed to a replica, as after a demotion, so the master counts no subscriber and
/// skips the waiter. The waiter must not receive a message that it owns the lock.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_do_not_notify_a_waiter_that_the_master_skips() {
    let (master, replicas) = group(1).await;
    let locks = master.locks_with(impatient()).await;
    let config = redlatch::deadpool_redis::Config::from_url(master.url());
    let pool = config.create_pool(Some(redlatch::deadpool_redis::Runtime::Tokio1)).unwrap();
    let messages = Proxy::at("127.0.0.3", vec![master.port()]).await;
    let builder = Locks::builder().pool(pool).subscriber(messages.url()).options(impatient());
    let others = builder.connect().await.unwrap();
    messages.lead_to(replicas[0].port());
    messages.cut();
    eventually("the client is subscribed to the replica", || async {
        replicas[0].subscribers().await.len() == 1
    })
    .await;
    let contended = Contention::of_each_kind(&master, "", &locks, &others).await;
    let master = Arc::new(master);
    let mut granting = tokio::task::JoinSet::new();
    for held in contended {
        let master = Arc::clone(&master);
        granting.spawn(async move { held.grant_to_waiter(&*master).await });
    }
    while let Some(took) = granting.join_next().await {
        println!("found by polling after {:?}", took.unwrap());
    }
    drop((locks, others));
    messages.outlive_clients().await;
    master.assert_nothing_left().await;
}

/// Calls that require fewer replicas continue while others fail with too few.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_missed_by_some_calls_do_not_affect_others() {
    let (master, replicas) = group(1).await;
    let (plain, holder) = (master.locks_with(impatient()).await, master.locks().await);
    let more = plain.with_options(impatient().replicas(2, TIMEOUT)).unwrap();
    let one = plain.with_options(impatient().replicas(1, TIMEOUT)).unwrap();
    for kind in KINDS {
        let busy = Kind::Mutex.lock(&holder, &format!("busy-{}", kind.name()));
        let guard = busy.lock().await.unwrap();
        for locks in [&plain, &one] {
            let waiter = Kind::Mutex.lock(locks, &format!("busy-{}", kind.name()));
            let waiting =
                tokio::spawn(async move { waiter.lock_timeout(Duration::from_millis(1_000)).await });
            eventually("the waiter queues", || async { master.queued_for(&busy).await == 1 }).await;
            let mut refusals = 0;
            while !waiting.is_finished() {
                // Another lock each time, since a released grant may exist for a moment.
                let outcome = kind.lock(&more, &format!("{}-{refusals}", kind.name())).try_lock().await;
                assert!(matches!(outcome, Err(Error::TooFewReplicas { required: 2, .. })), "{outcome:?}");
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

/// A waiter is granted the lock and gets too few replicas. Meanwhile the next waiter acquires the
/// lock, and the first fails after a shorter time than in an outage.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_missed_by_a_waiter_leave_the_lock_to_the_next() {
    let master = Server::start().await;
    let plain = master.locks_with(impatient()).await;
    let others = master.locks().await;
    for kind in KINDS {
        // A client that knows the outage would fail at once.
        let confirmed = master.locks_with(impatient().replicas(1, TIMEOUT)).await;
        let name = format!("kept-{}", kind.name());
        let held = kind.rival().lock(&plain, &name);
        let guard = held.lock().await.unwrap();
        let waiting = kind.lock(&confirmed, &name).lock_in_task();
        eventually("the waiter queues", || async { master.queued_for(&held).await == 1 }).await;
        let next = kind.rival().lock(&others, &name).lock_in_task();
        eventually("the next waiter queues", || async { master.queued_for(&held).await == 2 }).await;
        guard.release().await.unwrap();
        let next = soon("the next waiter is granted the lock", next).await.unwrap().unwrap();
        assert!(!waiting.is_finished(), "{kind:?}: the first waiter held the lock until it failed");
        next.release().await.unwrap();
        let outcome = soon("the first waiter fails", waiting).await.unwrap();
        assert!(
            matches!(outcome, Err(Error::TooFewReplicas { confirmed: 0, required: 1, .. })),
            "{outcome:?}"
        );
    }
    drop((plain, others));
    master.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_sentinel_grants_wait_for_replicas() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let sentinels = urls("127.0.0.1", deployment.sentinels());
    let options = impatient().ttl(Duration::from_secs(3));
    let confirmed = options.clone().replicas(1, TIMEOUT);
    let locks = Locks::builder().sentinel(&sentinels, "mymaster").options(confirmed).connect().await.unwrap();
    let plain = Locks::builder().sentinel(&sentinels, "mymaster").options(options).connect().await.unwrap();
    let both: Vec<&Server> = deployment.replicas().iter().collect();
    confirms_grants(&deployment.masters()[0], &both, &locks, &plain).await;
    // After a failover, the new master's replicas confirm.
    deployment.fail_over(0).await;
    let master = &deployment.masters()[0];
    caught_up(master, 2).await;
    let start = Stopwatch::start();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("after-{}", kind.name()));
        let guard = lock.lock().await;
        println!("served again after {:?}: {guard:?}", start.elapsed());
        guard.unwrap().release().await.unwrap();
    }
    println!("served again after {:?}", start.elapsed());
    assert!(waits(master).await >= 4, "the new master did not wait for replicas");
    drop((locks, plain));
    deployment.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_are_refused_for_a_cluster() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let urls = urls("127.0.0.1", deployment.masters());
    let wanted = Options::new().replicas(1, TIMEOUT);
    let outcome = Locks::builder().cluster(&urls).options(wanted.clone()).connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::ReplicasOfCluster))), "{outcome:?}");
    let locks = Locks::builder().cluster(&urls).connect().await.unwrap();
    assert!(matches!(locks.with_options(wanted.clone()), Err(Error::Config(ConfigError::ReplicasOfCluster))));
}

/// A replica without the adoption would let a second client adopt the ticket after its promotion.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_adoptions_wait_for_replicas() {
    let (master, replicas) = group(1).await;
    let locks = master.locks_with(impatient().replicas(1, TIMEOUT)).await;
    let plain = master.locks_with(impatient()).await;
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
        let before = waits(&master).await;
        let guard = lock.adopt(&ticket).await.unwrap();
        assert_eq!(waits(&master).await, before + 1, "{kind:?}");
        let ticket = guard.into_ticket().unwrap();
        caught_up(&master, 1).await;
        replicas[0].pause();
        let outcome = lock.adopt(&ticket).await;
        assert!(matches!(outcome, Err(Error::TooFewReplicas { .. })), "{kind:?}: {outcome:?}");
        replicas[0].resume();
        caught_up(&master, 1).await;
        let rival = kind.rival().lock(&plain, kind.name());
        soon("what was not confirmed is released", rival.lock()).await.unwrap().release().await.unwrap();
    }
    drop((locks, plain));
    master.assert_nothing_left().await;
}
