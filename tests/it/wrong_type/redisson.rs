//! Locks of this crate and the lock scripts of Redisson on the same keys.

use redis::Value;

use super::{KINDS, Snapshot, is_wrong_type, unrenewed};
use crate::support::{Kind, Oracle, Server, eventually, soon};

/// How an `RLock` acquires: the key must be absent, or have the caller's field. ARGV: field, TTL.
const LOCK: &str = "
    local taken = redis.call('EXISTS', KEYS[1]) == 1
    if taken and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return redis.call('PTTL', KEYS[1]) end
    redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 'granted'";

/// How the read lock of an `RReadWriteLock` acquires: the key must have no mode, the mode read, or
/// a write hold of the caller.
const READ: &str = "
    local mode = redis.call('HGET', KEYS[1], 'mode')
    local writes = mode == 'write' and redis.call('HEXISTS', KEYS[1], ARGV[1] .. ':write') == 1
    if mode and mode ~= 'read' and not writes then return redis.call('PTTL', KEYS[1]) end
    if not mode then redis.call('HSET', KEYS[1], 'mode', 'read') end
    redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 'granted'";

/// How the write lock of an `RReadWriteLock` acquires: the key must have no mode, or a write hold
/// of the caller.
const WRITE: &str = "
    local mode = redis.call('HGET', KEYS[1], 'mode')
    local writes = mode == 'write' and redis.call('HEXISTS', KEYS[1], ARGV[1] .. ':write') == 1
    if mode and not writes then return redis.call('PTTL', KEYS[1]) end
    if not mode then redis.call('HSET', KEYS[1], 'mode', 'write') end
    redis.call('HINCRBY', KEYS[1], ARGV[1] .. ':write', 1)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 'granted'";

const CALLER: &str = "3d7b6a52-1f0c-4c9a-9b1e-2a4f5c6d7e8f:31";

async fn acquire(server: &Server, script: &str, key: &str) -> redis::RedisResult<Value> {
    server.try_run(&["EVAL", script, "1", key, CALLER, "30000"]).await
}

fn is_granted(answer: &Value) -> bool {
    *answer == Value::BulkString(b"granted".to_vec())
}

/// Checks that the script waits, since its reply is a TTL, and changes nothing.
async fn waits(server: &Server, script: &str, key: &str, what: &str) {
    let before = Snapshot::of(server, key).await;
    let answer = acquire(server, script, key).await.unwrap();
    assert!(matches!(answer, Value::Int(1..)), "{what}: {answer:?}");
    before.assert_unchanged(server, key, what).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redisson_waits_while_read_write_lock_is_held() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    for (name, script) in [("lock", LOCK), ("read", READ), ("write", WRITE)] {
        let lock = locks.rwlock(name).unwrap();
        let writer = lock.write().await.unwrap();
        waits(&server, script, name, &format!("{name} beside a writer")).await;
        let waiting = tokio::spawn({
            let lock = lock.clone();
            async move { lock.read().await }
        });
        eventually("the waiter queues", || async {
            server.lock_state(lock.name()).await.waiting_readers == 1
        })
        .await;
        waits(&server, script, name, &format!("{name} beside a writer and a waiter")).await;
        writer.release().await.unwrap();
        let first = soon("the waiter is admitted", waiting).await.unwrap().unwrap();
        waits(&server, script, name, &format!("{name} beside a reader")).await;
        let second = lock.read().await.unwrap();
        waits(&server, script, name, &format!("{name} beside two readers")).await;
        first.release().await.unwrap();
        waits(&server, script, name, &format!("{name} beside the last reader")).await;
        second.release().await.unwrap();
        let alone = lock.read().await.unwrap();
        waits(&server, script, name, &format!("{name} beside a reader that is alone")).await;
        alone.release().await.unwrap();
        // Redisson acquires the free lock. Every kind of this crate with another layout refuses it.
        assert!(is_granted(&acquire(&server, script, name).await.unwrap()), "{name}");
        let before = Snapshot::of(&server, name).await;
        for kind in KINDS {
            let outcome = kind.lock(&locks, name).try_lock().await;
            let shares = kind == Kind::Reentrant && name == "lock";
            let is_expected = if shares { matches!(outcome, Ok(None)) } else { is_wrong_type(&outcome) };
            assert!(is_expected, "{kind:?} beside {name}: {outcome:?}");
        }
        before.assert_unchanged(&server, name, "a lock of ours").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redisson_waits_while_reentrant_lock_is_held() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    let lock = Kind::Reentrant.lock(&locks, "shared");
    let outer = lock.lock().await.unwrap();
    for (script, what) in [(LOCK, "an RLock"), (READ, "a read lock"), (WRITE, "a write lock")] {
        waits(&server, script, "shared", what).await;
        let inner = lock.lock().await.unwrap();
        waits(&server, script, "shared", &format!("{what} beside a nested hold")).await;
        inner.release().await.unwrap();
        waits(&server, script, "shared", &format!("{what} beside the outer hold")).await;
    }
    outer.release().await.unwrap();
    assert!(is_granted(&acquire(&server, LOCK, "shared").await.unwrap()));
    assert!(lock.try_lock().await.unwrap().is_none(), "Redisson holds the lock");
}

#[tokio::test(flavor = "multi_thread")]
async fn redisson_fails_while_mutex_is_held() {
    let server = Server::start().await;
    let locks = server.locks_with(unrenewed()).await;
    let guard = locks.mutex("mutex").unwrap().lock().await.unwrap();
    let before = Snapshot::of(&server, "mutex").await;
    for script in [LOCK, READ, WRITE] {
        let outcome = acquire(&server, script, "mutex").await;
        assert!(outcome.as_ref().is_err_and(|error| error.to_string().contains("WRONGTYPE")), "{outcome:?}");
        before.assert_unchanged(&server, "mutex", "Redisson").await;
    }
    guard.release().await.unwrap();
}
