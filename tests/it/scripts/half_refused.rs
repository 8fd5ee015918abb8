//! Users without a right that a call needs half-way: what has happened by then is the answer, and
//! the error of one lock is that lock's.

use std::collections::BTreeMap;

use redis::Value;

use super::client::{Acquire, Answer, Client, KEYS};
use super::commands;
use super::missing_rights::{PAIR, joined, limited, run};
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
        ("write", "pttl"),
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
        // The script of read-write locks asks for the TTL of a lost lock as well.
        let is_refused = (kind, without) == ("write", "pttl") && matches!(answers[1], Value::BulkString(_));
        let is_lost = matches!(answers[1], Value::Int(0));
        assert!(matches!(answers[0], Value::BulkString(_)) && (is_lost || is_refused), "{kind}: {answers:?}");
    }
}

/// To grant the second lock of the pair takes more rights then.
async fn queue_dead_waiter(client: &Client, kind: &str, time: u64) {
    let rest = if kind == "mutex" { "" } else { "d 255" };
    let (place, dead) = ((time - 9_000_000).to_string(), format!("d {kind} 1000  {rest}"));
    client.run::<()>(&["ZADD", PAIR[3], &place, &dead]).await;
    client.run::<()>(&["PEXPIRE", PAIR[3], "60000"]).await;
}

/// With `all`, a lock whose grant is taken back is free, and its node has accepted no token.
#[tokio::test]
async fn refused_command_for_one_of_all_locks_takes_back_the_others() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut refused = 0;
    for command in commands() {
        let limited = limited(&server, &client, &command).await;
        for kind in ["mutex", "reentrant", "write"] {
            client.flush().await;
            let time = client.time().await;
            queue_dead_waiter(&client, kind, time).await;
            let acquire = Acquire { kind, is_for_quorum: true };
            let request = acquire.fenced("a", "a", time).with("all", "1");
            let answer = run(&limited, kind, &PAIR, &joined(&request, &request)).await;
            let token = Value::Int(time.try_into().unwrap());
            if matches!(&answer, Ok(Value::Array(answers)) if answers[..] == [token.clone(), token]) {
                continue;
            }
            refused += 1;
            let fence: Option<u64> = client.run(&["GET", PAIR[4]]).await;
            let state = (client.exists(PAIR[0]).await, fence.unwrap_or(0));
            assert_eq!(state, (false, 0), "without {command}: {kind}: {answer:?}");
        }
    }
    assert!(refused > 10, "only {refused} were refused");
}

/// The same where the attempt waited for one of the locks, which had become free: its own place was
/// granted the lock in this call. Redis 6.2 has no rights for some keys only.
#[tokio::test]
async fn refused_command_for_one_of_all_locks_takes_back_what_was_waited_for() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let user = ["ACL", "SETUSER", "one", "on", ">secret", "~*", "+@all", "-incrby", "(+incrby ~{k1}*)"];
    if client.try_run::<()>(&user).await.is_err() {
        return;
    }
    let limited = Client::of(&server).await;
    limited.run::<()>(&["AUTH", "one", "secret"]).await;
    for kind in ["mutex", "reentrant", "write"] {
        client.flush().await;
        let time = client.time().await;
        let own = format!("a {kind} 60000  {}", if kind == "mutex" { "" } else { " 255" });
        client.run::<()>(&["ZADD", PAIR[2], &time.to_string(), &own]).await;
        client.run::<()>(&["PEXPIRE", PAIR[2], "60000"]).await;
        let request = Acquire { kind, is_for_quorum: false }.fenced("a", "a", 1).with("all", "1");
        let answer = run(&limited, kind, &PAIR, &joined(&request, &request)).await;
        let is_refused = matches!(&answer, Ok(Value::Array(answers))
            if matches!(answers[..], [Value::Int(-10), Value::BulkString(_)]));
        assert!(is_refused && !client.exists(PAIR[0]).await, "{kind}: {answer:?}");
    }
}

