//! The nodes of a cluster: subscriptions on any of them, and seeds.

use redlatch::{ConfigError, Error, Locks, Options};

use super::{open, replace, tag_at};
use crate::standalone::reconnections::{long_turn, lost_on_its_way};
use crate::support::events::{TRACED, listen};
use crate::support::failover::{Contention, NODE_TIMEOUT, SLACK, impatient, stat, urls, was_one_notified};
use crate::support::{Deployment, KINDS, Server, Stopwatch, Topology, eventually, patient};

/// A waiter is notified at once although its client is subscribed to another server than the
/// lock's: to a master, to a replica, and to any other server after that one has died.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_waiter_is_notified_through_any_node() {
    listen();
    let mut deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        // Servers without sharded channels do not know these rights.
        let _: Result<(), _> =
            server.try_run(&["ACL", "SETUSER", "default", "-ssubscribe", "-spublish"]).await;
    }
    let tag = tag_at(&deployment, 0).await;
    let locks = open(&deployment, Options::new()).await;
    for place in [&deployment.masters()[1], &deployment.replicas()[0], &deployment.replicas()[2]] {
        let others = Locks::builder().cluster([place.url()]).options(impatient()).connect().await.unwrap();
        let names = format!("{tag}{TRACED}{}-", place.port());
        for contended in Contention::of_each_kind(&deployment, &names, &locks, &others).await {
            contended.is_notified_at(&deployment.masters()[0], &[place]).await;
            let took = contended.grant_to_waiter(&deployment).await;
            println!("notified at {} after {took:?}", place.port());
        }
        assert!(was_one_notified(&names), "all waiters have polled");
        assert_eq!(deployment.subscriptions().await, 1);
        assert_no_requests_on_subscriptions(&deployment).await;
    }
    // That replica is the client's only seed.
    let others = Locks::builder()
        .cluster([deployment.replicas()[2].url()])
        .options(impatient())
        .connect()
        .await
        .unwrap();
    let names = format!("{tag}{TRACED}gone-{}-", deployment.replicas()[2].port());
    let contended = Contention::of_each_kind(&deployment, &names, &locks, &others).await;
    for held in &contended {
        held.is_notified_at(&deployment.masters()[0], &[&deployment.replicas()[2]]).await;
    }
    deployment.replicas_mut()[2].kill();
    let start = Stopwatch::start();
    let rest: Vec<&Server> = deployment.data().filter(|server| server.is_alive()).collect();
    for held in contended {
        held.is_notified_at(&deployment.masters()[0], &rest).await;
        println!("subscribed again after {:?}", start.elapsed());
        println!("redirected after {:?}", held.grant_to_waiter(&deployment).await);
    }
    assert!(was_one_notified(&names), "all waiters have polled");
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

/// Each request is sent once, so a release need not leave a mark that refuses later ones.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_release_leaves_no_queue() {
    let deployment = Deployment::start(Topology::Cluster).await;
    // With a short limit, a server that stands still is sent requests again.
    let builder = Locks::builder().cluster(urls("127.0.0.1", deployment.masters()));
    let locks = builder.options(patient()).connect().await.unwrap();
    for kind in KINDS {
        for number in 0..20 {
            let lock = kind.lock(&locks, &format!("{}-{number}", kind.name()));
            lock.lock().await.unwrap().release().await.unwrap();
        }
    }
    let keys = deployment.run::<Vec<String>>(&["KEYS", "*"]).await.concat();
    assert!(keys.len() >= 20 && keys.iter().all(|key| key.ends_with(":fence")), "{keys:?}");
    drop(locks);
    deployment.assert_nothing_left().await;
}

/// Connecting with seeds that are dead, that hang, or that are not part of a cluster.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_connect_returns_in_time_whatever_its_seeds_do() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let seeds = urls("127.0.0.1", deployment.masters());
    let stranger = Server::start().await;
    let start = Stopwatch::start();
    let outcome = Locks::builder().cluster([stranger.url()]).connect().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    for url in ["nonsense", "http://127.0.0.1:6379/"] {
        let outcome = Locks::builder().cluster([seeds[0].as_str(), url]).connect().await;
        assert!(matches!(outcome, Err(Error::Config(ConfigError::Url { .. }))), "{outcome:?}");
    }
    let outcome = Locks::builder().cluster(Vec::<String>::new()).connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::Url { .. }))), "{outcome:?}");
    println!("wrong seeds fail after {:?}", start.elapsed());
    assert!(start.undisturbed() < NODE_TIMEOUT + SLACK, "{start:?}");
    let uses = async |tag: &str| {
        let start = Stopwatch::start();
        let locks = Locks::builder().cluster(&seeds).options(impatient()).connect().await.unwrap();
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
        assert!(start.undisturbed() < NODE_TIMEOUT + SLACK, "{start:?}");
    };
    // The replica takes over, so all slots are served although a seed is dead.
    deployment.masters_mut()[0].kill();
    replace(&mut deployment, 0).await;
    uses(&here).await;
    uses(&there).await;
    deployment.masters()[1].pause();
    let start = Stopwatch::start();
    let opened = Locks::builder().cluster(&seeds).options(impatient()).connect().await.map(drop);
    println!("one seed dead and one hung: {opened:?} after {:?}", start.elapsed());
    assert!(opened.is_ok() && start.undisturbed() < NODE_TIMEOUT + SLACK, "{opened:?} {start:?}");
    deployment.masters()[2].pause();
    for _ in 0..2 {
        let start = Stopwatch::start();
        let outcome = Locks::builder().cluster(&seeds).connect().await;
        println!("no seed reachable: {outcome:?} after {:?}", start.elapsed());
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        assert!(start.undisturbed() < NODE_TIMEOUT + SLACK, "{start:?}");
        deployment.kill();
    }
}

/// A new connection to one master is as good a reason to ask as one to the only server.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_hold_that_was_lost_on_its_way_to_the_next_task_is_asked_about() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let tag = tag_at(&deployment, 0).await;
    lost_on_its_way(&open(&deployment, long_turn()).await, &deployment.masters()[0], &tag).await;
    deployment.assert_nothing_left().await;
}

/// A node that was removed from its cluster keeps its connections, and receives no message of the
/// others any more: a subscription moves away from it.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_subscription_leaves_a_node_that_was_removed() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let removed = &deployment.replicas()[0];
    let locks = Locks::builder().cluster([removed.url()]).options(Options::new()).connect().await.unwrap();
    let tag = tag_at(&deployment, 1).await;
    let contended = Contention::of_each_kind(&deployment, &tag, &locks, &locks).await;
    for held in &contended {
        held.is_notified_at(&deployment.masters()[1], &[removed]).await;
    }
    assert_eq!(deployment.subscriptions().await, 1);
    let id: String = removed.run(&["CLUSTER", "MYID"]).await;
    for server in deployment.all().filter(|server| server.port() != removed.port()) {
        server.run::<()>(&["CLUSTER", "FORGET", &id]).await;
    }
    removed.run::<()>(&["CLUSTER", "RESET", "SOFT"]).await;
    let has_moved = async || removed.subscribers().await.is_empty() && deployment.subscriptions().await == 1;
    eventually("it is subscribed to another server", has_moved).await;
    for held in contended {
        held.grant_to_waiter(&deployment).await;
    }
}
