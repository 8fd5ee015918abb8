//! Events for what happens in the background, where no return value can report it.

/// `tracing::$level!(...)` with the feature `tracing`, nothing without it. Never under one of our
/// locks: a subscriber is code of the application, which may drop a guard, block, or panic. A panic
/// must not take leases with it.
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

/// An event to be emitted after all that wait for its cause have continued: a subscriber may block.
pub(crate) type Report = Box<dyn FnOnce() + Send>;
