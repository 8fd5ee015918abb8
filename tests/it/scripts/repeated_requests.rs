//! Requests that arrive twice or late, on full servers, or beside foreign values.

use super::client::{Acquire, Answer, Client, KEYS, NODE, Request};
use crate::support::Server;
use Answer::{Busy, Final, Low};

const EXCLUSIVE: [&str; 3] = ["mutex", "reentrant", "write"];
const ALL: [&str; 4] = ["mutex", "reentrant", "write", "read"];

async fn every_script_may_arrive_twice(kind: &'static str) {
    for acquire in Acquire::all(&[kind]) {
        may_arrive_twice(acquire).await;
    }
}

async fn may_arrive_twice(acquire: Acquire) {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let take = |owner, attempt, proposal| acquire.fenced(owner, attempt, proposal);
    let end = |owner, attempt| acquire.release(owner, attempt).with("remember", "1");

    let Final(token @ 1..) = take("o1", "a1", 100).twice(&client).await else { panic!("the lock is free") };
    // On one server the counter chooses the token; on a quorum the client does.
    let next = |more: i64| Final(if acquire.is_for_quorum { 100 + 100 * more } else { token + more });
    assert_eq!(take("o2", "a2", 200).queued().twice(&client).await, Busy);
    assert_eq!(client.waiters().await, 1);
    let held = acquire.renew("o1", "a1").twice(&client).await;
    assert!(matches!(held, Final(1_000_000_000_000_000..)));
    assert_eq!(acquire.renew("o2", "a2").twice(&client).await, Final(0), "a stranger");
    assert_eq!(acquire.release("o2", "a3").twice(&client).await, Final(0), "a stranger");

    // The release grants the lock to the waiter, which then gets a larger token. A second delivery
    // of the release must not revoke that.
    assert_eq!(end("o1", "a1").twice(&client).await, Final(1));
    assert_eq!(take("o2", "a2", 200).queued().twice(&client).await, next(1));
    // An attempt that was ended stays ended.
    assert_eq!(take("o1", "a1", 300).twice(&client).await, Final(-1));

    // A second delivery of force revokes nothing.
    assert_eq!(acquire.force("f1").twice(&client).await, Final(1));
    assert!(!client.exists("k").await);
    // On one server, force takes a token of its own.
    let after_force = if acquire.is_for_quorum { next(2) } else { next(3) };
    assert_eq!(take("o3", "a4", 300).twice(&client).await, after_force);
    assert_eq!(acquire.force("f1").twice(&client).await, Final(1));
    assert!(client.exists("k").await, "the late delivery revoked nothing");

    // An attempt that was ended before its request arrives is refused, and leaves the queue.
    assert_eq!(take("o5", "a5", 400).queued().twice(&client).await, Busy);
    assert_eq!(end("o5", "a5").queued().twice(&client).await, Final(0));
    assert_eq!(take("o5", "a5", 400).queued().twice(&client).await, Final(-1));
    assert_eq!(client.waiters().await, 0);

    for key in KEYS {
        assert!(client.run::<i64>(&["PTTL", key]).await > 0, "{key} has a TTL");
    }
    let end_marks: i64 = client.run(&["PTTL", KEYS[2]]).await;
    assert!(end_marks <= 60_000, "end marks are kept for a minute");
}

#[tokio::test]
async fn scripts_mutex_standalone_may_arrive_twice() {
    every_script_may_arrive_twice("mutex").await;
}

#[tokio::test]
async fn scripts_reentrant_standalone_may_arrive_twice() {
    every_script_may_arrive_twice("reentrant").await;
    // The counts are right in any interleaving of two requests of one owner.
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let acquire = Acquire { kind: "reentrant", is_for_quorum: false };
    for (attempt, count) in [("a", 1), ("b", 2), ("a", 2), ("b", 2), ("c", 3), ("a", 3)] {
        assert!(matches!(acquire.fenced("o", attempt, 1).send(&client).await, Final(1..)), "{attempt}");
        assert_eq!(client.run::<u64>(&["HGET", "k", "o"]).await, count, "{attempt}");
    }
    let nested = acquire.fenced("o", "d", 1).with("ttl_ms", "1000");
    assert!(matches!(nested.twice(&client).await, Final(1..)));
    assert_eq!(acquire.release("o", "d").send(&client).await, Final(4));
    for (attempt, answer) in [("b", 3), ("b", 3), ("a", 2), ("b", 3), ("c", 1), ("a", 2)] {
        let release = acquire.release("o", attempt).with("remember", "1");
        assert_eq!(release.send(&client).await, Final(answer), "{attempt}");
    }
}

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

