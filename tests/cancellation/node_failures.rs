//! The same calls with a quorum of three servers, one of which fails.

use std::time::Duration;

use tokio::time::sleep;

use super::holds::{HOLD, disturbed, downgraded, held, nested, upgraded};
use super::locks::Kind;
use super::network::Outage;
use super::scenario::{Case, Fixture, NODE_TIMEOUT, Scenario};
use super::waiting::subscribe;

fn without_one(
    name: &'static str,
    passes: &[&'static str],
    kinds: &'static [Kind],
    scenario: impl AsyncFn(&Fixture) -> Scenario + Copy,
) {
    for how in [Outage::Silent, Outage::Refuses] {
        Case::new(name, 5, passes).without_one(how).kinds(kinds).run(scenario);
    }
}

#[test]
fn cancelled_holds_without_one_node_leave_nothing() {
    without_one("minority-hold", HOLD, &[Kind::Mutex, Kind::Read], held);
    without_one("minority-nest", HOLD, &[Kind::Reentrant], nested);
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_upgrades_and_downgrades_without_one_node_leave_nothing() {
    without_one("minority-upgrade", &["write_acquire at 2", "release"], &[Kind::Read], upgraded);
    without_one("minority-downgrade", &["downgrade at 2", "release"], &[Kind::Write], downgraded);
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_waits_without_one_node_leave_nothing() {
    for how in [Outage::Silent, Outage::Refuses] {
        let case = Case::new("minority-wait", 15, &["message", "release"]).without_one(how);
        case.kinds(&[Kind::Mutex]).run(async |fixture| {
            let before = fixture.rival.lock().await.unwrap();
            // The client must know that the node fails: else it waits for the node, and the rival
            // releases the lock meanwhile.
            fixture.net.fail(0, how);
            subscribe(fixture).await;
            sleep(2 * NODE_TIMEOUT).await;
            held(fixture).await.meanwhile(async move { before.release().await.unwrap() })
        });
    }
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_holds_leave_nothing_whenever_one_node_fails() {
    let silent = async |fixture: &Fixture| disturbed(fixture, |net| net.fail(0, Outage::Silent)).await;
    let case = Case::new("one-fails", 9, &["acquire at 3", "held back", "release"]);
    case.of_three().kinds(&[Kind::Mutex]).early(1).run(silent);
}

/// A node returns, and the lease is repaired on it.
#[test]
fn cancelled_repair_leaves_nothing() {
    Case::new("repair", 15, &["renew", "acquire repair at 1", "release"])
        .without_one(Outage::Refuses)
        .kinds(&[Kind::Mutex, Kind::Read])
        .run(async |fixture| {
            let (net, lock) = (fixture.net.clone(), fixture.lock.clone());
            Scenario::of(async move {
                let guard = lock.lock().await.unwrap();
                guard.lease().while_held(sleep(Duration::from_secs(1))).await.unwrap();
                guard.release().await.unwrap();
            })
            .meanwhile(async move { net.restore() })
        });
}
