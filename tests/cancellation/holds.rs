//! To take, keep and give back what is free, or one's own.

use std::time::Duration;

use redlatch::{Nesting, Options, Owner, RwLock};
use tokio::time::sleep;

use super::locks::{AnyGuard, AnyLock, Kind};
use super::network::{Net, Whose};
use super::scenario::{Case, Scene, Stage, open};

/// What each hold passes.
pub(super) const HOLD: &[&str] = &["acquire", "release"];

/// A ttl is 30 s: long enough for a renewal.
const RENEWED: Duration = Duration::from_secs(12);

#[test]
fn cancelled_tries_leave_nothing() {
    let tried = async |stage: &Stage| {
        let lock = stage.lock.clone();
        Scene::of(async move { drop(lock.try_lock().await.unwrap().unwrap()) })
    };
    Case::new("try", 5, &["acquire at 1"]).run(tried);
    Case::new("cold-try", 9, &["acquire by source"]).cold().run(tried);
}

pub(super) async fn held(stage: &Stage) -> Scene {
    let lock = stage.lock.clone();
    Scene::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
}

#[test]
fn cancelled_holds_leave_nothing() {
    Case::new("hold", 9, HOLD).run(held);
    Case::new("cold-hold", 17, &["acquire by source", "release by source"]).cold().run(held);
    Case::new("hold-within", 9, HOLD).run(async |stage| {
        let lock = stage.lock.clone();
        Scene::of(async move {
            lock.lock_timeout(Duration::from_secs(1)).await.unwrap().release().await.unwrap();
        })
    });
}

#[test]
fn cancelled_first_connections_leave_nothing() {
    Case::new("open", 18, &["connect", "acquire", "release"]).run(async |stage| {
        let (net, kind, name) = (stage.net.clone(), stage.kind, stage.name.clone());
        let options = stage.locks.options().clone();
        Scene::of(async move {
            let locks = open(&net, Whose::Subject, &options).await;
            kind.lock(&locks, &name).lock().await.unwrap().release().await.unwrap();
        })
    });
    Case::new("connect-anew", 15, &["connect", "acquire", "release"]).run(async |stage| {
        stage.net.cut(true);
        let lock = stage.lock.clone();
        // Sent twice, it may be told that it is not known whether it lasted.
        Scene::of(async move { drop(lock.lock().await.unwrap().release().await) })
    });
}

/// The connections fail meanwhile, and the future may try again before it is dropped.
pub(super) async fn disturbed(stage: &Stage, disturb: impl FnOnce(&Net) + 'static) -> Scene {
    let (net, lock) = (stage.net.clone(), stage.lock.clone());
    Scene::of(async move {
        if let Ok(guard) = lock.lock().await {
            drop(guard.release().await);
        }
    })
    .meanwhile(async move { disturb(&net) })
}

#[test]
fn cancelled_holds_leave_nothing_whenever_a_connection_fails() {
    let kinds = &[Kind::Mutex, Kind::Read];
    let broken = async |stage: &Stage| disturbed(stage, |net| net.cut(false)).await;
    Case::new("hold-broken", 9, &["connect", "acquire", "release"]).kinds(kinds).early().run(broken);
    let silent = async |stage: &Stage| disturbed(stage, |net| net.hang(true)).await;
    Case::new("hold-silent", 9, &["connect", "acquire held back", "release held back"])
        .kinds(kinds)
        .early()
        .run(silent);
}

pub(super) async fn nested(stage: &Stage) -> Scene {
    let kept = stage.lock.lock().await.unwrap();
    held(stage).await.keeping(kept)
}

#[test]
fn cancelled_nested_holds_leave_the_others() {
    Case::new("nest", 9, HOLD).kinds(&[Kind::Reentrant, Kind::Read]).run(nested);
    let local = |options: Options| options.nesting(Nesting::Local);
    Case::new("nest-locally", 1, &[]).kinds(&[Kind::Reentrant]).with(local).run(nested);
    Case::new("nest-writing", 9, &["write_acquire", "release"]).kinds(&[Kind::Write]).run(async |stage| {
        let (lock, owner) = (rwlock(&stage.lock), Owner::new());
        let kept = AnyGuard::Write(lock.with_owner(&owner).write().await.unwrap());
        Scene::of(async move { lock.with_owner(&owner).write().await.unwrap().release().await.unwrap() })
            .keeping(kept)
    });
    Case::new("read-while-writing", 9, &["read_acquire", "release"]).kinds(&[Kind::Write]).run(
        async |stage| {
            let (lock, owner) = (rwlock(&stage.lock), Owner::new());
            let kept = AnyGuard::Write(lock.with_owner(&owner).write().await.unwrap());
            Scene::of(async move { lock.with_owner(&owner).read().await.unwrap().release().await.unwrap() })
                .keeping(kept)
        },
    );
}

