//! In-memory connections for the crate's own tests. A test that drops a future at each of its steps
//! decides when each connection is made, and when each request and reply passes.

use std::cell::RefCell;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError};
use tokio::io::DuplexStream;
use tokio::sync::oneshot;

thread_local! {
    static PENDING: RefCell<Option<Vec<PendingConnection>>> = const { RefCell::new(None) };
}

/// A connection that a client wants to make. Dropping it refuses the connection.
#[derive(Debug)]
pub struct PendingConnection {
    /// The address of the server.
    pub address: String,
    /// Takes the client's end of the connection.
    pub accept: oneshot::Sender<DuplexStream>,
}

/// From now on, connections of this thread's clients wait for [`pending_connections`].
pub fn stay_in_memory() {
    PENDING.with_borrow_mut(|pending| *pending = Some(Vec::new()));
}

/// Returns the connections that this thread's clients have asked for since the last call.
pub fn pending_connections() -> Vec<PendingConnection> {
    PENDING.with_borrow_mut(|pending| pending.as_mut().map(std::mem::take).unwrap_or_default())
}

/// Connects in memory. `None`: this thread connects as usual.
pub(super) async fn connect(
    client: &Client,
    config: &AsyncConnectionConfig,
) -> Option<Result<MultiplexedConnection, RedisError>> {
    let (accept, accepted) = oneshot::channel();
    let address = client.get_connection_info().addr().to_string();
    PENDING.with_borrow_mut(|pending| {
        pending.as_mut()?.push(PendingConnection { address, accept });
        Some(())
    })?;
    let Ok(stream) = accepted.await else {
        return Some(Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))));
    };
    let settings = client.get_connection_info().redis_settings().clone();
    let made = MultiplexedConnection::new_with_config(&settings, stream, config.clone()).await;
    Some(made.map(|(connection, driver)| {
        tokio::spawn(driver);
        connection
    }))
}
