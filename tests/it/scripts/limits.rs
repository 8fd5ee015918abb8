//! Limits: the number of an owner's holds, and the time until which an attempt may be granted.

use super::client::{Acquire, Answer, Client, KEYS};
use crate::support::Server;
use Answer::{Busy, Final};

/// The number of read holds of the owner `o`.
async fn holds(client: &Client) -> usize {
    let field: Option<String> = client.run(&["HGET", KEYS[0], "read:o"]).await;
    field.map_or(0, |words| words.split(' ').count() - 1)
}

#[tokio::test]
async fn owner_with_4000_queued_reads_never_exceeds_max_depth() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [read, write] = ["read", "write"].map(|kind| Acquire { kind, is_for_quorum: false });
    assert!(matches!(write.fenced("w", "w", 0).send(&client).await, Final(1..)));
    let attempts: Vec<String> = (0..4000).map(|number| format!("r{number}")).collect();
    // A claim of a minute: no waiter is considered dead while the test queues the others.
    let take = |attempt: &str| read.fenced("o", attempt, 0).with("claim_ms", "60000");
    for attempt in &attempts {
        assert_eq!(take(attempt).send(&client).await, Busy);
    }
    assert_eq!(write.release("w", "w").send(&client).await, Final(1));
    let admitted = holds(&client).await;
    assert!((1..=255).contains(&admitted), "{admitted} holds");
    let mut granted = Vec::new();
    for attempt in &attempts {
        match take(attempt).send(&client).await {
            Final(1..) => granted.push(attempt),
            answer => assert_eq!(answer, Final(-4), "{attempt}"),
        }
        let holds = holds(&client).await;
        assert!(holds <= 255, "{attempt}: {holds} holds");
    }
    assert_eq!(granted.len(), 255, "the owner has max_depth holds");
    // A refused attempt is ended by its client; the others leave one after another.
    for attempt in attempts.iter().filter(|attempt| !granted.contains(attempt)) {
        let end = read.release("o", attempt).with("claim_ms", "60000");
        assert!(matches!(end.send(&client).await, Final(0..)));
    }
    assert_eq!(client.waiters().await, 0);
    for (index, attempt) in granted.iter().enumerate() {
        let answer = read.release("o", attempt).send(&client).await;
        assert_eq!(answer, Final(255 - i64::try_from(index).unwrap()), "{attempt}");
    }
    assert!(!client.exists("k").await);
}

#[tokio::test]
async fn attempt_is_refused_after_grant_before() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&["mutex", "reentrant", "write", "read"]) {
        let kind = acquire.kind;
        let rival = Acquire { kind: if kind == "read" { "write" } else { kind }, is_for_quorum: false };
        let take = || acquire.fenced("o", "a", 100);
        let refused = async |path: &str| {
            let before = client.state().await;
            for ago in [0, 1, 62_000_000] {
                let late = take().with("grant_before", &(client.time().await - ago).to_string());
                for request in [late.clone(), late.queued()] {
                    assert_eq!(request.send(&client).await, Final(-1), "{acquire:?} {path}");
                    assert_eq!(client.state().await, before, "{acquire:?} {path}");
                }
            }
        };
        let in_time = async |request: super::client::Request| {
            let minute = client.time().await + 60_000_000;
            request.with("grant_before", &minute.to_string()).send(&client).await
        };
        refused("free").await;
        assert!(matches!(rival.unfenced("p", "b").send(&client).await, Final(0)));
        refused("busy").await;
        assert_eq!(in_time(take().queued()).await, Busy);
        refused("queued").await;
        assert_eq!(rival.release("p", "b").send(&client).await, Final(1));
        refused("granted by a release").await;
        // On a quorum, the proposal must be larger than the release's token.
        let proposal = client.time().await + 1_000_000;
        let found = in_time(acquire.fenced("o", "a", proposal)).await;
        assert!(matches!(found, Final(1..)), "{acquire:?}: {found:?}");
        refused("held").await;
        client.flush().await;
        assert!(matches!(in_time(take()).await, Final(1..)), "{acquire:?}");
        client.flush().await;
    }
}
