//! Masters that die, hang, or come back, while clients hold locks on them and elsewhere.

use std::time::Duration;

use redlatch::{Error, Locks};
use tokio::time::{Instant, sleep};

use super::{open, tag_at};
use crate::support::failover::{
    Contended, KINDS, NODE_TIMEOUT, SLACK, Watch, caught_up, cut_off, fail, stat, told, urls,
};
use crate::support::{Deployment, Kind, Proxy, Topology, eventually, soon, ttl};

/// What is renewed every 500 ms: no less is left if none is late.
const SHORT: u64 = 1_500;
const LEFT: Duration = Duration::from_millis(SHORT - SHORT / 3 - 450);

async fn watched(locks: &Locks, tag: &str) -> (Vec<crate::support::AnyGuard>, Watch) {
    let short = locks.with_options(ttl(SHORT)).unwrap();
    let mut guards = Vec::new();
    for kind in KINDS {
        guards.push(kind.lock(&short, &format!("{tag}{}", kind.name())).lock().await.unwrap());
    }
    let watch = Watch::over(guards.iter().map(|guard| guard.lease().clone()).collect());
    (guards, watch)
}

/// A master is killed, and replaced by a replica that has missed the last writes.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_killed_master_is_replaced() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        // Otherwise the others serve nothing until the replica has taken over.
        server.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    deployment.allow_failover().await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let options = told().ttl(Duration::from_secs(8));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let survivors = Contended::of_each_kind(&deployment, &here, &locks, &others).await;
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
    let (elsewhere, watch) = watched(&locks, &there).await;
    let start = Instant::now();
    deployment.masters_mut()[0].kill();
    deployment.replicas()[0].resume();
    let took = fail(later.iter().map(|lock| lock.for_rival())).await;
    println!("requests to a dead master fail after {took:?}");
    assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
    deployment.has_failed_over(0).await;
    println!("replaced after {:?}", start.elapsed());
    // The same client goes on, with larger tokens; nobody else has what the replica knows to be held.
    for (lock, old) in later.iter().zip(&lost) {
        let next = soon("taken again", lock.for_rival().lock()).await.unwrap();
        assert!(next.token() > old.token(), "{next:?} after {old:?}");
        next.release().await.unwrap();
    }
    println!("goes on after {:?}", start.elapsed());
    for it in &survivors {
        it.assert_held(&deployment).await;
    }
    for old in lost {
        soon("the holder learns", old.lease().lost()).await;
        println!("lost after {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(7), "told, before its deadline: {:?}", start.elapsed());
        assert!(matches!(old.release().await, Err(Error::Lost { .. })));
    }
    // Renewed by the new master: none would last for so long.
    sleep(Duration::from_secs(9).saturating_sub(start.elapsed())).await;
    for it in survivors {
        it.assert_held(&deployment).await;
        println!("handed over after {:?}", it.hand_over(&deployment).await);
    }
    println!("left at least {:?} of {LEFT:?}", watch.least());
    assert!(watch.least() > LEFT, "renewed late: {:?} left", watch.least());
    drop((elsewhere, later, locks, others));
    for master in deployment.masters() {
        master.assert_nothing_left().await;
    }
}

/// A master that hangs is not replaced here: nobody else has its slots.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_hung_master_holds_nobody_else_up() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let (locks, others) = (open(&deployment, told()).await, open(&deployment, told()).await);
    let contended = Contended::of_each_kind(&deployment, &here, &locks, &others).await;
    let (elsewhere, watch) = watched(&locks, &there).await;
    deployment.masters()[0].pause();
    for round in 0..3 {
        let hung = KINDS.map(|kind| kind.lock(&locks, &format!("{here}hung-{}", kind.name())));
        let took = fail(hung).await;
        println!("requests to a hung master fail after {took:?}");
        assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
        let start = Instant::now();
        let other = Kind::Mutex.lock(&locks, &format!("{there}other-{round}"));
        other.lock().await.unwrap().release().await.unwrap();
        println!("others: {:?}", start.elapsed());
        assert!(start.elapsed() < NODE_TIMEOUT / 2, "{:?}", start.elapsed());
    }
    let start = Instant::now();
    let new =
        Locks::builder().cluster(urls("127.0.0.1", deployment.masters())).options(told()).connect().await;
    println!("opened after {:?}: {:?}", start.elapsed(), new.as_ref().err());
    let lock = Kind::Mutex.lock(&new.unwrap(), &format!("{there}new"));
    lock.lock().await.unwrap().release().await.unwrap();
    println!("used after {:?}", start.elapsed());
    assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    deployment.masters()[0].resume();
    for kind in KINDS {
        let lock = kind.lock(&others, &format!("{here}hung-{}", kind.name()));
        let start = Instant::now();
        let guard = soon("no orphan", lock.lock()).await.unwrap();
        println!("after it hung: {:?}", start.elapsed());
        guard.release().await.unwrap();
    }
    for it in contended {
        it.assert_held(&deployment).await;
        it.hand_over(&deployment).await;
    }
    println!("left at least {:?} of {LEFT:?}", watch.least());
    assert!(watch.least() > LEFT, "renewed late: {:?} left", watch.least());
    drop((elsewhere, lock, locks, others));
    deployment.assert_nothing_left().await;
}

