//! In tests: connections that stay in the process, made when somebody in the same thread picks up.

use std::cell::RefCell;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError};
use tokio::io::DuplexStream;
use tokio::sync::oneshot;

thread_local! {
    static DIALLED: RefCell<Option<Vec<Dialled>>> = const { RefCell::new(None) };
}

/// A connection that somebody wants. Dropped, it is refused.
pub(crate) struct Dialled {
    pub(crate) address: String,
    pub(crate) pick_up: oneshot::Sender<DuplexStream>,
}

/// From now on, what this thread connects to waits for [`dialled`].
pub(crate) fn stay_in_memory() {
    DIALLED.with_borrow_mut(|dialled| *dialled = Some(Vec::new()));
}

/// The connections that are wanted by now.
pub(crate) fn dialled() -> Vec<Dialled> {
    DIALLED.with_borrow_mut(|dialled| dialled.as_mut().map(std::mem::take).unwrap_or_default())
}

/// `None`: this thread connects as usual.
pub(super) async fn connect(
    client: &Client,
    config: &AsyncConnectionConfig,
) -> Option<Result<MultiplexedConnection, RedisError>> {
    let (pick_up, picked_up) = oneshot::channel();
    let address = client.get_connection_info().addr().to_string();
    DIALLED.with_borrow_mut(|dialled| {
        dialled.as_mut()?.push(Dialled { address, pick_up });
        Some(())
    })?;
    let Ok(stream) = picked_up.await else {
        return Some(Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))));
    };
    let settings = client.get_connection_info().redis_settings().clone();
    let made = MultiplexedConnection::new_with_config(&settings, stream, config.clone()).await;
    Some(made.map(|(connection, driver)| {
        tokio::spawn(driver);
        connection
    }))
}
