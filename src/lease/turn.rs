//! [`Turn`]: the time in which tasks of one client use a hold after each other, or together.
//! [`Caller`]: one of these tasks.

use std::any::Any;
use std::thread::{self, ThreadId};

use tokio::task;

/// A turn of this client: a [`Cohort`](super::cohort::Cohort), or the members of a joint
/// hold. They know the queues, which do not know them.
pub(super) trait Turn: Any + Send + Sync {
    /// The task behind the holder asks the server.
    fn end(&self);

    /// No task waits any more that came before the turn began.
    fn queue_is_empty(&self) {}

    /// Whether this task or thread has a part in it.
    fn is_used_by(&self, _caller: Caller) -> bool {
        false
    }
}

/// Which task, or thread outside of tasks, makes a call. A call that waits for a lock that its own
/// task holds would wait for ever, and says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller(Result<task::Id, ThreadId>);

impl Caller {
    pub(super) fn current() -> Caller {
        Caller(task::try_id().ok_or_else(|| thread::current().id()))
    }
}
