//! [`Connection`]: sends requests to one server or to a cluster, alone or together. Below it, the
//! settings of its socket.

#[cfg(feature = "cluster")]
use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Cmd, ConnectionInfo, ErrorKind, Pipeline, RedisError, Value};
#[cfg(feature = "cluster")]
use redis::{
    cluster_async::ClusterConnection,
    cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo},
};
#[cfg(feature = "cluster")]
use tokio::{task::JoinSet, time::timeout};

/// For a request whose caller sets a timer: a second timer would be paid for in vain.
pub(super) const UNLIMITED: Duration = Duration::MAX;

/// Cheap to clone; clones share everything. A connection to one server sets no limit for replies.
#[derive(Clone)]
pub(super) enum Connection {
    Server(MultiplexedConnection),
    #[cfg(feature = "cluster")]
    Cluster(redis::cluster_async::ClusterConnection),
}

impl Connection {
    /// Sends a request and waits for its reply, for at most `limit`.
    ///
    /// # Cancel safety
    /// Not cancel safe: the request may still run.
    pub(super) async fn send(&self, request: &Cmd, limit: Duration) -> Result<Value, RedisError> {
        match self {
            Connection::Server(connection) => {
                let mut connection = connection.clone();
                if limit < UNLIMITED {
                    connection.set_response_timeout(limit);
                }
                request.query_async(&mut connection).await
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let mut connection = connection.clone();
                timeout(limit, request.query_async(&mut connection)).await.unwrap_or_else(|_| Err(too_slow()))
            }
        }
    }

    /// Sends requests together and returns a reply for each, even if the pipeline fails as a whole.
    /// Through a cluster each request takes its own way, so that no reply waits for another server.
    pub(super) async fn send_all(
        &self,
        requests: Vec<Cmd>,
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        match self {
            Connection::Server(connection) => {
                let mut connection = connection.clone();
                if limit < UNLIMITED {
                    connection.set_response_timeout(limit);
                }
                pipeline(&mut connection, requests).await
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(_) => {
                let count = requests.len();
                let mut sent = JoinSet::new();
                for (index, request) in requests.into_iter().enumerate() {
                    let connection = self.clone();
                    sent.spawn(async move { (index, connection.send(&request, limit).await) });
                }
                let mut answers: Vec<_> = std::iter::repeat_with(|| Err(too_slow())).take(count).collect();
                while let Some(answered) = sent.join_next().await {
                    // A join fails only if the runtime shuts down.
                    if let Ok((index, answer)) = answered {
                        answers[index] = answer;
                    }
                }
                answers
            }
        }
    }

    /// Sets the name in `CLIENT LIST`; in a cluster, on each of its connections. A server that
    /// refuses `CLIENT` for lack of rights is used without a name.
    pub(super) async fn set_name(&self, name: &str, limit: Duration) -> Result<(), RedisError> {
        let mut naming = redis::cmd("CLIENT");
        naming.arg("SETNAME").arg(name);
        match self.send(&naming, limit).await {
            Err(error) if is_broken(&error) => Err(error),
            _named_or_refused => Ok(()),
        }
    }

    /// Whether every master of a cluster replies through this connection. If one is missing, the
    /// library looks for it with every request to it, while all other requests wait.
    pub(super) async fn is_whole(&self, limit: Duration) -> bool {
        match self {
            Connection::Server(_) => {
                let _ = limit;
                true
            }
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let masters = masters_answer(connection.clone());
                timeout(limit, masters).await.unwrap_or(false)
            }
        }
    }

    /// Sends a request to every server that grants locks: to the one, or to each master of a
    /// cluster, by address.
    pub(super) async fn send_to_masters(
        &self,
        request: &Cmd,
        limit: Duration,
    ) -> Result<Vec<(Option<String>, Value)>, RedisError> {
        match self {
            Connection::Server(_) => Ok(vec![(None, self.send(request, limit).await?)]),
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let answers = ask_masters(connection.clone(), request.clone());
                timeout(limit, answers).await.map_err(|_| too_slow())?
            }
        }
    }

    /// Whether gathering requests pays off on this connection.
    pub(super) fn may_batch(&self) -> bool {
        matches!(self, Connection::Server(_))
    }
}

