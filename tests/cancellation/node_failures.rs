//! In front of three servers, of which two are reached.

use std::time::Duration;

use tokio::time::sleep;

use super::holds::{HOLD, disturbed, downgraded, held, nested, upgraded};
use super::locks::Kind;
use super::network::Away;
use super::scenario::{Case, NODE_TIMEOUT, Scene, Stage};
use super::waiting::subscribe;

fn without_one(
    name: &'static str,
    passes: &[&'static str],
    kinds: &'static [Kind],
    scene: impl AsyncFn(&Stage) -> Scene + Copy,
) {
    for how in [Away::Silent, Away::Refuses] {
        Case::new(name, 5, passes).without_one(how).kinds(kinds).run(scene);
    }
}

#[test]
fn cancelled_holds_without_one_node_leave_nothing() {
    without_one("minority-hold", HOLD, &[Kind::Mutex, Kind::Read], held);
    without_one("minority-nest", HOLD, &[Kind::Reentrant], nested);
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_exchanges_without_one_node_leave_nothing() {
    without_one("minority-upgrade", &["write_acquire at 2", "release"], &[Kind::Read], upgraded);
    without_one("minority-downgrade", &["downgrade at 2", "release"], &[Kind::Write], downgraded);
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_waits_without_one_node_leave_nothing() {
    for how in [Away::Silent, Away::Refuses] {
        let case = Case::new("minority-wait", 15, &["message", "release"]).without_one(how);
        case.kinds(&[Kind::Mutex]).run(async |stage| {
            let before = stage.rival.lock().await.unwrap();
            // It is known to fail: else it would be waited for, and the lock given back meanwhile.
            stage.net.lose(0, how);
            subscribe(stage).await;
            sleep(2 * NODE_TIMEOUT).await;
            held(stage).await.meanwhile(async move { before.release().await.unwrap() })
        });
    }
}

#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_holds_leave_nothing_whenever_one_node_fails() {
    let silent = async |stage: &Stage| disturbed(stage, |net| net.lose(0, Away::Silent)).await;
    let case = Case::new("one-fails", 9, &["acquire at 3", "held back", "release"]);
    case.of_three().kinds(&[Kind::Mutex]).early().run(silent);
}

/// A node comes back, and is told of the hold.
#[test]
fn cancelled_while_mended_leaves_nothing() {
    Case::new("mend", 15, &["renew", "acquire repair at 1", "release"])
        .without_one(Away::Refuses)
        .kinds(&[Kind::Mutex, Kind::Read])
        .run(async |stage| {
            let (net, lock) = (stage.net.clone(), stage.lock.clone());
            Scene::of(async move {
                let guard = lock.lock().await.unwrap();
                guard.lease().while_held(sleep(Duration::from_secs(1))).await.unwrap();
                guard.release().await.unwrap();
            })
            .meanwhile(async move { net.restore() })
        });
}
