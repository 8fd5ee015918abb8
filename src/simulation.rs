//! For the crate's own tests, which drop futures at each of their steps: replaces the transport of
//! a thread, and the clock that goes with it. Not covered by semantic versioning.
//!
//! A test decides when each connection is made, and when each request and reply passes. Time that
//! its paused runtime skips also passes for deadlines.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::io::DuplexStream;
use tokio::sync::oneshot;
use tokio::time::Instant;

thread_local! {
    static PENDING: RefCell<Option<Vec<PendingConnection>>> = const { RefCell::new(None) };
    static PAUSED_AT: Cell<Option<Instant>> = const { Cell::new(None) };
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

/// From now on, advances this thread's clock by the time that a paused runtime skips.
pub fn skip_with_the_runtime() {
    PAUSED_AT.set(Some(Instant::now()));
}

/// Asks the test for a connection: the client's end of it. `None`: this thread connects as usual.
pub(crate) fn ask_for_connection(address: String) -> Option<oneshot::Receiver<DuplexStream>> {
    PENDING.with_borrow_mut(|pending| {
        let (accept, accepted) = oneshot::channel();
        pending.as_mut()?.push(PendingConnection { address, accept });
        Some(accepted)
    })
}

/// The time that the thread's paused runtime has skipped.
pub(crate) fn skipped_time() -> Duration {
    PAUSED_AT.get().map_or(Duration::ZERO, |paused| paused.elapsed())
}
