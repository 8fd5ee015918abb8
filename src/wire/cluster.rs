//! A cluster: the library's client, with limits where the library has none, which runs each request
//! at most once; the nodes to subscribe at; and requests to all masters.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{
    Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::failure::{too_slow, was_redirected};
use super::transport::Certificates;

/// The library connects to all seeds, then to all servers that one of them names, and waits for
/// each. It waits twice for a server that hangs, and that must leave time for the others.
const CONNECTS: u32 = 3;
/// The first and the longest pause before a request follows its slot once more.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

pub(crate) fn cluster(
    seeds: Vec<ConnectionInfo>,
    certificates: Option<&Certificates>,
    limit: Duration,
) -> Result<(ClusterClient, Seeds), RedisError> {
    let Some(first) = seeds.first() else {
        return Err(RedisError::from((ErrorKind::InvalidClientConfig, "no node of the cluster was named")));
    };
    let builder = ClusterClient::builder(seeds.clone());
    // The library does not take the certificates from the seeds.
    #[cfg(feature = "tls")]
    let builder = match certificates {
        Some(certificates) => builder.certs(certificates.clone()),
        None => builder,
    };
    #[cfg(not(feature = "tls"))]
    let _none = certificates;
    let client = builder
        .tcp_settings(first.tcp_settings().clone())
        .connection_timeout(limit / CONNECTS)
        .response_timeout(limit)
        .overall_response_timeout(Some(limit))
        // It would send a request again after an error that does not say whether it has run, and
        // not report that: every release would have to leave a mark that refuses late requests.
        .retries(0)
        .build()?;
    Ok((client, Seeds::new(seeds)))
}

/// Sends a request, and follows its slot from server to server until one of them runs it.
///
/// # Cancel safety
/// Not cancel safe: the request may still run.
pub(super) async fn send(
    mut connection: ClusterConnection,
    request: &Cmd,
    limit: Duration,
) -> Result<Value, RedisError> {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::ZERO;
    loop {
        let sending = send_to_slot(&mut connection, request);
        let error = match timeout_at(deadline, sending).await.unwrap_or_else(|_| Err(too_slow())) {
            Err(error) if was_redirected(&error) => error,
            outcome => return outcome,
        };
        if Instant::now() + pause >= deadline {
            return Err(error);
        }
        // The first time at once: the library has learned where the slot is now.
        sleep(pause).await;
        pause = (pause * 2).clamp(PAUSES.0, PAUSES.1);
    }
}

async fn send_to_slot(connection: &mut ClusterConnection, request: &Cmd) -> Result<Value, RedisError> {
    let outcome = request.query_async(connection).await;
    match outcome.as_ref().err().and_then(asked_target) {
        Some(target) => ask(connection, request, target).await,
        None => outcome,
    }
}

/// The server that has the keys already while their slot moves.
fn asked_target(error: &RedisError) -> Option<SingleNodeRoutingInfo> {
    let (address, _slot) =
        error.redirect_node().filter(|_| error.kind() == ErrorKind::Server(ServerErrorKind::Ask))?;
    let (host, port) = address.rsplit_once(':')?;
    Some(SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port: port.parse().ok()? })
}

async fn ask(
    connection: &mut ClusterConnection,
    request: &Cmd,
    target: SingleNodeRoutingInfo,
) -> Result<Value, RedisError> {
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.add_command(redis::cmd("ASKING")).add_command(request.clone());
    let replies = connection.route_pipeline(pipeline, 1, 1, target).await?;
    let missing = || RedisError::from((ErrorKind::UnexpectedReturnType, "no reply of a pipeline"));
    replies.into_iter().next().ok_or_else(missing)?.extract_error()
}

/// Servers of a cluster. A subscriber of any of them receives messages published on any other.
#[derive(Debug)]
pub(crate) struct Seeds {
    named: Vec<ConnectionInfo>,
    /// Further servers that the cluster had when it was last queried.
    others: Mutex<Vec<ConnectionInfo>>,
    turn: AtomicUsize,
}

