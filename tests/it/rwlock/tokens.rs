//! Fencing tokens of readers and writers.

use std::time::Duration;

use redlatch::{Error, Fencing, Owner, Renewal};

use super::{client, notified_only, queued};
use crate::support::{Oracle, Server, patient, soon};

/// Locks with and without fencing share a name: no lease gets another lease's token, and a lease
/// without fencing gets none.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_lease_has_token_only_if_fencing_is_on() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let with = |fencing| locks.with_options(patient().fencing(fencing)).unwrap().rwlock("rw").unwrap();
    let (on, off) = (with(Fencing::On), with(Fencing::Off));
    let before = on.write().await.unwrap();
    let token = before.lease().fencing_token();
    before.release().await.unwrap();
    let owner = Owner::new();
    let reading = on.with_owner(&owner).read().await.unwrap();
    let outer = off.with_owner(&owner).write().await.unwrap();
    assert_eq!(outer.lease().fencing_token(), None);
    let inner = on.with_owner(&owner).write().await.unwrap();
    assert!(inner.lease().fencing_token() > token, "not the earlier writer's token");
    for guard in [inner, outer] {
        guard.release().await.unwrap();
    }
    reading.release().await.unwrap();
    // The same for a lease that is granted to a waiter.
    let never = patient().fencing(Fencing::Off).renewal(Renewal::Never);
    let never = locks.with_options(never).unwrap();
    let held = on.write().await.unwrap();
    let waiting = queued(&server, &on, {
        let lock = never.rwlock("rw").unwrap();
        async move { lock.write().await }
    })
    .await;
    held.release().await.unwrap();
    let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    assert_eq!(guard.lease().fencing_token(), None);
    guard.release().await.unwrap();
    drop((on, off, never, locks));
    server.assert_nothing_left().await;
}

/// The token counter is reset, as by an old snapshot: a reader's token is still no smaller than the
/// last writer's.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_read_token_is_not_older_than_last_write() {
    let server = Server::start().await;
    let lock = client(&server, notified_only()).await;
    let write = async || {
        let guard = lock.write().await.unwrap();
        let token = guard.lease().fencing_token();
        guard.release().await.unwrap();
        token
    };
    let goes_back = async || server.run::<()>(&["SET", "{lock:rw}:fence", "5", "PX", "60000"]).await;
    // A reader alone, one beside an older reader, and one admitted after a writer's release.
    let written = write().await;
    goes_back().await;
    let alone = lock.read().await.unwrap();
    assert!(alone.lease().fencing_token() >= written, "{alone:?} after {written:?}");
    goes_back().await;
    let beside = lock.read().await.unwrap();
    assert!(beside.lease().fencing_token() >= written, "{beside:?} after {written:?}");
    for guard in [alone, beside] {
        guard.release().await.unwrap();
    }
    let written = write().await;
    let writing = lock.write().await.unwrap();
    let waiting = queued(&server, &lock, {
        let lock = lock.clone();
        async move { lock.read().await.unwrap() }
    })
    .await;
    server.run::<i64>(&["HSET", "lock:rw", "token", "5"]).await;
    writing.release().await.unwrap();
    let admitted = soon("the waiter is admitted", waiting).await.unwrap();
    assert!(admitted.lease().fencing_token() >= written, "{admitted:?} after {written:?}");
    let later = lock.read().await.unwrap();
    assert!(later.lease().fencing_token() >= written, "{later:?} after {written:?}");
    for guard in [admitted, later] {
        guard.release().await.unwrap();
    }
    drop(lock);
    server.assert_nothing_left().await;
}

/// A fenced hold nested in an unfenced one gets a new token; the next writer gets a larger one.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_tokens_grow_past_tokens_nested_in_unfenced_hold() {
    let server = Server::start().await;
    let far = server.run::<(u64, u64)>(&["TIME"]).await.0 * 1_000_000 + 600_000_000;
    let _: () = server.run(&["SET", "{lock:rw}:fence", &far.to_string(), "PX", "86400000"]).await;
    let without = client(&server, patient().fencing(Fencing::Off)).await;
    let owner = Owner::new();
    let mut last = far;
    for round in 0..3 {
        let outer = without.with_owner(&owner).write().await.unwrap();
        assert_eq!(outer.lease().fencing_token(), None);
        let lock = client(&server, patient()).await;
        for guard in
            [lock.with_owner(&owner).write().await.unwrap(), lock.with_owner(&owner).write().await.unwrap()]
        {
            let token = guard.lease().fencing_token().unwrap().get();
            assert_eq!(token, last + 1, "both nested holds have one token, round {round}");
            guard.release().await.unwrap();
        }
        outer.release().await.unwrap();
        let next = lock.write().await.unwrap();
        let token = next.lease().fencing_token().unwrap().get();
        assert!(token > last + 1, "the next writer's token: {token} after {last}, round {round}");
        last = token;
        next.release().await.unwrap();
    }
    drop(without);
    server.assert_nothing_left().await;
}

/// The counter key has another type or value: the call returns an error and leaves no hold.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_corrupt_counter_returns_error_and_leaves_no_hold() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let off = locks
        .with_options(patient().fencing(Fencing::Off).local_turn(Duration::ZERO))
        .unwrap()
        .rwlock("rw")
        .unwrap();
    let on = locks.rwlock("rw").unwrap();
    let guards = [off.read().await.unwrap(), off.read().await.unwrap()];
    for junk in [&["RPUSH", "{lock:rw}:fence", "a"][..], &["SET", "{lock:rw}:fence", "many"]] {
        let _: redis::Value = server.run(junk).await;
        assert!(matches!(on.read().await, Err(Error::Corrupt { .. })));
        assert!(matches!(on.try_write().await, Ok(None)));
        assert_eq!(server.lock_state(off.name()).await.readers.len(), 2, "{junk:?}");
        let _: i64 = server.run(&["DEL", "{lock:rw}:fence"]).await;
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
    off.try_write().await.unwrap().expect("no reader is left").release().await.unwrap();
    drop((on, off, locks));
    server.assert_nothing_left().await;
}

/// The counter is lost while the lock is held: nested holds and the next writer still get tokens.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_tokens_grow_after_counter_is_lost() {
    let server = Server::start().await;
    let lock = client(&server, patient()).await;
    let owner = Owner::new();
    let outer = lock.with_owner(&owner).write().await.unwrap();
    let _: i64 = server.run(&["DEL", "{lock:rw}:fence"]).await;
    let (inner, reading) =
        (lock.with_owner(&owner).write().await.unwrap(), lock.with_owner(&owner).read().await.unwrap());
    assert!(inner.lease().fencing_token() >= outer.lease().fencing_token());
    assert_eq!(reading.lease().fencing_token(), inner.lease().fencing_token());
    let last = inner.lease().fencing_token();
    for guard in [outer, inner] {
        guard.release().await.unwrap();
    }
    reading.release().await.unwrap();
    let next = lock.write().await.unwrap();
    assert!(next.lease().fencing_token() > last);
    next.release().await.unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}
