//! Tests of the test support: deployments of all topologies, and proxies before them.

use std::time::{Duration, Instant};

use redis::{FromRedisValue, RedisResult};

use crate::support::{Deployment, Proxy, Server, Topology, connect, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn deployment_cluster_serves_after_a_restart() {
    let mut cluster = Deployment::start(Topology::Cluster).await;
    assert_eq!((cluster.masters().len(), cluster.replicas().len()), (3, 3));
    let keys = ["a", "b", "c", "d", "e", "f"];
    for key in keys {
        assert_eq!(cluster.run_at::<String>(key, &["SET", key, "1", "PX", "60000"]).await, ["OK"]);
    }
    let mut found = cluster.keys("*").await;
    found.sort();
    assert_eq!(found, keys);
    let sizes: Vec<usize> = cluster.run(&["DBSIZE"]).await;
    assert!(sizes.iter().all(|size| *size > 0), "{sizes:?}");
    assert!(cluster.kept_until("a").await <= Instant::now() + Duration::from_secs(60));
    cluster.pause();
    cluster.resume();
    cluster.kill();
    cluster.restart().await;
    assert!(cluster.keys("*").await.is_empty(), "nothing was saved");
    assert_eq!(cluster.run_at::<String>("a", &["SET", "a", "1", "PX", "60000"]).await, ["OK"]);
    for master in cluster.masters() {
        eventually("the replica follows its master", || async { master.replicas_online().await == 1 }).await;
    }
    cluster.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_cluster_moves_slots() {
    let cluster = Deployment::start(Topology::Cluster).await;
    let from = cluster.owner("{slot}:1").await.unwrap();
    let to = (from + 1) % 3;
    for number in 0..150 {
        let key = format!("{{slot}}:{number}");
        cluster.run_at::<String>(&key, &["SET", &key, "1", "PX", "60000"]).await;
    }
    cluster.begin_move("{slot}", to).await;
    assert_eq!(cluster.owner("{slot}").await, Some(from));
    let new = cluster.masters()[from].try_run::<String>(&["SET", "{slot}:new", "1"]).await;
    assert_eq!(new.unwrap_err().code(), Some("ASK"));
    cluster.move_keys("{slot}", to).await;
    cluster.end_move("{slot}", to).await;
    assert_eq!(cluster.owner("{slot}").await, Some(to));
    assert_eq!(cluster.masters()[to].run::<Vec<String>>(&["KEYS", "{slot}:*"]).await.len(), 150);
    cluster.move_slot("{slot}", from).await;
    assert_eq!(cluster.masters()[from].run::<Vec<String>>(&["KEYS", "{slot}:*"]).await.len(), 150);
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_cluster_fails_over() {
    let mut cluster = Deployment::start(Topology::Cluster).await;
    cluster.run_at::<String>("key", &["SET", "key", "1", "PX", "60000"]).await;
    let owner = cluster.owner("key").await.unwrap();
    let replica = &cluster.replicas()[owner];
    eventually("the replica has the key", || async { replica.run::<i64>(&["DBSIZE"]).await == 1 }).await;
    let promoted = replica.port();
    cluster.fail_over(owner).await;
    assert_eq!(cluster.masters()[owner].port(), promoted);
    assert_eq!(cluster.run_at::<String>("key", &["GET", "key"]).await, ["1"]);
    // The new master is killed, so the old one takes over again.
    cluster.allow_failover().await;
    let master = &cluster.masters()[owner];
    eventually("the old master follows the new one", || async { master.replicas_online().await == 1 }).await;
    cluster.masters_mut()[owner].kill();
    cluster.has_failed_over(owner).await;
    assert_ne!(cluster.masters()[owner].port(), promoted);
    assert_eq!(cluster.run_at::<String>("key", &["GET", "key"]).await, ["1"]);
    cluster.replicas_mut()[owner].restart().await;
    let master = &cluster.masters()[owner];
    eventually("the restarted server follows the new master", || async {
        master.replicas_online().await == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_sentinels_replace_the_master() {
    let mut group = Deployment::start(Topology::Sentinel).await;
    assert_eq!((group.masters().len(), group.replicas().len(), group.sentinels().len()), (1, 2, 3));
    assert_eq!(group.subscriptions().await, 0, "subscriptions of sentinels do not count");
    assert_eq!(group.run_at::<String>("key", &["SET", "key", "1", "PX", "60000"]).await, ["OK"]);
    for replica in group.replicas() {
        eventually("the replica has the key", || async { replica.run::<i64>(&["EXISTS", "key"]).await == 1 })
            .await;
    }
    let first = group.masters()[0].port();
    group.fail_over(0).await;
    assert_ne!(group.masters()[0].port(), first);
    assert_eq!(group.run_at::<String>("key", &["GET", "key"]).await, ["1"]);
    group.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_sentinels_notice_a_dead_master() {
    let mut group = Deployment::start(Topology::Sentinel).await;
    group.kill();
    group.restart().await;
    let before = group.masters()[0].port();
    group.allow_failover().await;
    // Two of three sentinels are a majority.
    group.sentinels_mut()[2].kill();
    eventually("the replicas follow the master", || async {
        group.masters()[0].replicas_online().await == 2
    })
    .await;
    group.masters_mut()[0].kill();
    group.has_failed_over(0).await;
    assert_ne!(group.masters()[0].port(), before);
}

/// Through a proxy, servers name each other by their proxies' addresses. Faults affect only
/// connections through proxies.
#[tokio::test(flavor = "multi_thread")]
async fn deployment_proxies_replace_all_addresses() {
    for topology in [Topology::Cluster, Topology::Sentinel, Topology::Quorum3, Topology::Quorum5] {
        let deployment = Deployment::start(topology).await;
        let proxy = Proxy::before(deployment.all().map(Server::port).collect()).await;
        let entrance = &deployment.entrances()[0];
        let behind = |server: &Server| format!("redis://127.0.0.2:{}/", server.port());
        match topology {
            Topology::Cluster => {
                // Each range of slots: its first and its last one, then its nodes.
                let ranges: Vec<Vec<redis::Value>> =
                    ask(&behind(entrance), &["CLUSTER", "SLOTS"]).await.unwrap();
                assert_eq!(ranges.len(), 3);
                for node in ranges.into_iter().flat_map(|range| range.into_iter().skip(2)) {
                    let node: Vec<redis::Value> = FromRedisValue::from_redis_value(node).unwrap();
                    assert_eq!(node[0], redis::Value::BulkString(b"127.0.0.2".to_vec()));
                }
                let owner = deployment.owner("key").await.unwrap();
                let other = &deployment.masters()[(owner + 1) % 3];
                let moved = ask::<String>(&behind(other), &["GET", "key"]).await.unwrap_err();
                let address = format!("127.0.0.2:{}", deployment.masters()[owner].port());
                assert_eq!(moved.redirect_node().map(|(target, _)| target), Some(address.as_str()));
            }
            Topology::Sentinel => {
                let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
                let (host, port): (String, u16) = ask(&behind(entrance), &words).await.unwrap();
                assert_eq!((host.as_str(), port), ("127.0.0.2", deployment.masters()[0].port()));
            }
            _ => assert_eq!(deployment.run::<i64>(&["DBSIZE"]).await.len(), topology.nodes()),
        }
        let script = ["EVAL", "return 7", "0"];
        let data = behind(&deployment.masters()[0]);
        proxy.lose_next_reply();
        assert_eq!(ask::<String>(&data, &["PING"]).await.unwrap(), "PONG", "faults affect scripts only");
        assert!(ask::<i64>(&data, &script).await.is_err());
        assert_eq!(ask::<i64>(&data, &script).await.unwrap(), 7);
        proxy.lose_next_replies();
        for master in deployment.masters() {
            assert!(ask::<i64>(&behind(master), &script).await.is_err());
            assert_eq!(ask::<i64>(&behind(master), &script).await.unwrap(), 7);
        }
        assert_eq!(proxy.lost(), 1 + deployment.masters().len());
        proxy.set_drops_requests(true);
        assert_eq!(
            deployment.masters()[0].run::<i64>(&script).await,
            7,
            "direct connections are not affected"
        );
    }
}

async fn ask<T: FromRedisValue>(url: &str, words: &[&str]) -> RedisResult<T> {
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connect(url).await?).await
}
