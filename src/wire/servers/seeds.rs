//! [`Seeds`]: the nodes of a cluster that a client knows.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, ServerErrorKind, Value};

use super::transport::moved_to;
use crate::guarded::Guarded;

/// How many servers are kept, and of how many names in a reply: a cluster has at most [1,000
/// nodes](https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/), and may name
/// each of them for many ranges of slots.
pub(super) const MOST_NODES: usize = 1_000;
const MOST_NAMED: usize = 65_536;

pub(super) const CLUSTER_DOWN: ErrorKind = ErrorKind::Server(ServerErrorKind::ClusterDown);

/// Servers of a cluster. A subscriber of any of them receives messages published on any other.
#[derive(Debug)]
pub(crate) struct Seeds {
    named: Vec<ConnectionInfo>,
    /// Further servers that the cluster had when it was last queried.
    others: Guarded<Vec<ConnectionInfo>>,
    next: AtomicUsize,
}

impl Seeds {
    /// `named` holds at least one server.
    pub(crate) fn new(named: Vec<ConnectionInfo>) -> Seeds {
        Seeds { named, others: Guarded::default(), next: AtomicUsize::new(0) }
    }

    /// The next server. Each call returns another one.
    pub(super) fn next(&self) -> Result<Client, RedisError> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let others = self.others.lock();
        let place = next % (self.named.len() + others.len());
        Client::open(self.named.iter().chain(&*others).nth(place).unwrap_or(&self.named[0]).clone())
    }

    /// Queries a server for the others: the seeds may be removed from the cluster one day. Fails if
    /// it was removed itself.
    pub(super) async fn refresh(
        &self,
        connection: &mut MultiplexedConnection,
        from: &Client,
    ) -> Result<(), RedisError> {
        let from = from.get_connection_info();
        ask_slots(connection, from).await.map(|slots| self.replace_others(&slots, from))
    }

    /// The servers that the client was given, and those that it has learned of.
    pub(super) fn all(&self) -> Vec<ConnectionInfo> {
        self.named.iter().chain(&*self.others.lock()).cloned().collect()
    }

    pub(super) fn replace_others(&self, slots: &[Vec<Value>], from: &ConnectionInfo) {
        let mut known: HashSet<String> = self.named.iter().map(|info| info.addr().to_string()).collect();
        let nodes = slots.iter().flat_map(|range| range.iter().skip(2));
        let infos = nodes.take(MOST_NAMED).filter_map(|node| with_settings_of(from, node));
        let others: Vec<_> =
            infos.filter(|info| known.insert(info.addr().to_string())).take(MOST_NODES).collect();
        *self.others.lock() = others;
    }
}

/// Asks a server for the masters and replicas of all slots. Fails if no cluster has it yet, or it
/// was removed from one: it knows no slots. (A server with cluster support off says so itself.)
pub(super) async fn ask_slots(
    connection: &mut MultiplexedConnection,
    server: &ConnectionInfo,
) -> Result<Vec<Vec<Value>>, RedisError> {
    let slots: Vec<_> = redis::cmd("CLUSTER").arg("SLOTS").query_async(connection).await?;
    if slots.is_empty() {
        let address = server.addr().to_string();
        return Err(RedisError::from((CLUSTER_DOWN, "the server knows no slots", address)));
    }
    Ok(slots)
}

/// A server that another one names, with the connection settings of the one that replied. `None`:
/// that one does not know its address.
pub(super) fn with_settings_of(from: &ConnectionInfo, node: &Value) -> Option<ConnectionInfo> {
    let Value::Array(words) = node else { return None };
    let [host, Value::Int(port), ..] = words.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::Nil => "",
        _ => return None,
    };
    at_address(from, host, u16::try_from(*port).ok()?)
}

/// The server at an address that another one named. Without a host it is that of the other one.
pub(super) fn at_address(from: &ConnectionInfo, host: &str, port: u16) -> Option<ConnectionInfo> {
    let named_by = match from.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    };
    let host = if host.is_empty() { named_by } else { host };
    let is_known = !host.is_empty() && host != "?";
    is_known.then(|| moved_to(from, host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;
    use redis::IntoConnectionInfo;

    fn info(port: u16) -> ConnectionInfo {
        ConnectionAddr::Tcp("10.0.0.1".to_owned(), port).into_connection_info().unwrap()
    }

    /// A reply to `CLUSTER SLOTS`: one range, served by all of these.
    fn topology(ports: &[u16]) -> Vec<Vec<Value>> {
        let node = |port: &u16| {
            let host = Value::BulkString(b"10.0.0.1".to_vec());
            Value::Array(vec![host, Value::Int((*port).into()), Value::BulkString(b"id".to_vec())])
        };
        vec![[Value::Int(0), Value::Int(16_383)].into_iter().chain(ports.iter().map(node)).collect()]
    }

    /// The servers that it names in one round, and the first of the next round.
    fn named(seeds: &Seeds, count: usize) -> Vec<u16> {
        let port = |_| match seeds.next().unwrap().get_connection_info().addr() {
            ConnectionAddr::Tcp(_, port) => *port,
            other => unreachable!("{other:?}"),
        };
        let mut rounds: Vec<u16> = (0..2 * count).map(port).collect();
        rounds.sort_unstable();
        rounds.dedup();
        rounds
    }

    #[test]
    fn seeds_are_those_named_and_those_of_the_last_topology() {
        let seeds = Seeds::new(vec![info(1), info(2)]);
        assert_eq!(named(&seeds, 2), [1, 2]);
        seeds.replace_others(&topology(&[1, 3, 4]), &info(1));
        assert_eq!(named(&seeds, 4), [1, 2, 3, 4]);
        for port in 5..1_000 {
            seeds.replace_others(&topology(&[1, 4, port]), &info(1));
            assert_eq!(named(&seeds, 4), [1, 2, 4, port], "a server that has left is forgotten");
        }
        seeds.replace_others(&topology(&[7]), &info(1));
        assert_eq!(named(&seeds, 3), [1, 2, 7], "those that were named stay");
    }
}
