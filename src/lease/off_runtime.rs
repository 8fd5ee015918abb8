//! Calls of callers that are on no tokio runtime, as a thread of the standard library or a task of
//! another executor: the timers of a call then are those of the client's runtime.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::runtime::Handle;

use super::client::Client;
use crate::error::{Context, Error};

impl Client {
    /// Runs a call with a runtime at hand: its caller's if there is one, else the client's. `None`:
    /// the caller has none, and the client's has ended, whose timers panic from then on.
    pub(crate) async fn with_runtime<F: Future>(&self, mut call: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|context| {
            if Handle::try_current().is_ok() {
                return call.as_mut().poll(context).map(Some);
            }
            let _poll = self.keeper.polls.read(); // before the check
            if self.keeper.has_ended() {
                return Poll::Ready(None);
            }
            let _entered = self.nodes.runtime.enter();
            call.as_mut().poll(context).map(Some)
        })
        .await
    }

    /// The same, of a call that may fail.
    pub(crate) async fn run<T>(
        &self,
        call: Pin<&mut impl Future<Output = Result<T, Error>>>,
        context: impl FnOnce() -> Context,
    ) -> Result<T, Error> {
        self.with_runtime(call).await.unwrap_or_else(|| Err(Error::RuntimeEnded { context: context() }))
    }
}
