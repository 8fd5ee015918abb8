//! [`ClientThread`]: drives the runtime of a blocking client, and waits for its calls.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use crate::error::{ConfigError, Error};
use crate::locks::Locks;
use crate::traces::event;

/// The thread of one client. It ends after this was dropped, so it lives during each call.
#[derive(Debug)]
pub(super) struct ClientThread {
    runtime: Handle,
    locks: Locks,
    /// Taken when this is dropped.
    end: Option<oneshot::Sender<Ending>>,
}

/// A client that ends: what it has is released within this limit. Its sender is dropped once that
/// is done, or after the limit.
type Ending = (Locks, Duration, mpsc::Sender<()>);

impl ClientThread {
    pub(super) fn start(
        connecting: impl Future<Output = Result<Locks, Error>>,
    ) -> Result<ClientThread, Error> {
        check_may_block()?;
        let thread = |cause| ConfigError::Thread { cause };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(thread)?;
        let handle = runtime.handle().clone();
        let (end, ending) = oneshot::channel();
        let serve = move || serve(runtime, ending);
        // Detached: a drop that joined it would wait for a subscriber of `tracing` that blocks.
        let _detached = thread::Builder::new().name("redlatch".to_owned()).spawn(serve).map_err(thread)?;
        // If this fails, `end` is dropped, and the thread ends.
        let locks = handle.block_on(connecting)?;
        Ok(ClientThread { runtime: handle, locks, end: Some(end) })
    }

    /// The client as it was made, with its own options.
    pub(super) fn locks(&self) -> &Locks {
        &self.locks
    }

    /// Waits for a call, which is polled on this thread; its timers and sockets are driven by the
    /// client's.
    pub(super) fn block_on<F: Future>(&self, call: F) -> Result<F::Output, Error> {
        check_may_block()?;
        Ok(self.runtime.block_on(call))
    }

    pub(super) fn call<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.block_on(call)?
    }
}

/// Guards that were dropped before this one are released by the thread. Without the wait, a program
/// that ends now would leave their locks held until the TTLs expire.
impl Drop for ClientThread {
    fn drop(&mut self) {
        // One try of a release takes at most a node timeout to connect, and one of silence.
        let limit = 2 * self.locks.options().node_timeout;
        let (released, is_released) = mpsc::channel();
        let ending = (self.locks.clone(), limit, released);
        let is_served = self.end.take().is_some_and(|end| end.send(ending).is_ok());
        if is_served && check_may_block().is_ok() {
            // Both outcomes are an end: nothing is ever sent.
            let _ended = is_released.recv_timeout(limit);
        }
    }
}

/// A thread on a runtime must not block: its other tasks would stand still, and tokio panics. So
/// must one whose thread-local values are being dropped, where tokio cannot say.
fn check_may_block() -> Result<(), ConfigError> {
    match Handle::try_current() {
        Err(error) if error.is_missing_context() => Ok(()),
        _ => Err(ConfigError::InsideRuntime),
    }
}

/// The thread: drives the runtime until the client is dropped, and then until its releases have
/// succeeded or were given up.
fn serve(runtime: Runtime, ending: oneshot::Receiver<Ending>) {
    runtime.block_on(async {
        // An error: it did not connect.
        let Ok((locks, limit, released)) = ending.await else { return };
        if let Err(_error) = locks.close(limit).await {
            event!(warn, error = %_error, "the client was dropped with unreleased locks");
            drop(released);
            locks.into_settled().await;
        }
    });
    // A name that is being resolved may occupy another thread of the runtime for long.
    runtime.shutdown_background();
}
