//! Users without a right that a call needs half-way: what has happened by then is the answer, and
//! the error of one lock is that lock's.

use redis::Value;

use super::client::{Acquire, Answer, Client, KEYS};
use super::missing_rights::{PAIR, joined, limited};
use crate::support::Server;
use crate::support::raw::script;
use Answer::{Busy, Final};

/// A release finds a dead waiter, which has the lock for its claim by the time that a right is
/// missing. The hold that was released is over, so the answer is not an error.
#[tokio::test]
async fn release_that_passed_the_lock_on_is_no_error() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let channel = format!("wake:{:032x}", 7); // without a subscriber
    for kind in ["mutex", "reentrant"] {
        for (without, force) in [("del", false), ("del", true), ("zscore", false)] {
            client.flush().await;
            let limited = limited(&server, &client, without).await;
            let acquire = Acquire { kind, is_for_quorum: false };
            assert!(matches!(acquire.fenced("a", "a", 1).send(&client).await, Final(1..)));
            let time = client.time().await;
            for (waiter, age) in [("w", 0), ("v", 60_000_000)] {
                let waits =
                    acquire.fenced(waiter, waiter, 1).with("claim_ms", "3000").with("channel", &channel);
                let place = (time + 1 - age).to_string();
                assert_eq!(waits.with("queued_at", &place).send(&client).await, Busy);
            }
            if without == "zscore" {
                // The second waiter counts as alive only by a mark, which that user may not read.
                let _: i64 = client.run(&["ZREM", KEYS[1], "seen v", "seen w"]).await;
                let entries: Vec<String> = client.run(&["ZRANGE", KEYS[1], "0", "-1"]).await;
                let live = entries.iter().find(|entry| entry.starts_with("w ")).unwrap();
                let _: i64 = client.run(&["ZADD", KEYS[1], &(time - 90_000_000).to_string(), live]).await;
                let _: i64 = client
                    .run(&[
                        "ZADD",
                        KEYS[1],
                        &(time + 4_503_599_627_370_496 + 90_000_000).to_string(),
                        "seen w",
                    ])
                    .await;
            }
            let release = if force { acquire.force("f") } else { acquire.release("a", "a") };
            let answer = release.try_send(&limited).await;
            let is_held = acquire.renew("a", "a").send(&client).await != Final(0);
            assert_eq!(answer.is_err(), is_held, "{kind} without {without}, force {force}: {answer:?}");
        }
    }
}

/// The first of two leases may not be renewed for lack of a right; the second was lost.
#[tokio::test]
async fn refused_renewal_is_the_answer_of_its_lock() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for (kind, without) in [
        ("mutex", "pexpire"),
        ("reentrant", "pexpire"),
        ("write", "pexpire"),
        ("mutex", "pttl"),
        ("reentrant", "pttl"),
    ] {
        client.flush().await;
        let limited = limited(&server, &client, without).await;
        let acquire = Acquire { kind, is_for_quorum: false };
        let taken = acquire.unfenced("a", "a");
        let text = script(&taken.verb.script);
        let send = async |client: &Client, arguments: Vec<String>| {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let words: Vec<&str> = ["EVAL", &text, "6"].into_iter().chain(PAIR).chain(arguments).collect();
            client.run::<Vec<Value>>(&words).await
        };
        send(&client, joined(&taken, &taken)).await;
        let _: i64 = client.run(&["DEL", PAIR[1]]).await;
        let _: i64 = client.run(&["PEXPIRE", PAIR[0], "30000"]).await;
        let renew = acquire.renew("a", "a");
        let answers = send(&limited, joined(&renew, &renew)).await;
        assert!(matches!(answers[..], [Value::BulkString(_), Value::Int(0)]), "{kind}: {answers:?}");
    }
}