/// Dead waiters and malformed entries in the queue do not delay the live ones.
#[tokio::test]
async fn release_passes_over_dead_or_malformed_waiters() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&EXCLUSIVE) {
        let kind = acquire.kind;
        let take = |owner, attempt| acquire.fenced(owner, attempt, 100);
        assert!(matches!(take("o1", "a1").send(&client).await, Final(1..)));
        // The first is recent, but its channel has no subscriber; `silent` is dead by its age.
        let now = client.time().await;
        let unheard = format!("dead {kind} 3000 lock:wake:00000000000000000000000000000000 o 255");
        let silent = format!("silent {kind} 3000 lock:wake:00000000000000000000000000000001 o 255");
        for (score, junk) in [
            (now - 20, unheard.as_str()),
            (now - 19, "junk"),
            (now - 18, ""),
            (now - 17, "a 3000 o c"),
            (now - 16, &format!("a {kind} 0  o 255")),
            (now - 15, &format!("a {kind} x  o 255")),
            (now - 14, &format!("a {kind} -5  o 255")),
            (now - 13, &format!("a {kind} 3000 elsewhere o 255")),
            (1, &silent),
        ] {
            let _: i64 = client.run(&["ZADD", KEYS[2], &score.to_string(), junk]).await;
        }
        let _: i64 = client.run(&["PEXPIRE", KEYS[2], "60000"]).await;
        assert_eq!(take("o2", "a2").queued().send(&client).await, Busy);
        assert_eq!(acquire.release("o1", "a1").send(&client).await, Final(1), "{acquire:?}");
        let holder: Vec<u8> = client.run(&["DUMP", "k"]).await;
        let holds = |word: &[u8]| holder.windows(word.len()).any(|bytes| bytes == word);
        assert!(holds(b"a2"), "{acquire:?}: granted to the live waiter");
        let found = acquire.fenced("o2", "a2", 200).queued().send(&client).await;
        assert!(matches!(found, Final(1..)), "{acquire:?}: {found:?}");
        assert_eq!(acquire.release("o2", "a2").send(&client).await, Final(1));
        assert!(!client.exists("k").await, "{acquire:?}");
        assert_eq!(client.waiters().await, 0, "{acquire:?}");
        client.flush().await;
    }
}

/// A waiter leaves the queue when it is granted the lock behind more dead waiters than one request
/// passes over.
#[tokio::test]
async fn acquire_leaves_queue_when_granted_behind_many_dead_waiters() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&EXCLUSIVE) {
        let take = acquire.fenced("o1", "a1", 100).queued();
        let holder = acquire.fenced("o0", "a0", 50);
        assert!(matches!(holder.send(&client).await, Final(1..)));
        for number in 0..1000 {
            let dead =
                format!("d{number} {} 3000 lock:wake:00000000000000000000000000000000 o 255", acquire.kind);
            let _: i64 = client.run(&["ZADD", KEYS[2], &number.to_string(), &dead]).await;
        }
        assert_eq!(take.send(&client).await, Busy);
        let _: i64 = client.run(&["DEL", "k"]).await;
        let mut polls = 1;
        while take.send(&client).await == Busy {
            polls += 1;
            assert!(polls < 10, "{acquire:?}");
        }
        let queued: Vec<String> = client.run(&["ZRANGE", KEYS[2], "0", "-1"]).await;
        assert!(!queued.iter().any(|entry| entry.starts_with("a1 ")), "{acquire:?} holds the lock and waits");
        client.flush().await;
    }
}

