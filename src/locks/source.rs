//! [`Source`]: the address and the credentials of a server.

use std::fmt;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use crate::error::ConfigError;
use crate::wire::{Certificates, provide_cryptography, with_certificates, with_settings};

/// The address and the credentials of a server: a URL, or the application's own [`redis::Client`]
/// or [`redis::ConnectionInfo`]. Made with `into()`.
///
/// A URL is `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS, or
/// `unix://path`. With `?protocol=resp3` requests speak RESP3. The sockets of all sources get
/// `TCP_NODELAY`, keepalive and timeouts.
///
/// ```
/// use redlatch::{Source, redis};
/// let by_url = Source::from("redis://10.0.0.1/");
/// let by_client = Source::from(redis::Client::open("redis://10.0.0.1/")?);
/// # let _ = (by_url, by_client);
/// # Ok::<(), redis::RedisError>(())
/// ```
#[derive(Clone)]
pub struct Source(Address);

#[derive(Clone)]
enum Address {
    Text(String),
    Info(Box<ConnectionInfo>),
}

macro_rules! from_texts {
    ($($text:ty),+) => {
        $(impl From<$text> for Source {
            fn from(url: $text) -> Source {
                Source(Address::Text(url.to_string()))
            }
        })+
    };
}

from_texts!(&str, String, &String, &&str);

impl From<redis::Client> for Source {
    fn from(client: redis::Client) -> Source {
        Source(Address::Info(Box::new(client.get_connection_info().clone())))
    }
}

impl From<ConnectionInfo> for Source {
    fn from(info: ConnectionInfo) -> Source {
        Source(Address::Info(Box::new(info)))
    }
}

/// Shows the address, without the password.
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.info() {
            Ok(info) => write!(f, "Source({})", info.addr()),
            Err(_) => f.write_str("Source(not a URL)"),
        }
    }
}

impl Source {
    fn info(&self) -> Result<ConnectionInfo, redis::RedisError> {
        match &self.0 {
            Address::Text(url) => url.as_str().into_connection_info(),
            Address::Info(info) => Ok((**info).clone()),
        }
    }

    /// Returns the server's settings, with `TCP_NODELAY`, keepalive, timeouts and the certificates,
    /// if any.
    pub(super) fn resolve(
        &self,
        certificates: Option<&Certificates>,
        limit: Duration,
    ) -> Result<ConnectionInfo, ConfigError> {
        match (&self.0, certificates) {
            (Address::Info(info), Some(_)) => {
                Err(ConfigError::CertificatesOfClient { server: info.addr().to_string() })
            }
            _ => prepare(self.info().map_err(|cause| ConfigError::Url { cause })?, certificates, limit),
        }
    }

    /// Whether the server is reached through TLS, as far as the source shows.
    pub(super) fn is_tls(&self) -> bool {
        self.info().is_ok_and(|info| is_tls(&info))
    }

    /// Whether the source is an address, not only a master's name.
    pub(super) fn is_url(&self) -> bool {
        !matches!(&self.0, Address::Text(text) if !text.contains("://"))
    }

    /// Returns a master's settings, with its name in place of the host. A name alone is reached
    /// through TLS if its sentinels are.
    pub(super) fn resolve_master(
        &self,
        has_tls_sentinels: bool,
        certificates: Option<&Certificates>,
        limit: Duration,
    ) -> Result<ConnectionInfo, ConfigError> {
        let name = match &self.0 {
            Address::Text(name) if !self.is_url() => name,
            _ => return self.resolve(certificates, limit),
        };
        let (host, port) = (name.clone(), 0);
        let addr = if has_tls_sentinels {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let info = addr.into_connection_info().map_err(|cause| ConfigError::Url { cause })?;
        prepare(info, certificates, limit)
    }
}

fn prepare(
    info: ConnectionInfo,
    certificates: Option<&Certificates>,
    limit: Duration,
) -> Result<ConnectionInfo, ConfigError> {
    if is_tls(&info) {
        provide_cryptography();
    }
    let info = match certificates {
        Some(_) if !is_tls(&info) => {
            return Err(ConfigError::CertificatesWithoutTls { server: info.addr().to_string() });
        }
        Some(certificates) => {
            with_certificates(info, certificates).map_err(|cause| ConfigError::Certificates { cause })?
        }
        None => info,
    };
    Ok(with_settings(info, limit))
}

/// Whether the server is reached through TLS.
fn is_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}
