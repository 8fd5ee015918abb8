//! [`Together`]: requests for several locks that one task begins together, and that leave as few
//! calls.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::asking::{InFlight, LoneRequest, WaitFor};
use super::failure::Failure;
use super::nodes::Nodes;
use super::script::{Call, Reply};
use super::votes::Votes;
use crate::guarded::Guarded;

/// The requests, until they leave. `None`: they have left.
pub(crate) struct Together(Guarded<Option<Vec<TogetherRequest>>>);

struct TogetherRequest {
    call: Arc<Call>,
    outcome: oneshot::Sender<Result<Reply, Failure>>,
}

impl Together {
    pub(crate) fn new() -> Together {
        Together(Guarded::new(Some(Vec::new())))
    }

    /// Fails the requests that have not left. Nothing sends them any more.
    pub(crate) fn give_up(&self) {
        let unsent = self.0.lock().take();
        drop(unsent); // not under the lock: it wakes tasks
    }

    fn add(&self, call: &Arc<Call>) -> Option<oneshot::Receiver<Result<Reply, Failure>>> {
        let (outcome, received) = oneshot::channel();
        self.0.lock().as_mut()?.push(TogetherRequest { call: Arc::clone(call), outcome });
        Some(received)
    }
}

impl Nodes {
    /// Sends a request to all nodes like [`ask`](Nodes::ask). If one node decides alone, it leaves
    /// with the others of `together`.
    ///
    /// # Cancel safety
    /// Not cancel safe: like [`ask`](Nodes::ask).
    pub(crate) async fn ask_together(
        &self,
        together: Option<&Together>,
        call: &Arc<Call>,
        in_flight: &Arc<InFlight>,
        wait_for: WaitFor,
    ) -> Votes {
        let joined = together.filter(|_| self.deployment.decides_alone()).and_then(|all| all.add(call));
        let Some(received) = joined else {
            return self.ask(call, self.all_nodes(), in_flight, wait_for).await;
        };
        let request = LoneRequest::new(in_flight);
        request.sent_flag.set(); // it leaves in the same poll of the task
        let outcome = received.await.unwrap_or_else(|_| Err(Failure::runtime_ended()));
        request.record(&outcome);
        self.votes(vec![(0, outcome)], wait_for)
    }

    /// Sends what was added, once all callers were polled. Requests that come later leave alone.
    pub(crate) async fn send_together(&self, together: &Together) {
        let requests = together.0.lock().take().unwrap_or_default();
        if requests.is_empty() {
            return;
        }
        let calls = requests.iter().map(|request| (Arc::clone(&request.call), self.all_nodes())).collect();
        let votes = self.ask_ahead(calls, self.limit()).await;
        for (request, vote) in requests.into_iter().zip(votes) {
            if let Some((_, outcome)) = vote.into_iter().next() {
                // A caller that was dropped has left its release to the keeper.
                let _dropped = request.outcome.send(outcome);
            }
        }
    }
}
