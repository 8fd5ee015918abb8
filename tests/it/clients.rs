//! Clients: pools, rights, 10,000 leases, and what is public.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{
    Error, Locks, Mutex, MutexGuard, NodeState, NodeStatus, Options, Owner, ReentrantGuard, ReentrantLock,
};
use tokio::time::Instant;

use crate::support::{Kind, Server, eventually, soon, ttl};

async fn ten_thousand_leases_are_renewed(kind: Kind) {
    const LEASES: usize = 10_000;
    let server = Server::start().await;
    let locks = server.locks_with(ttl(4_000)).await;
    let mut guards = Vec::with_capacity(LEASES);
    for hundred in 0..LEASES / 100 {
        let mut round = tokio::task::JoinSet::new();
        for one in 0..100 {
            let lock = kind.lock(&locks, &format!("many-{hundred}-{one}"));
            round.spawn(async move { lock.lock().await.unwrap() });
        }
        while let Some(guard) = round.join_next().await {
            guards.push(guard.unwrap());
        }
    }
    let clients: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    assert!(clients.lines().count() <= 2, "one connection, and this one:\n{clients}");
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let lost = guards.iter().filter(|guard| guard.lease().is_lost()).count();
        assert_eq!(lost, 0, "{lost} of {LEASES} lost");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(guards);
    drop(locks);
    eventually("all are released in the background", || async {
        server.run::<Vec<String>>(&["KEYS", "lock:many-*"]).await.is_empty()
    })
    .await;
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Reentrant).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_an_exhausted_one_starves_no_lease() {
    let server = Server::start().await;
    let mut config = Config::from_url(server.url());
    config.pool = Some(redlatch::deadpool_redis::PoolConfig::new(1));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::from_pool_with(pool.clone(), ttl(600)).await.unwrap();
    let _the_only_place = pool.get().await.unwrap();
    let mutex = locks.mutex("pooled").unwrap();
    let guard = mutex.lock().await.unwrap();
    tokio::time::sleep(Duration::from_millis(900)).await;
    // Its connection breaks as well: it makes a new one beside the pool.
    let _: i64 = server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(!guard.lease().is_lost() && mutex.is_held_by(guard.lease()).await.unwrap());
    guard.release().await.unwrap();
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_a_client_of_one_is_told_once_it_has_a_subscriber() {
    let server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::from_pool(pool).await.unwrap().with_subscriber(&server.url()).unwrap();
    assert!(locks.clone().with_subscriber("nonsense").is_err());
    let mutex = locks.mutex("told").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    eventually("it subscribes", || async {
        !server.run::<Vec<String>>(&["PUBSUB", "CHANNELS"]).await.is_empty()
    })
    .await;
    guard.release().await.unwrap();
    soon("told", waiting).await.unwrap().unwrap().release().await.unwrap();
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_server_are_one() {
    let mut server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let (locks, pooled) = (server.locks().await, Locks::from_pool(pool).await.unwrap());
    let address = format!("127.0.0.1:{}", server.port());
    for (locks, name) in [(&locks, address.as_str()), (&pooled, "pool")] {
        assert_eq!(locks.nodes().await[0].to_string(), format!("{name}: votes"));
        assert_eq!(locks.nodes().await.len(), 1);
        assert!(locks.rejoin().await.unwrap().is_empty());
    }
    server.kill();
    for locks in [locks, pooled] {
        let [node] = locks.nodes().await.try_into().unwrap();
        assert!(matches!(node.state, NodeState::Failed(Error::Redis { .. })), "{node}");
    }
}

/// The rights that the README documents, and no more.
#[tokio::test(flavor = "multi_thread")]
async fn acl_the_documented_rights_are_enough() {
    let server = Server::start().await;
    let readme = include_str!("../../README.md");
    let rights =
        readme.lines().find_map(|line| line.trim().strip_prefix("ACL SETUSER locks on >secret ")).unwrap();
    let mut words = vec!["ACL", "SETUSER", "locks", "on", ">secret"];
    words.extend(rights.split_whitespace());
    server.run::<()>(&words).await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    for protocol in ["resp2", "resp3"] {
        let locks = Locks::open_with(&format!("{url}?protocol={protocol}"), ttl(600)).await.unwrap();
        for kind in [Kind::Mutex, Kind::Reentrant] {
            let lock = kind.lock(&locks, &format!("limited-{}-{protocol}", kind.name()));
            let guard = lock.lock().await.unwrap();
            let waiting = tokio::spawn({
                let other = lock.for_another();
                async move { other.lock().await }
            });
            eventually("it queues", || async { lock.waiters().await == 1 }).await;
            let told: Vec<String> = server.run(&["PUBSUB", "CHANNELS", "lock:wake:*"]).await;
            assert_eq!(told.len(), 1, "it is subscribed");
            tokio::time::sleep(Duration::from_millis(900)).await;
            assert!(!guard.lease().is_lost(), "renewed");
            guard.release().await.unwrap();
            drop(soon("handed over", waiting).await.unwrap().unwrap());
            eventually("free", || async { !lock.is_locked().await }).await;
            assert!(!lock.force_release().await.unwrap());
        }
    }
    // Without the right to publish nothing fails: the waiter looks.
    server.run::<()>(&["ACL", "SETUSER", "locks", "-publish"]).await;
    let locks = Locks::open(&url).await.unwrap();
    let lock = Kind::Mutex.lock(&locks, "unpublished");
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let other = lock.for_another();
        async move { other.lock().await }
    });
    eventually("it queues", || async { lock.waiters().await == 1 }).await;
    guard.release().await.unwrap();
    soon("found", waiting).await.unwrap().unwrap().release().await.unwrap();
    // Another application's locks are out of reach.
    let foreign = locks.with_options(Options::new().prefix("other:")).unwrap();
    assert!(matches!(foreign.mutex("x").unwrap().try_lock().await, Err(Error::Redis { .. })));
}

#[test]
fn public_types_may_cross_threads() {
    fn send_sync<T: Send + Sync + Unpin + 'static>() {}
    send_sync::<Locks>();
    send_sync::<Mutex>();
    send_sync::<MutexGuard>();
    send_sync::<ReentrantLock>();
    send_sync::<ReentrantGuard>();
    send_sync::<Owner>();
    send_sync::<Error>();
    send_sync::<NodeStatus>();
}

/// A client in a static, and a runtime for each test: the second one is told at once what is wrong.
#[test]
fn clients_end_with_their_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (outer, second) = (runtime(), runtime());
    let server = outer.block_on(Server::start());
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write] {
        let first = runtime();
        let locks = first.block_on(server.locks());
        let held = first.block_on(kind.lock(&locks, kind.name()).lock()).unwrap();
        drop(first);
        drop(held);
        second.block_on(async {
            let lock = kind.lock(&locks, "after");
            let start = Instant::now();
            for outcome in [lock.try_lock().await.map(drop), lock.lock().await.map(drop)] {
                assert!(matches!(outcome, Err(Error::RuntimeEnded)), "{kind:?}: {outcome:?}");
            }
            assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
            soon("nothing is given back any more", locks.settled()).await;
        });
    }
    drop((second, server, outer));
}
