//! Spans and DEBUG events of acquiring, renewing and releasing, with the feature `tracing`.
//!
//! The caller's future carries a span. The keeper has none: a subscriber that panics when a span is
//! entered would end it. Owners are shortened, since a complete one is enough to release a lock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::attempt::Attempt;
use super::lease::Lease;
use super::lock_request::LockRequest;
#[cfg(feature = "tracing")]
use crate::clock::Moment;
use crate::error::Error;
use crate::event::Report;
use crate::event::event;
#[cfg(feature = "tracing")]
use crate::shorten::shortened;
#[cfg(feature = "tracing")]
use crate::wire::Vote;

/// What made an attempt send the request that was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WakeReason {
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
pub(super) async fn acquiring<T>(
    request: &LockRequest,
    call: Pin<&mut impl Future<Output = (Result<T, Error>, Option<WakeReason>)>>,
) -> Result<T, Error> {
    use tracing::Instrument;
    let owner = request.owner.as_deref().map(shortened);
    let span = tracing::debug_span!(
        target: "redlatch",
        "acquire",
        lock = %request.name,
        kind = request.kind.name,
        owner = owner.as_deref(),
    );
    let traced = async {
        let begun = Moment::now();
        let (outcome, woken) = call.await;
        let waited = Moment::now().since(begun);
        match (&outcome, woken) {
            (Ok(_), Some(woken)) => {
                event!(debug, lock = %request.name, woken = woken.word(), waited = ?waited, "acquired");
            }
            (Ok(_), None) => {
                event!(debug, lock = %request.name, waited = ?waited, "not acquired: the lock is held");
            }
            (Err(error), _) => {
                event!(debug, lock = %request.name, waited = ?waited, error = %error, "not acquired");
            }
        }
        outcome
    };
    traced.instrument(span).await
}

#[cfg(not(feature = "tracing"))]
pub(super) async fn acquiring<T>(
    _request: &LockRequest,
    call: Pin<&mut impl Future<Output = (Result<T, Error>, Option<WakeReason>)>>,
) -> Result<T, Error> {
    call.await.0
}

/// Runs a release that its caller waits for, in a span.
#[cfg(feature = "tracing")]
pub(super) async fn releasing(
    attempt: &Attempt,
    call: Pin<&mut impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    use tracing::Instrument;
    let owner = shortened(attempt.owner());
    let span =
        tracing::debug_span!(target: "redlatch", "release", lock = %attempt.name, owner = owner.as_str());
    let traced = async {
        let outcome = call.await;
        match &outcome {
            Ok(()) => event!(debug, lock = %attempt.name, "released"),
            Err(error) => event!(debug, lock = %attempt.name, error = %error, "not released"),
        }
        outcome
    };
    traced.instrument(span).await
}

#[cfg(not(feature = "tracing"))]
pub(super) async fn releasing(
    _attempt: &Attempt,
    call: Pin<&mut impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    call.await
}

/// A report that a lease was renewed, to be called under no lock. `None` if no subscriber records
/// DEBUG events; checking that runs no code of a subscriber.
#[cfg(feature = "tracing")]
pub(super) fn renewed(lease: &Lease) -> Option<Report> {
    use tracing::level_filters::LevelFilter;
    if LevelFilter::current() < LevelFilter::DEBUG {
        return None;
    }
    let lease = lease.clone();
    Some(Box::new(move || {
        let owner = shortened(lease.attempt().owner());
        let left = lease.until().since(Moment::now());
        event!(debug, lock = %lease.name(), owner = owner.as_str(), valid_for = ?left, "renewed");
    }))
}

#[cfg(not(feature = "tracing"))]
pub(super) fn renewed(_lease: &Lease) -> Option<Report> {
    None
}

/// Reports the release of a dropped guard or of a dropped call. To be called under no lock.
pub(super) fn released_in_background(attempt: &Arc<Attempt>) {
    #[cfg(feature = "tracing")]
    {
        let owner = shortened(attempt.owner());
        event!(debug, lock = %attempt.name, owner = owner.as_str(), "released in the background");
    }
    let _ = attempt;
}

/// Logs an attempt that had to leave the full schedule of releases.
pub(super) fn given_up(given_up: Option<Arc<Attempt>>) {
    if let Some(_attempt) = given_up {
        event!(error, lock = %_attempt.name, holder = _attempt.holder(),
            "too many pending releases: the lock stays held until its TTL expires");
    }
}

/// The failure of a node that did not answer.
#[cfg(feature = "tracing")]
pub(super) fn first_failure(votes: &[Vote]) -> Option<&crate::wire::Failure> {
    votes.iter().find_map(|(_, outcome)| outcome.as_ref().err())
}
