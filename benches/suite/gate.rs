//! A barrier for the tasks of a slice and the task that measures them: all begin at the same
//! moment.

use std::sync::OnceLock;
use std::time::Instant;

use tokio::sync::Barrier;

#[derive(Debug)]
pub(crate) struct Gate {
    barrier: Barrier,
    start: OnceLock<Instant>,
}

impl Gate {
    pub(crate) fn new(tasks: usize) -> Gate {
        Gate { barrier: Barrier::new(tasks), start: OnceLock::new() }
    }

    /// Waits until all tasks are prepared. None has begun then.
    pub(crate) async fn prepared(&self) {
        self.barrier.wait().await;
    }

    /// Waits until all tasks may begin, and returns that moment: the same for all.
    pub(crate) async fn start(&self) -> Instant {
        self.barrier.wait().await;
        *self.start.get_or_init(Instant::now)
    }
}
