//! Calls for a free lock, or for one that the owner holds: acquire, renew, nest, upgrade,
//! downgrade, release, close.

use std::time::Duration;

use redlatch::{Error, Nesting, Options, Owner, RwLock};
use tokio::time::sleep;

use super::locks::{AnyGuard, AnyLock, Kind};
use super::network::{ConnectionOwner, Network};
use super::scenario::{Case, Fixture, Scenario, open};

/// What is in flight during every hold.
pub(super) const HOLD: &[&str] = &["acquire", "release"];

/// The least time for which a lock is held.
const MINIMUM: Duration = Duration::from_millis(20);

/// A third of the TTL of 30 s is due within this time, so the lease is renewed.
const RENEWED: Duration = Duration::from_secs(12);

#[test]
fn cancelled_tries_leave_nothing() {
    let tried = async |fixture: &Fixture| {
        let lock = fixture.lock.clone();
        Scenario::of(async move { drop(lock.try_lock().await.unwrap().unwrap()) })
    };
    Case::new("try", 5, &["acquire at 1"]).run(tried);
    Case::new("cold-try", 9, &["acquire by source"]).cold().run(tried);
}

pub(super) async fn held(fixture: &Fixture) -> Scenario {
    let lock = fixture.lock.clone();
    Scenario::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
}

