//! A master with replicas, and the sentinels that watch them.

use std::collections::HashMap;

use super::deployment::{PROMPT, servers};
use super::port::{TRIES, free_port};
use super::{Server, eventually};

/// What the sentinels call the master.
pub const MASTER: &str = "mymaster";

const SENTINELS: usize = 3;

/// Milliseconds after which a master that does not answer is taken for dead: never.
const PATIENT: &str = "60000";

/// A master, two replicas and three sentinels.
pub async fn form(arguments: &[&str]) -> (Vec<Server>, Vec<Server>, Vec<Server>) {
    let mut masters = servers(3, &[&PROMPT[..], arguments].concat()).await;
    let replicas = masters.split_off(1);
    let master = masters[0].port().to_string();
    for replica in &replicas {
        replica.run::<()>(&["REPLICAOF", "127.0.0.1", &master]).await;
        replica.run::<()>(&["CONFIG", "REWRITE"]).await;
    }
    let sentinels = watch(&masters[0], &replicas).await;
    eventually("the replicas follow", || async { masters[0].replicas_online().await == replicas.len() })
        .await;
    for sentinel in &sentinels {
        eventually("the sentinel sees all", || async {
            let seen = |list| async move {
                let seen: Vec<HashMap<String, String>> = sentinel.run(&["SENTINEL", list, MASTER]).await;
                seen.iter().filter(|one| !one["flags"].contains("disconnected")).count()
            };
            sentinel.try_run::<String>(&["SENTINEL", "CKQUORUM", MASTER]).await.is_ok()
                && seen("REPLICAS").await == replicas.len()
                && seen("SENTINELS").await == SENTINELS - 1
        })
        .await;
    }
    (masters, replicas, sentinels)
}

/// The sentinels know each other from the start: to find out takes seconds.
async fn watch(master: &Server, replicas: &[Server]) -> Vec<Server> {
    let id = |place: usize| format!("{:040x}", place + 1);
    for _ in 0..TRIES {
        let ports: Vec<u16> = (0..SENTINELS).map(|_| free_port()).collect();
        let start = |place: usize| {
            // Nobody is taken for dead, until failover is allowed.
            let mut configuration = format!(
                "sentinel myid {}\nsentinel monitor {MASTER} 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds {MASTER} {PATIENT}\n\
                 sentinel failover-timeout {MASTER} 3000\nsentinel parallel-syncs {MASTER} 2\n",
                id(place),
                master.port(),
            );
            for replica in replicas {
                configuration += &format!("sentinel known-replica {MASTER} 127.0.0.1 {}\n", replica.port());
            }
            for other in (0..SENTINELS).filter(|other| *other != place) {
                let (port, id) = (ports[other], id(other));
                configuration += &format!("sentinel known-sentinel {MASTER} 127.0.0.1 {port} {id}\n");
            }
            let port = ports[place];
            tokio::spawn(async move { Server::start_sentinel(port, &configuration).await })
        };
        let starting: Vec<_> = (0..SENTINELS).map(start).collect();
        let mut sentinels = Vec::new();
        for sentinel in starting {
            sentinels.extend(sentinel.await.unwrap());
        }
        if sentinels.len() == SENTINELS {
            return sentinels;
        }
    }
    panic!("no sentinels start")
}

/// From now on, a master that does not answer for a second or so is replaced.
pub async fn allow_failover(sentinels: &[Server]) {
    for sentinel in sentinels {
        // Who has just lost sight of the master would find that it has long been dead.
        eventually("the sentinel sees the master", || async {
            let seen: HashMap<String, String> = sentinel.run(&["SENTINEL", "MASTER", MASTER]).await;
            seen["flags"] == "master"
        })
        .await;
        sentinel.run::<()>(&["SENTINEL", "SET", MASTER, "down-after-milliseconds", "700"]).await;
    }
}

/// From now on, nobody is taken for dead.
pub async fn forbid_failover(sentinels: &[Server]) {
    for sentinel in sentinels {
        sentinel.run::<()>(&["SENTINEL", "SET", MASTER, "down-after-milliseconds", PATIENT]).await;
    }
}

/// Has the master replaced.
pub async fn fail_over(sentinel: &Server) {
    eventually("a replica is good enough", || async {
        sentinel.try_run::<()>(&["SENTINEL", "FAILOVER", MASTER]).await.is_ok()
    })
    .await;
}

/// Waits until one of the replicas is the master, as all sentinels that live see it and as it does itself.
pub async fn heir(replicas: &[Server], sentinels: &[Server]) -> usize {
    let named = || async {
        let mut ports = Vec::new();
        for sentinel in sentinels {
            let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER];
            if let Ok((_, port)) = sentinel.try_run::<(String, u16)>(&words).await {
                ports.push(port);
            }
        }
        let port = *ports.first()?;
        let place = replicas.iter().position(|replica| replica.port() == port)?;
        let role: Vec<redis::Value> = replicas[place].try_run(&["ROLE"]).await.ok()?;
        let leads = role.first() == Some(&redis::Value::BulkString(b"master".to_vec()));
        (leads && ports.iter().all(|other| *other == port)).then_some(place)
    };
    eventually("all name the heir", || async { named().await.is_some() }).await;
    named().await.expect("nobody replaces it so soon")
}
