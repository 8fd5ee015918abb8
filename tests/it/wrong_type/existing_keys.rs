//! Every ordered pair of an existing key and a lock of another kind with the same name.

use std::time::Duration;

use redis::Value;
use redlatch::{Error, Locks, Owner};

use super::{KINDS, Snapshot, assert_no_waiter, is_wrong_type, share, unrenewed};
use crate::support::raw::{RawLock, RawWaiter};
use crate::support::{AnyGuard, AnyLock, Kind, Server, Stopwatch, soon};

/// A refusal within this time was not preceded by a wait.
const AT_ONCE: Duration = Duration::from_secs(2);

/// A key of another program, and the commands that create it.
struct Foreign {
    name: &'static str,
    commands: &'static [&'static str],
    /// The kind whose calls wait for such a key instead of failing.
    shared_with: Option<Kind>,
}

const FOREIGN: [Foreign; 10] = [
    Foreign { name: "string-with-ttl", commands: &["SET K value PX 300000"], shared_with: Some(Kind::Mutex) },
    Foreign { name: "string-without-ttl", commands: &["SET K value"], shared_with: None },
    Foreign {
        name: "hash-with-ttl",
        commands: &["HSET K user 42 balance 10", "PEXPIRE K 300000"],
        shared_with: None,
    },
    Foreign { name: "hash-without-ttl", commands: &["HSET K user 42 balance 10"], shared_with: None },
    Foreign {
        name: "hash-of-one-field",
        commands: &["HSET K user 42", "PEXPIRE K 300000"],
        shared_with: None,
    },
    Foreign { name: "list", commands: &["RPUSH K job-1 job-2", "PEXPIRE K 300000"], shared_with: None },
    Foreign {
        name: "redisson-lock",
        commands: &["HSET K 3d7b6a52-1f0c-4c9a-9b1e-2a4f5c6d7e8f:31 1", "PEXPIRE K 300000"],
        shared_with: Some(Kind::Reentrant),
    },
    Foreign {
        name: "redisson-read",
        commands: &["HSET K mode read 3d7b6a52-1f0c-4c9a-9b1e-2a4f5c6d7e8f:31 1", "PEXPIRE K 300000"],
        shared_with: None,
    },
    Foreign {
        name: "redisson-write",
        commands: &["HSET K mode write 3d7b6a52-1f0c-4c9a-9b1e-2a4f5c6d7e8f:31:write 1", "PEXPIRE K 300000"],
        shared_with: None,
    },
    Foreign {
        name: "hash-with-a-mode",
        commands: &["HSET K mode several-uses color red", "PEXPIRE K 300000"],
        shared_with: None,
    },
];

impl Foreign {
    async fn make(&self, server: &Server, key: &str) {
        for command in self.commands {
            let words: Vec<&str> =
                command.split(' ').map(|word| if word == "K" { key } else { word }).collect();
            server.run::<Value>(&words).await;
        }
    }
}

/// Checks that every call of `kind` returns `WrongType` at once and leaves the key unchanged.
async fn refuses(server: &Server, locks: &Locks, kind: Kind, key: &str) {
    let lock = kind.lock(locks, key);
    let before = Snapshot::of(server, key).await;
    let what = format!("{kind:?} beside {key}");
    let start = Stopwatch::start();
    let outcome = lock.try_lock().await;
    assert!(is_wrong_type(&outcome), "{what}: try_lock: {outcome:?}");
    let outcome = lock.lock_timeout(Duration::from_secs(10)).await;
    assert!(is_wrong_type(&outcome), "{what}: lock_timeout: {outcome:?}");
    let outcome = soon("the call is refused", lock.lock()).await;
    assert!(is_wrong_type(&outcome), "{what}: lock: {outcome:?}");
    let outcome = lock.force_release().await;
    assert!(is_wrong_type(&outcome), "{what}: force_release: {outcome:?}");
    assert!(start.undisturbed() < AT_ONCE, "{what}: {start:?}");
    // The inspection of a mutex accepts any string; acquiring one without a TTL fails.
    if !(kind == Kind::Mutex && key.contains("string-without-ttl")) {
        let outcome = lock.inspect().await;
        assert!(is_wrong_type(&outcome), "{what}: inspect: {outcome:?}");
        let outcome = match &lock {
            AnyLock::Mutex(lock) => lock.is_locked().await,
            AnyLock::Reentrant(lock, owner) => lock.is_held_by(owner).await,
            AnyLock::Read(lock, owner) => lock.is_held_by(owner).await,
            AnyLock::SharedRead(lock) | AnyLock::Write(lock) => lock.is_held_by(&Owner::new()).await,
        };
        assert!(is_wrong_type(&outcome), "{what}: is_locked or is_held_by: {outcome:?}");
    }
    soon("nothing is left to release", locks.settled()).await;
    before.assert_unchanged(server, key, &what).await;
    assert_no_waiter(server, key, &what).await;
    scripts_refuse(RawLock { server, kind, key }, &before, &what).await;
}

