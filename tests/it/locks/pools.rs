//! Clients that borrow their connections from a pool.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, NodeState};

use crate::support::{Oracle, Server, eventually, soon, ttl};

#[tokio::test(flavor = "multi_thread")]
async fn pool_an_exhausted_one_starves_no_lease() {
    let server = Server::start().await;
    let mut config = Config::from_url(server.url());
    config.pool = Some(redlatch::deadpool_redis::PoolConfig::new(1));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder()
        .pool(pool.clone())
        .subscriber(server.url())
        .options(ttl(600))
        .connect()
        .await
        .unwrap();
    let _the_only_place = pool.get().await.unwrap();
    let mutex = locks.mutex("pooled").unwrap();
    let guard = mutex.lock().await.unwrap();
    tokio::time::sleep(Duration::from_millis(900)).await;
    // Its connection breaks as well: it makes a new one beside the pool.
    let _: i64 = server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(!guard.lease().is_lost() && server.lock_state(mutex.name()).await.is_held());
    guard.release().await.unwrap();
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_a_client_of_one_is_told_once_it_has_a_subscriber() {
    let server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder().pool(pool).subscriber(server.url()).connect().await.unwrap();
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
    eventually("it queues", || async { server.lock_state(mutex.name()).await.waiters() == 1 }).await;
    let before = server.published().await;
    guard.release().await.unwrap();
    soon("notified", waiting).await.unwrap().unwrap().release().await.unwrap();
    assert!(server.published().await > before, "it is notified");
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_server_are_one() {
    let mut server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let (locks, pooled) =
        (server.locks().await, Locks::builder().pool(pool).subscriber(server.url()).connect().await.unwrap());
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
