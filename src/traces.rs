//! Log events and spans, with the feature `tracing`: for a caller that waits, a span; for work in
//! the background, events, since no return value reports its failures.
//!
//! The caller's future carries a span. The keeper enters none, since a subscriber that panics there
//! would end it: the span of a renewal is only made and closed. Owners are shortened: a program
//! that knows a complete one can release the lock.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
#[cfg(feature = "tracing")]
use std::time::Duration;

#[cfg(feature = "tracing")]
use tracing::field::Empty;
#[cfg(feature = "tracing")]
use tracing::level_filters::LevelFilter;

use crate::clock::Moment;
use crate::error::Error;
use crate::events::{Event, Observer};
use crate::fencing::FencingToken;
#[cfg(feature = "tracing")]
use crate::measure::safely;
use crate::measure::{self, WakeReason};
use crate::name::Name;
#[cfg(feature = "tracing")]
use crate::shorten::shortened;

/// `tracing::$level!(...)` with the feature `tracing`, nothing without it. Never called under one
/// of our locks: a subscriber is code of the application, which may drop a guard, block, or panic.
/// A panic is caught, so that it does not end the task that renews all leases.
macro_rules! event {
    ($level:ident, $($fields:tt)+) => {{
        #[cfg(feature = "tracing")]
        $crate::measure::safely(|| ::tracing::$level!(target: "redlatch", $($fields)+));
    }};
}

pub(crate) use event;

/// A deferred event: it is emitted after the tasks that wait for its cause have been woken, since a
/// subscriber may block.
pub(crate) type Report = Box<dyn FnOnce() + Send>;

/// A call that acquires: what spans, metrics and events say of it.
pub(crate) struct Acquiring<'a> {
    pub(crate) observer: &'a Observer,
    pub(crate) lock: &'a Name,
    pub(crate) kind: &'static str,
    pub(crate) _owner: Option<&'a str>,
}

/// What a call that acquires returns.
pub(crate) trait Grant {
    /// The lease, if it was granted one: its token, and a place for the span of its hold.
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)>;
}

impl<T: Grant> Grant for Option<T> {
    fn granted(&mut self) -> Option<(Option<FencingToken>, &mut HoldSpan)> {
        self.as_mut()?.granted()
    }
}

/// A span that is never entered; nothing without the feature. Its end runs code of the subscriber,
/// too: a panic there must not leave the `Drop` of a guard.
#[derive(Default)]
pub(crate) struct Span {
    #[cfg(feature = "tracing")]
    span: Option<tracing::Span>,
}

/// `tracing::debug_span!(...)` as a [`Span`].
macro_rules! span {
    ($($fields:tt)+) => {{
        #[allow(unused_mut, reason = "without the feature")]
        let mut span = Span::default();
        #[cfg(feature = "tracing")]
        safely(|| span.span = Some(tracing::debug_span!(target: "redlatch", $($fields)+)));
        span
    }};
}

impl Span {
    /// The span of a renewal, from before it is sent until it is answered. Checking whether a
    /// subscriber records DEBUG spans runs no code of it.
    pub(crate) fn of_renewal(_lock: &Name, _kind: &'static str) -> Span {
        #[cfg(feature = "tracing")]
        if LevelFilter::current() >= LevelFilter::DEBUG {
            return span!(parent: None, "renew", lock = %_lock, kind = _kind, outcome = Empty);
        }
        Span::default()
    }

    pub(crate) fn record(&self, _field: &str, _word: &'static str) {
        #[cfg(feature = "tracing")]
        safely(|| _ = self.span.as_ref().map(|span| span.record(_field, _word)));
    }
}

#[cfg(feature = "tracing")]
impl Drop for Span {
    fn drop(&mut self) {
        if let Some(span) = self.span.take() {
            safely(move || drop(span));
        }
    }
}

/// The span of a hold, from the grant until the guard is gone.
#[derive(Default)]
pub(crate) struct HoldSpan(Span);

impl HoldSpan {
    /// Ends the span, and says how the lease ended.
    pub(crate) fn end(&mut self, how: &'static str) {
        std::mem::take(&mut self.0).record("end", how);
    }
}

impl Drop for HoldSpan {
    /// A guard that was dropped, not released.
    fn drop(&mut self) {
        self.end("dropped");
    }
}

/// The span of a wait: from the first busy answer of a call on.
#[derive(Default)]
pub(crate) struct WaitSpan {
    waiting: Option<measure::Waiting>,
    span: Span,
}

impl WaitSpan {
    pub(crate) fn has_begun(&self) -> bool {
        self.waiting.is_some()
    }

    /// The lock is busy, and the call waits from now on.
    pub(crate) fn begin(&mut self, _lock: &Name, kind: &'static str) {
        if self.waiting.is_none() {
            self.waiting = Some(measure::Waiting::new(kind));
            self.span = span!("wait", lock = %_lock, kind, woken = Empty);
        }
    }

    /// The latest reason to ask again.
    pub(crate) fn woken(&mut self, woken: WakeReason) {
        self.span.record("woken", woken.word());
    }
}

