//! Several locks at once: whatever was granted before the drop is released, and no place is left.

use redlatch::{All, Member, Owner};

use super::locks::Kind;
use super::scenario::{Case, Fixture, Scenario};

/// Two mutexes, one call for both, and a lock of another kind.
fn several(fixture: &Fixture) -> All {
    let Fixture { locks, name, .. } = fixture;
    let members: [Member; 3] = [
        locks.mutex(name).unwrap().into(),
        locks.mutex(format!("{name}-b")).unwrap().into(),
        locks.reentrant(format!("{name}-c"), &Owner::new()).unwrap().into(),
    ];
    locks.all(members).unwrap()
}

async fn held(fixture: &Fixture) -> Scenario {
    let all = several(fixture);
    Scenario::of(async move { all.lock().await.unwrap().release().await.unwrap() })
}

/// The rival holds the second lock, and releases it once the call waits.
async fn waiting(fixture: &Fixture) -> Scenario {
    let (all, rival) = (several(fixture), fixture.rival_of(&format!("{}-b", fixture.name)));
    let guard = rival.lock().await.unwrap();
    Scenario::of(async move { all.lock().await.unwrap().release().await.unwrap() })
        .meanwhile(async move { guard.release().await.unwrap() })
}

#[test]
fn cancelled_holds_of_several_locks_leave_nothing() {
    let only = &[Kind::Mutex];
    Case::new("several", 12, &["mutex/acquire", "reentrant/acquire", "release"]).kinds(only).run(held);
    Case::new("several-cold", 12, &["acquire by source"]).kinds(only).cold().run(held);
    Case::new("several-wait", 16, &["mutex/acquire", "release"]).kinds(only).run(waiting);
    Case::new("several-of-three", 20, &["mutex/acquire", "release"]).kinds(only).of_three().run(held);
}
