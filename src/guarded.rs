//! [`Guarded`]: a value that the threads of this process share.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
