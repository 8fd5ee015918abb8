//! Cluster failovers: masters that die, hang or restart, while clients hold locks on them and on
//! other masters.

use std::time::Duration;

use redlatch::{Error, LeaseEnd, Locks};

use super::{open, replace, set_node_timeout, tag_at};
use crate::support::failover::{
    Contention, Ends, NODE_TIMEOUT, SLACK, Watch, caught_up, cut_off, fail_all, impatient, stat, urls,
};
use crate::support::{
    AnyGuard, Deployment, KINDS, Kind, Proxy, Server, Stopwatch, Topology, eventually, notified_only,
    patient, soon,
};

/// The TTL of leases that must outlast an outage. If the masters do not agree, an election is
/// repeated after seconds, and then again.
const LONG: Duration = Duration::from_secs(600);

/// The TTL of leases that are renewed often, for a [`Watch`].
const SHORT: Duration = Duration::from_secs(2);

async fn short_leases(locks: &Locks, tag: &str) -> Vec<AnyGuard> {
    let short = locks.with_options(patient().ttl(SHORT).node_timeout(NODE_TIMEOUT)).unwrap();
    let mut guards = Vec::new();
    for kind in KINDS {
        guards.push(kind.lock(&short, &format!("{tag}short-{}", kind.name())).lock().await.unwrap());
    }
    guards
}

/// A master is killed, and replaced by a replica that missed its last writes.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_clients_continue_after_a_master_was_killed() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        // By default, the other masters serve nothing until the replica has taken over.
        server.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let survivors = Contention::of_each_kind(&deployment, &here, &locks, &others).await;
    let mut later = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("{here}later-{}", kind.name()));
        lock.lock().await.unwrap().release().await.unwrap();
        later.push(lock);
    }
    cut_off(&deployment.masters()[0], &[&deployment.replicas()[0]]).await;
    let mut lost = Vec::new();
    for lock in &later {
        for _ in 0..5 {
            lock.lock().await.unwrap().release().await.unwrap();
        }
        lost.push(lock.lock().await.unwrap());
    }
    let elsewhere = short_leases(&locks, &there).await;
    let watch = Watch::over(&elsewhere, &deployment.masters()[1]).await;
    let start = Stopwatch::start();
    deployment.masters_mut()[0].kill();
    let ends = Ends::of(survivors.iter().map(|held| &held.guard));
    deployment.replicas()[0].resume();
    let took = fail_all(later.iter().map(|lock| lock.for_rival())).await;
    println!("requests to a dead master fail after {took:?}");
    assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
    replace(&mut deployment, 0).await;
    println!("replaced after {:?}", start.elapsed());
    // The same client continues with larger tokens. Locks that the replica has stay held.
    for (lock, old) in later.iter().zip(&lost) {
        // A first call may still fail: its outage limit counts from the death of the master.
        let rival = lock.for_rival();
        eventually("the same client is served again", || async { rival.try_lock().await.is_ok() }).await;
        let next = soon("the lock is acquired again", rival.lock()).await.unwrap();
        assert!(next.token() > old.token(), "{next:?} after {old:?}");
        next.release().await.unwrap();
    }
    println!("served again after {:?}", start.elapsed());
    for held in &survivors {
        held.assert_held(&deployment).await;
    }
    for old in lost {
        let end = soon("the holder is notified of the loss", old.lease().lost()).await;
        println!("lost after {:?}", start.elapsed());
        assert_eq!(end, LeaseEnd::Revoked);
        assert!(matches!(old.release().await, Err(Error::Lost { .. })));
    }
    ends.are_extended().await; // by the new master
    for held in survivors {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    watch.assert_prompt(SHORT);
    drop((elsewhere, later, locks, others));
    for master in deployment.masters() {
        master.assert_nothing_left().await;
    }
}

