//! What the library leaves open in its settings, and a lock needs.

use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, IntoConnectionInfo, RedisError};

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

/// What a URL says, with those socket settings.
pub(super) fn info(url: &str, limit: Duration) -> Result<ConnectionInfo, RedisError> {
    let info = url.into_connection_info()?;
    let tcp = tcp(info.tcp_settings(), limit);
    Ok(info.set_tcp_settings(tcp))
}

/// A client for a server's URL.
pub(crate) fn client(url: &str, limit: Duration) -> Result<Client, RedisError> {
    Client::open(info(url, limit)?)
}
