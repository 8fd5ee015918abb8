//! Requests to a full server, and to one that refuses writes.

use super::client::{Acquire, Answer, Client, KEYS};
use crate::support::Server;
use Answer::{Busy, Final};

const ALL: [&str; 4] = ["mutex", "reentrant", "write", "read"];

/// A full server still runs releases. A server that refuses writes answers with an error and
/// changes nothing.
#[tokio::test]
async fn release_succeeds_on_full_server_and_fails_if_writes_are_refused() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let set = async |name, value| client.run::<()>(&["CONFIG", "SET", name, value]).await;
    for acquire in Acquire::all(&ALL) {
        let take = |attempt| acquire.fenced("o", attempt, 100);
        let end = |attempt| acquire.release("o", attempt).with("remember", "1");
        set("maxmemory", "1").await;
        assert_eq!(end("full").send(&client).await, Final(0), "{acquire:?}");
        set("maxmemory", "0").await;
        assert_eq!(take("full").send(&client).await, Final(-1), "{acquire:?}");
        set("min-replicas-to-write", "1").await;
        let error = end("refused").try_send(&client).await.unwrap_err();
        assert!(error.to_string().contains("NOREPLICAS"), "{acquire:?}: {error}");
        set("min-replicas-to-write", "0").await;
        assert!(matches!(take("refused").send(&client).await, Final(1..)), "{acquire:?}");
        set("maxmemory", "1").await;
        assert_eq!(end("refused").send(&client).await, Final(1), "{acquire:?}");
        set("maxmemory", "0").await;
        client.flush().await;
    }
}

/// The successor of a hold gets it on a full server too, since that is no more than a renewal.
#[tokio::test]
async fn hold_is_handed_over_on_full_server() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&ALL) {
        assert!(matches!(acquire.fenced("o", "holder", 100).send(&client).await, Final(1..)), "{acquire:?}");
        client.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        let handed = acquire.renew("o", "holder").with("successor", "next");
        for _ in 0..2 {
            assert!(matches!(handed.send(&client).await, Final(1..)), "{acquire:?}");
        }
        assert!(matches!(acquire.renew("o", "next").send(&client).await, Final(1..)), "{acquire:?}");
        assert_eq!(acquire.renew("o", "holder").send(&client).await, Final(0), "{acquire:?}");
        assert_eq!(acquire.release("o", "next").send(&client).await, Final(1), "{acquire:?}");
        client.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
        client.flush().await;
    }
}

/// Also if the release leaves the lock held for a time.
#[tokio::test]
async fn release_keeps_a_lock_held_on_full_server() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&ALL) {
        for remembers in [false, true] {
            assert!(
                matches!(acquire.fenced("o", "holder", 100).send(&client).await, Final(1..)),
                "{acquire:?}"
            );
            let release = acquire.release("o", "holder").with("keep_ms", "50000");
            let release = if remembers { release.with("remember", "1") } else { release };
            client.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
            assert_eq!(release.send(&client).await, Final(1), "{acquire:?}");
            client.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
            assert_eq!(acquire.renew("o", "holder").send(&client).await, Final(0), "{acquire:?}");
            let left: i64 = client.run(&["PTTL", KEYS[0]]).await;
            assert!((1..=50_000).contains(&left), "{acquire:?}: {left}");
            client.flush().await;
        }
    }
}

/// Each poll, also if the queue need not be extended, and if it must be.
#[tokio::test]
async fn polls_of_a_full_server_are_refused() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&ALL) {
        assert!(matches!(acquire.fenced("o", "holder", 100).send(&client).await, Final(1..)), "{acquire:?}");
        let waiter = || acquire.fenced("p", "waiter", 100).with("claim_ms", "5000");
        if !matches!(waiter().send(&client).await, Busy) {
            continue; // a second reader
        }
        let poll = || waiter().with("queued_at", "1700000000000000");
        let set = async |value| client.run::<()>(&["CONFIG", "SET", "maxmemory", value]).await;
        for _ in 0..3 {
            set("1").await;
            let error = poll().try_send(&client).await.unwrap_err();
            assert!(error.to_string().contains("OOM"), "{acquire:?}: {error}");
            set("0").await;
            assert!(matches!(poll().send(&client).await, Busy), "{acquire:?}");
        }
        client.flush().await;
    }
}

/// A full server refuses only the first write of a script: one before that of the token, even of
/// nothing, is enough.
#[tokio::test]
async fn lock_is_handed_over_on_full_server() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&ALL) {
        assert!(matches!(acquire.fenced("o", "holder", 100).send(&client).await, Final(1..)), "{acquire:?}");
        let waiter = acquire.fenced("p", "waiter", 100).with("claim_ms", "5000");
        if !matches!(waiter.send(&client).await, Busy) {
            client.flush().await;
            continue; // a second reader
        }
        client.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        assert_eq!(acquire.release("o", "holder").send(&client).await, Final(1), "{acquire:?}");
        assert_eq!(client.run::<u64>(&["EXISTS", KEYS[0]]).await, 1, "{acquire:?}: the lock is free");
        client.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
        client.flush().await;
    }
}
