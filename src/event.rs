//! Events for what happens in the background, where no return value can tell of it.

/// `tracing::$level!(...)` with the feature `tracing`, nothing without it.
macro_rules! event {
    ($level:ident, $($fields:tt)+) => {{
        #[cfg(feature = "tracing")]
        ::tracing::$level!(target: "redlatch", $($fields)+);
    }};
}

pub(crate) use event;