/// Runs a call that acquires, in a span. The call returns what woke it, or `None` if another client
/// holds the lock.
pub(crate) async fn acquiring<T: Grant>(
    acquiring: Acquiring<'_>,
    call: Pin<&mut impl Future<Output = (Result<T, Error>, Option<WakeReason>)>>,
) -> Result<T, Error> {
    let Acquiring { observer, lock, kind, .. } = acquiring;
    // Without a listener, no time is spent on the clock.
    let is_heard = measure::ON || cfg!(feature = "tracing") || observer.is_observed();
    let begun = is_heard.then(Moment::now);
    #[cfg(feature = "tracing")]
    let span = tracing::debug_span!(
        target: "redlatch",
        "acquire",
        lock = %lock,
        kind,
        owner = acquiring._owner.map(shortened).as_deref(),
        outcome = Empty,
        woken = Empty,
        waited = Empty,
        token = Empty,
    );
    let call = async {
        let (outcome, woken) = call.await;
        let waited = begun.map(|begun| Moment::now().since(begun));
        #[cfg(feature = "tracing")]
        let outcome = trace_acquired(&span, lock, outcome, woken, waited.unwrap_or_default());
        (outcome, woken, waited)
    };
    #[cfg(feature = "tracing")]
    let call = tracing::Instrument::instrument(call, span.clone());
    let (mut outcome, woken, waited) = call.await;
    if let Some(waited) = waited {
        measure::acquired(kind, outcome_word(&mut outcome), woken, waited);
        if let Ok(Some((token, hold))) = outcome.as_mut().map(Grant::granted) {
            // Beside the span of the call, not inside it: that one ends now.
            hold.0 = span!("hold", lock = %lock, kind, token = token.map(FencingToken::get), end = Empty);
            observer.emit(|| Event::Granted { lock: lock.clone(), kind, token, waited });
        }
    }
    outcome
}

/// The outcome of a call that acquires, as one word.
fn outcome_word<T: Grant>(outcome: &mut Result<T, Error>) -> &'static str {
    match outcome {
        Ok(granted) => granted.granted().map_or("held", |_| "granted"),
        Err(Error::TimedOut { .. }) => "timed_out",
        Err(_) => "failed",
    }
}

/// Records the outcome in the span of the call, and as an event.
#[cfg(feature = "tracing")]
fn trace_acquired<T: Grant>(
    span: &tracing::Span,
    lock: &Name,
    mut outcome: Result<T, Error>,
    woken: Option<WakeReason>,
    waited: Duration,
) -> Result<T, Error> {
    let word = outcome_word(&mut outcome);
    let token = outcome.as_mut().ok().and_then(Grant::granted).and_then(|(token, _)| token);
    safely(|| {
        span.record("outcome", word);
        span.record("waited", tracing::field::debug(waited));
        span.record("woken", woken.map(WakeReason::word));
        span.record("token", token.map(FencingToken::get));
    });
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
}

/// Runs a release that its caller waits for, in a span.
pub(crate) async fn releasing<'a>(
    observer: &Observer,
    (lock, kind, _owner): (&Name, &'static str, impl Fn() -> Cow<'a, str>),
    call: Pin<&mut impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    #[cfg(feature = "tracing")]
    let outcome = {
        use tracing::Instrument;
        let span = tracing::debug_span!(
            target: "redlatch",
            "release",
            lock = %lock,
            kind,
            owner = shortened(&_owner()).as_str(),
            outcome = Empty,
        );
        let traced = async {
            let outcome = call.await;
            let word = if outcome.is_ok() { "released" } else { "failed" };
            safely(|| {
                span.record("outcome", word);
            });
            match &outcome {
                Ok(()) => event!(debug, lock = %lock, "released"),
                Err(error) => event!(debug, lock = %lock, error = %error, "not released"),
            }
            outcome
        };
        traced.instrument(span.clone()).await
    };
    #[cfg(not(feature = "tracing"))]
    let outcome = call.await;
    if outcome.is_ok() {
        observer.emit(|| Event::Released { lock: lock.clone(), kind });
    }
    outcome
}

/// A report that a lease was renewed, to be called under no lock. `None` without a listener, if no
/// subscriber records DEBUG events; checking that runs no code of a subscriber.
pub(crate) fn renewed<'a>(
    observer: &Arc<Observer>,
    (lock, kind, _owner): (&Name, &'static str, impl Fn() -> Cow<'a, str>),
    until: Moment,
) -> Option<Report> {
    #[cfg(feature = "tracing")]
    let traced = (LevelFilter::current() >= LevelFilter::DEBUG).then(|| shortened(&_owner()));
    #[cfg(not(feature = "tracing"))]
    let traced: Option<String> = None;
    if traced.is_none() && !observer.is_observed() {
        return None;
    }
    let (observer, lock) = (Arc::clone(observer), lock.clone());
    Some(Box::new(move || {
        let valid_for = until.since(Moment::now());
        if let Some(_owner) = traced {
            event!(debug, lock = %lock, owner = _owner.as_str(), valid_for = ?valid_for, "renewed");
        }
        observer.emit(|| Event::Renewed { lock, kind, valid_for });
    }))
}

/// Reports the release of a dropped guard or of a dropped call. To be called under no lock.
pub(crate) fn released_in_background<'a>(
    observer: &Observer,
    (lock, kind, _owner): (&Name, &'static str, impl Fn() -> Cow<'a, str>),
    had_lease: bool,
) {
    event!(debug, lock = %lock, owner = shortened(&_owner()).as_str(), "released in the background");
    if had_lease {
        observer.emit(|| Event::Released { lock: lock.clone(), kind });
    }
}
