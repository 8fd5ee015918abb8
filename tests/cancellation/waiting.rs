//! To wait for what somebody else has.

use redlatch::{Error, Options, Wakeups};
use std::time::Duration;

use super::holds::held;
use super::locks::Kind;
use super::network::Order;
use super::scenario::{Case, Scene, Stage};

/// What each wait passes.
pub(super) const WAIT: &[&str] = &["acquire", "SUBSCRIBE", "nothing", "message", "release"];
/// What who is not told passes.
pub(super) const POLL: &[&str] = &["acquire", "nothing", "release"];

/// Somebody has the lock, and gives it back as soon as this waits for it.
pub(super) async fn waited(stage: &Stage) -> Scene {
    let before = stage.rival.lock().await.unwrap();
    held(stage).await.meanwhile(async move { before.release().await.unwrap() })
}

#[test]
fn cancelled_waits_leave_nothing() {
    Case::new("wait", 28, WAIT).run(waited);
    for order in [Order::AnswersFirst, Order::Together] {
        Case::new("wait-ordered", 20, WAIT).ordered(order).kinds(&[Kind::Mutex, Kind::Read]).run(waited);
    }
}

#[test]
fn cancelled_waits_leave_nothing_whenever_the_lock_is_free() {
    Case::new("wait-whenever", 28, WAIT).kinds(&[Kind::Mutex, Kind::Read]).early().run(waited);
    let poll = |options: Options| options.wakeups(Wakeups::Poll);
    Case::new("poll-whenever", 18, POLL).kinds(&[Kind::Mutex]).with(poll).early().run(waited);
}

/// Waits in vain for what somebody else has, and has a subscription from then on.
pub(super) async fn subscribe(stage: &Stage) {
    let tried = stage.lock.lock_timeout(Duration::from_millis(50)).await;
    assert!(matches!(tried, Err(Error::TimedOut { .. })), "{tried:?}");
    stage.locks.settled().await;
}

#[test]
fn cancelled_waits_of_subscribers_leave_nothing() {
    Case::new("wait-subscribed", 13, &["nothing", "message", "release"]).run(async |stage| {
        let before = stage.rival.lock().await.unwrap();
        subscribe(stage).await;
        held(stage).await.meanwhile(async move { before.release().await.unwrap() })
    });
}

#[test]
fn cancelled_waits_that_look_leave_nothing() {
    Case::new("poll", 18, POLL).with(|options| options.wakeups(Wakeups::Poll)).run(waited);
}

#[test]
fn cancelled_waits_in_vain_leave_nothing() {
    Case::new("in-vain", 22, &["SUBSCRIBE", "acquire", "nothing"]).run(async |stage| {
        let before = stage.rival.lock().await.unwrap();
        let lock = stage.lock.clone();
        Scene::of(async move {
            let outcome = lock.lock_timeout(Duration::from_millis(1_500)).await;
            assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        })
        .afterwards(async move { before.release().await.unwrap() })
    });
}

#[test]
fn cancelled_waits_pass_on_what_they_are_granted() {
    Case::new("pass-on", 29, WAIT).run(async |stage| {
        let before = stage.rival.lock().await.unwrap();
        let (lock, next) = (stage.lock.clone(), stage.rival.for_another());
        let next = async move { next.lock().await.unwrap().release().await.unwrap() };
        let (comes, came) = tokio::sync::oneshot::channel();
        Scene::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
            .meanwhile(async move {
                comes.send(tokio::spawn(next)).unwrap();
                tokio::time::sleep(Duration::from_millis(50)).await; // it queues
            })
            .meanwhile(async move { before.release().await.unwrap() })
            .afterwards(async move { came.await.unwrap().await.unwrap() })
    });
}

#[test]
fn cancelled_waits_behind_others_leave_nothing() {
    let kinds = &[Kind::Mutex, Kind::Reentrant, Kind::Write];
    Case::new("behind", 15, &["nothing", "message", "acquire", "release"]).kinds(kinds).run(async |stage| {
        let before = stage.rival.lock().await.unwrap();
        let first = stage.lock.for_another();
        // Its connection may break as well: then it cannot be sure that it lasted.
        let first = tokio::spawn(async move { drop(first.lock().await.unwrap().release().await) });
        while stage.queued() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let lock = stage.lock.clone();
        Scene::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
            .meanwhile(async move { before.release().await.unwrap() })
            .afterwards(async move { first.await.unwrap() })
    });
}

/// He holds it already, and a colleague with another owner waits for it before him.
#[test]
fn cancelled_further_holds_behind_others_leave_nothing() {
    Case::new("further-behind", 9, &["acquire", "release"]).kinds(&[Kind::Reentrant]).run(async |stage| {
        let (lock, first) = (stage.lock.clone(), stage.lock.for_another());
        let outer = lock.lock().await.unwrap();
        let first = tokio::spawn(async move { drop(first.lock().await.unwrap().release().await) });
        while stage.queued() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Scene::of(async move { drop(lock.lock().await.unwrap().release().await) }).afterwards(async move {
            drop(outer.release().await);
            first.await.unwrap();
        })
    });
}