async fn pipeline(
    connection: &mut MultiplexedConnection,
    requests: Vec<Cmd>,
) -> Vec<Result<Value, RedisError>> {
    let mut pipeline = Pipeline::with_capacity(requests.len());
    for request in requests {
        pipeline.add_command(request);
    }
    if pipeline.is_empty() {
        return Vec::new();
    }
    let count = pipeline.len();
    match pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(connection).await {
        Ok(answers) if answers.len() == count => answers,
        Ok(answers) => {
            let detail = format!("{} for {count} requests", answers.len());
            let error =
                RedisError::from((ErrorKind::UnexpectedReturnType, "wrong number of answers", detail));
            vec![Err(error); count]
        }
        Err(error) => vec![Err(error); count],
    }
}

/// Whether no reply came.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error()
}

pub(super) fn too_slow() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.may_batch() { "Server" } else { "Cluster" })
    }
}

/// Whether all masters reply that one of them lists.
#[cfg(feature = "cluster")]
async fn masters_answer(mut connection: ClusterConnection) -> bool {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let any_node = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
    let Ok(answer) = connection.route_command(slots, any_node).await else { return false };
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

/// Sends a request to every master and returns each one's reply, by address.
#[cfg(feature = "cluster")]
async fn ask_masters(
    mut connection: ClusterConnection,
    request: redis::Cmd,
) -> Result<Vec<(Option<String>, Value)>, RedisError> {
    let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
    let Value::Map(answers) = connection.route_command(request, masters).await? else {
        return Ok(Vec::new());
    };
    let named = |(server, answer)| Some((Some(redis::from_redis_value::<String>(server).ok()?), answer));
    Ok(answers.into_iter().filter_map(named).collect())
}

/// The address of a node in a reply to `CLUSTER SLOTS`, if the server knows it.
#[cfg(feature = "cluster")]
pub(super) fn address(node: &Value) -> Option<(String, u16)> {
    let Value::Array(words) = node else { return None };
    let [Value::BulkString(host), Value::Int(port), ..] = words.as_slice() else { return None };
    let host = std::str::from_utf8(host).ok().filter(|host| !["", "?"].contains(host))?;
    Some((host.to_owned(), u16::try_from(*port).ok()?))
}

/// A private CA and a client certificate.
#[cfg(feature = "tls")]
pub(crate) type Certificates = redis::TlsCertificates;

/// Without the feature there are no certificates.
#[cfg(not(feature = "tls"))]
#[derive(Clone, Debug)]
pub(crate) enum Certificates {}

pub(super) fn config(limit: Duration) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(Some(limit))
}

/// The socket settings that a lock needs and the library leaves off.
pub(super) fn tcp(settings: &TcpSettings, limit: Duration) -> TcpSettings {
    let keepalive = redis::io::tcp::socket2::TcpKeepalive::new().with_time(Duration::from_secs(10));
    let tcp = settings.clone().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    let tcp = tcp.set_user_timeout(limit.max(Duration::from_secs(1)) * 5);
    tcp
}

/// The same server, with those socket settings. The library would name itself to the server in a
/// round trip of its own: [`introduction`] travels with the first request.
pub(crate) fn with_settings(info: ConnectionInfo, limit: Duration) -> ConnectionInfo {
    let tcp = tcp(info.tcp_settings(), limit);
    let redis = info.redis_settings().clone().set_skip_set_lib_name();
    info.set_tcp_settings(tcp).set_redis_settings(redis)
}

/// Names this library in `CLIENT LIST`. Servers before Redis 7.2 refuse it, and so do users without
/// that right.
pub(super) fn introduction() -> impl Iterator<Item = Cmd> {
    [("LIB-NAME", "redlatch"), ("LIB-VER", env!("CARGO_PKG_VERSION"))].into_iter().map(|(what, text)| {
        let mut cmd = redis::cmd("CLIENT");
        cmd.arg("SETINFO").arg(what).arg(text);
        cmd
    })
}

/// The same server, with these certificates. Fails unless the connection uses TLS.
#[cfg(feature = "tls")]
pub(crate) fn with_certificates(
    info: ConnectionInfo,
    certificates: &Certificates,
) -> Result<ConnectionInfo, RedisError> {
    let client = redis::Client::build_with_tls(info, certificates.clone())?;
    Ok(client.get_connection_info().clone())
}

#[cfg(not(feature = "tls"))]
pub(crate) fn with_certificates(
    _info: ConnectionInfo,
    certificates: &Certificates,
) -> Result<ConnectionInfo, RedisError> {
    match *certificates {}
}

/// Installs `ring` as the process's provider of cryptography, unless there is one. The client
/// library brings none and panics if the application's other dependencies bring none, or two.
pub(crate) fn provide_cryptography() {
    #[cfg(feature = "tls")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Refused if another thread was first; then a provider is installed.
        let _there_is_one = rustls::crypto::ring::default_provider().install_default();
    }
}
