//! Log events for background work, whose failures no return value can report.

/// `tracing::$level!(...)` with the feature `tracing`, nothing without it. Never called under one
/// of our locks: a subscriber is code of the application, which may drop a guard, block, or panic.
/// A panic is caught, so that it does not end the task that renews all leases.
macro_rules! event {
    ($level:ident, $($fields:tt)+) => {{
        #[cfg(feature = "tracing")]
        {
            let emit = || ::tracing::$level!(target: "redlatch", $($fields)+);
            let _panicked = ::std::panic::catch_unwind(::std::panic::AssertUnwindSafe(emit));
        }
    }};
}

pub(crate) use event;

/// A deferred event: it is emitted after the tasks that wait for its cause have been woken, since a
/// subscriber may block.
pub(crate) type Report = Box<dyn FnOnce() + Send>;
