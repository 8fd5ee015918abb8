//! Every ordered pair of a key that is there and a lock of another kind on the same name.

use std::time::{Duration, Instant};

use redis::Value;
use redlatch::{Error, Locks, Owner};

use super::{KINDS, Snapshot, assert_no_waiter, is_wrong_type, share, unrenewed};
use crate::support::raw::{RawLock, RawWaiter, script_of};
use crate::support::{AnyGuard, AnyLock, Kind, Server, soon};

/// A refusal that took less was not the end of a wait.
const AT_ONCE: Duration = Duration::from_secs(2);

/// A key of another program, by the commands that make it.
struct Foreign {
    name: &'static str,
    commands: &'static [&'static str],
    /// The kind that waits for such a key instead of refusing it.
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

/// Every request of `kind` is refused at once, and the key stays as it is.
async fn refuses(server: &Server, locks: &Locks, kind: Kind, key: &str) {
    let lock = kind.lock(locks, key);
    let before = Snapshot::of(server, key).await;
    let what = format!("{kind:?} beside {key}");
    let start = Instant::now();
    let outcome = lock.try_lock().await;
    assert!(is_wrong_type(&outcome), "{what}: try_lock: {outcome:?}");
    let outcome = lock.lock_timeout(Duration::from_secs(10)).await;
    assert!(is_wrong_type(&outcome), "{what}: lock_timeout: {outcome:?}");
    let outcome = soon("refused", lock.lock()).await;
    assert!(is_wrong_type(&outcome), "{what}: lock: {outcome:?}");
    let outcome = lock.force_release().await;
    assert!(is_wrong_type(&outcome), "{what}: force_release: {outcome:?}");
    assert!(start.elapsed() < AT_ONCE, "{what}: {:?}", start.elapsed());
    // A mutex shows any string; without a TTL it cannot be taken.
    if !(kind == Kind::Mutex && key.contains("string-without-ttl")) {
        let outcome = lock.inspect().await;
        assert!(is_wrong_type(&outcome), "{what}: inspect: {outcome:?}");
        let outcome = match &lock {
            AnyLock::Mutex(lock) => lock.is_locked().await,
            AnyLock::Reentrant(lock, owner) => lock.is_held_by(owner).await,
            AnyLock::Read(lock, owner) => lock.is_held_by(owner).await,
            AnyLock::Write(lock) => lock.is_held_by(&Owner::new()).await,
        };
        assert!(is_wrong_type(&outcome), "{what}: is_locked or is_held_by: {outcome:?}");
    }
    soon("nothing is left to release", locks.settled()).await;
    before.assert_unchanged(server, key, &what).await;
    assert_no_waiter(server, key, &what).await;
    scripts_refuse(RawLock { server, kind, key }, &before, &what).await;
}

/// The same for the scripts that a client sends only for what it holds, and for those of a quorum's
/// nodes.
async fn scripts_refuse(lock: RawLock<'_>, before: &Snapshot, what: &str) {
    let waiter = RawWaiter { claim_ms: 3_000, channel: "" };
    let attempt = format!("attempt-{}", lock.kind.name());
    let acquire = lock.acquiring(&attempt, 60_000, Some(waiter));
    let owner = (lock.kind != Kind::Mutex).then(|| format!("owner-{attempt}"));
    let head: Vec<String> = acquire.iter().take(2).cloned().chain(owner.clone()).collect();
    let words = |more: &[&str]| head.iter().cloned().chain(more.iter().map(ToString::to_string)).collect();
    // attempt ttl_ms [owner] proposal purpose claim_ms channel [max_depth] queued_at
    let depth: &[&str] = if owner.is_some() { &[""] } else { &[] };
    let proposes = |purpose| words(&[&["1", purpose, "3000", ""], depth, &["1"]].concat());
    let quorum = format!("quorum/{}_acquire", lock.kind.name());
    let mut requests = vec![
        (script_of(lock.kind, "renew"), words(&[])),
        (quorum.clone(), proposes("")),
        (quorum.clone(), proposes("nested")),
        (quorum, proposes("repair")),
    ];
    if matches!(lock.kind, Kind::Read | Kind::Write) {
        requests.push(("rwlock/downgrade".to_owned(), words(&["0"])));
        requests.push(("quorum/downgrade".to_owned(), words(&["0"])));
    }
    // The last one: what it has ended is refused from then on.
    requests.push((script_of(lock.kind, "release"), lock.releasing(&attempt, waiter)));
    for (script, arguments) in requests {
        let answer = lock.send(&script, &arguments).await.unwrap();
        let what = format!("{what}: {script} {arguments:?}");
        // To release and to renew a mutex need not look at the TTL of a string that is not the
        // attempt's.
        let refusal = if matches!(answer, Value::Int(-3..=-2 | 0)) { None } else { Some(&answer) };
        assert_eq!(refusal, None, "{what}");
        before.assert_unchanged(lock.server, lock.key, &what).await;
        assert_no_waiter(lock.server, lock.key, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_other_kinds_are_refused_and_stay_as_they_are() {
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
                // The name is free for the other kind now.
                let guard = kind.lock(&others, &key).try_lock().await.unwrap();
                guard.expect("it is free").release().await.unwrap();
            }
        }
    }
}

/// A read-write lock has other layouts as well: several readers, and a writer that waits beside
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn read_write_locks_with_several_holds_are_refused_and_stay_as_they_are() {
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
async fn keys_of_other_programs_are_refused_and_stay_as_they_are() {
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

/// A waiter of a key that another program holds, and the key as it was before.
async fn waits(server: &Server, locks: &Locks, kind: Kind, key: &str) -> AnyGuard {
    let lock = kind.lock(locks, key);
    let before = Snapshot::of(server, key).await;
    assert!(lock.try_lock().await.unwrap().is_none(), "{key}");
    let outcome = lock.lock_timeout(Duration::from_millis(300)).await;
    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{key}: {outcome:?}");
    assert_eq!(lock.inspect().await.unwrap().holders.len(), 1, "{key}");
    assert!(lock.is_locked().await, "{key}");
    soon("it has left the queue", locks.settled()).await;
    before.assert_unchanged(server, key, "a waiter").await;
    let waiting = tokio::spawn({
        let lock = lock.for_another();
        async move { lock.lock().await }
    });
    crate::support::eventually("it queues", || async { lock.waiters().await == 1 }).await;
    before.assert_unchanged(server, key, "a waiter that is queued").await;
    server.run::<()>(&["DEL", key]).await;
    soon("free", waiting).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_libraries_that_share_the_layout_are_waited_for() {
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
