//! Clients that are built from a pool.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, NodeState};

use crate::support::{Oracle, Server, eventually, renewed_by, soon, ttl};

#[tokio::test(flavor = "multi_thread")]
async fn exhausted_pool_does_not_block_renewal() {
    let server = Server::start().await;
    let mut config = Config::from_url(server.url());
    config.pool = Some(redlatch::deadpool_redis::PoolConfig::new(1));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder()
        .pool(pool.clone())
        .subscriber(server.url())
        .options(ttl(6_000))
        .connect()
        .await
        .unwrap();
    let _only_connection = pool.get().await.unwrap();
    let mutex = locks.mutex("pooled").unwrap();
    let guard = mutex.lock().await.unwrap();
    renewed_by(guard.lease(), Duration::from_secs(3)).await;
    // The client's own connection breaks, too: it makes a new one beside the pool.
    let _: i64 = server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    renewed_by(guard.lease(), Duration::from_secs(3)).await;
    assert!(server.lock_state(mutex.name()).await.is_held());
    guard.release().await.unwrap();
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_client_with_a_subscriber_is_notified() {
    let server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder().pool(pool).subscriber(server.url()).connect().await.unwrap();
    let mutex = locks.mutex("notified").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    eventually("the waiter queues", || async { server.lock_state(mutex.name()).await.waiters() == 1 }).await;
    server.all_notified("lock:notified").await;
    let before = server.published().await;
    guard.release().await.unwrap();
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    assert!(server.published().await > before, "no message was published");
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_a_single_server_are_one_voter() {
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