/// The servers' clocks are real, and those of the clients are not: without real time, no minimum
/// ends.
async fn held_at_least(fixture: &Fixture) -> Scenario {
    let (net, key) = (fixture.net.clone(), fixture.lock.key().to_owned());
    held(fixture).await.afterwards(async move {
        for server in &net.servers {
            let left = || server.run::<i64>(&["PTTL", &key]);
            assert!(left() <= i64::try_from(MINIMUM.as_millis()).unwrap() + 1, "longer than the minimum");
            while left() > -2 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    })
}

#[test]
fn cancelled_holds_leave_nothing() {
    Case::new("hold", 9, HOLD).run(held);
    // One script has all verbs, so the server knows it by the release.
    Case::new("cold-hold", 17, &["acquire by source", "release at 1"]).cold().run(held);
    let at_least = |options: Options| options.hold_at_least(MINIMUM);
    Case::new("hold-at-least", 9, HOLD).with(at_least).run(held_at_least);
    Case::new("hold-within", 9, HOLD).run(async |fixture| {
        let lock = fixture.lock.clone();
        Scenario::of(async move {
            lock.lock_timeout(Duration::from_secs(1)).await.unwrap().release().await.unwrap();
        })
    });
}

#[test]
fn cancelled_first_connections_leave_nothing() {
    Case::new("open", 18, &["connect", "acquire", "release"]).run(async |fixture| {
        let (net, kind, name) = (fixture.net.clone(), fixture.kind, fixture.name.clone());
        let options = fixture.locks.options().clone();
        Scenario::of(async move {
            let locks = open(&net, ConnectionOwner::Subject, &options).await;
            kind.lock(&locks, &name).lock().await.unwrap().release().await.unwrap();
        })
    });
    Case::new("reconnect", 15, &["connect", "acquire", "release"]).run(async |fixture| {
        fixture.net.cut(true);
        let lock = fixture.lock.clone();
        // A release that was sent twice may fail, since its first outcome is unknown.
        Scenario::of(async move { drop(lock.lock().await.unwrap().release().await) })
    });
}

/// The connections fail during the future, which may retry before it is dropped.
pub(super) async fn disturbed(fixture: &Fixture, disturb: impl FnOnce(&Network) + 'static) -> Scenario {
    let (net, lock) = (fixture.net.clone(), fixture.lock.clone());
    Scenario::of(async move {
        if let Ok(guard) = lock.lock().await {
            drop(guard.release().await);
        }
    })
    .meanwhile(async move { disturb(&net) })
}

#[test]
fn cancelled_holds_leave_nothing_whenever_a_connection_fails() {
    let kinds = &[Kind::Mutex, Kind::Read];
    let broken = async |fixture: &Fixture| disturbed(fixture, |net| net.cut(false)).await;
    Case::new("hold-broken", 9, &["connect", "acquire", "release"]).kinds(kinds).early(1).run(broken);
    let silent = async |fixture: &Fixture| disturbed(fixture, |net| net.silence(true)).await;
    Case::new("hold-silent", 9, &["connect", "acquire held back", "release held back"])
        .kinds(kinds)
        .early(1)
        .run(silent);
}

/// The work takes a while, so that the connections may fail while it runs.
#[test]
fn cancelled_elections_leave_nothing() {
    let elected = |fixture: &Fixture| {
        let (locks, name) = (fixture.locks.clone(), fixture.name.clone());
        Scenario::of(async move {
            let work = async |_| {
                sleep(Duration::from_secs(1)).await;
                Ok::<_, Error>(())
            };
            drop(locks.elect(&name, work).await); // the release may fail
        })
    };
    let kinds = &[Kind::Mutex];
    Case::new("elect", 9, HOLD).kinds(kinds).run(async |fixture| elected(fixture));
    Case::new("elect-broken", 9, &["connect", "acquire", "release"]).kinds(kinds).early(1).run(
        async |fixture| {
            let net = fixture.net.clone();
            elected(fixture).meanwhile(async move { net.cut(false) })
        },
    );
}

pub(super) async fn nested(fixture: &Fixture) -> Scenario {
    let kept = fixture.lock.lock().await.unwrap();
    held(fixture).await.keeping(kept)
}

#[test]
fn cancelled_nested_holds_leave_the_others() {
    Case::new("nest", 9, HOLD).kinds(&[Kind::Reentrant, Kind::Read]).run(nested);
    let local = |options: Options| options.nesting(Nesting::Local);
    Case::new("nest-locally", 1, &[]).kinds(&[Kind::Reentrant]).with(local).run(nested);
    Case::new("nest-writing", 9, &["write_acquire", "release"]).kinds(&[Kind::Write]).run(async |fixture| {
        let (lock, owner) = (rwlock(&fixture.lock), Owner::new());
        let kept = AnyGuard::Write(lock.with_owner(&owner).write().await.unwrap());
        Scenario::of(async move { lock.with_owner(&owner).write().await.unwrap().release().await.unwrap() })
            .keeping(kept)
    });
    Case::new("read-while-writing", 9, &["read_acquire", "release"]).kinds(&[Kind::Write]).run(
        async |fixture| {
            let (lock, owner) = (rwlock(&fixture.lock), Owner::new());
            let kept = AnyGuard::Write(lock.with_owner(&owner).write().await.unwrap());
            Scenario::of(
                async move { lock.with_owner(&owner).read().await.unwrap().release().await.unwrap() },
            )
            .keeping(kept)
        },
    );
}

pub(super) async fn upgraded(fixture: &Fixture) -> Scenario {
    let AnyLock::Read(lock, owner) = fixture.lock.clone() else { panic!("not a read lock") };
    let kept = AnyGuard::Read(lock.with_owner(&owner).read().await.unwrap());
    Scenario::of(async move { lock.with_owner(&owner).write().await.unwrap().release().await.unwrap() })
        .keeping(kept)
}

pub(super) async fn waited_to_upgrade(fixture: &Fixture) -> Scenario {
    let beside = rwlock(&fixture.rival).read().await.unwrap();
    upgraded(fixture).await.meanwhile(async move { beside.release().await.unwrap() })
}

pub(super) async fn downgraded(fixture: &Fixture) -> Scenario {
    let guard = rwlock(&fixture.lock).write().await.unwrap();
    Scenario::of(async move { guard.downgrade().await.unwrap().release().await.unwrap() })
}

#[test]
fn cancelled_upgrades_leave_the_reader() {
    Case::new("upgrade", 9, &["write_acquire", "release"]).kinds(&[Kind::Read]).run(upgraded);
    Case::new("wait-to-upgrade", 26, &["write_acquire", "SUBSCRIBE", "nothing", "message", "release"])
        .kinds(&[Kind::Read])
        .run(waited_to_upgrade);
}

#[test]
fn cancelled_downgrades_leave_nothing() {
    Case::new("downgrade", 9, &["downgrade", "release"]).kinds(&[Kind::Write]).run(downgraded);
}

#[test]
fn cancelled_releases_still_release() {
    Case::new("release", 5, &["release"]).run(async |fixture| {
        let guard = fixture.lock.lock().await.unwrap();
        Scenario::of(async move { guard.release().await.unwrap() })
    });
    Case::new("cold-release", 9, &["release by source"]).cold().run(async |fixture| {
        let guard = fixture.lock.lock().await.unwrap();
        Scenario::of(async move { guard.release().await.unwrap() })
    });
    Case::new("release-nested", 5, &["release"]).kinds(&[Kind::Reentrant, Kind::Read]).run(async |fixture| {
        let (kept, guard) = (fixture.lock.lock().await.unwrap(), fixture.lock.lock().await.unwrap());
        Scenario::of(async move { guard.release().await.unwrap() }).keeping(kept)
    });
}

#[test]
fn cancelled_closes_leave_nothing() {
    Case::new("close", 3, &["release"]).run(async |fixture| {
        let (guard, locks) = (fixture.lock.lock().await.unwrap(), fixture.locks.clone());
        Scenario::of(async move {
            locks.close(RENEWED).await.unwrap();
            guard.release().await.unwrap();
        })
    });
}

/// Holds the lock until the lease was renewed.
pub(super) async fn renewed(fixture: &Fixture) -> Scenario {
    let lock = fixture.lock.clone();
    Scenario::of(async move {
        let guard = lock.lock().await.unwrap();
        guard.lease().while_held(sleep(RENEWED)).await.unwrap();
        guard.release().await.unwrap();
    })
}

#[test]
fn cancelled_while_renewed_leaves_nothing() {
    Case::new("renew", 30, &["acquire", "nothing", "renew", "release"]).run(renewed);
}

pub(super) async fn renewed_by_hand(fixture: &Fixture) -> Scenario {
    let kept = fixture.lock.lock().await.unwrap();
    let lease = kept.lease().clone();
    Scenario::of(async move { drop(lease.renew().await) }).keeping(kept)
}

pub(super) async fn renewed_and_released(fixture: &Fixture) -> Scenario {
    let guard = fixture.lock.lock().await.unwrap();
    Scenario::of(async move {
        drop(guard.lease().renew().await);
        drop(guard.release().await);
    })
}

#[test]
fn cancelled_renewals_by_hand_leave_the_lease() {
    Case::new("renew-by-hand", 5, &["renew"]).run(renewed_by_hand);
    Case::new("renew-and-release", 9, &["renew", "release"]).run(renewed_and_released);
}

/// The hold is adopted, or stays with its ticket until another client adopts it.
pub(super) async fn adopted(fixture: &Fixture) -> Scenario {
    let ticket = fixture.lock.lock().await.unwrap().into_ticket().unwrap();
    let (lock, rest, again) = (fixture.lock.clone(), fixture.lock.clone(), ticket.clone());
    Scenario::of(async move {
        if let Ok(guard) = lock.adopt(&ticket).await {
            drop(guard.release().await);
        }
    })
    .afterwards(async move { drop(rest.adopt(&again).await) })
}

#[test]
fn cancelled_adoptions_leave_nothing() {
    Case::new("adopt", 9, &["renew", "release"]).run(adopted);
}

#[test]
fn clients_dropped_while_they_renew_leave_nothing() {
    Case::new("client", 5, &["renew"]).run(async |fixture| {
        let locks = open(&fixture.net, ConnectionOwner::Subject, fixture.locks.options()).await;
        let guard = fixture.kind.lock(&locks, &fixture.name).lock().await.unwrap();
        Scenario::of(async move {
            sleep(RENEWED).await;
            drop((locks, guard));
        })
    });
}

#[test]
fn cancelled_watches_leave_the_lease() {
    Case::new("watch", 25, &["nothing", "renew"]).kinds(&[Kind::Mutex]).run(async |fixture| {
        let kept = fixture.lock.lock().await.unwrap();
        let lease = kept.lease().clone();
        Scenario::of(async move { lease.while_held(sleep(RENEWED)).await.unwrap() }).keeping(kept)
    });
}

pub(super) fn rwlock(lock: &AnyLock) -> RwLock {
    match lock {
        AnyLock::Read(lock, _) | AnyLock::Write(lock) => lock.clone(),
        _ => panic!("not a read-write lock"),
    }
}
