//! What the library leaves open in its settings, and a lock needs.

use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, ConnectionInfo, RedisError};

/// A private CA and a client certificate.
#[cfg(feature = "tls")]
pub(crate) type Certificates = redis::TlsCertificates;

/// Without the feature there are none.
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

/// The same server, reached with those socket settings.
pub(crate) fn with_tcp(info: ConnectionInfo, limit: Duration) -> ConnectionInfo {
    let tcp = tcp(info.tcp_settings(), limit);
    info.set_tcp_settings(tcp)
}

/// The same server, reached with these certificates. An error unless it is one of TLS.
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

/// TLS takes a provider of cryptography. The client library has none of its own and panics where
/// the application's other dependencies bring none, or two: then it is `ring`.
pub(crate) fn provide_cryptography() {
    #[cfg(feature = "tls")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Refused if another thread was first: then there is one.
        let _there_is_one = rustls::crypto::ring::default_provider().install_default();
    }
}
