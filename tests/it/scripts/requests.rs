//! Requests to the scripts, as a program in any language would send them.

use super::{acquires, path, script};
use crate::support::Server;

/// What each delivery left in the server.
async fn state(server: &Server) -> Vec<(String, Vec<u8>)> {
    let mut state = Vec::new();
    let mut keys: Vec<String> = server.run(&["KEYS", "*"]).await;
    keys.sort();
    for key in keys {
        let dump: Vec<u8> = server.run(&["DUMP", &key]).await;
        state.push((key, dump));
    }
    state
}

/// How often something was written, whether it changed anything or not.
async fn writes(server: &Server) -> u64 {
    let info: String = server.run(&["INFO", "persistence"]).await;
    info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")?.parse().ok()).unwrap()
}

/// One request to a script, as a program in any language would send it.
struct Request<'a> {
    script: &'a str,
    arguments: Vec<&'a str>,
}

/// One integer is final; two are a busy lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Final(i64),
    Busy,
}
use Answer::{Busy, Final};

impl Request<'_> {
    async fn send(&self, server: &Server, attempt: &str) -> Answer {
        match self.try_send(server, attempt).await.unwrap() {
            redis::Value::Int(answer) => Final(answer),
            redis::Value::Array(items) if items.len() == 2 => Busy,
            other => panic!("{} answers {other:?}", self.script),
        }
    }

    async fn try_send(&self, server: &Server, attempt: &str) -> redis::RedisResult<redis::Value> {
        let ended = format!("{{k}}:ended:{attempt}");
        let keys = ["k", "{k}:fence", "{k}:waiters", &ended];
        let keys = if self.script.ends_with("renew") { &keys[..1] } else { &keys };
        let text = script(self.script);
        let count = keys.len().to_string();
        let mut words = vec!["EVAL", &text, &count];
        words.extend(keys);
        words.extend(&self.arguments);
        server.try_run(&words).await
    }

    /// Sends it twice: the same answer, and nothing changes the second time. But each grant writes, for `WAIT`.
    async fn twice(&self, server: &Server, attempt: &str) -> Answer {
        let first = self.send(server, attempt).await;
        let after_first = state(server).await;
        let written = writes(server).await;
        let second = self.send(server, attempt).await;
        if self.script.ends_with("acquire") && matches!(second, Final(0..)) {
            assert!(writes(server).await > written, "{} {:?}", self.script, self.arguments);
        }
        if !self.script.ends_with("renew") {
            assert_eq!(first, second, "{} {:?}", self.script, self.arguments);
        }
        assert_eq!(after_first, state(server).await, "{} {:?}", self.script, self.arguments);
        second
    }
}

fn request<'a>(script: &'a str, arguments: &[&'a str]) -> Request<'a> {
    Request { script, arguments: arguments.to_vec() }
}

async fn every_script_may_arrive_twice(kind: &'static str) {
    for (_, acquire) in acquires(&[kind]) {
        may_arrive_twice(kind, &acquire).await;
    }
}

async fn may_arrive_twice(kind: &str, acquire: &str) {
    let server = Server::start().await;
    let name = |verb: &str| format!("{kind}/{verb}");
    let (renew, release, force) = (name("renew"), name("release"), name("force"));
    let take = |owner, attempt, waiter| request(acquire, &[owner, attempt, "60000", "7", "9", waiter]);
    let give = |owner, attempt, ended_ms, waiter| request(&release, &[owner, attempt, ended_ms, "7", waiter]);
    let keep = |owner, attempt| request(&renew, &[owner, attempt, "60000"]);

    let Final(token @ 1..) = take("o1", "a1", "").twice(&server, "a1").await else { panic!("it is free") };
    assert_eq!(take("o2", "a2", "a2 3000 o2 ").twice(&server, "a2").await, Busy);
    assert_eq!(server.run::<u64>(&["ZCARD", "{k}:waiters"]).await, 1);
    assert!(matches!(keep("o1", "a1").twice(&server, "a1").await, Final(1_000_000_000_000_000..)));
    assert_eq!(keep("o2", "a2").twice(&server, "a2").await, Final(0), "a stranger");
    assert_eq!(give("o2", "a3", "0", "").twice(&server, "a3").await, Final(0), "a stranger");

    // Released to the waiter, who then finds it with a larger token; the second delivery of the release
    // must not take it from him.
    assert_eq!(give("o1", "a1", "60000", "").twice(&server, "a1").await, Final(1));
    assert_eq!(take("o2", "a2", "a2 3000 o2 ").twice(&server, "a2").await, Final(token + 1));
    // What was ended stays ended.
    assert_eq!(take("o1", "a1", "").twice(&server, "a1").await, Final(-1));

    // Taken away once, however often it is asked for.
    assert_eq!(request(&force, &["", "f1", "60000", "7"]).twice(&server, "f1").await, Final(1));
    assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0);
    assert_eq!(take("o3", "a4", "").twice(&server, "a4").await, Final(token + 2));
    assert_eq!(request(&force, &["", "f1", "60000", "7"]).twice(&server, "f1").await, Final(1));
    assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 1, "the late delivery took nothing");

    // An attempt that is ended before it arrives is refused when it does, and leaves the queue.
    assert_eq!(take("o5", "a5", "a5 3000 o5 ").twice(&server, "a5").await, Busy);
    assert_eq!(give("o5", "a5", "60000", "a5 3000 o5 ").twice(&server, "a5").await, Final(0));
    assert_eq!(take("o5", "a5", "a5 3000 o5 ").twice(&server, "a5").await, Final(-1));
    assert_eq!(server.run::<u64>(&["EXISTS", "{k}:waiters"]).await, 0);

    for (key, _) in state(&server).await {
        assert!(server.run::<i64>(&["PTTL", &key]).await > 0, "{key} has a ttl");
    }
}

