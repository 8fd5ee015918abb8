//! Fencing tokens, and the minimum tokens of requests.

use super::client::{Acquire, Answer, Client, KEYS, Request, path};
use crate::support::Server;
use Answer::{Busy, Final};

const ALL: [&str; 4] = ["mutex", "reentrant", "write", "read"];
const DAY: u64 = 86_400_000_000;

fn on_one_server(kind: &'static str) -> Acquire {
    Acquire { kind, is_for_quorum: false }
}

/// A holder that excludes this kind.
fn rival(kind: &'static str) -> Acquire {
    on_one_server(if kind == "read" { "write" } else { kind })
}

/// Minimum tokens that no right clock yields: nanoseconds, and a year ahead.
async fn too_large(client: &Client) -> [String; 3] {
    let now = client.time().await;
    [now * 1000, now + 365 * DAY, now + DAY + 60_000_000].map(|token| token.to_string())
}

#[tokio::test]
async fn acquire_refuses_min_token_far_ahead_of_clock() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for kind in ALL {
        let acquire = on_one_server(kind);
        for min_token in too_large(&client).await {
            let take = acquire.unfenced("o", "a").with("min_token", &min_token);
            let refused = async |path: &str| {
                let before = client.state().await;
                for request in [take.clone(), take.clone().queued()] {
                    let answer = request.send(&client).await;
                    assert_eq!(answer, Final(-5), "{kind} {path} {min_token}");
                    assert_eq!(client.state().await, before, "{kind} {path} {min_token}");
                }
            };
            refused("free").await;
            client.run::<()>(&["SET", KEYS[1], "20"]).await;
            refused("free, with a counter").await;
            assert!(matches!(rival(kind).fenced("p", "b", 0).send(&client).await, Final(1..)));
            refused("busy").await;
            assert_eq!(acquire.fenced("q", "c", 0).queued().send(&client).await, Busy);
            refused("busy, with a waiter").await;
            let _: i64 = client.run(&["DEL", KEYS[0]]).await;
            refused("free, with a waiter").await;
            client.flush().await;
            assert!(matches!(acquire.fenced("o", "b", 0).send(&client).await, Final(1..)));
            // The token of a nested hold is that of the first one.
            if kind == "mutex" {
                refused("held by another attempt").await;
            }
            client.flush().await;
        }
        // Less than a day ahead is accepted: the server's clock may have been set back.
        let ahead = (client.time().await + DAY - 60_000_000).to_string();
        let Final(token) = acquire.unfenced("o", "a").with("min_token", &ahead).send(&client).await else {
            panic!("{kind} must accept {ahead}");
        };
        assert!(token >= ahead.parse().unwrap(), "{kind}");
        client.flush().await;
    }
}

/// A release with such a minimum token must release the lock all the same, and must not corrupt the
/// next waiter's token.
#[tokio::test]
async fn release_and_force_ignore_min_token_far_ahead_of_clock() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for kind in ALL {
        for min_token in too_large(&client).await.iter().filter(|token| token.len() <= 16) {
            let acquire = rival(kind);
            let release = acquire.release("o", "a");
            let force = Request::new(&path(acquire.kind, "force"), &[("attempt", "f")]);
            for request in [release.clone(), release.with("remember", "1"), force] {
                for is_awaited in [false, true] {
                    assert!(matches!(acquire.fenced("o", "a", 0).send(&client).await, Final(1..)));
                    let waiting = on_one_server(kind).fenced("p", "b", 0).queued();
                    if is_awaited {
                        assert_eq!(waiting.send(&client).await, Busy);
                    }
                    let answer = request.clone().with("min_token", min_token).send(&client).await;
                    assert_eq!(answer, Final(1), "{kind} {min_token} {is_awaited}");
                    assert_eq!(client.exists(KEYS[0]).await, is_awaited, "{kind}: the waiter holds the lock");
                    let token: u64 = client.run(&["GET", KEYS[1]]).await;
                    assert!(token < client.time().await + 1000, "{kind}: {token}");
                    client.flush().await;
                }
            }
        }
    }
}

/// The counter may expire during the outer hold. A nested hold with a new token would make the
/// resource refuse the outer one.
#[tokio::test]
async fn nested_write_has_outer_token_without_counter() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let write = on_one_server("write");
    let Final(token @ 1..) = write.fenced("o", "a", 0).send(&client).await else {
        panic!("the lock is free")
    };
    let _: i64 = client.run(&["DEL", KEYS[1]]).await;
    assert_eq!(write.fenced("o", "a", 0).send(&client).await, Final(token), "a second delivery");
    assert_eq!(write.fenced("o", "b", 0).send(&client).await, Final(token), "a nested hold");
}

#[tokio::test]
async fn corrupt_counter_grants_no_token() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for spoilt in ["9007199254740992", "1790000000000000000", "9223372036854775807", "many"] {
        for kind in ALL {
            client.run::<()>(&["SET", KEYS[1], spoilt, "PX", "60000"]).await;
            let answer = on_one_server(kind).fenced("o", "a", 0).try_send(&client).await;
            assert!(answer.is_err(), "{kind} {spoilt}: {answer:?}");
            assert!(!client.exists("k").await, "{kind} {spoilt}");
            assert_eq!(
                client.run::<String>(&["GET", KEYS[1]]).await,
                spoilt,
                "{kind}: the value is unchanged"
            );
            client.flush().await;
        }
        // A reader beside a reader, and a queued one.
        let read = on_one_server("read");
        assert!(matches!(read.fenced("p", "b", 0).send(&client).await, Final(1..)));
        client.run::<()>(&["SET", KEYS[1], spoilt, "PX", "60000"]).await;
        let answer = read.fenced("o", "a", 0).try_send(&client).await;
        assert!(!matches!(answer, Ok(Final(9_007_199_254_740_992..))), "{spoilt}: {answer:?}");
        client.flush().await;
    }
}

/// The outer hold is Redisson's `RLock`, or was acquired without fencing.
#[tokio::test]
async fn nested_hold_has_token_inside_unfenced_hold() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let reentrant = on_one_server("reentrant");
    let owner = "8743c9c0-0795-4907-87fd-6c719a6b4586:1";
    let _: i64 = client.run(&["HSET", "k", owner, "1"]).await;
    let _: i64 = client.run(&["PEXPIRE", "k", "30000"]).await;
    let Final(token @ 1..) = reentrant.fenced(owner, "a", 0).twice(&client).await else { panic!("no token") };
    assert_eq!(client.run::<u64>(&["HGET", "k", owner]).await, 2);
    assert_eq!(reentrant.fenced(owner, "b", 0).twice(&client).await, Final(token), "one token");
    assert_eq!(reentrant.fenced("another", "c", 0).send(&client).await, Busy);
    for (attempt, left) in [("b", 3), ("a", 2)] {
        assert_eq!(reentrant.release(owner, attempt).send(&client).await, Final(left));
    }
    assert_eq!(client.run::<u64>(&["HGET", "k", owner]).await, 1, "the hold of the other library");
    client.flush().await;

    for kind in ["reentrant", "write"] {
        let acquire = on_one_server(kind);
        assert_eq!(acquire.unfenced("o", "a").send(&client).await, Final(0), "{kind}");
        let nested = acquire.fenced("o", "b", 0).send(&client).await;
        let Final(token @ 1..) = nested else { panic!("{kind}: {nested:?}") };
        assert_eq!(acquire.fenced("o", "c", 0).send(&client).await, Final(token), "{kind}");
        client.flush().await;
    }
}
