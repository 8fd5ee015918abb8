//! The same calls with a quorum of three servers.

use redlatch::{Options, Wakeups};

use super::holds::{
    adopted, disturbed, downgraded, held, nested, renewed, renewed_and_released, renewed_by_hand, upgraded,
    waited_to_upgrade,
};
use super::locks::Kind;
use super::network::Order;
use super::scenario::{Case, Fixture, Scenario};
use super::waiting::{POLL, WAIT, waited};

fn everywhere(
    name: &'static str,
    least: usize,
    passes: &[&'static str],
    scenario: impl AsyncFn(&Fixture) -> Scenario + Copy,
) {
    for order in [Order::RequestsFirst, Order::AnswersFirst, Order::Together] {
        Case::new(name, least, passes).of_three().ordered(order).kinds(&[Kind::Mutex]).run(scenario);
    }
}

#[test]
fn cancelled_tries_of_a_quorum_leave_nothing() {
    everywhere("quorum-try", 5, &["acquire at 3"], async |fixture: &Fixture| {
        let lock = fixture.lock.clone();
        Scenario::of(async move { drop(lock.try_lock().await.unwrap().unwrap()) })
    });
}

#[test]
fn cancelled_holds_of_a_quorum_leave_nothing() {
    everywhere("quorum-hold", 9, &["acquire at 3", "release"], held);
    let others = &[Kind::Reentrant, Kind::Read, Kind::Write];
    Case::new("quorum-hold-others", 9, &["acquire at 3", "release"]).of_three().kinds(others).run(held);
}

/// The connections fall silent after every n-th step.
fn silenced(every: usize) {
    Case::new("quorum-silent", 17, &["connect", "held back", "acquire", "release"])
        .of_three()
        .kinds(&[Kind::Mutex])
        .early(every)
        .run(async |fixture: &Fixture| disturbed(fixture, |net| net.silence(true)).await);
}

#[test]
fn cancelled_holds_of_a_quorum_leave_nothing_whenever_connections_fail() {
    silenced(3);
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_holds_of_a_quorum_leave_nothing_after_each_step() {
    silenced(1);
}

#[test]
fn cancelled_renewals_by_hand_of_a_quorum_leave_the_lease() {
    everywhere("quorum-renew-by-hand", 5, &["renew at 3"], renewed_by_hand);
    everywhere("quorum-renew-and-release", 9, &["renew", "release"], renewed_and_released);
}

#[test]
fn cancelled_adoptions_of_a_quorum_leave_nothing() {
    everywhere("quorum-adopt", 9, &["renew at 3", "release"], adopted);
}

#[test]
fn cancelled_waits_of_a_quorum_leave_nothing() {
    everywhere("quorum-wait", 35, WAIT, waited);
}

#[test]
fn cancelled_polling_waits_of_a_quorum_leave_nothing() {
    let poll = |options: Options| options.wakeups(Wakeups::Poll);
    Case::new("quorum-poll", 40, POLL).of_three().kinds(&[Kind::Mutex]).with(poll).run(waited);
}

#[test]
fn cancelled_renewals_of_a_quorum_leave_nothing() {
    everywhere("quorum-renew", 30, &["acquire at 3", "nothing", "renew at 3", "release at 3"], renewed);
}

#[test]
fn cancelled_nested_holds_of_a_quorum_leave_the_others() {
    let kinds = &[Kind::Reentrant, Kind::Read];
    Case::new("quorum-nest", 9, &["acquire at 3", "release"]).of_three().kinds(kinds).run(nested);
}

#[test]
fn cancelled_upgrades_of_a_quorum_leave_the_reader() {
    let kinds = &[Kind::Read];
    Case::new("quorum-upgrade", 9, &["write_acquire at 3", "release"]).of_three().kinds(kinds).run(upgraded);
    let passes = &["write_acquire at 3", "SUBSCRIBE", "nothing", "message", "release"];
    Case::new("quorum-wait-to-upgrade", 35, passes).of_three().kinds(kinds).run(waited_to_upgrade);
}

#[test]
fn cancelled_downgrades_of_a_quorum_leave_nothing() {
    let passes = &["downgrade at 3", "release"];
    Case::new("quorum-downgrade", 9, passes).of_three().kinds(&[Kind::Write]).run(downgraded);
}
