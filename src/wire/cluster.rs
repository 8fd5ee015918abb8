//! A cluster: its client, with limits on what the library leaves open, and the nodes to listen to.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, Value};
use tokio::task::JoinSet;

use super::dial::{info, tcp};

/// How often the library sends a request at most: to follow slots that move, and servers that fail over. The limit
/// of a request covers all of them.
const RETRIES: u32 = 16;
/// The library connects to all seeds, then to all servers that one of them names, and waits for each: a server that
/// hangs is waited for twice, and that must leave time for the others.
const CONNECTS: u32 = 3;
/// The pauses between them, in milliseconds. The library's own are 1.3 seconds and 11 minutes.
const PAUSES: (u64, u64) = (10, 200);

pub(crate) fn cluster(
    urls: impl IntoIterator<Item = impl AsRef<str>>,
    limit: Duration,
) -> Result<(ClusterClient, Seeds), RedisError> {
    let seeds = urls.into_iter().map(|url| info(url.as_ref(), limit)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = seeds.first() else {
        return Err(RedisError::from((ErrorKind::InvalidClientConfig, "no node of the cluster was named")));
    };
    let client = ClusterClient::builder(seeds.clone())
        .tcp_settings(tcp(first.tcp_settings(), limit))
        .connection_timeout(limit / CONNECTS)
        .response_timeout(limit)
        .overall_response_timeout(Some(limit))
        .retries(RETRIES)
        .min_retry_wait(PAUSES.0)
        .max_retry_wait(PAUSES.1)
        .build()?;
    Ok((client, Seeds { known: Mutex::new(seeds) }))
}

/// Whether all masters answer, of which one of them knows.
pub(super) async fn masters_answer(mut connection: ClusterConnection) -> bool {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let anybody = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
    let Ok(answer) = connection.route_command(slots, anybody).await else { return false };
    let Ok(slots) = redis::from_redis_value::<Vec<Vec<Value>>>(answer) else { return false };
    let masters: HashSet<_> = slots.iter().filter_map(|range| address(range.get(2)?)).collect();
    let mut asked = JoinSet::new();
    for (host, port) in masters {
        let mut connection = connection.clone();
        asked.spawn(async move {
            let master = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress { host, port });
            connection.route_command(redis::cmd("PING"), master).await.is_ok()
        });
    }
    while let Some(answers) = asked.join_next().await {
        if !answers.unwrap_or(false) {
            return false;
        }
    }
    true
}

/// Servers of a cluster, any of which hears what is published on any.
#[derive(Debug)]
pub(crate) struct Seeds {
    known: Mutex<Vec<ConnectionInfo>>,
}

impl Seeds {
    /// Each call names another one.
    pub(super) fn next(&self) -> Result<Client, RedisError> {
        let mut known = self.known();
        known.rotate_left(1);
        // There is one: a cluster has a first node, and none is ever removed.
        Client::open(known[known.len() - 1].clone())
    }

    /// Asks a server for the others: those that were named at first may be gone some day.
    pub(super) async fn learn(&self, connection: &mut MultiplexedConnection, from: &Client) {
        let slots = redis::cmd("CLUSTER").arg("SLOTS").query_async::<Vec<Vec<Value>>>(connection).await;
        let Ok(slots) = slots else { return };
        let from = from.get_connection_info();
        let mut known = self.known();
        for node in slots.iter().flat_map(|range| range.iter().skip(2)) {
            if let Some(info) = beside(from, node)
                && !known.iter().any(|old| old.addr() == info.addr())
            {
                known.push(info);
            }
        }
    }

    /// Poisoning does not matter: nothing under this lock panics.
    fn known(&self) -> MutexGuard<'_, Vec<ConnectionInfo>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a node of an answer to `CLUSTER SLOTS` is, if the server knows.
fn address(node: &Value) -> Option<(String, u16)> {
    let Value::Array(words) = node else { return None };
    let [Value::BulkString(host), Value::Int(port), ..] = words.as_slice() else { return None };
    let host = std::str::from_utf8(host).ok().filter(|host| !["", "?"].contains(host))?;
    Some((host.to_owned(), u16::try_from(*port).ok()?))
}

/// The same, reached as the one that answered is.
fn beside(from: &ConnectionInfo, node: &Value) -> Option<ConnectionInfo> {
    let (host, port) = address(node)?;
    let addr = match from.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Some(from.clone().set_addr(addr))
}
