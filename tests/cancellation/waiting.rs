//! Calls that wait for a lock which another client holds.

use redlatch::{Error, Options, RwLock, Wakeups};
use std::time::Duration;

use super::holds::held;
use super::locks::{AnyGuard, AnyLock, Kind};
use super::network::Order;
use super::scenario::{Case, Fixture, Scenario};

/// What is in flight during every wait.
pub(super) const WAIT: &[&str] = &["acquire", "SUBSCRIBE", "nothing", "message", "release"];
/// What is in flight during a wait by polling.
pub(super) const POLL: &[&str] = &["acquire", "nothing", "release"];

/// The rival holds the lock, and releases it once the future waits for it.
pub(super) async fn waited(fixture: &Fixture) -> Scenario {
    let before = fixture.rival.lock().await.unwrap();
    held(fixture).await.meanwhile(async move { before.release().await.unwrap() })
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
    Case::new("wait-whenever", 28, WAIT).kinds(&[Kind::Mutex, Kind::Read]).early(1).run(waited);
    let poll = |options: Options| options.wakeups(Wakeups::Poll);
    Case::new("poll-whenever", 18, POLL).kinds(&[Kind::Mutex]).with(poll).early(1).run(waited);
}

/// Waits for a held lock until the limit, so that the client subscribes.
pub(super) async fn subscribe(fixture: &Fixture) {
    let tried = fixture.lock.lock_timeout(Duration::from_millis(50)).await;
    assert!(matches!(tried, Err(Error::TimedOut { .. })), "{tried:?}");
    fixture.locks.settled().await;
}

#[test]
fn cancelled_waits_of_subscribers_leave_nothing() {
    Case::new("wait-subscribed", 13, &["nothing", "message", "release"]).run(async |fixture| {
        let before = fixture.rival.lock().await.unwrap();
        subscribe(fixture).await;
        held(fixture).await.meanwhile(async move { before.release().await.unwrap() })
    });
}

#[test]
fn cancelled_polling_waits_leave_nothing() {
    Case::new("poll", 18, POLL).with(|options| options.wakeups(Wakeups::Poll)).run(waited);
}

#[test]
fn cancelled_waits_that_time_out_leave_nothing() {
    Case::new("in-vain", 22, &["SUBSCRIBE", "acquire", "nothing"]).run(async |fixture| {
        let before = fixture.rival.lock().await.unwrap();
        let lock = fixture.lock.clone();
        Scenario::of(async move {
            let outcome = lock.lock_timeout(Duration::from_millis(1_500)).await;
            assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        })
        .afterwards(async move { before.release().await.unwrap() })
    });
}

#[test]
fn cancelled_waits_release_their_grant_to_the_next() {
    Case::new("pass-on", 29, WAIT).run(async |fixture| {
        let before = fixture.rival.lock().await.unwrap();
        let (lock, next) = (fixture.lock.clone(), fixture.rival.for_another());
        let next = async move { next.lock().await.unwrap().release().await.unwrap() };
        let (comes, came) = tokio::sync::oneshot::channel();
        Scenario::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
            .meanwhile(async move {
                comes.send(tokio::spawn(next)).unwrap();
                tokio::time::sleep(Duration::from_millis(50)).await; // until it queues
            })
            .meanwhile(async move { before.release().await.unwrap() })
            .afterwards(async move { came.await.unwrap().await.unwrap() })
    });
}

#[test]
fn cancelled_waits_behind_local_waiters_leave_nothing() {
    let kinds = &[Kind::Mutex, Kind::Reentrant, Kind::Write];
    Case::new("behind", 15, &["nothing", "message", "acquire", "release"]).kinds(kinds).run(
        async |fixture| {
            let before = fixture.rival.lock().await.unwrap();
            let first = fixture.lock.for_another();
            // Its connection may break, too; then its release may fail with an unknown outcome.
            let first = tokio::spawn(async move { drop(first.lock().await.unwrap().release().await) });
            while fixture.queued() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let lock = fixture.lock.clone();
            Scenario::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
                .meanwhile(async move { before.release().await.unwrap() })
                .afterwards(async move { first.await.unwrap() })
        },
    );
}