/// A full server ends attempts as well; one that refuses to write has done nothing, and says so.
#[tokio::test]
async fn scripts_end_attempts_or_fail() {
    let server = Server::start().await;
    let set = async |name, value| server.run::<()>(&["CONFIG", "SET", name, value]).await;
    for (kind, acquire) in acquires(&["mutex", "reentrant", "write"]) {
        let release = path(kind, "release");
        let take = |attempt| request(&acquire, &["o", attempt, "60000", "7", "9"]);
        let end = |attempt| request(&release, &["o", attempt, "60000", "7"]);
        set("maxmemory", "1").await;
        assert_eq!(end("full").send(&server, "full").await, Final(0), "{kind}");
        set("maxmemory", "0").await;
        assert_eq!(take("full").send(&server, "full").await, Final(-1), "{kind}");
        set("min-replicas-to-write", "1").await;
        let error = end("refused").try_send(&server, "refused").await.unwrap_err();
        assert!(error.to_string().contains("NOREPLICAS"), "{kind}: {error}");
        set("min-replicas-to-write", "0").await;
        assert!(matches!(take("refused").send(&server, "refused").await, Final(1..)), "{kind}");
        assert_eq!(end("refused").send(&server, "refused").await, Final(1), "{kind}");
        server.run::<()>(&["DEL", "{k}:ended:full", "{k}:ended:refused"]).await;
    }
}

#[tokio::test]
async fn scripts_mutex_standalone_may_arrive_twice() {
    every_script_may_arrive_twice("mutex").await;
}

#[tokio::test]
async fn scripts_reentrant_standalone_may_arrive_twice() {
    every_script_may_arrive_twice("reentrant").await;
    // Counts as well, in any interleaving of two requests of one owner.
    let server = Server::start().await;
    for (attempt, count) in [("a", 1), ("b", 2), ("a", 2), ("b", 2), ("c", 3), ("a", 3)] {
        let take = request("reentrant/acquire", &["o", attempt, "60000", "7", "9"]);
        assert!(matches!(take.send(&server, attempt).await, Final(1..)), "{attempt}");
        assert_eq!(server.run::<u64>(&["HGET", "k", "o"]).await, count, "{attempt}");
    }
    let nested = request("reentrant/acquire", &["o", "d", "1000", "7", "9"]);
    assert!(matches!(nested.twice(&server, "d").await, Final(1..)));
    assert_eq!(request("reentrant/release", &["o", "d", "0", "7"]).send(&server, "d").await, Final(4));
    for (attempt, answer) in [("b", 3), ("b", 3), ("a", 2), ("b", 3), ("c", 1), ("a", 2)] {
        let give = request("reentrant/release", &["o", attempt, "60000", "7"]);
        assert_eq!(give.send(&server, attempt).await, Final(answer), "{attempt}");
    }
}

