//! [`Turn`]: the time in which tasks of one client use a hold after each other, or together.

use std::any::Any;

use super::caller::Caller;

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