/// A master that hangs is replaced by its replica: nobody is told by a refusal.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_hung_master_is_replaced() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    deployment.allow_failover().await;
    let here = tag_at(&deployment, 0).await;
    let options = told().ttl(Duration::from_secs(10));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contended::of_each_kind(&deployment, &here, &locks, &others).await;
    caught_up(&deployment.masters()[0], 1).await;
    let start = Instant::now();
    deployment.masters()[0].pause();
    deployment.has_failed_over(0).await;
    let replaced = Instant::now();
    println!("replaced after {:?}", start.elapsed());
    let lock = Kind::Mutex.lock(&locks, &format!("{here}hung"));
    eventually("the same client goes on", || async { lock.try_lock().await.is_ok() }).await;
    println!("goes on {:?} later", replaced.elapsed());
    assert!(replaced.elapsed() < 4 * NODE_TIMEOUT, "{:?}", replaced.elapsed());
    eventually("the other as well", || async { contended[0].rival.try_lock().await.is_ok() }).await;
    sleep(Duration::from_secs(12).saturating_sub(start.elapsed())).await;
    for it in contended {
        it.assert_held(&deployment).await;
        println!("handed over after {:?}", it.hand_over(&deployment).await);
    }
    deployment.replicas()[0].resume();
    drop((lock, locks, others));
    deployment.assert_nothing_left().await;
}

/// The connections to one master fall silent, which serves whoever connects anew.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_silent_connection_is_replaced() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let silent = Proxy::start(deployment.masters()[0].port()).await;
    let rest = deployment.all().skip(1).map(|server| server.port()).collect();
    let rest = Proxy::before(rest).await;
    let seeds = urls("127.0.0.2", deployment.masters());
    let locks = Locks::builder().cluster(seeds).options(told()).connect().await.unwrap();
    let (elsewhere, watch) = watched(&locks, &there).await;
    let others = open(&deployment, told()).await;
    let options = ttl(3_000);
    let contended =
        Contended::of_each_kind(&deployment, &here, &locks.with_options(options).unwrap(), &others).await;
    silent.hold_requests(true);
    sleep(Duration::from_secs(5)).await;
    for it in &contended {
        it.assert_held(&deployment).await;
    }
    silent.hold_requests(false);
    for it in contended {
        println!("handed over after {:?}", it.hand_over(&deployment).await);
    }
    println!("left at least {:?} of {LEFT:?}", watch.least());
    assert!(watch.least() > LEFT, "renewed late: {:?} left", watch.least());
    drop((elsewhere, locks, others));
    silent.outlive_clients().await;
    rest.outlive_clients().await;
    deployment.assert_nothing_left().await;
}

/// A master restarts and loads for a while (LOADING); then it is gone with its replica, so that nobody serves its
/// slots, and with them none (CLUSTERDOWN).
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_master_that_is_missing_fails_in_time() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let options = told().ttl(Duration::from_secs(60));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contended::of_each_kind(&deployment, &here, &locks, &others).await;
    let master = &deployment.masters()[0];
    // Loading takes microseconds for each key, and requests are looked at now and then: every 2 MB, if that is not an option.
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
        let took = fail(missing(&here)).await;
        println!("requests to a master that loads fail after {took:?}");
        assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
    }
    deployment.masters_mut()[0].is_back().await;
    assert!(stat(&deployment.masters()[0], "evalsha", "rejected_calls").await > 0, "it said LOADING");
    let start = Instant::now();
    for lock in missing(&here) {
        eventually("the same client goes on", || async { lock.try_lock().await.is_ok() }).await;
    }
    println!("goes on after {:?}", start.elapsed());
    // A connection that failed is made again after a second at most.
    assert!(start.elapsed() < 2 * NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    for it in &contended {
        it.assert_held(&deployment).await; // it was saved
    }
    deployment.allow_failover().await;
    deployment.replicas_mut()[0].kill();
    deployment.masters_mut()[0].kill();
    let others_serve = || async { Kind::Mutex.lock(&others, &there).try_lock().await.is_ok() };
    eventually("the others give up as well", || async { !others_serve().await }).await;
    for tag in [&here, &there] {
        let took = fail(missing(tag)).await;
        println!("requests to a cluster that is down fail after {took:?}");
        assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
        // A newcomer is patient for two node timeouts, and the last try takes one.
        let start = Instant::now();
        let outcome = missing(tag)[0].lock().await;
        println!("a newcomer fails after {:?}", start.elapsed());
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        assert!(start.elapsed() < 3 * NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    }
    let start = Instant::now();
    deployment.masters_mut()[0].restart().await;
    deployment.replicas_mut()[0].restart().await;
    for tag in [&here, &there] {
        for lock in missing(tag) {
            eventually("the same client goes on", || async { lock.lock().await.is_ok() }).await;
        }
    }
    println!("goes on after {:?}", start.elapsed());
    for it in contended {
        it.assert_held(&deployment).await;
        println!("handed over after {:?}", it.hand_over(&deployment).await);
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}
