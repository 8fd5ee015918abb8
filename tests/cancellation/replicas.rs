//! Grants that count once replicas have confirmed them.

use redlatch::{Error, Options};
use std::time::Duration;

use super::holds::held;
use super::locks::Kind;
use super::scenario::{Case, Fixture, Scenario};
use super::waiting::waited;

/// Options for a replica that is up.
fn confirmed(options: Options) -> Options {
    options.replicas(1, Duration::from_secs(1))
}

#[test]
fn cancelled_confirmed_holds_leave_nothing() {
    let passes = &["acquire", "WAIT", "release"];
    Case::new("hold-confirmed", 13, passes).replicated().with(confirmed).run(held);
    Case::new("wait-confirmed", 30, &["nothing", "message", "WAIT"])
        .replicated()
        .kinds(&[Kind::Mutex, Kind::Read])
        .with(confirmed)
        .run(waited);
}

/// Without a replica, every grant is released.
#[test]
fn cancelled_unconfirmed_holds_leave_nothing() {
    let unconfirmed = |options: Options| options.replicas(1, Duration::from_millis(1));
    Case::new("unconfirmed", 13, &["acquire", "WAIT", "nothing"])
        .kinds(&[Kind::Mutex, Kind::Read])
        .with(unconfirmed)
        .run(async |fixture: &Fixture| {
            let lock = fixture.lock.clone();
            Scenario::of(async move {
                // Long enough for a few retries.
                let outcome = lock.lock_timeout(Duration::from_millis(300)).await;
                assert!(matches!(outcome, Err(Error::TooFewReplicas { .. })), "{outcome:?}");
            })
        });
}
