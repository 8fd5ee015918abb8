//! [`Caller`]: which task, or thread outside of tasks, makes a call. A call that waits for a lock
//! that its own task holds would wait for ever, and says so.

use std::hash::{DefaultHasher, Hash, Hasher};

/// A hash of its id: a lease has eight bytes for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller(u64);

impl Caller {
    pub(super) fn current() -> Caller {
        let mut hasher = DefaultHasher::new();
        match tokio::task::try_id() {
            Some(task) => task.hash(&mut hasher),
            None => std::thread::current().id().hash(&mut hasher),
        }
        Caller(hasher.finish())
    }
}
