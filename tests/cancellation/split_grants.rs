//! Of three servers, some grant a lock that others have granted to somebody else.

use redlatch::{Options, Renewal};

use super::holds::held;
use super::locks::{AnyGuard, Kind};
use super::network::Away;
use super::scenario::{Case, Scene, Stage};
use super::waiting::subscribe;

/// As what only they gave up is told: to few nodes, and not for good.
const LET_GO: &str = "release at 1";

/// Some nodes lose what they have granted, and under which token.
fn forget(stage: &Stage, nodes: &[usize]) {
    let (key, fence) = (stage.lock.key(), format!("{{{}}}:fence", stage.lock.key()));
    for node in nodes {
        assert_eq!(stage.net.servers[*node].run::<usize>(&["DEL", key, &fence]), 2);
    }
}

/// Nobody finds out that he has lost a lock on some nodes, or takes it there once more.
fn unrenewed(options: Options) -> Options {
    options.renewal(Renewal::Never)
}

/// Looks for what somebody else has, of which nodes know nothing.
async fn tried(stage: &Stage, forgetful: &[usize]) -> Scene {
    let before = stage.rival.lock().await.unwrap();
    forget(stage, forgetful);
    let lock = stage.lock.clone();
    Scene::of(async move { assert!(lock.try_lock().await.unwrap().is_none()) })
        // On most of the nodes it may be lost.
        .afterwards(async move { drop(before.release().await) })
}

#[test]
fn cancelled_tries_that_are_split_leave_nothing() {
    let kinds = &[Kind::Mutex, Kind::Write];
    let passes = &["acquire at 3", LET_GO, "nothing"];
    Case::new("split-try", 20, passes)
        .of_three()
        .kinds(kinds)
        .with(unrenewed)
        .outlasting()
        .run(async |stage| tried(stage, &[0]).await);
}

/// Nobody has most of them, nor can have.
#[test]
#[ignore = "takes long: scripts/test --full"]
fn cancelled_tries_that_are_split_evenly_leave_nothing() {
    Case::new("split-evenly", 20, &["acquire at 2", LET_GO])
        .without_one(Away::Silent)
        .kinds(&[Kind::Mutex])
        .with(unrenewed)
        .outlasting()
        .run(async |stage| tried(stage, &[0, 1]).await);
}

#[test]
fn cancelled_waits_that_are_split_leave_nothing() {
    let passes = &["acquire at 3", LET_GO, "nothing", "message", "release"];
    Case::new("split-wait", 20, passes).of_three().kinds(&[Kind::Mutex]).with(unrenewed).outlasting().run(
        async |stage| {
            let before = stage.rival.lock().await.unwrap();
            subscribe(stage).await;
            forget(stage, &[0]);
            held(stage).await.meanwhile(async move { before.release().await.unwrap() })
        },
    );
}

/// The same for who is not told of anything yet: he gives up what he has, and begins anew as one who is.
#[test]
fn cancelled_first_waits_that_are_split_leave_nothing() {
    let passes = &["acquire at 3", "SUBSCRIBE", "nothing", "message", "release"];
    Case::new("split-first", 20, passes).of_three().kinds(&[Kind::Mutex]).with(unrenewed).run(
        async |stage| {
            let before = stage.rival.lock().await.unwrap();
            forget(stage, &[0]);
            held(stage).await.meanwhile(async move { before.release().await.unwrap() })
        },
    );
}

/// Each node remembers another hold of the owner, or none: none is nested in what most of them know, and a larger token
/// is proposed, once all have answered.
#[test]
fn cancelled_holds_with_mixed_tokens_leave_nothing() {
    let passes = &["acquire at 3", "acquire at 1", "acquire nested at 3"];
    Case::new("mixed", 9, passes).of_three().kinds(&[Kind::Reentrant]).with(unrenewed).outlasting().run(
        async |stage| {
            let mut old: Vec<AnyGuard> = Vec::new();
            for forgetful in [&[1, 2][..], &[2]] {
                old.push(stage.lock.lock().await.unwrap());
                forget(stage, forgetful);
            }
            let lock = stage.lock.clone();
            Scene::of(async move { drop(lock.lock().await.unwrap()) }).afterwards(async move {
                for guard in old {
                    drop(guard.release().await);
                }
            })
        },
    );
}