/// The same inside another hold of the owner, which stays.
#[tokio::test]
async fn refused_command_for_one_of_all_locks_leaves_an_outer_hold_as_it_was() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut refused = 0;
    for command in commands() {
        let limited = limited(&server, &client, &command).await;
        for kind in ["reentrant", "write"] {
            client.flush().await;
            let time = client.time().await;
            queue_dead_waiter(&client, kind, time).await;
            let acquire = Acquire { kind, is_for_quorum: true };
            let outer = acquire.fenced("me", "outer", time).with("ttl_ms", "20000");
            run(&client, kind, &[PAIR[0], PAIR[2], PAIR[4]], &outer.arguments()).await.unwrap();
            let before: BTreeMap<String, String> = client.run(&["HGETALL", PAIR[0]]).await;
            let request = acquire.fenced("me", "inner", time).with("ttl_ms", "60000").with("all", "1");
            let answer = run(&limited, kind, &PAIR, &joined(&request, &request)).await;
            let is_granted = |answer: &Value| matches!(answer, Value::Int(1..));
            if matches!(&answer, Ok(Value::Array(answers)) if answers.iter().all(is_granted)) {
                continue;
            }
            refused += 1;
            if kind == "write" && command == "hdel" {
                continue; // to take a nested hold back is to remove a field
            }
            let what = format!("without {command}: {kind}: {answer:?}");
            let after: BTreeMap<String, String> = client.run(&["HGETALL", PAIR[0]]).await;
            // A write hold is taken back by a release: the lock has another form then, and may last
            // longer, as after each nested hold.
            let is_released = kind == "write";
            assert!(is_released || after == before, "{what}: {after:?}");
            assert!(!after.values().any(|hold| hold.contains("inner")), "{what}: {after:?}");
            assert!(is_released || client.run::<i64>(&["PTTL", PAIR[0]]).await <= 20_000, "{what}");
        }
    }
    assert!(refused > 10, "only {refused} were refused");
}

/// No lock of a call is granted before the node has noted its token and its lease.
#[tokio::test]
async fn refused_note_of_the_node_grants_none_of_several_locks() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let limited = limited(&server, &client, "hset").await;
    client.run::<()>(&["HSET", "node", "run", "r"]).await;
    let time = client.time().await;
    let attempts = ["a", "b", "c", "", "", ""].map(str::to_owned);
    let proposals = [3, 2, 1].map(|more| (time + more).to_string());
    let shared = ["60000", "", "", "", "", "", "", "", "", "r"].map(str::to_owned);
    let keys =
        ["", ":waiters", ":fence"].map(|end| ["k1", "k2", "k3"].map(|lock| format!("{{{lock}}}{end}")));
    let keys: Vec<&str> = keys.iter().flatten().map(String::as_str).chain(["node"]).collect();
    let words = ["acquire".to_owned()].into_iter().chain(attempts).chain(proposals).chain(shared);
    let answers = run(&limited, "mutex", &keys, &words.collect::<Vec<_>>()).await.unwrap();
    let Value::Array(answers) = answers else { panic!("{answers:?}") };
    assert!(answers.iter().all(|answer| !matches!(answer, Value::Int(_))), "{answers:?}");
}

/// If the former attempt kept the hold, two would continue it.
#[tokio::test]
async fn refused_adoption_leaves_the_hold_to_its_attempt() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for (kind, without) in [("mutex", "set"), ("reentrant", "hdel"), ("reentrant", "hset"), ("write", "hset")]
    {
        client.flush().await;
        let acquire = Acquire { kind, is_for_quorum: false };
        assert!(matches!(acquire.fenced("o", "a", 7).send(&client).await, Final(1..)));
        let limited = limited(&server, &client, without).await;
        let adopting = acquire.renew("o", "a").with("successor", "s");
        assert!(adopting.try_send(&limited).await.is_err(), "{kind} without {without}");
        assert!(matches!(acquire.renew("o", "a").send(&client).await, Final(1..)), "{kind}");
        assert_eq!(acquire.renew("o", "s").send(&client).await, Final(0), "{kind} without {without}");
    }
}

/// The same for the lease that a node notes, for which its next admission waits.
#[tokio::test]
async fn refused_note_of_the_node_adopts_nothing() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    client.run::<()>(&["HSET", "node", "run", "r", "ttl", "1000"]).await;
    let limited = limited(&server, &client, "hset").await;
    let held: Vec<String> = ["acquire", "a", "", "", "60000", "1"].map(str::to_owned).to_vec();
    run(&client, "mutex", &KEYS, &held).await.unwrap();
    let adopting: Vec<String> = ["renew", "a", "90000", "s", "r"].map(str::to_owned).to_vec();
    let keys = [&KEYS[..], &["node"]].concat();
    assert!(run(&limited, "mutex", &keys, &adopting).await.is_err());
    assert_eq!(client.run::<String>(&["GET", KEYS[0]]).await, "a");
}

/// A minimum token from a clock that is far ahead is refused. The counter that was made for it is
/// removed, or expires.
#[tokio::test]
async fn refused_minimum_token_leaves_no_counter_for_ever() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for without in ["del", "pexpire", "set"] {
        let limited = limited(&server, &client, without).await;
        for kind in ["mutex", "reentrant", "write"] {
            client.flush().await;
            let acquire = Acquire { kind, is_for_quorum: false };
            let refused = acquire.fenced("o", "a", 7).with("min_token", "4000000000000000");
            let _refused_or_failed = refused.try_send(&limited).await;
            assert_ne!(client.run::<i64>(&["PTTL", KEYS[2]]).await, -1, "{kind} without {without}");
        }
    }
}
