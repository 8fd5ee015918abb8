//! [`explain`]: why a server does not answer on a new connection. It may have said so as it
//! accepted, before it read anything, and a connection that finds itself closed while it writes
//! does not read that.

use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::error_replies::{closed, is_broken, is_error_reply, refuses_connection};

/// The part of a limit that this may take after an attempt to connect.
pub(in crate::wire) const EXPLAINING: u32 = 4;

/// A line that is no command, in the form of a TLS alert. Without TLS, a server answers that it
/// does not know this command or this client; with TLS, by an alert of its own.
fn question() -> Vec<u8> {
    let head = [21, 3, 1, 1, 1]; // an alert of TLS 1.0, of 257 bytes, without a byte of 0
    [&head[..], &[b'x'; 255], b"\r\n"].concat()
}

/// The request that was refused.
fn authentication(server: &ConnectionInfo) -> Vec<u8> {
    let (mut request, settings) = (redis::cmd("AUTH"), server.redis_settings());
    request.arg(settings.username()).arg(settings.password());
    request.get_packed_command()
}

/// How much of an answer is read: of a server in protected mode, it has 1,067 bytes.
const LONGEST: usize = 4096;

/// The first byte of a TLS record: an alert, or a part of a handshake.
const TLS_RECORDS: [u8; 2] = [21, 22];

/// The server's reason for the failure of a new connection, if it gives one: it refuses connections
/// for now, or speaks TLS where the client does not, or the reverse. Else the failure itself.
///
/// Opens one more connection, for at most `limit`.
pub(in crate::wire) async fn explain(
    server: &ConnectionInfo,
    failure: RedisError,
    limit: Duration,
) -> RedisError {
    let address = server.addr();
    let (host, port, is_tls) = match address {
        ConnectionAddr::Tcp(host, port) => (host, *port, false),
        ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
        _ => return failure,
    };
    // The client library takes whatever a server says to its `AUTH` for a refusal of the password,
    // also that there are too many clients. A server with TLS says nothing to one too many.
    let is_refused = failure.kind() == ErrorKind::AuthenticationFailed;
    // A server that is silent without TLS stays silent.
    let is_unexplained = if is_tls {
        !is_error_reply(&failure) && !is_refused
    } else {
        is_refused || is_broken(&failure) && !failure.is_timeout()
    };
    if !is_unexplained || failure.is_connection_refusal() {
        return failure;
    }
    let question = if is_refused { authentication(server) } else { question() };
    let Ok(Ok(said)) = timeout(limit, ask(host, port, &question)).await else { return failure };
    let mistake = |text| RedisError::from((ErrorKind::InvalidClientConfig, text, address.to_string()));
    match said.first() {
        Some(first) if !is_tls && TLS_RECORDS.contains(first) => {
            mistake("the server expects TLS: its URL must begin with rediss://")
        }
        Some(b'-') if is_tls => mistake("the server does not speak TLS: its URL must begin with redis://"),
        Some(b'-') => match redis::parse_redis_value(&said).and_then(redis::Value::extract_error) {
            Err(reason) if refuses_connection(&reason) => reason,
            _ => failure,
        },
        Some(b'+') if is_refused => closed(), // there was no room for a moment
        _ => failure,
    }
}

/// The first line that a server sends, or the first bytes of something else.
async fn ask(host: &str, port: u16, question: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect((host, port)).await?;
    // It may have closed the connection, and what it said before that is still there to be read.
    let _closed_already = stream.write_all(question).await;
    let mut said = Vec::new();
    while stream.read_buf(&mut said).await? > 0 {
        let is_reply = matches!(said.first(), Some(b'+' | b'-'));
        if !is_reply || said.ends_with(b"\r\n") || said.len() >= LONGEST {
            break;
        }
    }
    Ok(said)
}
