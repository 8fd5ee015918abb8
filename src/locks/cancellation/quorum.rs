//! The same in front of three servers, of which two decide.

use tokio::time::sleep;

use super::holds::{RENEWED, disturbed};
use super::locks::Kind;
use super::net::Order;
use super::stage::{Case, Scene, Stage};
use super::waits::waited;
use crate::options::{Options, Wakeups};

fn everywhere(name: &'static str, least: usize, scene: impl AsyncFn(&Stage) -> Scene + Copy) {
    for order in [Order::RequestsFirst, Order::AnswersFirst, Order::Together] {
        Case::new(name, least).of_three().ordered(order).kinds(&[Kind::Mutex]).run(scene);
    }
}

#[test]
fn cancelled_tries_of_a_quorum_leave_nothing() {
    everywhere("quorum-try", 5, async |stage: &Stage| {
        let lock = stage.lock.clone();
        Scene::of(async move { drop(lock.try_lock().await.unwrap().unwrap()) })
    });
}

#[test]
fn cancelled_holds_of_a_quorum_leave_nothing() {
    everywhere("quorum-hold", 9, async |stage: &Stage| {
        let lock = stage.lock.clone();
        Scene::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
    });
}

#[test]
fn cancelled_holds_of_a_quorum_leave_nothing_whenever_connections_fail() {
    Case::new("quorum-silent", 17)
        .of_three()
        .kinds(&[Kind::Mutex])
        .early()
        .run(async |stage: &Stage| disturbed(stage, |net| net.hang(true)).await);
}

#[test]
fn cancelled_waits_of_a_quorum_leave_nothing() {
    everywhere("quorum-wait", 35, waited);
}

#[test]
fn cancelled_waits_of_a_quorum_that_look_leave_nothing() {
    let poll = |options: Options| options.wakeups(Wakeups::Poll);
    Case::new("quorum-poll", 40).of_three().kinds(&[Kind::Mutex]).with(poll).run(waited);
}

#[test]
fn cancelled_renewals_of_a_quorum_leave_nothing() {
    everywhere("quorum-renew", 30, async |stage: &Stage| {
        let lock = stage.lock.clone();
        Scene::of(async move {
            let guard = lock.lock().await.unwrap();
            guard.lease().while_held(sleep(RENEWED)).await.unwrap();
            guard.release().await.unwrap();
        })
    });
}