/// What a dead client left in the queue costs nobody a turn, and junk in it is passed over.
#[tokio::test]
async fn scripts_pass_over_waiters_who_cannot_be_told() {
    let server = Server::start().await;
    for (kind, acquire) in acquires(&["mutex", "reentrant", "write"]) {
        let release = path(kind, "release");
        let take = |owner, attempt, waiter| request(&acquire, &[owner, attempt, "60000", "7", "9", waiter]);
        assert!(matches!(take("o1", "a1", "").send(&server, "a1").await, Final(1..)));
        let junk = ["dead 3000 o nobody-listens", "junk", "", "a 0 o c", "a 999999 o c", "x -5 o c"];
        for (score, junk) in junk.iter().enumerate() {
            let _: i64 = server.run(&["ZADD", "{k}:waiters", &score.to_string(), junk]).await;
        }
        let _: i64 = server.run(&["PEXPIRE", "{k}:waiters", "60000"]).await;
        assert_eq!(take("o2", "a2", "a2 3000 o2 ").send(&server, "a2").await, Busy);
        assert_eq!(request(&release, &["o1", "a1", "0", "7"]).send(&server, "a1").await, Final(1));
        let found = take("o2", "a2", "a2 3000 o2 ").send(&server, "a2").await;
        assert!(matches!(found, Final(1..)), "{kind}: handed to the living");
        assert_eq!(request(&release, &["o2", "a2", "0", "7"]).send(&server, "a2").await, Final(1));
        assert_eq!(server.run::<u64>(&["EXISTS", "k", "{k}:waiters"]).await, 0);
    }
}

/// One who is granted the lock after more dead waiters than one look passes over is not queued any more.
#[tokio::test]
async fn scripts_leave_nobody_queued_who_was_granted() {
    let server = Server::start().await;
    for (kind, acquire) in acquires(&["mutex", "reentrant", "write"]) {
        let take = || request(&acquire, &["o1", "a1", "60000", "7", "9", "a1 3000 o1 somewhere"]);
        for number in 0..100 {
            let dead = format!("d{number} 3000 o nobody-listens");
            let _: i64 = server.run(&["ZADD", "{k}:waiters", &number.to_string(), &dead]).await;
        }
        let _: i64 = server.run(&["ZADD", "{k}:waiters", "1000", "a1 3000 o1 somewhere"]).await;
        let _: i64 = server.run(&["PEXPIRE", "{k}:waiters", "60000"]).await;
        assert!(matches!(take().send(&server, "a1").await, Final(1..)));
        let place: Option<f64> = server.run(&["ZSCORE", "{k}:waiters", "a1 3000 o1 somewhere"]).await;
        assert_eq!(place, None, "{kind}: it holds the lock and queues for it");
        server.run::<()>(&["FLUSHALL"]).await;
    }
}

/// Companions that hold something else make a typed error or are passed over, and never half a change.
#[tokio::test]
async fn scripts_change_nothing_when_a_companion_is_of_another_type() {
    let server = Server::start().await;
    let _: i64 = server.run(&["LPUSH", "{k}:fence", "x"]).await;
    let locks = server.locks_with(redlatch::Options::new().prefix("")).await;
    let mutex = locks.mutex("k").unwrap();
    assert!(matches!(mutex.try_lock().await, Err(redlatch::Error::Redis { .. })));
    assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0, "no lock without its token");
    // Nor a place in the queue.
    for (kind, acquire) in acquires(&["mutex", "reentrant", "write"]) {
        let _: i64 = server.run(&["ZADD", "{k}:waiters", "1", "junk"]).await;
        let text = script(&acquire);
        let mut refused = redis::cmd("EVAL");
        refused.arg(text).arg(4).arg(&["k", "{k}:fence", "{k}:waiters", "{k}:ended:a"]);
        refused.arg(&["o", "a", "1000", "7", "9", "a 3000 o c"]);
        assert!(refused.query_async::<redis::Value>(&mut server.connection().await).await.is_err());
        assert_eq!(
            server.run::<Vec<String>>(&["ZRANGE", "{k}:waiters", "0", "-1"]).await,
            ["junk"],
            "{kind}"
        );
        let _: i64 = server.run(&["DEL", "{k}:waiters"]).await;
    }
    for poisoned in ["9223372036854775807", "9007199254740991", "many"] {
        let _: i64 = server.run(&["DEL", "{k}:fence"]).await;
        server.run::<()>(&["SET", "{k}:fence", poisoned]).await;
        assert!(matches!(mutex.try_lock().await, Err(redlatch::Error::Redis { .. })), "{poisoned}");
        assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0);
        assert_eq!(server.run::<String>(&["GET", "{k}:fence"]).await, poisoned, "left as it was");
    }
    let _: i64 = server.run(&["DEL", "{k}:fence"]).await;
    let guard = mutex.lock().await.unwrap();
    server.run::<()>(&["SET", "{k}:waiters", "x"]).await;
    guard.release().await.unwrap();
    assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0, "released all the same");
}

