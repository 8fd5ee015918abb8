//! A cluster: forming it, finding the owner of a slot, moving a slot.

use std::time::{Duration, Instant};

use redis::RedisError;

use super::deployment::{PROMPT, servers};
use super::{LONGEST_WAIT, Server, eventually};

const MASTERS: usize = 3;
const SLOTS: usize = 16_384;

/// The node timeout in milliseconds: so long that no server is considered failed.
const PATIENT: &str = "60000";

/// Three masters, and a replica for each.
pub async fn form(arguments: &[&str]) -> (Vec<Server>, Vec<Server>) {
    let member = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-announce-ip"];
    let patient = ["127.0.0.1", "--cluster-node-timeout", PATIENT, "--cluster-replica-no-failover", "yes"];
    let mut masters = servers(2 * MASTERS, &[&member[..], &patient, &PROMPT, arguments].concat()).await;
    // Nodes gossip twice within the node timeout, so a short one lets them find each other soon. On
    // a busy machine, a slower node may be considered failed; its replica may not replace it yet.
    set_timeout(masters.iter(), "1000").await;
    // Before the nodes meet: afterwards they would first have to agree on epochs and slots.
    for (place, server) in masters.iter().enumerate() {
        let epoch = (place + 1).to_string();
        server.run::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).await;
        if place < MASTERS {
            server.add_slots((0..SLOTS).filter(|slot| slot * MASTERS / SLOTS == place)).await;
        }
    }
    introduce(&masters).await;
    let replicas = masters.split_off(MASTERS);
    for (replica, master) in replicas.iter().zip(&masters) {
        let id = id(master).await;
        eventually("the replica knows its master", || async {
            replica.try_run::<()>(&["CLUSTER", "REPLICATE", &id]).await.is_ok()
        })
        .await;
    }
    is_ok(masters.iter().chain(&replicas)).await;
    for (replica, master) in replicas.iter().zip(&masters) {
        eventually("the replica follows", || async {
            master.replicas_online().await == 1 && replica.follows().await
        })
        .await;
        let (id, master) = (id(replica).await, id(master).await);
        for server in masters.iter().chain(&replicas) {
            eventually("all nodes know the replica's master", || async {
                node(server, &id).await.is_some_and(|node| node.follows == master)
            })
            .await;
        }
    }
    set_timeout(masters.iter().chain(&replicas), PATIENT).await;
    (masters, replicas)
}

