//! A cluster is many servers, any of which may be listened to, named as a seed, or asked twice.

use std::time::Duration;

use redlatch::deadpool_redis::cluster::Config;
use redlatch::deadpool_redis::{PoolConfig, Runtime};
use redlatch::{ConfigError, Error, Locks, Options, Wakeups};
use tokio::time::{Instant, sleep};

use super::{open, tag_at};
use crate::support::failover::{Contended, KINDS, NODE_TIMEOUT, SLACK, stat, told, urls};
use crate::support::{Deployment, Proxy, Server, Topology, eventually, ttl};

/// Who is told on another server than the lock's is told at once: on a master, on a replica, and wherever he listens
/// after that one is gone.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_wakes_those_who_listen_elsewhere() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        // A server that has no sharded messages does not know these words.
        let _: Result<(), _> =
            server.try_run(&["ACL", "SETUSER", "default", "-ssubscribe", "-spublish"]).await;
    }
    let tag = tag_at(&deployment, 0).await;
    let locks = open(&deployment, Options::new()).await;
    for place in [&deployment.masters()[1], &deployment.replicas()[0], &deployment.replicas()[2]] {
        let others = Locks::builder().cluster([place.url()]).options(told()).connect().await.unwrap();
        for kind in KINDS {
            let name = format!("{tag}{}-{}", kind.name(), place.port());
            let contended = Contended::new(&deployment, kind, &name, &locks, &others).await;
            assert_eq!(place.subscribers().await.len(), 1, "it listens there");
            let took = contended.hand_over(&deployment).await;
            println!("told at {} after {took:?}", place.port());
            assert!(took < Duration::from_millis(500), "{took:?}");
        }
        assert_eq!(deployment.subscriptions().await, 1);
        assert_no_requests_on_subscriptions(&deployment).await;
    }
    // It was the only one that the client was given.
    let others =
        Locks::builder().cluster([deployment.replicas()[2].url()]).options(told()).connect().await.unwrap();
    let mut contended = Vec::new();
    for kind in KINDS {
        contended.push(
            Contended::new(&deployment, kind, &format!("{tag}{}-gone", kind.name()), &locks, &others).await,
        );
    }
    deployment.replicas_mut()[2].kill();
    let start = Instant::now();
    let (masters, replicas) = (deployment.masters(), &deployment.replicas()[..2]);
    let listens = || async {
        let mut sum = 0;
        for server in masters.iter().chain(replicas) {
            sum += server.subscribers().await.len();
        }
        sum == 1
    };
    eventually("it listens elsewhere", listens).await;
    println!("listens again after {:?}", start.elapsed());
    for it in contended {
        let took = it.hand_over(&deployment).await;
        println!("told after {took:?}");
        assert!(took < Duration::from_millis(500), "{took:?}");
    }
    drop((locks, others));
    for master in deployment.masters() {
        master.assert_nothing_left().await;
    }
}

/// What runs scripts is subscribed to nothing, and nothing is published to shards.
async fn assert_no_requests_on_subscriptions(deployment: &Deployment) {
    let mut scripts = 0;
    for server in deployment.masters().iter().chain(deployment.replicas()) {
        let list: String = server.run(&["CLIENT", "LIST"]).await;
        for client in list.lines().filter(|client| client.contains(" cmd=eval")) {
            scripts += 1;
            assert!(client.contains(" sub=0 psub=0 "), "{client}");
            assert!(!client.contains(" ssub=") || client.contains(" ssub=0 "), "{client}");
        }
        for command in ["ssubscribe", "spublish"] {
            assert_eq!(stat(server, command, "calls").await, 0, "{command}");
            assert_eq!(stat(server, command, "rejected_calls").await, 0, "{command}");
        }
    }
    assert!(scripts > 0, "there are some");
}

/// The library sends a request again whose answer was lost, and tells nobody: the script runs twice.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_counts_once_what_runs_twice() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let proxy = Proxy::before(deployment.all().map(Server::port).collect()).await;
    let locks = Locks::builder()
        .cluster(urls("127.0.0.2", deployment.masters()))
        .options(told())
        .connect()
        .await
        .unwrap();
    let others = open(&deployment, told()).await;
    let runs = || async { deployment.scripts_run().await };
    for kind in KINDS {
        let (lock, watcher) = (kind.lock(&locks, kind.name()), kind.lock(&others, kind.name()));
        let guard = lock.lock().await.unwrap();
        let mut last = guard.lease().fencing_token();
        guard.release().await.unwrap();
        for round in 1..=5 {
            let (before, lost) = (runs().await, proxy.lost());
            proxy.lose_next_reply();
            let guard = lock.lock().await.unwrap();
            let ran = runs().await - before;
            assert!(ran >= 2 && proxy.lost() == lost + 1, "granted twice: {ran}");
            let (counts, last_token) = deployment.holds_and_token(&watcher).await;
            assert_eq!(counts, [1], "{kind:?}");
            let token = guard.lease().fencing_token();
            assert_eq!(last_token, token.map(|token| token.get()));
            // A lock to read shares the token of the last writer, and nobody has written.
            assert!(token > last || kind.name() == "read", "{token:?} after {last:?}");
            last = token;
            let before = runs().await;
            proxy.lose_next_reply();
            guard.release().await.unwrap_or_else(|error| panic!("{kind:?} in round {round}: {error}"));
            let ran = runs().await - before;
            assert!(ran >= 2 && proxy.lost() == lost + 2, "released twice: {ran}");
            assert!(!deployment.is_locked(&watcher).await, "{kind:?}");
        }
    }
    drop((locks, others));
    proxy.outlive_clients().await;
    deployment.assert_nothing_left().await;
}