/// A replica replaces a master of which the client has never lost a connection. The connection to
/// it is a new one, so the client asks about its leases there: the next renewal is minutes away,
/// and another client could have the lock for so long.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_lease_that_a_new_master_misses_is_asked_about() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let locks = open(&deployment, patient().ttl(Duration::from_secs(600))).await;
    let other = locks.mutex(format!("{here}other")).unwrap().lock().await.unwrap();
    let master = &deployment.masters()[0];
    let pings = stat(master, "ping", "calls").await;
    let checked = || async { stat(master, "ping", "calls").await > pings + 3 };
    eventually("the client checks its connections", checked).await;
    cut_off(master, &[&deployment.replicas()[0]]).await;
    let missed = locks.mutex(format!("{here}missed")).unwrap().lock().await.unwrap();
    deployment.masters_mut()[0].kill();
    deployment.replicas()[0].resume();
    replace(&mut deployment, 0).await;
    assert_eq!(soon("the client asks about it", missed.lease().lost()).await, LeaseEnd::Revoked);
    assert!(!other.lease().is_lost(), "the replica has this one");
    other.release().await.unwrap();
    drop((missed, locks));
    for master in deployment.masters() {
        master.assert_nothing_left().await;
    }
}

/// A master has no connection, for as long as it is down. That another one has lost its data is
/// noticed all the same.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_lease_is_asked_about_while_another_master_is_down() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let locks = open(&deployment, patient().ttl(Duration::from_secs(600))).await;
    let guard = locks.mutex(format!("{here}lost")).unwrap().lock().await.unwrap();
    deployment.masters_mut()[1].kill();
    let master = &deployment.masters()[0];
    let checks = || async { stat(master, "ping", "calls").await };
    let before = checks().await;
    eventually("the client checks its connections", || async { checks().await > before + 3 }).await;
    master.run::<u64>(&["DEL", &format!("lock:{here}lost")]).await;
    master.kill_connections().await;
    assert_eq!(soon("the client asks about it", guard.lease().lost()).await, LeaseEnd::Revoked);
    drop((guard, locks));
    for server in [0, 2] {
        deployment.masters()[server].assert_nothing_left().await;
    }
}

/// A master hangs and is not replaced. Requests to its slots fail in time, and those to other
/// masters are not delayed.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_hung_master_does_not_delay_other_masters() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, &here, &locks, &others).await;
    let elsewhere = short_leases(&locks, &there).await;
    let watch = Watch::over(&elsewhere, &deployment.masters()[1]).await;
    deployment.masters()[0].pause();
    let mut shortest = Duration::MAX;
    for round in 0..3 {
        let hung = KINDS.map(|kind| kind.lock(&locks, &format!("{here}hung-{}", kind.name())));
        let took = fail_all(hung).await;
        println!("requests to a hung master fail after {took:?}");
        assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
        let start = Stopwatch::start();
        let other = Kind::Mutex.lock(&locks, &format!("{there}other-{round}"));
        other.lock().await.unwrap().release().await.unwrap();
        println!("another master: {:?}", start.elapsed());
        shortest = shortest.min(start.undisturbed());
    }
    assert!(shortest < NODE_TIMEOUT / 2, "each of them took {shortest:?} or longer");
    let start = Stopwatch::start();
    let new = Locks::builder()
        .cluster(urls("127.0.0.1", deployment.masters()))
        .options(impatient())
        .connect()
        .await;
    println!("opened after {:?}: {:?}", start.elapsed(), new.as_ref().err());
    let lock = Kind::Mutex.lock(&new.unwrap(), &format!("{there}new"));
    lock.lock().await.unwrap().release().await.unwrap();
    println!("used after {:?}", start.elapsed());
    assert!(start.undisturbed() < NODE_TIMEOUT + SLACK, "{start:?}");
    watch.assert_prompt(SHORT);
    deployment.masters()[0].resume();
    for kind in KINDS {
        let lock = kind.lock(&others, &format!("{here}hung-{}", kind.name()));
        let start = Stopwatch::start();
        let guard = soon("the hung request left no hold", lock.lock()).await.unwrap();
        println!("after the master resumed: {:?}", start.elapsed());
        guard.release().await.unwrap();
    }
    for held in contended {
        held.assert_held(&deployment).await;
        held.grant_to_waiter(&deployment).await;
    }
    drop((elsewhere, lock, locks, others));
    deployment.assert_nothing_left().await;
}

