//! Grants that count once replicas have them.

use redlatch::{Error, Options};
use std::time::Duration;

use super::holds::held;
use super::locks::Kind;
use super::scenario::{Case, Scene, Stage};
use super::waiting::waited;

/// For a replica that follows.
fn patient(options: Options) -> Options {
    options.replicas(1, Duration::from_secs(1))
}

#[test]
fn cancelled_holds_that_replicas_confirm_leave_nothing() {
    let passes = &["acquire", "WAIT", "release"];
    Case::new("hold-confirmed", 13, passes).replicated().with(patient).run(held);
    Case::new("wait-confirmed", 30, &["nothing", "message", "WAIT"])
        .replicated()
        .kinds(&[Kind::Mutex, Kind::Read])
        .with(patient)
        .run(waited);
}

/// There is no replica: whatever is granted is given back.
#[test]
fn cancelled_holds_that_nobody_confirms_leave_nothing() {
    let in_vain = |options: Options| options.replicas(1, Duration::from_millis(1));
    Case::new("unconfirmed", 13, &["acquire", "WAIT", "nothing"])
        .kinds(&[Kind::Mutex, Kind::Read])
        .with(in_vain)
        .run(async |stage: &Stage| {
            let lock = stage.lock.clone();
            Scene::of(async move {
                // Long enough to ask a few times.
                let outcome = lock.lock_timeout(Duration::from_millis(300)).await;
                assert!(matches!(outcome, Err(Error::TooFewReplicas { .. })), "{outcome:?}");
            })
        });
}