/// A task that acquired the lock after it had waited for another one of its client.
async fn contended(fixture: &Fixture) -> AnyGuard {
    let first = fixture.lock.lock().await.unwrap();
    let (second, third) = (fixture.lock.clone(), fixture.lock.clone());
    let second = tokio::spawn(async move { second.lock().await.unwrap().release().await });
    while fixture.queued() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let third = tokio::spawn(async move { third.lock().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(10)).await; // until it is behind the second one
    first.release().await.unwrap();
    second.await.unwrap().unwrap();
    third.await.unwrap()
}

#[test]
fn cancelled_receipts_of_a_passed_hold_leave_nothing() {
    let kinds = &[Kind::Mutex, Kind::Write];
    let turn = |options: Options| options.local_turn(Duration::from_secs(5));
    Case::new("passed-on", 4, &["nothing", "release"]).kinds(kinds).with(turn).run(async |fixture| {
        let holder = contended(fixture).await;
        let lock = fixture.lock.clone();
        Scenario::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
            .meanwhile(async move { holder.release().await.unwrap() })
    });
    // Another task is behind the one that is dropped.
    Case::new("passed-further", 4, &["nothing"]).kinds(kinds).with(turn).run(async |fixture| {
        let holder = contended(fixture).await;
        let (lock, next) = (fixture.lock.clone(), fixture.lock.clone());
        let (comes, came) = tokio::sync::oneshot::channel();
        let next = async move { next.lock().await.unwrap().release().await.unwrap() };
        Scenario::of(async move { lock.lock().await.unwrap().release().await.unwrap() })
            .meanwhile(async move { comes.send(tokio::spawn(next)).unwrap() })
            .meanwhile(async move { holder.release().await.unwrap() })
            .afterwards(async move { came.await.unwrap().await.unwrap() })
    });
}

/// The lock to read without an owner: tasks of the client share holds.
fn plain(fixture: &Fixture) -> RwLock {
    let AnyLock::Read(lock, _) = &fixture.lock else { panic!("only reads are shared") };
    lock.clone()
}

async fn read(lock: RwLock) {
    lock.read().await.unwrap().release().await.unwrap();
}

#[test]
fn cancelled_shared_reads_leave_nothing() {
    let kinds = &[Kind::Read];
    let turn = |options: Options| options.local_turn(Duration::from_secs(5));
    // It joins a hold, and is the last that leaves it.
    Case::new("joined", 6, &["release"]).kinds(kinds).with(turn).run(async |fixture| {
        let first = plain(fixture).read().await.unwrap();
        let lock = plain(fixture);
        Scenario::of(async move {
            let guard = lock.read().await.unwrap();
            first.release().await.unwrap();
            guard.release().await.unwrap();
        })
    });
    // It waits behind the task that asks for both.
    Case::new("joins-behind", 7, &["nothing"]).kinds(kinds).with(turn).run(async |fixture| {
        let before = fixture.rival.lock().await.unwrap();
        let first = tokio::spawn(read(plain(fixture)));
        while fixture.queued() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Scenario::of(read(plain(fixture)))
            .meanwhile(async move { before.release().await.unwrap() })
            .afterwards(async move { first.await.unwrap() })
    });
    // It asks for both, and the other one waits behind it.
    Case::new("asks-for-both", 20, &["acquire", "SUBSCRIBE", "nothing", "message"])
        .kinds(kinds)
        .with(turn)
        .run(async |fixture| {
            let before = fixture.rival.lock().await.unwrap();
            let next = read(plain(fixture));
            let (comes, came) = tokio::sync::oneshot::channel();
            Scenario::of(read(plain(fixture)))
                .meanwhile(async move { comes.send(tokio::spawn(next)).unwrap() })
                .meanwhile(async move { before.release().await.unwrap() })
                .afterwards(async move { came.await.unwrap().await.unwrap() })
        });
}

/// The owner holds the lock already, and a task of another owner waits in the same client.
#[test]
fn cancelled_nested_holds_behind_waiters_leave_nothing() {
    Case::new("further-behind", 9, &["acquire", "release"]).kinds(&[Kind::Reentrant]).run(async |fixture| {
        let (lock, first) = (fixture.lock.clone(), fixture.lock.for_another());
        let outer = lock.lock().await.unwrap();
        let first = tokio::spawn(async move { drop(first.lock().await.unwrap().release().await) });
        while fixture.queued() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Scenario::of(async move { drop(lock.lock().await.unwrap().release().await) }).afterwards(async move {
            drop(outer.release().await);
            first.await.unwrap();
        })
    });
}