/// Seeds that are dead, hang, or are none.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_opens_or_fails_in_time() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let seeds = urls("127.0.0.1", deployment.masters());
    let stranger = Server::start().await;
    let start = Instant::now();
    let outcome = Locks::builder().cluster([stranger.url()]).connect().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    for url in ["nonsense", "http://127.0.0.1:6379/"] {
        let outcome = Locks::builder().cluster([seeds[0].as_str(), url]).connect().await;
        assert!(matches!(outcome, Err(Error::Config(ConfigError::Url { .. }))), "{outcome:?}");
    }
    let outcome = Locks::builder().cluster(Vec::<String>::new()).connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::Url { .. }))), "{outcome:?}");
    println!("wrong ones fail after {:?}", start.elapsed());
    assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    let uses = async |tag: &str| {
        let start = Instant::now();
        let locks = Locks::builder().cluster(&seeds).options(told()).connect().await.unwrap();
        let opened = start.elapsed();
        for kind in KINDS {
            kind.lock(&locks, &format!("{tag}seed-{}", kind.name()))
                .lock()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        println!("opened after {opened:?}, used after {:?}", start.elapsed());
        assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    };
    // Its replica takes over: all slots are served although a seed is gone.
    deployment.allow_failover().await;
    deployment.masters_mut()[0].kill();
    deployment.has_failed_over(0).await;
    eventually("the cluster is well again", || async {
        let states = deployment.run::<String>(&["CLUSTER", "INFO"]).await;
        states.iter().all(|state| state.contains("cluster_state:ok"))
    })
    .await;
    uses(&here).await;
    uses(&there).await;
    deployment.masters()[1].pause();
    let start = Instant::now();
    let opened = Locks::builder().cluster(&seeds).options(told()).connect().await.map(drop);
    println!("one dead and one hung: {opened:?} after {:?}", start.elapsed());
    assert!(opened.is_ok() && start.elapsed() < NODE_TIMEOUT + SLACK, "{opened:?} {:?}", start.elapsed());
    deployment.masters()[2].pause();
    for _ in 0..2 {
        let start = Instant::now();
        let outcome = Locks::builder().cluster(&seeds).connect().await;
        println!("none reachable: {outcome:?} after {:?}", start.elapsed());
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
        deployment.kill();
    }
}

/// A pool cannot subscribe.
fn polling(options: Options) -> Options {
    options.wakeups(Wakeups::Poll)
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_an_exhausted_pool_starves_no_lease() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let mut config = Config::from_urls(urls("127.0.0.1", deployment.masters()));
    config.pool = Some(PoolConfig::new(1));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    let _the_only_place = pool.get().await.unwrap();
    let locks =
        Locks::builder().cluster_pool(pool.clone()).options(polling(ttl(900))).connect().await.unwrap();
    let mut held = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        held.push((lock.clone(), lock.lock().await.unwrap()));
    }
    sleep(Duration::from_millis(1_200)).await;
    // Its connections break as well: it makes new ones beside the pool.
    deployment.kill_connections().await;
    sleep(Duration::from_millis(1_200)).await;
    for (lock, guard) in held {
        assert!(!guard.lease().is_lost() && deployment.is_held_by(&lock, &guard).await, "{guard:?}");
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
    drop(locks);
    deployment.assert_nothing_left().await;
}

/// Connections with a pool's settings have the library's timeouts, within the node timeout.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_a_pool_takes_longer_to_open_beside_a_server_that_hangs() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let config = Config::from_urls(urls("127.0.0.1", deployment.masters()));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    deployment.masters()[1].pause();
    let start = Instant::now();
    let outcome =
        Locks::builder().cluster_pool(pool.clone()).options(polling(Options::new())).connect().await;
    println!("{:?} after {:?}", outcome.as_ref().map(drop), start.elapsed());
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    assert!(start.elapsed() < NODE_TIMEOUT + SLACK, "{:?}", start.elapsed());
    let (start, limit) = (Instant::now(), 3 * NODE_TIMEOUT);
    let locks = Locks::builder()
        .cluster_pool(pool)
        .options(polling(Options::new().node_timeout(limit)))
        .connect()
        .await
        .unwrap();
    println!("opened after {:?}", start.elapsed());
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("{here}{}", kind.name()));
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let start = Instant::now();
    let outcome = locks.mutex(format!("{there}mutex")).unwrap().try_lock().await.map(drop);
    println!("{outcome:?} after {:?}", start.elapsed());
    assert!(outcome.is_err() && start.elapsed() < limit + SLACK, "{outcome:?} {:?}", start.elapsed());
    deployment.masters()[1].resume();
    drop(locks);
    deployment.assert_nothing_left().await;
}
