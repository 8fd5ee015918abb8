//! Log events and spans, with the feature `tracing`: for a caller that waits, a span; for work in
//! the background, events, since no return value reports its failures.
//!
//! The caller's future carries a span. The keeper has none: a subscriber that panics when a span is
//! entered would end it. Owners are shortened, since a complete one allows its reader
//! to release a lock.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;

use crate::clock::Moment;
use crate::error::Error;
use crate::name::Name;
#[cfg(feature = "tracing")]
use crate::shorten::shortened;

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

/// What made an attempt send the request that was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// It did not wait.
    #[default]
    AtOnce,
    /// A notification, or a new subscription.
    Notified,
    /// Its next poll was due, or the holder's lease expired.
    Polled,
    /// It was its turn among the tasks of this client.
    Local,
}

#[cfg(feature = "tracing")]
impl WakeReason {
    fn word(self) -> &'static str {
        match self {
            WakeReason::AtOnce => "at once",
            WakeReason::Notified => "notified",
            WakeReason::Polled => "polled",
            WakeReason::Local => "local",
        }
    }
}

/// Runs a call that acquires, in a span. The call returns what woke it, or `None` if another client
/// holds the lock.
#[cfg(feature = "tracing")]
pub(crate) async fn acquiring<T>(
    (lock, kind, owner): (&Name, &'static str, Option<&str>),
    call: Pin<&mut impl Future<Output = (Result<T, Error>, Option<WakeReason>)>>,
) -> Result<T, Error> {
    use tracing::Instrument;
    let span = tracing::debug_span!(
        target: "redlatch",
        "acquire",
        lock = %lock,
        kind,
        owner = owner.map(shortened).as_deref(),
    );
    let traced = async {
        let begun = Moment::now();
        let (outcome, woken) = call.await;
        let waited = Moment::now().since(begun);
        match (&outcome, woken) {
            (Ok(_), Some(woken)) => {
                event!(debug, lock = %lock, woken = woken.word(), waited = ?waited, "acquired");
            }
            (Ok(_), None) => {
                event!(debug, lock = %lock, waited = ?waited, "not acquired: the lock is held");
            }
            (Err(error), _) => {
                event!(debug, lock = %lock, waited = ?waited, error = %error, "not acquired");
            }
        }
        outcome
    };
    traced.instrument(span).await
}

#[cfg(not(feature = "tracing"))]
pub(crate) async fn acquiring<T>(
    _acquired: (&Name, &'static str, Option<&str>),
    call: Pin<&mut impl Future<Output = (Result<T, Error>, Option<WakeReason>)>>,
) -> Result<T, Error> {
    call.await.0
}

/// Runs a release that its caller waits for, in a span.
#[cfg(feature = "tracing")]
pub(crate) async fn releasing<'a>(
    (lock, owner): (&Name, impl Fn() -> Cow<'a, str>),
    call: Pin<&mut impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    use tracing::Instrument;
    let span = tracing::debug_span!(
        target: "redlatch",
        "release",
        lock = %lock,
        owner = shortened(&owner()).as_str(),
    );
    let traced = async {
        let outcome = call.await;
        match &outcome {
            Ok(()) => event!(debug, lock = %lock, "released"),
            Err(error) => event!(debug, lock = %lock, error = %error, "not released"),
        }
        outcome
    };
    traced.instrument(span).await
}

#[cfg(not(feature = "tracing"))]
pub(crate) async fn releasing<'a>(
    _released: (&Name, impl Fn() -> Cow<'a, str>),
    call: Pin<&mut impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    call.await
}

/// A report that a lease was renewed, to be called under no lock. `None` if no subscriber records
/// DEBUG events; checking that runs no code of a subscriber.
#[cfg(feature = "tracing")]
pub(crate) fn renewed<'a>(lock: &Name, owner: impl Fn() -> Cow<'a, str>, until: Moment) -> Option<Report> {
    use tracing::level_filters::LevelFilter;
    if LevelFilter::current() < LevelFilter::DEBUG {
        return None;
    }
    let (lock, owner) = (lock.clone(), shortened(&owner()));
    Some(Box::new(move || {
        let left = until.since(Moment::now());
        event!(debug, lock = %lock, owner = owner.as_str(), valid_for = ?left, "renewed");
    }))
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn renewed<'a>(_lock: &Name, _owner: impl Fn() -> Cow<'a, str>, _until: Moment) -> Option<Report> {
    None
}

/// Reports the release of a dropped guard or of a dropped call. To be called under no lock.
pub(crate) fn released_in_background<'a>(_lock: &Name, _owner: impl Fn() -> Cow<'a, str>) {
    event!(debug, lock = %_lock, owner = shortened(&_owner()).as_str(), "released in the background");
}
