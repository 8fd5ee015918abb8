//! [`Guarded`]: a value that the threads of this process share. [`Gate`]: what one of them closes.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// Read by those that have passed it; written by one that waits until they are done.
pub(crate) type Gate = RwLock<()>;

/// A value behind a mutex that ignores poisoning: no code under one of these locks panics between
/// two steps of a change, so a panic elsewhere in the thread leaves the value whole.
#[derive(Debug, Default)]
pub(crate) struct Guarded<T>(Mutex<T>);

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Guarded<T> {
        Guarded(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
