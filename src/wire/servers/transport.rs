//! How a socket to a server is opened: its settings and certificates, and the name of this library.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, RedisError, Value};

use super::super::error_replies::is_broken;

/// A private CA and a client certificate.
#[cfg(feature = "tls")]
pub(crate) type Certificates = redis::TlsCertificates;

/// Without the feature there are no certificates.
#[cfg(not(feature = "tls"))]
#[derive(Clone, Debug)]
pub(crate) enum Certificates {}

/// What each server has replied, by address. `None`: the only one.
pub(in crate::wire) type RepliesByServer = Vec<(Option<String>, Result<Value, RedisError>)>;

pub(in crate::wire) fn config(limit: Duration) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(Some(limit))
}

/// How many requests a connection takes that are not written yet. A further one waits for a place,
/// and keeps the place that it is given while its future is not polled. With 50 places, the default
/// of the crate `redis`, and 50 such futures, nothing else would ever be sent.
pub(super) const UNWRITTEN: usize = 2_048;

/// No limit for replies: each request has its own.
pub(super) fn unlimited(limit: Duration) -> AsyncConnectionConfig {
    config(limit).set_response_timeout(None).set_pipeline_buffer_size(UNWRITTEN)
}

/// The socket settings that a lock needs and the library leaves off.
fn tcp(settings: &TcpSettings, limit: Duration) -> TcpSettings {
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

/// The server at another address, with the settings of this one.
pub(super) fn moved_to(info: &ConnectionInfo, new_host: String, new_port: u16) -> ConnectionInfo {
    let mut addr = info.addr().clone();
    match &mut addr {
        ConnectionAddr::TcpTls { host, port, .. } => (*host, *port) = (new_host, new_port),
        other => *other = ConnectionAddr::Tcp(new_host, new_port),
    }
    info.clone().set_addr(addr)
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

/// Sets the name of a connection in `CLIENT LIST`. A server that refuses `CLIENT` for lack of
/// rights is used without a name.
pub(in crate::wire) async fn set_name(
    name: &str,
    send: impl AsyncFnOnce(Cmd) -> Result<Value, RedisError>,
) -> Result<(), RedisError> {
    let mut naming = redis::cmd("CLIENT");
    naming.arg("SETNAME").arg(name);
    match send(naming).await {
        Err(error) if is_broken(&error) => Err(error),
        _named_or_refused => Ok(()),
    }
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

/// Connects to the server of a client.
pub(in crate::wire) async fn connect(
    client: &Client,
    config: &AsyncConnectionConfig,
) -> Result<MultiplexedConnection, RedisError> {
    #[cfg(feature = "simulation")]
    if let Some(stream) =
        crate::simulation::ask_for_connection(client.get_connection_info().addr().to_string())
    {
        let stream = stream.await.map_err(|_| std::io::Error::from(std::io::ErrorKind::ConnectionRefused))?;
        let settings = client.get_connection_info().redis_settings();
        let (connection, driver) =
            MultiplexedConnection::new_with_config(settings, stream, config.clone()).await?;
        tokio::spawn(driver);
        return Ok(connection);
    }
    client.get_multiplexed_async_connection_with_config(config).await
}