/// A hanging master is replaced by its replica: the old master refuses no request, so clients must
/// find the new one after a time-out.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_clients_continue_after_a_hung_master_was_replaced() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, &here, &locks, &others).await;
    caught_up(&deployment.masters()[0], 1).await;
    let start = Stopwatch::start();
    deployment.masters()[0].pause();
    let ends = Ends::of(contended.iter().map(|held| &held.guard));
    replace(&mut deployment, 0).await;
    let replaced = Stopwatch::start();
    println!("replaced after {:?}", start.elapsed());
    let lock = Kind::Mutex.lock(&locks, &format!("{here}hung"));
    eventually("the same client is served again", || async { lock.try_lock().await.is_ok() }).await;
    println!("served again {:?} later", replaced.elapsed());
    assert!(replaced.undisturbed() < 4 * NODE_TIMEOUT, "{replaced:?}");
    ends.are_extended().await; // by the new master
    for held in contended {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    deployment.replicas()[0].resume();
    drop((lock, locks, others));
    deployment.assert_nothing_left().await;
}

/// Calls for a slot that no master serves, and that are not polled any more. The client must learn
/// the slots again all the same, to find the replica that has replaced a master.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_calls_that_are_not_polled_do_not_hide_a_failover() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        server.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    let (here, unserved) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let slot: u16 = deployment.masters()[0].run(&["CLUSTER", "KEYSLOT", &unserved]).await;
    for server in deployment.masters() {
        server.run::<()>(&["CLUSTER", "DELSLOTS", &slot.to_string()]).await;
    }
    let locks = open(&deployment, notified_only()).await;
    let calls: Vec<_> =
        (0..20).map(|number| Kind::Mutex.lock(&locks, &format!("{unserved}{number}"))).collect();
    let mut calls: Vec<_> = calls.iter().map(|lock| Box::pin(lock.lock())).collect();
    for call in &mut calls {
        tokio::select! {
            biased;
            outcome = call => panic!("{:?}", outcome.map(drop)),
            () = std::future::ready(()) => {}
        }
    }
    deployment.masters_mut()[0].kill();
    replace(&mut deployment, 0).await;
    let lock = Kind::Mutex.lock(&locks, &format!("{here}after"));
    eventually("served by the replica", || async { lock.try_lock().await.is_ok() }).await;
}

/// All servers hang for longer than the client tries to learn the slots. It learns them again after
/// a later failover.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_failover_is_followed_after_the_slots_could_not_be_learned() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let locks = open(&deployment, notified_only()).await;
    let lock = Kind::Mutex.lock(&locks, &format!("{here}later"));
    lock.lock().await.unwrap().release().await.unwrap();
    deployment.all().for_each(Server::pause);
    // The first failure makes the client ask for the slots. It stops after a node timeout, which is
    // what each further call takes as well.
    for _ in 0..3 {
        let outcome = lock.try_lock().await;
        assert!(outcome.is_err(), "{outcome:?}");
    }
    deployment.all().for_each(Server::resume);
    eventually("the master serves again", || async { lock.try_lock().await.is_ok() }).await;
    deployment.masters_mut()[0].kill();
    replace(&mut deployment, 0).await;
    eventually("served by the replica", || async { lock.try_lock().await.is_ok() }).await;
}

/// The connections to one master fall silent, and new ones work.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_silent_connection_is_replaced() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let silent = Proxy::start(deployment.masters()[0].port()).await;
    let rest = deployment.all().skip(1).map(|server| server.port()).collect();
    let rest = Proxy::before(rest).await;
    let seeds = urls("127.0.0.2", deployment.masters());
    let locks = Locks::builder().cluster(seeds).options(impatient()).connect().await.unwrap();
    let others = open(&deployment, notified_only()).await;
    let options = impatient().ttl(LONG);
    let contended =
        Contention::of_each_kind(&deployment, &here, &locks.with_options(options).unwrap(), &others).await;
    let elsewhere = short_leases(&locks, &there).await;
    let watch = Watch::over(&elsewhere, &deployment.masters()[1]).await;
    silent.hold_requests(true);
    Ends::of(contended.iter().map(|held| &held.guard)).are_extended().await;
    for held in &contended {
        held.assert_held(&deployment).await;
    }
    silent.hold_requests(false);
    for held in contended {
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    watch.assert_prompt(SHORT);
    drop((elsewhere, locks, others));
    silent.outlive_clients().await;
    rest.outlive_clients().await;
    deployment.assert_nothing_left().await;
}