/// Companion keys with values of another type cause a typed error or are ignored; no change is half
/// done.
#[tokio::test]
async fn scripts_change_nothing_if_companion_has_another_type() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let _: i64 = client.run(&["LPUSH", KEYS[1], "x"]).await;
    let locks = server.locks_with(redlatch::Options::new().prefix("")).await;
    let mutex = locks.mutex("k").unwrap();
    assert!(matches!(mutex.try_lock().await, Err(redlatch::Error::Corrupt { .. })));
    assert!(!client.exists("k").await, "no lock is held without its token");
    // An attempt that ends with such an error is released, which leaves a mark.
    locks.settled().await;
    let _: i64 = client.run(&["DEL", KEYS[2]]).await;
    // Nor a place in the queue.
    for acquire in Acquire::all(&ALL) {
        let _: i64 = client.run(&["ZADD", KEYS[2], "1", "junk"]).await;
        let before = client.state().await;
        let refused = acquire.fenced("o", "a", 100).queued().try_send(&client).await;
        assert!(refused.is_err(), "{acquire:?}: {refused:?}");
        let rest = |state: Vec<(String, Vec<u8>)>| state.into_iter().filter(|(key, _)| key != KEYS[2]);
        let after = client.state().await;
        assert!(rest(before).eq(rest(after)), "{acquire:?}");
        assert_eq!(client.run::<u64>(&["ZCOUNT", KEYS[2], "2", "+inf"]).await, 0, "{acquire:?}");
        let _: i64 = client.run(&["DEL", KEYS[2]]).await;
    }
    for poisoned in ["9223372036854775807", "9007199254740991", "many"] {
        let _: i64 = client.run(&["DEL", KEYS[1]]).await;
        client.run::<()>(&["SET", KEYS[1], poisoned]).await;
        assert!(matches!(mutex.try_lock().await, Err(redlatch::Error::Corrupt { .. })), "{poisoned}");
        assert!(!client.exists("k").await);
        assert_eq!(client.run::<String>(&["GET", KEYS[1]]).await, poisoned, "the value is unchanged");
    }
    let _: i64 = client.run(&["DEL", KEYS[1]]).await;
    let guard = mutex.lock().await.unwrap();
    client.run::<()>(&["SET", KEYS[2], "x"]).await;
    guard.release().await.unwrap();
    assert!(!client.exists("k").await, "the lock is released all the same");
}

/// One attempt has holds on both sides: its late acquire was granted the write, and a repair had
/// acquired the read that was missing on this node. A release ends both; a downgrade keeps the
/// read.
#[tokio::test]
async fn scripts_rwlock_standalone_release_ends_hold_on_both_sides() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [write, read] = ["write", "read"].map(|kind| Acquire { kind, is_for_quorum: false });
    let stranger = read.fenced("p", "b", 100);
    for (attempt, is_downgraded) in [("a1", true), ("a2", false)] {
        let arguments = [("attempt", attempt), ("ttl_ms", "60000"), ("owner", "o"), ("min_token", "7")];
        let downgrade = Request::new("rwlock/downgrade", &arguments);
        assert!(matches!(write.fenced("o", attempt, 100).send(&client).await, Final(1..)));
        assert!(matches!(read.fenced("o", attempt, 100).send(&client).await, Final(1..)));
        assert_eq!(stranger.send(&client).await, Busy, "the attempt writes");
        if is_downgraded {
            assert!(matches!(downgrade.send(&client).await, Final(1..)));
            assert!(matches!(stranger.send(&client).await, Final(1..)));
            assert_eq!(read.release("p", "b").send(&client).await, Final(1));
            let held: String = client.run(&["HGET", "k", "read:o"]).await;
            assert_eq!(held.split(' ').skip(1).collect::<Vec<_>>(), [attempt], "one read hold is left");
        }
        assert_eq!(read.release("o", attempt).send(&client).await, Final(1));
        assert!(!client.exists("k").await, "nothing is left");
    }
}

/// Only clients of a quorum send these arguments: a token that must be larger than all accepted
/// ones, and the admitted run of the server.
#[tokio::test]
async fn scripts_for_quorums_refuse_lower_proposals_and_unadmitted_nodes() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let free = async || client.run::<u64>(&["DEL", "k"]).await;
    for kind in EXCLUSIVE {
        let acquire = Acquire { kind, is_for_quorum: true };
        let repair = |proposal| acquire.fenced("b", "b", proposal).with("purpose", "repair");
        for _delivery in 0..2 {
            assert_eq!(acquire.fenced("a", "a", 20).send(&client).await, Final(20), "{kind}");
        }
        free().await;
        assert_eq!(acquire.fenced("b", "b", 20).send(&client).await, Low { highest: 20 }, "{kind}");
        assert!(!client.exists("k").await, "{kind}");
        for _delivery in 0..2 {
            assert_eq!(repair(20).send(&client).await, Final(20), "{kind}");
        }
        free().await;
        assert_eq!(repair(19).send(&client).await, Final(0), "{kind}");
        client.flush().await;
    }
    for kind in ALL {
        let acquire = Acquire { kind, is_for_quorum: true };
        let take = acquire.fenced("a", "a", 20).with("run", "run").guarded();
        assert_eq!(take.send(&client).await, Final(-9), "{kind}");
        assert_eq!(client.run::<u64>(&["DBSIZE"]).await, 0, "{kind}");
        let _: i64 = client.run(&["HSET", NODE, "run", "run", "min_token", "19"]).await;
        assert_eq!(take.send(&client).await, Final(20), "{kind}");
        let ttl: String = client.run(&["HGET", NODE, "ttl"]).await;
        assert_eq!(ttl, "60000", "{kind}");
        client.flush().await;
    }
}