/// Checks the same for the scripts that a client sends only while it holds a lock, and for those of
/// a quorum's nodes.
async fn scripts_refuse(lock: RawLock<'_>, before: &Snapshot, what: &str) {
    let waiter = RawWaiter { claim_ms: 3_000, channel: "" };
    let attempt = format!("attempt-{}", lock.kind.name());
    let with = |more: &[(&'static str, &str)]| {
        let more = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
        lock.owned(&attempt).into_iter().chain(more).collect::<Vec<_>>()
    };
    let proposes = |purpose| {
        let rest = [("claim_ms", "3000"), ("queued_at", "1")];
        with(&[&[("ttl_ms", "60000"), ("proposal", "1"), ("purpose", purpose)][..], &rest].concat())
    };
    let mut requests = vec![
        ("renew", with(&[("ttl_ms", "60000")])),
        ("acquire", proposes("")),
        ("acquire", proposes("nested")),
        ("acquire", proposes("repair")),
    ];
    if matches!(lock.kind, Kind::Read | Kind::Write) {
        requests.push(("downgrade", with(&[("ttl_ms", "60000"), ("min_token", "0")])));
    }
    // Release comes last: it ends the attempt, which is refused from then on.
    requests.push(("release", lock.releasing(&attempt, waiter)));
    for (verb, words) in requests {
        let answer = lock.send(verb, &words).await.unwrap();
        let what = format!("{what}: {verb} {words:?}");
        // Release and renewal of a mutex answer "not held" if the string is not the attempt's,
        // without checking its TTL.
        let refusal = if matches!(answer, Value::Int(-3..=-2 | 0)) { None } else { Some(&answer) };
        assert_eq!(refusal, None, "{what}");
        before.assert_unchanged(lock.server, lock.key, &what).await;
        assert_no_waiter(lock.server, lock.key, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_other_kinds_are_refused_and_unchanged() {
    let server = Server::start().await;
    let (holders, others) = (server.locks_with(unrenewed()).await, server.locks_with(unrenewed()).await);
    for held in KINDS {
        for kind in KINDS.into_iter().filter(|kind| !share(held, *kind)) {
            for prefix in ["", "lock:"] {
                let key = format!("{prefix}{}-{}", held.name(), kind.name());
                let lock = held.lock(&holders, &key);
                let guard = lock.lock().await.unwrap();
                refuses(&server, &others, kind, &key).await;
                assert!(server.is_held_by(&lock, &guard).await && !guard.lease().is_lost());
                guard.release().await.unwrap();
                // After the release, the other kind may use the name.
                let guard = kind.lock(&others, &key).try_lock().await.unwrap();
                guard.expect("the lock is free").release().await.unwrap();
            }
        }
    }
}

/// A read-write lock has another layout while it has several holds.
#[tokio::test(flavor = "multi_thread")]
async fn locks_of_several_readers_are_refused_and_unchanged() {
    let server = Server::start().await;
    let (holders, others) = (server.locks_with(unrenewed()).await, server.locks_with(unrenewed()).await);
    let lock = holders.rwlock("several").unwrap();
    let first = lock.read().await.unwrap();
    let second = lock.read().await.unwrap();
    for kind in [Kind::Mutex, Kind::Reentrant] {
        refuses(&server, &others, kind, "several").await;
    }
    first.release().await.unwrap();
    second.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_other_programs_are_refused_and_unchanged() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    for foreign in FOREIGN {
        for kind in KINDS.into_iter().filter(|kind| foreign.shared_with != Some(*kind)) {
            let key = format!("{}-{}", foreign.name, kind.name());
            foreign.make(&server, &key).await;
            refuses(&server, &locks, kind, &key).await;
        }
    }
}

/// Checks that a waiter does not change a key that another program holds, and returns its guard
/// once the key is deleted.
async fn waits(server: &Server, locks: &Locks, kind: Kind, key: &str) -> AnyGuard {
    let lock = kind.lock(locks, key);
    let before = Snapshot::of(server, key).await;
    assert!(lock.try_lock().await.unwrap().is_none(), "{key}");
    let outcome = lock.lock_timeout(Duration::from_millis(300)).await;
    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{key}: {outcome:?}");
    assert_eq!(lock.inspect().await.unwrap().holders.len(), 1, "{key}");
    assert!(lock.is_locked().await, "{key}");
    soon("the waiter has left the queue", locks.settled()).await;
    before.assert_unchanged(server, key, "a waiter").await;
    let waiting = lock.for_another().lock_in_task();
    crate::support::eventually("the waiter queues", || async { lock.waiters().await == 1 }).await;
    before.assert_unchanged(server, key, "a waiter that is queued").await;
    server.run::<()>(&["DEL", key]).await;
    soon("the waiter acquires", waiting).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_acquires_after_foreign_key_of_same_layout() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    for foreign in FOREIGN {
        let Some(kind) = foreign.shared_with else { continue };
        foreign.make(&server, foreign.name).await;
        waits(&server, &locks, kind, foreign.name).await.release().await.unwrap();
        foreign.make(&server, foreign.name).await;
        let before = Snapshot::of(&server, foreign.name).await;
        let outcome = kind.lock(&locks, foreign.name).force_release().await;
        if kind == Kind::Mutex {
            assert!(outcome.unwrap(), "a string with a TTL is a mutex of any library");
            assert_eq!(server.run::<u64>(&["EXISTS", foreign.name]).await, 0);
        } else {
            assert!(is_wrong_type(&outcome), "{outcome:?}");
            before.assert_unchanged(&server, foreign.name, "force_release").await;
        }
    }
}

/// The key of a held lock is overwritten. The holder learns that at its next renewal, long before
/// its deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_key_was_overwritten_has_lost_the_lock() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        server.run::<()>(&["DEL", lock.key()]).await;
        server.run::<()>(&["RPUSH", lock.key(), "another program's"]).await;
        let renewed = guard.lease().renew().await;
        assert!(matches!(renewed, Err(Error::Lost { .. })), "{kind:?}: {renewed:?}");
        assert!(guard.lease().is_lost(), "{kind:?}");
        server.run::<()>(&["DEL", lock.key()]).await;
    }
    soon("settled() returns", locks.settled()).await;
    drop(locks);
    server.assert_nothing_left().await;
}

/// Another program's hash has fields with names of this crate: abandoned calls leave it unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_abandoned_calls_leave_foreign_hash_unchanged() {
    let server = Server::start().await;
    let lock = server.locks().await.rwlock("rw").unwrap();
    for ttl in [false, true] {
        let words =
            ["HSET", "lock:rw", "writer_left", "beta", "token", "wood", "readers", "north", ":token", "1"];
        let _: i64 = server.run(&words).await;
        if ttl {
            let _: i64 = server.run(&["PEXPIRE", "lock:rw", "60000"]).await;
        }
        let before: Vec<u8> = server.run(&["DUMP", "lock:rw"]).await;
        for micros in (0..3_000).step_by(100) {
            let limit = Duration::from_micros(micros);
            drop(tokio::time::timeout(limit, lock.read()).await);
            drop(tokio::time::timeout(limit, lock.write()).await);
        }
        for outcome in [lock.read().await.map(drop), lock.write().await.map(drop)] {
            assert!(matches!(outcome, Err(Error::WrongType { .. })), "{outcome:?}");
        }
        crate::support::eventually("the hash is unchanged", || async {
            server.run::<Vec<u8>>(&["DUMP", "lock:rw"]).await == before
        })
        .await;
        let _: i64 = server.run(&["DEL", "lock:rw"]).await;
    }
    drop(lock);
    server.assert_nothing_left().await;
}
