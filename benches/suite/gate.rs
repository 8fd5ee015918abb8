//! Where the tasks of a slice wait for each other, and for who measures.

use std::sync::OnceLock;
use std::time::Instant;

use tokio::sync::Barrier;

#[derive(Debug)]
pub(crate) struct Gate {
    barrier: Barrier,
    start: OnceLock<Instant>,
}

impl Gate {
    pub(crate) fn new(visitors: usize) -> Gate {
        Gate { barrier: Barrier::new(visitors), start: OnceLock::new() }
    }

    /// All are prepared, and none has begun.
    pub(crate) async fn prepared(&self) {
        self.barrier.wait().await;
    }

    /// Lets everybody begin; the same moment for all.
    pub(crate) async fn start(&self) -> Instant {
        self.barrier.wait().await;
        *self.start.get_or_init(Instant::now)
    }
}