/// Arguments that are not what they must be are refused before anything is written, also by who finds it free.
#[tokio::test]
async fn scripts_refuse_what_is_not_an_argument() {
    let server = Server::start().await;
    let (clock, _): (u64, u64) = server.run(&["TIME"]).await;
    for (kind, acquire) in acquires(&["mutex", "reentrant", "write", "read"]) {
        let has_owner = kind != "mutex";
        let mut wrong = Vec::new();
        for ttl_ms in ["0", "-5", "250.5", "0.5", "1s", "", "1e20", "nan", "inf"] {
            wrong.push(vec!["o", "a", ttl_ms, "7", "9", ""]);
        }
        for owner in ["", "web 7", "a\tb", " o", "o "].into_iter().filter(|_| has_owner) {
            wrong.push(vec![owner, "a", "1000", "7", "9", ""]);
        }
        // A token is proposed to a quorum only, a day ahead at most.
        let proposal = |hours: u64| format!("={}000000", clock + hours * 3_600);
        let (near, far) = (proposal(23), proposal(25));
        for floor in ["=", "=x", "=-7", ">1.5", "~", "?7", &far] {
            wrong.push(vec!["o", "a", "1000", floor, "9", ""]);
        }
        let for_quorum = acquire.starts_with("quorum/");
        for proposal in [&near, "=7", ">7", "~7"].into_iter().filter(|_| !for_quorum) {
            wrong.push(vec!["o", "a", "1000", proposal, "9", ""]);
        }
        let near = if for_quorum { &near } else { "7" };
        for arguments in wrong {
            let answer = request(&acquire, &arguments).send(&server, "a").await;
            assert_eq!(answer, Final(-5), "{acquire} {arguments:?}");
            assert_eq!(server.run::<u64>(&["DBSIZE"]).await, 0, "{acquire} {arguments:?}");
        }
        assert!(matches!(
            request(&acquire, &["o1", "a1", "1500", near, "9", ""]).send(&server, "a1").await,
            Final(1..)
        ));
        let before = state(&server).await;
        for waiter in ["a 3000", "a 3000 o", "a 3000 o c x", "a 0 o c", "a 100000 o c", "a x o c"] {
            let queueing = if kind == "read" {
                // Beside a writer, or it is granted.
                let _: i64 = server.run(&["DEL", "k"]).await;
                let write = ["o1", "a1", "60000", "7", "9", ""];
                assert!(matches!(
                    request("rwlock/write_acquire", &write).send(&server, "a1").await,
                    Final(1..)
                ));
                request(&acquire, &["o", "a", "1500", "7", "9", waiter])
            } else {
                request(&acquire, &["o", "a", "1500", "7", "9", waiter])
            };
            assert_eq!(queueing.send(&server, "a").await, Final(-5), "{acquire} {waiter:?}");
            assert_eq!(server.run::<u64>(&["EXISTS", "{k}:waiters"]).await, 0, "{acquire} {waiter:?}");
        }
        if kind != "read" {
            assert_eq!(state(&server).await, before, "{acquire}");
        }
        server.run::<()>(&["FLUSHALL"]).await;
    }
    // What may be left out is left out.
    let take = |attempt| ["o", attempt, "1500", "7", "9"];
    for attempt in ["a1", "a2", "a3"] {
        let answer = request("rwlock/read_acquire", &take(attempt)).send(&server, attempt).await;
        assert!(matches!(answer, Final(1..)), "{answer:?}");
    }
    let other = request("rwlock/write_acquire", &["p", "b", "1500", "7", "9"]).send(&server, "b").await;
    assert_eq!(other, Busy);
}