/// Introduces each node to each other one, since gossip alone takes seconds. A node forgets one
/// that does not respond within a second, as on a busy machine, so it is introduced again.
async fn introduce(servers: &[Server]) {
    let known = format!("cluster_known_nodes:{}\r", servers.len());
    let start = Instant::now();
    let mut introduced: Option<Instant> = None;
    for server in servers {
        while !server.run::<String>(&["CLUSTER", "INFO"]).await.contains(&known) {
            assert!(start.elapsed() < LONGEST_WAIT, "not within {LONGEST_WAIT:?}: all nodes know each other");
            if introduced.is_none_or(|last| last.elapsed() > Duration::from_secs(2)) {
                for (place, server) in servers.iter().enumerate() {
                    for other in &servers[..place] {
                        server.run::<()>(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]).await;
                    }
                }
                introduced = Some(Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Sets the long node timeout on the live servers: none considers another one failed.
pub async fn forbid_failover(servers: impl Iterator<Item = &Server>) {
    set_timeout(servers, PATIENT).await;
}

async fn set_timeout(servers: impl Iterator<Item = &Server>, millis: &str) {
    for server in servers {
        if !server.is_alive() {
            continue;
        }
        server.run::<()>(&["CONFIG", "SET", "cluster-node-timeout", millis]).await;
    }
}

/// Waits until all of them report that every slot is served.
pub async fn is_ok(servers: impl Iterator<Item = &Server>) {
    let known = format!("cluster_known_nodes:{}\r", 2 * MASTERS);
    for server in servers {
        let start = Instant::now();
        loop {
            let info: String = server.run(&["CLUSTER", "INFO"]).await;
            if info.contains("cluster_state:ok") && info.contains(&known) {
                break;
            }
            if start.elapsed() > LONGEST_WAIT {
                let nodes: String = server.run(&["CLUSTER", "NODES"]).await;
                panic!("not within {LONGEST_WAIT:?}: the cluster is ok: {info}{nodes}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Allows a replica to replace a master that does not respond for a second.
pub async fn allow_failover(servers: impl Iterator<Item = &Server>) {
    for server in servers.filter(|server| server.is_alive()) {
        server.run::<()>(&["CONFIG", "SET", "cluster-node-timeout", "1000"]).await;
        server.run::<()>(&["CONFIG", "SET", "cluster-replica-no-failover", "no"]).await;
    }
}

/// Asks a replica to replace its master.
pub async fn fail_over(replica: &Server) {
    eventually("the replica may take over", || async {
        replica.try_run::<()>(&["CLUSTER", "FAILOVER"]).await.is_ok()
    })
    .await;
}

/// Waits until a replica has replaced its master, in its own view and in that of the others.
pub async fn leads<'a>(replica: &'a Server, others: impl Iterator<Item = &'a Server>) {
    let id = id(replica).await;
    for server in others.chain([replica]) {
        eventually("the replica has become master", || async {
            node(server, &id).await.is_some_and(|node| node.is_master && !node.slots.is_empty())
        })
        .await;
    }
}

async fn id(server: &Server) -> String {
    server.run(&["CLUSTER", "MYID"]).await
}

/// One server's view of a node of the cluster.
struct Node {
    is_master: bool,
    /// The id of its master, if it is a replica.
    follows: String,
    slots: Vec<(u16, u16)>,
}

async fn node(server: &Server, id: &str) -> Option<Node> {
    let nodes: String = server.try_run(&["CLUSTER", "NODES"]).await.ok()?;
    // id, address, flags, master, ping, pong, epoch, link; then slots, as 5, 5-7 or [5->-to].
    let line: Vec<&str> = nodes.lines().find(|line| line.starts_with(id))?.split(' ').collect();
    let range = |words: &&str| {
        let (first, last) = words.split_once('-').unwrap_or((words, words));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    let slots = line[8..].iter().filter(|words| !words.starts_with('[')).filter_map(range).collect();
    Some(Node { is_master: line[2].contains("master"), follows: line[3].to_owned(), slots })
}

async fn slot(server: &Server, key: &str) -> u16 {
    server.run(&["CLUSTER", "KEYSLOT", key]).await
}

/// Whether a node owns this slot, in the view of that server.
async fn has(server: &Server, id: &str, slot: u16) -> bool {
    let node = node(server, id).await;
    node.is_some_and(|node| node.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot)))
}

/// The index of the master that owns the slot of a key, in that master's own view.
pub async fn owner(masters: &[Server], key: &str) -> usize {
    let slot = slot(&masters[0], key).await;
    for (place, master) in masters.iter().enumerate() {
        if has(master, &id(master).await, slot).await {
            return place;
        }
    }
    panic!("no master owns slot {slot} of {key}")
}

pub async fn begin_move(key: &str, from: &Server, to: &Server) {
    let slot = slot(from, key).await.to_string();
    to.run::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from).await]).await;
    from.run::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to).await]).await;
}

/// Fails if the server learns meanwhile that it does not own the slot any more.
pub async fn move_keys(key: &str, from: &Server, to: &Server) -> Result<(), RedisError> {
    let slot = slot(from, key).await.to_string();
    loop {
        let keys: Vec<String> = from.run(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).await;
        if keys.is_empty() {
            return Ok(());
        }
        let port = to.port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        words.extend(keys.iter().map(String::as_str));
        from.try_run::<String>(&words).await?;
    }
}

/// Announces the new owner to all masters, to itself first and to the old owner second, and waits
/// until they agree.
pub async fn end_move(key: &str, masters: &[Server], to: usize) {
    let slot = slot(&masters[to], key).await;
    let (from, new) = (owner(masters, key).await, id(&masters[to]).await);
    let rest = (0..masters.len()).filter(|place| *place != to && *place != from);
    for place in [to, from].into_iter().chain(rest) {
        let words = ["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &new];
        // Clients may still write to the old owner: repeat until it has no key left.
        eventually("the slot has a new owner", || async {
            let has_none = place != from || move_keys(key, &masters[from], &masters[to]).await.is_ok();
            has_none && masters[place].try_run::<()>(&words).await.is_ok()
        })
        .await;
    }
    for master in masters {
        eventually("all agree on the owner", || has(master, &new, slot)).await;
    }
}
