//! A master with replicas, and the sentinels that monitor them.

use std::collections::HashMap;
use std::sync::OnceLock;

use tokio::net::TcpStream;

use super::deployment::{PROMPT, servers};
use super::port::{TRIES, free_port};
use super::{Server, eventually};

/// The sentinels' name of the master.
pub const MASTER: &str = "mymaster";

const SENTINELS: usize = 3;

/// `down-after-milliseconds`: so long that no master is considered failed.
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

/// Starts the sentinels. They are configured to know each other, since discovery takes seconds.
async fn watch(master: &Server, replicas: &[Server]) -> Vec<Server> {
    let id = |place: usize| format!("{:040x}", place + 1);
    for _ in 0..TRIES {
        let ports: Vec<u16> = (0..SENTINELS).map(|_| free_port()).collect();
        let start = |place: usize| {
            // No master is considered failed until failover is allowed.
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

/// Allows the sentinels to replace a master that does not respond for about a second.
pub async fn allow_failover(sentinels: &[Server]) {
    for sentinel in sentinels {
        // A sentinel that has just lost its connection to a live master would, with the shorter
        // limit, consider it failed at once.
        eventually("the sentinel sees the master, or that is dead", || async {
            let seen: HashMap<String, String> = sentinel.run(&["SENTINEL", "MASTER", MASTER]).await;
            let address = ("127.0.0.1", seen["port"].parse::<u16>().unwrap());
            seen["flags"] == "master" || TcpStream::connect(address).await.is_err()
        })
        .await;
        sentinel.run::<()>(&["SENTINEL", "SET", MASTER, "down-after-milliseconds", "700"]).await;
    }
}

/// Forbids failovers: no master is considered failed.
pub async fn forbid_failover(sentinels: &[Server]) {
    for sentinel in sentinels.iter().filter(|sentinel| sentinel.is_alive()) {
        sentinel.run::<()>(&["SENTINEL", "SET", MASTER, "down-after-milliseconds", PATIENT]).await;
    }
}

/// Starts a failover of the master.
pub async fn fail_over(sentinel: &Server) {
    eventually("a replica is eligible", || async {
        sentinel.try_run::<()>(&["SENTINEL", "FAILOVER", MASTER]).await.is_ok()
    })
    .await;
}

/// The port of the master, if all live sentinels name the same one.
async fn named(sentinels: &[Server]) -> Option<u16> {
    let mut ports = Vec::new();
    for sentinel in sentinels.iter().filter(|sentinel| sentinel.is_alive()) {
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER];
        ports.push(sentinel.try_run::<(String, u16)>(&words).await.ok()?.1);
    }
    ports.first().copied().filter(|port| ports.iter().all(|other| other == port))
}

/// The port of the master that all live sentinels name.
pub async fn master_port(sentinels: &[Server]) -> u16 {
    let found = OnceLock::new();
    let is_named = || async { named(sentinels).await.is_some_and(|port| found.set(port).is_ok()) };
    eventually("all sentinels name one master", is_named).await;
    found.into_inner().expect("it was found")
}

/// Waits until one of the replicas is the master, in its own view and in that of all live
/// sentinels. Returns its index.
pub async fn promoted(replicas: &[Server], sentinels: &[Server]) -> usize {
    let leader = || async {
        let port = named(sentinels).await?;
        let place = replicas.iter().position(|replica| replica.port() == port)?;
        let role: Vec<redis::Value> = replicas[place].try_run(&["ROLE"]).await.ok()?;
        let leads = role.first() == Some(&redis::Value::BulkString(b"master".to_vec()));
        leads.then_some(place)
    };
    let found = OnceLock::new();
    let is_named = || async { leader().await.is_some_and(|place| found.set(place).is_ok()) };
    eventually("all sentinels name the new master", is_named).await;
    found.into_inner().expect("it was found")
}