pub(super) async fn upgraded(stage: &Stage) -> Scene {
    let AnyLock::Read(lock, owner) = stage.lock.clone() else { panic!("not to read") };
    let kept = AnyGuard::Read(lock.with_owner(&owner).read().await.unwrap());
    Scene::of(async move { lock.with_owner(&owner).write().await.unwrap().release().await.unwrap() })
        .keeping(kept)
}

pub(super) async fn waited_to_upgrade(stage: &Stage) -> Scene {
    let beside = rwlock(&stage.rival).read().await.unwrap();
    upgraded(stage).await.meanwhile(async move { beside.release().await.unwrap() })
}

pub(super) async fn downgraded(stage: &Stage) -> Scene {
    let guard = rwlock(&stage.lock).write().await.unwrap();
    Scene::of(async move { guard.downgrade().await.unwrap().release().await.unwrap() })
}

#[test]
fn cancelled_upgrades_leave_the_reader() {
    Case::new("upgrade", 9, &["write_acquire", "release"]).kinds(&[Kind::Read]).run(upgraded);
    Case::new("wait-to-upgrade", 28, &["write_acquire", "SUBSCRIBE", "nothing", "message", "release"])
        .kinds(&[Kind::Read])
        .run(waited_to_upgrade);
}

#[test]
fn cancelled_downgrades_leave_nothing() {
    Case::new("downgrade", 9, &["downgrade", "release"]).kinds(&[Kind::Write]).run(downgraded);
}

#[test]
fn cancelled_releases_go_on() {
    Case::new("release", 5, &["release"]).run(async |stage| {
        let guard = stage.lock.lock().await.unwrap();
        Scene::of(async move { guard.release().await.unwrap() })
    });
    Case::new("cold-release", 9, &["release by source"]).cold().run(async |stage| {
        let guard = stage.lock.lock().await.unwrap();
        Scene::of(async move { guard.release().await.unwrap() })
    });
    Case::new("release-nested", 5, &["release"]).kinds(&[Kind::Reentrant, Kind::Read]).run(async |stage| {
        let (kept, guard) = (stage.lock.lock().await.unwrap(), stage.lock.lock().await.unwrap());
        Scene::of(async move { guard.release().await.unwrap() }).keeping(kept)
    });
}

#[test]
fn cancelled_closes_leave_nothing() {
    Case::new("close", 3, &["release"]).run(async |stage| {
        let (guard, locks) = (stage.lock.lock().await.unwrap(), stage.locks.clone());
        Scene::of(async move {
            locks.close(RENEWED).await.unwrap();
            guard.release().await.unwrap();
        })
    });
}

/// A hold that is renewed.
pub(super) async fn renewed(stage: &Stage) -> Scene {
    let lock = stage.lock.clone();
    Scene::of(async move {
        let guard = lock.lock().await.unwrap();
        guard.lease().while_held(sleep(RENEWED)).await.unwrap();
        guard.release().await.unwrap();
    })
}

#[test]
fn cancelled_while_renewed_leaves_nothing() {
    Case::new("renew", 30, &["acquire", "nothing", "renew", "release"]).run(renewed);
}

#[test]
fn clients_dropped_while_they_renew_leave_nothing() {
    Case::new("client", 5, &["renew"]).run(async |stage| {
        let locks = open(&stage.net, Whose::Subject, stage.locks.options()).await;
        let guard = stage.kind.lock(&locks, &stage.name).lock().await.unwrap();
        Scene::of(async move {
            sleep(RENEWED).await;
            drop((locks, guard));
        })
    });
}

#[test]
fn cancelled_watches_leave_the_lease() {
    Case::new("watch", 25, &["nothing", "renew"]).kinds(&[Kind::Mutex]).run(async |stage| {
        let kept = stage.lock.lock().await.unwrap();
        let lease = kept.lease().clone();
        Scene::of(async move { lease.while_held(sleep(RENEWED)).await.unwrap() }).keeping(kept)
    });
}

pub(super) fn rwlock(lock: &AnyLock) -> RwLock {
    match lock {
        AnyLock::Read(lock, _) | AnyLock::Write(lock) => lock.clone(),
        _ => panic!("not a read-write lock"),
    }
}
