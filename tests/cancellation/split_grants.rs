//! Split grants: of three nodes, some grant the lock that others have granted to another client.

use redlatch::{Options, Renewal};

use super::holds::held;
use super::locks::{AnyGuard, Kind};
use super::network::Outage;
use super::scenario::{Case, Fixture, Scenario};
use super::waiting::subscribe;

/// The release of a partial grant: to one node, and not for good.
const PARTIAL_RELEASE: &str = "release at 1";

/// Deletes the lock and its token counter on some nodes.
fn lose_data(fixture: &Fixture, nodes: &[usize]) {
    let (key, fence) = (fixture.lock.key(), format!("{{{}}}:fence", fixture.lock.key()));
    for node in nodes {
        assert_eq!(fixture.net.servers[*node].run::<usize>(&["DEL", key, &fence]), 2);
    }
}

/// Without renewals, no client notices the loss on some nodes or repairs it.
fn unrenewed(options: Options) -> Options {
    options.renewal(Renewal::Never)
}

/// Tries a held lock that some nodes have lost.
async fn tried(fixture: &Fixture, nodes: &[usize]) -> Scenario {
    let before = fixture.rival.lock().await.unwrap();
    lose_data(fixture, nodes);
    let lock = fixture.lock.clone();
    Scenario::of(async move { assert!(lock.try_lock().await.unwrap().is_none()) })
        // A majority may have lost it.
        .afterwards(async move { drop(before.release().await) })
}

#[test]
fn cancelled_tries_with_split_grants_leave_nothing() {
    let kinds = &[Kind::Mutex, Kind::Write];
    let passes = &["acquire at 3", PARTIAL_RELEASE, "nothing"];
    Case::new("split-try", 20, passes)
        .of_three()
        .kinds(kinds)
        .with(unrenewed)
        .outlasting()
        .run(async |fixture| tried(fixture, &[0]).await);
}

/// No client has a majority, and none can get one.
#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_tries_with_evenly_split_grants_leave_nothing() {
    Case::new("split-evenly", 20, &["acquire at 2", PARTIAL_RELEASE])
        .without_one(Outage::Silent)
        .kinds(&[Kind::Mutex])
        .with(unrenewed)
        .outlasting()
        .run(async |fixture| tried(fixture, &[0, 1]).await);
}

#[test]
fn cancelled_waits_with_split_grants_leave_nothing() {
    let passes = &["acquire at 3", PARTIAL_RELEASE, "nothing", "message", "release"];
    Case::new("split-wait", 20, passes).of_three().kinds(&[Kind::Mutex]).with(unrenewed).outlasting().run(
        async |fixture| {
            let before = fixture.rival.lock().await.unwrap();
            subscribe(fixture).await;
            lose_data(fixture, &[0]);
            held(fixture).await.meanwhile(async move { before.release().await.unwrap() })
        },
    );
}

/// The same for a client without a subscription: it releases its partial grant and retries with
/// one.
#[test]
fn cancelled_first_waits_with_split_grants_leave_nothing() {
    let passes = &["acquire at 3", "SUBSCRIBE", "nothing", "message", "release"];
    Case::new("split-first", 20, passes).of_three().kinds(&[Kind::Mutex]).with(unrenewed).run(
        async |fixture| {
            let before = fixture.rival.lock().await.unwrap();
            lose_data(fixture, &[0]);
            held(fixture).await.meanwhile(async move { before.release().await.unwrap() })
        },
    );
}

/// Each node has another hold of the owner, or none, so no majority knows an outer hold. The client
/// proposes a larger token once all nodes have replied.
#[test]
fn cancelled_holds_with_mixed_tokens_leave_nothing() {
    let passes = &["acquire at 3", "acquire at 1", "acquire nested at 3"];
    Case::new("mixed", 9, passes).of_three().kinds(&[Kind::Reentrant]).with(unrenewed).outlasting().run(
        async |fixture| {
            let mut old: Vec<AnyGuard> = Vec::new();
            for nodes in [&[1, 2][..], &[2]] {
                old.push(fixture.lock.lock().await.unwrap());
                lose_data(fixture, nodes);
            }
            let lock = fixture.lock.clone();
            Scenario::of(async move { drop(lock.lock().await.unwrap()) }).afterwards(async move {
                for guard in old {
                    drop(guard.release().await);
                }
            })
        },
    );
}