/// A master restarts and loads its data for a while (LOADING). Then it dies with its replica, so
/// that its slots, and with them all others, are not served (CLUSTERDOWN).
#[tokio::test(flavor = "multi_thread")]
async fn cluster_calls_fail_in_time_while_a_master_is_missing() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let options = notified_only().ttl(Duration::from_secs(60));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, &here, &locks, &others).await;
    let master = &deployment.masters()[0];
    // With `key-load-delay`, each key takes microseconds to load. Meanwhile the server reads
    // requests now and then: every 2 MB, where that is no option.
    let fill = "for i = 1, 1000 do redis.call('SET', KEYS[1] .. i, string.rep('x', 20000), 'PX', 120000) end";
    master.run::<()>(&["EVAL", fill, "1", &here]).await;
    master.run::<()>(&["CONFIG", "SET", "rdbcompression", "no"]).await;
    master.run::<()>(&["CONFIG", "SET", "key-load-delay", "3000"]).await;
    let often = ["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"];
    let _: Result<(), _> = master.try_run(&often).await;
    master.run::<()>(&["CONFIG", "REWRITE"]).await;
    master.run::<()>(&["SAVE"]).await;
    deployment.masters_mut()[0].kill();
    deployment.masters_mut()[0].restart_unseen();
    let missing = |tag: &str| {
        let lock = |kind: Kind| kind.lock(&locks, &format!("{tag}missing-{}", kind.name()));
        KINDS.map(lock)
    };
    for _ in 0..2 {
        let took = fail_all(missing(&here)).await;
        println!("requests to a loading master fail after {took:?}");
        assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
    }
    deployment.masters_mut()[0].is_back().await;
    assert!(
        stat(&deployment.masters()[0], "evalsha", "rejected_calls").await > 0,
        "the master replied LOADING"
    );
    let start = Stopwatch::start();
    for lock in missing(&here) {
        eventually("the same client is served again", || async { lock.try_lock().await.is_ok() }).await;
    }
    println!("served again after {:?}", start.elapsed());
    // A failed connection is retried after a second at most.
    assert!(start.undisturbed() < 2 * NODE_TIMEOUT + SLACK, "{start:?}");
    for held in &contended {
        held.assert_held(&deployment).await; // from the snapshot
    }
    deployment.replicas_mut()[0].kill();
    deployment.masters_mut()[0].kill();
    let gone = deployment.masters()[0].port();
    set_node_timeout(&deployment, gone, "1000").await;
    let is_served = || async { Kind::Mutex.lock(&others, &there).try_lock().await.is_ok() };
    eventually("the other masters serve nothing", || async { !is_served().await }).await;
    for tag in [&here, &there] {
        let took = fail_all(missing(tag)).await;
        println!("requests to a cluster that is down fail after {took:?}");
        assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
        // An unqueued call retries for two node timeouts, and the last try takes one.
        let start = Stopwatch::start();
        let outcome = missing(tag)[0].lock().await;
        println!("an unqueued call fails after {:?}", start.elapsed());
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        assert!(start.undisturbed() < 3 * NODE_TIMEOUT + SLACK, "{start:?}");
    }
    let start = Stopwatch::start();
    deployment.masters_mut()[0].restart().await;
    deployment.replicas_mut()[0].restart().await;
    for tag in [&here, &there] {
        for lock in missing(tag) {
            eventually("the same client is served again", || async { lock.lock().await.is_ok() }).await;
        }
    }
    println!("served again after {:?}", start.elapsed());
    deployment.is_whole().await;
    deployment.forbid_failover().await;
    for held in contended {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}
