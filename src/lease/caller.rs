//! [`Caller`]: which task, or thread outside of tasks, makes a call. A call that waits for a lock
//! that its own task holds would wait for ever, and says so.

use std::thread::{self, ThreadId};

use tokio::task;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller(Result<task::Id, ThreadId>);

impl Caller {
    pub(super) fn current() -> Caller {
        Caller(task::try_id().ok_or_else(|| thread::current().id()))
    }
}
