//! A key was deleted while waiters of its kind are queued: a lock of another kind may take the
//! name.

use super::{KINDS, share};
use crate::support::raw::{RawLock, RawWaiter};
use crate::support::{Kind, Server};

/// A claim longer than a test: these waiters stay alive although no client polls for them.
const ALIVE: u64 = 60_000;

/// The layout of a key: a type or kind, and the fields of a hash.
async fn layout(server: &Server, key: &str) -> (String, Vec<String>) {
    let layout: String = server.run(&["TYPE", key]).await;
    if layout == "hash" {
        let mode: Option<String> = server.run(&["HGET", key, "mode"]).await;
        let mode = mode.unwrap_or_default();
        let kind = if mode.starts_with("reentrant ") { "reentrant" } else { "rwlock" };
        return (kind.to_owned(), server.run(&["HKEYS", key]).await);
    }
    (layout, Vec::new())
}

fn is_of(kind: Kind, (layout, fields): &(String, Vec<String>)) -> bool {
    let has = |name: &str| fields.iter().any(|field| field == name);
    match kind {
        Kind::Mutex => layout == "string",
        Kind::Reentrant => layout == "reentrant" && has("mode"),
        Kind::Read | Kind::Write => layout == "rwlock" && has("mode"),
    }
}

/// Two waiters of `first` are queued and its key is deleted. `second` acquires, waits and releases
/// as if these waiters did not exist. Then `first` continues with its waiters, in their order.
async fn passes_over_waiters(server: &Server, first: Kind, second: Kind, channel: &str) {
    let key =
        format!("{}-{}-{}", first.name(), second.name(), if channel.is_empty() { "poll" } else { "push" });
    let (ours, others) =
        (RawLock { server, kind: second, key: &key }, RawLock { server, kind: first, key: &key });
    let holder = RawLock { kind: if first == Kind::Read { Kind::Write } else { first }, ..others };
    let waiter = RawWaiter { claim_ms: ALIVE, channel };
    assert!(holder.acquire("a0", 60_000, None).await.is_some());
    assert_eq!(others.acquire("a1", 60_000, Some(waiter)).await, None);
    assert_eq!(others.acquire("a2", 60_000, Some(waiter)).await, None);
    let queue = others.waiters().await;
    assert_eq!(queue.len(), 2);
    server.run::<()>(&["DEL", &key]).await;

    let what = format!("{second:?} beside waiters of {first:?}");
    let token = ours.acquire("b1", 60_000, None).await;
    assert!(token.is_some(), "{what}: waiters of the other kind do not block it");
    let found = layout(server, &key).await;
    assert!(is_of(second, &found), "{what}: {found:?}");
    assert_eq!(others.waiters().await, queue, "{what}: waiters of the other kind keep their places");
    // A waiter of the second kind queues behind them, and is the next one all the same. It is a
    // writer where it could read beside the holder.
    let rival = RawLock { kind: if second == Kind::Read { Kind::Write } else { second }, ..ours };
    let polling = RawWaiter { claim_ms: ALIVE, channel: "" };
    assert_eq!(rival.acquire("b2", 60_000, Some(polling)).await, None, "{what}");
    assert_eq!(ours.release("b1").await, 1, "{what}");
    let found = layout(server, &key).await;
    assert!(is_of(second, &found), "{what}: granted to its own waiter: {found:?}");
    assert_eq!(others.waiters().await, queue, "{what}: waiters of the other kind keep their places");
    assert!(rival.acquire("b2", 60_000, Some(polling)).await > token, "{what}: a poll returns the grant");
    assert_eq!(rival.release("b2").await, 1, "{what}");
    assert_eq!(server.run::<u64>(&["EXISTS", &key]).await, 0, "{what}: not granted to the other kind");
    assert_eq!(others.waiters().await, queue, "{what}: waiters of the other kind keep their places");

    // A force release finds a free lock, and does not grant it to the other kind either.
    let answer = ours.send("release", &ours.forcing("f1")).await.unwrap();
    assert_eq!(answer, redis::Value::Int(0), "{what}");
    assert_eq!(server.run::<u64>(&["EXISTS", &key]).await, 0, "{what}: not granted to the other kind");
    assert_eq!(others.waiters().await, queue, "{what}: waiters of the other kind keep their places");
    assert_eq!(server.published().await, 0, "{what}: no waiter of the other kind is notified");

    // The waiters of the first kind acquire in their order.
    if channel.is_empty() {
        assert!(others.acquire("a1", 60_000, Some(waiter)).await > token, "{what}");
        let found = layout(server, &key).await;
        assert!(is_of(first, &found), "{what}: {found:?}");
        assert_eq!(others.release("a1").await, 1, "{what}");
        assert!(others.acquire("a2", 60_000, Some(waiter)).await > token, "{what}");
        assert_eq!(others.release("a2").await, 1, "{what}");
        assert!(others.waiters().await.is_empty(), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_another_kind_neither_block_nor_acquire_after_deletion() {
    let server = Server::start().await;
    for first in KINDS {
        for second in KINDS.into_iter().filter(|kind| !share(first, *kind)) {
            passes_over_waiters(&server, first, second, "").await;
            passes_over_waiters(&server, first, second, "lock:wake:00000000000000000000000000000000").await;
        }
    }
}

/// While another kind has the name, a waiter's poll is refused, and its release removes it from the
/// queue.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_refused_once_another_kind_has_the_name() {
    let server = Server::start().await;
    for first in KINDS {
        for second in KINDS.into_iter().filter(|kind| !share(first, *kind)) {
            let key = format!("{}-{}", first.name(), second.name());
            let (others, ours) = (
                RawLock { server: &server, kind: first, key: &key },
                RawLock { server: &server, kind: second, key: &key },
            );
            let holder = RawLock { kind: if first == Kind::Read { Kind::Write } else { first }, ..others };
            let waiter = RawWaiter { claim_ms: ALIVE, channel: "" };
            assert!(holder.acquire("a0", 60_000, None).await.is_some());
            assert_eq!(others.acquire("a1", 60_000, Some(waiter)).await, None);
            server.run::<()>(&["DEL", &key]).await;
            assert!(ours.acquire("b1", 60_000, None).await.is_some());
            let before = super::Snapshot::of(&server, &key).await;
            let acquire = others.acquiring("a1", 60_000, Some(waiter));
            let refused = others.send("acquire", &acquire).await;
            assert_eq!(refused.unwrap(), redis::Value::Int(-2), "{key}");
            let release = others.releasing("a1", waiter);
            let refused = others.send("release", &release).await;
            let expected: &[i64] = &[-2, 0]; // 0: a mutex beside another attempt's string
            assert!(
                matches!(refused.unwrap(), redis::Value::Int(answer) if expected.contains(&answer)),
                "{key}"
            );
            before.assert_unchanged(&server, &key, "an attempt of another kind").await;
            assert!(others.waiters().await.is_empty(), "{key}: the waiter has left the queue");
            assert_eq!(ours.release("b1").await, 1, "{key}");
        }
    }
}