impl Seeds {
    /// `named` holds at least one server.
    pub(crate) fn new(named: Vec<ConnectionInfo>) -> Seeds {
        Seeds { named, others: Mutex::default(), turn: AtomicUsize::new(0) }
    }

    /// The next server. Each call returns another one.
    pub(super) fn next(&self) -> Result<Client, RedisError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let others = self.others();
        let place = turn % (self.named.len() + others.len());
        Client::open(self.named.iter().chain(&*others).nth(place).unwrap_or(&self.named[0]).clone())
    }

    /// Queries a server for the others: the seeds may be removed from the cluster one day.
    pub(super) async fn refresh(&self, connection: &mut MultiplexedConnection, from: &Client) {
        let slots = redis::cmd("CLUSTER").arg("SLOTS").query_async::<Vec<Vec<Value>>>(connection).await;
        if let Ok(slots) = slots {
            self.replace_others(&slots, from.get_connection_info());
        }
    }

    fn replace_others(&self, slots: &[Vec<Value>], from: &ConnectionInfo) {
        let mut others: Vec<ConnectionInfo> = Vec::new();
        for node in slots.iter().flat_map(|range| range.iter().skip(2)) {
            if let Some(info) = with_settings_of(from, node)
                && !self.named.iter().chain(&others).any(|known| known.addr() == info.addr())
            {
                others.push(info);
            }
        }
        // A server that was removed from its cluster knows of no slots: its reply says nothing
        // about the others.
        if !slots.is_empty() {
            *self.others() = others;
        }
    }

    /// Poisoning does not matter: no code under this lock panics.
    fn others(&self) -> MutexGuard<'_, Vec<ConnectionInfo>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same, with the connection settings of the server that replied.
fn with_settings_of(from: &ConnectionInfo, node: &Value) -> Option<ConnectionInfo> {
    let (host, port) = address(node)?;
    let addr = match from.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Some(from.clone().set_addr(addr))
}

/// Whether all masters reply that one of them lists.
pub(super) async fn masters_answer(mut connection: ClusterConnection) -> bool {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let any_node = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
    let Ok(answer) = connection.route_command(slots, any_node).await else { return false };
    let Ok(slots) = redis::from_redis_value::<Vec<Vec<Value>>>(answer) else { return false };
    let masters: HashSet<_> = slots.iter().filter_map(|range| address(range.get(2)?)).collect();
    let mut queries = JoinSet::new();
    for (host, port) in masters {
        let mut connection = connection.clone();
        queries.spawn(async move {
            let master = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress { host, port });
            connection.route_command(redis::cmd("PING"), master).await.is_ok()
        });
    }
    while let Some(answers) = queries.join_next().await {
        if !answers.unwrap_or(false) {
            return false;
        }
    }
    true
}

/// Sends a request to every master and returns each one's reply, by address.
pub(super) async fn ask_masters(
    mut connection: ClusterConnection,
    request: Cmd,
) -> Result<Vec<(Option<String>, Value)>, RedisError> {
    let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
    let Value::Map(answers) = connection.route_command(request, masters).await? else {
        return Ok(Vec::new());
    };
    let named = |(server, answer)| Some((Some(redis::from_redis_value::<String>(server).ok()?), answer));
    Ok(answers.into_iter().filter_map(named).collect())
}

/// The address of a node in a reply to `CLUSTER SLOTS`, if the server knows it.
fn address(node: &Value) -> Option<(String, u16)> {
    let Value::Array(words) = node else { return None };
    let [Value::BulkString(host), Value::Int(port), ..] = words.as_slice() else { return None };
    let host = std::str::from_utf8(host).ok().filter(|host| !["", "?"].contains(host))?;
    Some((host.to_owned(), u16::try_from(*port).ok()?))
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
        seeds.replace_others(&[], &info(1));
        assert_eq!(named(&seeds, 4), [1, 2, 4, 999], "an empty reply changes nothing");
        seeds.replace_others(&topology(&[7]), &info(1));
        assert_eq!(named(&seeds, 3), [1, 2, 7], "those that were named stay");
    }
}
