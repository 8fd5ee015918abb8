//! The key is gone, but waiters of its kind are still queued: a lock of another kind may have the
//! name.

use super::{KINDS, share};
use crate::support::raw::{RawLock, RawWaiter};
use crate::support::{Kind, Server};

/// Longer than a test: these waiters stay alive, although no client polls for them.
const ALIVE: u64 = 60_000;

/// The layout that a kind gives to its key.
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

async fn published(server: &Server) -> usize {
    server.run::<String>(&["INFO", "commandstats"]).await.matches("cmdstat_publish:").count()
}

/// Two waiters of `first` are queued and its key is gone. `second` takes the name, waits for it and
/// releases it as if they were not there; then `first` goes on with its own waiters, in their
/// order.
async fn passes_over_waiters(server: &Server, first: Kind, second: Kind, channel: &str) {
    let key =
        format!("{}-{}-{}", first.name(), second.name(), if channel.is_empty() { "polls" } else { "hears" });
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
    assert!(token.is_some(), "{what}: they do not block it");
    let found = layout(server, &key).await;
    assert!(is_of(second, &found), "{what}: {found:?}");
    assert_eq!(others.waiters().await, queue, "{what}: they keep their places");
    // One of its own kind queues behind them, and is the next all the same: a writer excludes every
    // other attempt.
    let rival = RawLock { kind: if second == Kind::Read { Kind::Write } else { second }, ..ours };
    let polling = RawWaiter { claim_ms: ALIVE, channel: "" };
    assert_eq!(rival.acquire("b2", 60_000, Some(polling)).await, None, "{what}");
    assert_eq!(ours.release("b1").await, 1, "{what}");
    let found = layout(server, &key).await;
    assert!(is_of(second, &found), "{what}: granted to its own waiter: {found:?}");
    assert_eq!(others.waiters().await, queue, "{what}: they keep their places");
    assert!(rival.acquire("b2", 60_000, Some(polling)).await > token, "{what}: it finds what it was granted");
    assert_eq!(rival.release("b2").await, 1, "{what}");
    assert_eq!(server.run::<u64>(&["EXISTS", &key]).await, 0, "{what}: granted to none of the other kind");
    assert_eq!(others.waiters().await, queue, "{what}: they keep their places");

    // A force of the other kind finds a free lock, and grants it to none of them either.
    let force = [["f1".to_owned()].as_slice(), &["0".to_owned()]].concat();
    let answer = ours.send(&crate::support::raw::script_of(second, "force"), &force).await.unwrap();
    assert_eq!(answer, redis::Value::Int(0), "{what}");
    assert_eq!(server.run::<u64>(&["EXISTS", &key]).await, 0, "{what}: granted to none of the other kind");
    assert_eq!(others.waiters().await, queue, "{what}: they keep their places");
    assert_eq!(published(server).await, 0, "{what}: no waiter of the other kind is notified");

    // The kind that was there first goes on in its order.
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
async fn waiters_of_another_kind_neither_block_nor_are_granted_after_the_key_is_gone() {
    let server = Server::start().await;
    for first in KINDS {
        for second in KINDS.into_iter().filter(|kind| !share(first, *kind)) {
            passes_over_waiters(&server, first, second, "").await;
            passes_over_waiters(&server, first, second, "lock:wake:00000000000000000000000000000000").await;
        }
    }
}

/// While the name is another kind's, a waiter that polls is refused, and leaves the queue when it
/// is released.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_refused_once_the_name_is_another_kinds() {
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
            let refused = others.send(&crate::support::raw::script_of(first, "acquire"), &acquire).await;
            assert_eq!(refused.unwrap(), redis::Value::Int(-2), "{key}");
            let release = others.releasing("a1", waiter);
            let refused = others.send(&crate::support::raw::script_of(first, "release"), &release).await;
            let expected: &[i64] = &[-2, 0]; // a mutex beside a string of no attempt of its own
            assert!(
                matches!(refused.unwrap(), redis::Value::Int(answer) if expected.contains(&answer)),
                "{key}"
            );
            before.assert_unchanged(&server, &key, "an attempt of another kind").await;
            assert!(others.waiters().await.is_empty(), "{key}: it has left the queue");
            assert_eq!(ours.release("b1").await, 1, "{key}");
        }
    }
}
