//! Requests to a full server, and to one that refuses writes.

use super::client::{Acquire, Answer, Client};
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