/// One hold on both sides: to write, since that was asked for first and came late, and to read since it was taken once more
/// where it was missing. It ends on both, or reads.
#[tokio::test]
async fn scripts_rwlock_standalone_free_a_hold_from_both_sides() {
    let server = Server::start().await;
    let stranger = request("rwlock/read_acquire", &["p", "b", "60000", "7", "9"]);
    let leave = request("rwlock/release", &["p", "b", "0", "7"]);
    for (its, goes_on_to_read) in [("a1", true), ("a2", false)] {
        let write = request("rwlock/write_acquire", &["o", its, "60000", "7", "9"]);
        let read = request("rwlock/read_acquire", &["o", its, "60000", "7", "9"]);
        let downgrade = request("rwlock/downgrade", &["o", its, "60000", "7"]);
        let release = request("rwlock/release", &["o", its, "0", "7"]);
        assert!(matches!(write.send(&server, its).await, Final(1..)));
        assert!(matches!(read.send(&server, its).await, Final(1..)));
        assert_eq!(stranger.send(&server, "b").await, Busy, "it writes");
        if goes_on_to_read {
            assert!(matches!(downgrade.send(&server, its).await, Final(1..)));
            assert!(matches!(stranger.send(&server, "b").await, Final(1..)));
            assert_eq!(leave.send(&server, "b").await, Final(1));
            let held: String = server.run(&["HGET", "k", "read:o"]).await;
            assert_eq!(held.split(' ').skip(1).collect::<Vec<_>>(), [its], "once");
        }
        assert_eq!(release.send(&server, its).await, Final(1));
        assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0, "nothing is left");
    }
}

/// What only a quorum sends: a token that is larger than all accepted ones, and the run that was admitted.
#[tokio::test]
async fn scripts_for_quorums_refuse_lower_proposals_and_nodes_that_were_not_admitted() {
    let server = Server::start().await;
    for kind in ["mutex", "reentrant", "write"] {
        let acquire = format!("quorum/{kind}_acquire");
        let take = |attempt, floor| request(&acquire, &[attempt, attempt, "60000", floor, "9", ""]);
        let free = async || server.run::<u64>(&["DEL", "k"]).await;
        for _delivery in 0..2 {
            assert_eq!(take("a", "=20").send(&server, "a").await, Final(20), "{acquire}");
        }
        free().await;
        let text = script(&acquire);
        let words = ["EVAL", &text, "4", "k", "{k}:fence", "{k}:waiters", "{k}:ended:b"];
        let words = [&words[..], &["b", "b", "60000", "=20", "9"]].concat();
        assert_eq!(server.run::<[i64; 2]>(&words).await, [-8, 20], "{acquire}");
        assert_eq!(server.run::<u64>(&["EXISTS", "k"]).await, 0, "{acquire}");
        for _delivery in 0..2 {
            assert_eq!(take("b", "~20").send(&server, "b").await, Final(20), "{acquire}");
        }
        free().await;
        assert_eq!(take("b", "~19").send(&server, "b").await, Final(0), "{acquire}");
        free().await;
        server.run::<()>(&["FLUSHALL"]).await;
    }
    for kind in ["mutex", "reentrant", "write", "read"] {
        let text = script(&format!("quorum/{kind}_acquire"));
        let words = ["EVAL", &text, "5", "k", "{k}:fence", "{k}:waiters", "{k}:ended:a", "lock:{}node"];
        let words = [&words[..], &["a", "a", "60000", "=20", "9", "", "9", "run"]].concat();
        assert_eq!(server.run::<i64>(&words).await, -9, "{kind}");
        assert_eq!(server.run::<u64>(&["DBSIZE"]).await, 0, "{kind}");
        let _: i64 = server.run(&["HSET", "lock:{}node", "run", "run", "floor", "19"]).await;
        assert_eq!(server.run::<i64>(&words).await, 20, "{kind}");
        let ttl: String = server.run(&["HGET", "lock:{}node", "ttl"]).await;
        assert_eq!(ttl, "60000", "{kind}");
        server.run::<()>(&["FLUSHALL"]).await;
    }
}
