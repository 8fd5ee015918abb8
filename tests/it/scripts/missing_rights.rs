//! Users without one of the rights that the scripts need: a request that is refused half-way must
//! grant nothing, must not leave a key without a TTL, and must not be remembered.

use std::collections::BTreeSet;

use redis::{RedisResult, Value};

use super::client::{Acquire, Answer, Client, KEYS, Request};
use super::commands;
use crate::support::Server;
use crate::support::raw::script;
use Answer::{Busy, Final, Low};

const KINDS: [&str; 4] = ["mutex", "reentrant", "write", "read"];

/// The state of the lock when the request arrives.
#[derive(Clone, Copy, Debug)]
enum Lock {
    Free,
    /// The attempt `a` holds it.
    Held,
    /// The same, and `w` waits.
    HeldWithWaiter,
    /// The attempt `h` holds it, and `a` waits.
    Queued,
    /// Its holder is gone, and `w` waits.
    FreeWithWaiter,
}

const LOCKS: [Lock; 5] = [Lock::Free, Lock::Held, Lock::HeldWithWaiter, Lock::Queued, Lock::FreeWithWaiter];

impl Lock {
    async fn prepare(self, client: &Client, acquire: Acquire) {
        client.flush().await;
        let rival = Acquire { kind: if acquire.kind == "read" { "write" } else { acquire.kind }, ..acquire };
        let take = async |acquire: Acquire, attempt: &str| {
            acquire.fenced(attempt, attempt, 7).with("claim_ms", "60000").send(client).await
        };
        match self {
            Lock::Free => {}
            Lock::Held => assert!(matches!(take(acquire, "a").await, Final(1..))),
            Lock::HeldWithWaiter => {
                assert!(matches!(take(acquire, "a").await, Final(1..)));
                let waiter =
                    Acquire { kind: if acquire.kind == "read" { "write" } else { acquire.kind }, ..acquire };
                assert_eq!(take(waiter, "w").await, Busy);
                assert_eq!(take(waiter, "w").await, Busy, "a poll, which leaves a mark");
            }
            Lock::Queued => {
                assert!(matches!(take(rival, "h").await, Final(1..)));
                assert_eq!(take(acquire, "a").await, Busy);
            }
            Lock::FreeWithWaiter => {
                assert!(matches!(take(rival, "h").await, Final(1..)));
                assert_eq!(take(acquire, "w").await, Busy);
                let _: i64 = client.run(&["DEL", KEYS[0]]).await;
            }
        }
    }
}

/// Every verb of a kind, with the words of a usual client.
fn requests(acquire: Acquire) -> Vec<Request> {
    let mut requests = vec![
        acquire.fenced("a", "a", 9_000),
        acquire.fenced("a", "a", 9_000).with("claim_ms", "60000"),
        acquire.renew("a", "a").with("ttl_ms", "90000"),
        acquire.release("a", "a"),
        acquire.release("a", "a").with("claim_ms", "60000").with("remember", "1"),
        acquire.release("a", "a").with("last_token", "5").with("tokens", "10"),
        acquire.release("a", "a").with("last_token", "5").with("tokens", "10").with("keep_ms", "3000"),
        acquire.force("f"),
        acquire.inspect(),
    ];
    if acquire.kind == "write" {
        requests.push(acquire.downgrade("a", "a"));
    }
    requests
}

/// A connection of a user that may send all commands but one.
pub async fn limited(server: &Server, client: &Client, without: &str) -> Client {
    let without = format!("-{without}");
    let words = ["ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", &without];
    client.run::<()>(&words).await;
    Client::at(&server.url().replace("redis://", "redis://limited:secret@")).await
}

/// Without one command after the other: every key has a TTL, no refusal stands for the missing
/// right, and an acquire that fails leaves no hold of its attempt, but its place in the queue. A
/// release that fails leaves the hold and its tokens.
#[tokio::test]
async fn refused_command_leaves_no_key_without_ttl_and_no_grant() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let commands: BTreeSet<String> = commands();
    let mut wrong = Vec::new();
    let mut refused = 0;
    for command in &commands {
        let limited = limited(&server, &client, command).await;
        for acquire in Acquire::all(&KINDS) {
            for lock in LOCKS {
                for request in requests(acquire) {
                    lock.prepare(&client, acquire).await;
                    let held = async || acquire.renew("a", "a").send(&client).await != Final(0);
                    let before = held().await;
                    let counter = async || client.run::<Option<u64>>(&["GET", KEYS[2]]).await;
                    let last = counter().await;
                    let waits = async || {
                        let queue: Vec<String> = client.run(&["ZRANGE", KEYS[1], "0", "-1"]).await;
                        queue.iter().any(|entry| entry.starts_with("a "))
                    };
                    let is_queued = waits().await;
                    let answer = request.try_send(&limited).await;
                    let what =
                        format!("without {command}: {acquire:?}, {lock:?}, {}: {answer:?}", request.title());
                    refused += usize::from(answer.is_err());
                    if matches!(answer, Ok(Final(-3 | -2))) {
                        wrong.push(format!("{what}: a refusal of another cause"));
                    }
                    if answer.is_err() && held().await && !before {
                        wrong.push(format!("{what}: a grant without an answer"));
                    }
                    if answer.is_err() && before && !held().await {
                        wrong.push(format!("{what}: the hold is gone"));
                    }
                    if answer.is_err() && is_queued && !waits().await {
                        wrong.push(format!("{what}: the place is gone"));
                    }
                    if answer.is_err() && before && counter().await < last {
                        wrong.push(format!("{what}: the counter went back"));
                    }
                    for key in KEYS {
                        if client.run::<i64>(&["PTTL", key]).await == -1 {
                            wrong.push(format!("{what}: {key} has no TTL"));
                        }
                    }
                    let is_low = async || matches!(request.try_send(&client).await, Ok(Low { .. }));
                    if answer.is_err() && is_low().await {
                        wrong.push(format!("{what}: the node has accepted the token all the same"));
                    }
                    if matches!(answer, Ok(Low { .. })) {
                        lock.prepare(&client, acquire).await;
                        if !is_low().await {
                            wrong.push(format!("{what}: a refusal of another cause"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {refused} refusals:\n{}", wrong.len(), wrong.join("\n"));
    assert!(refused > 500, "only {refused} requests were refused");
}

/// A release that was answered is remembered, whatever happens to a second delivery of it.
#[tokio::test]
async fn refused_second_delivery_of_a_release_keeps_its_mark() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut refused = 0;
    for command in commands() {
        let limited = limited(&server, &client, &command).await;
        for acquire in Acquire::all(&KINDS) {
            Lock::HeldWithWaiter.prepare(&client, acquire).await;
            let release = acquire.release("a", "a").with("claim_ms", "60000").with("remember", "1");
            let first = release.try_send(&client).await.unwrap();
            let second = release.try_send(&limited).await;
            refused += usize::from(second.is_err());
            let third = release.try_send(&client).await.unwrap();
            assert_eq!(third, first, "without {command}: {acquire:?}, after {second:?}");
        }
    }
    assert!(refused >= KINDS.len(), "only {refused} were refused");
}

/// A second delivery that is refused leaves no token in the lock that the node has not accepted.
#[tokio::test]
async fn refused_second_proposal_leaves_the_token_of_the_lock() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let acquire = Acquire { kind: "reentrant", is_for_quorum: true };
    let limited = limited(&server, &client, "pexpire").await;
    assert_eq!(acquire.fenced("a", "a", 7).send(&client).await, Final(7));
    assert!(acquire.fenced("a", "a", 9).try_send(&limited).await.is_err());
    assert_eq!(acquire.fenced("a", "nested", 8).send(&client).await, Final(7));
}

/// A user may write counters and no locks: a node forgets the proposal that it did not grant. Redis
/// 6.2 has no rights for some keys only.
#[tokio::test]
async fn refused_lock_takes_its_proposal_back() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let rights = ["on", ">secret", "~*", "+@all", "-set", "-hset", "(+set ~*:fence)"];
    let user = [&["ACL", "SETUSER", "counters"][..], &rights].concat();
    if client.try_run::<()>(&user).await.is_err() {
        return;
    }
    let limited = Client::of(&server).await;
    limited.run::<()>(&["AUTH", "counters", "secret"]).await;
    for kind in KINDS {
        client.flush().await;
        let acquire = Acquire { kind, is_for_quorum: true };
        assert!(acquire.fenced("a", "a", 9).try_send(&limited).await.is_err(), "{kind}");
        let accepted: Option<u64> = client.run(&["GET", KEYS[2]]).await;
        assert_eq!(accepted.unwrap_or(0), 0, "{kind}");
        assert_eq!(acquire.fenced("a", "b", 9).send(&client).await, Final(9), "{kind}");
    }
}

/// Two locks in one call: their keys, and what they have in common.
pub const PAIR: [&str; 6] = ["k1", "k2", "{k1}:waiters", "{k2}:waiters", "{k1}:fence", "{k2}:fence"];

/// Copies the states of two locks, of which the names are given, over the keys of the pair.
const COPY: &str = "
    for at, key in ipairs(KEYS) do
      redis.call('DEL', key)
      redis.call('COPY', ARGV[2 - at % 2] .. math.ceil(at / 2), key)
    end";

/// What the keys of the pair hold, as texts; the keys without a TTL; and for each lock whether the
/// attempt `a` holds it.
const LOOK: &str = "
    local contents, bare, held = {}, {}, {0, 0}
    for at, key in ipairs(KEYS) do
      local type = redis.call('TYPE', key).ok
      local found = type == 'hash' and redis.call('HGETALL', key)
        or type == 'zset' and redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
        or type == 'string' and {redis.call('GET', key)} or {}
      if redis.call('PTTL', key) == -1 then bare[#bare + 1] = key end
      for _, text in ipairs(at < 3 and found or {}) do
        if text == 'a' and type == 'string' or text == ':a' or string.find(text, ' a$') then held[at] = 1 end
      end
      contents[at] = table.concat(found, ',')
    end
    return {contents, bare, held}";

/// Runs the script of a kind.
pub async fn run(client: &Client, kind: &str, keys: &[&str], arguments: &[String]) -> RedisResult<Value> {
    let kind = if ["read", "write"].contains(&kind) { "rwlock" } else { kind };
    let (text, count) = (script(kind), keys.len().to_string());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    client.try_run(&[&["EVAL", &text, &count], keys, &arguments].concat()).await
}

/// The arguments of one call for two locks, from requests for one each.
pub fn joined(first: &Request, second: &Request) -> Vec<String> {
    let (one, other) = (first.arguments(), second.arguments());
    let words = first.verb.words.len();
    let mut arguments = vec![one[0].clone()];
    for at in 1..=words {
        arguments.extend([one[at].clone(), other[at].clone()]);
    }
    arguments.extend_from_slice(&one[1 + words..]);
    arguments
}

/// An error of one of two locks is the answer of this lock, for which nothing was granted, and the
/// other one is served. An error instead of both answers means that nothing was changed.
#[tokio::test]
async fn refused_command_for_one_of_two_locks_grants_nothing_without_an_answer() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut wrong = BTreeSet::new();
    let (mut texts, mut errors) = (0, 0);
    for acquire in Acquire::all(&KINDS) {
        let text = script(&acquire.fenced("a", "a", 1).verb.script);
        let load = async |text: &str| client.run::<String>(&["SCRIPT", "LOAD", text]).await;
        client.flush().await;
        // The states under names of their own, from which each case copies.
        let mut states = Vec::new();
        for lock in LOCKS {
            let mut kept: Vec<Vec<u8>> = Vec::new();
            lock.prepare(&client, acquire).await;
            for key in KEYS {
                kept.push(client.run::<Option<Vec<u8>>>(&["DUMP", key]).await.unwrap_or_default());
            }
            states.push((lock, kept));
        }
        client.flush().await;
        for (lock, kept) in &states {
            for (at, dump) in kept.iter().enumerate().filter(|(_, dump)| !dump.is_empty()) {
                let name = format!("{lock:?}{}", at + 1);
                client.run_bytes(&[b"RESTORE", name.as_bytes(), b"600000", dump]).await;
            }
        }
        let (sum, copy, look) = (load(&text).await, load(COPY).await, load(LOOK).await);
        let call = async |client: &Client, sum: &str, arguments: &[&str]| {
            let words: Vec<&str> = ["EVALSHA", sum, "6"].into_iter().chain(PAIR).collect();
            client.try_run::<Value>(&[&words[..], arguments].concat()).await
        };
        for command in
            commands().iter().filter(|command| text.contains(&format!("'{}'", command.to_uppercase())))
        {
            let limited = limited(&server, &client, command).await;
            for request in requests(acquire) {
                // On a quorum, the first lock has no proposal: it needs no clock.
                let first = if request.verb.has("proposal") {
                    request.clone().with("proposal", "")
                } else {
                    request.clone()
                };
                let arguments = joined(&first, &request);
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                for (one, other) in LOCKS.into_iter().flat_map(|one| LOCKS.map(|other| (one, other))) {
                    let names = [format!("{one:?}"), format!("{other:?}")];
                    call(&client, &copy, &[&names[0], &names[1]]).await.unwrap();
                    let before = call(&client, &look, &[]).await.unwrap();
                    let answer = call(&limited, &sum, &arguments).await;
                    let after = call(&client, &look, &[]).await.unwrap();
                    type Look = (Vec<String>, Vec<String>, Vec<u8>);
                    let [(contents, _, held), (now, bare, holds)]: [Look; 2] =
                        [before, after].map(|look| redis::from_redis_value(look).unwrap());
                    let mut fault = |what: &str| {
                        let title = request.title();
                        wrong.insert(format!(
                            "without {command}: {acquire:?}, {one:?}, {other:?}, {title}: {what}: {answer:?}"
                        ));
                    };
                    if !bare.is_empty() {
                        fault(&format!("{bare:?} have no TTL"));
                    }
                    match &answer {
                        Err(_) => {
                            errors += 1;
                            if contents != now {
                                fault("an error of the call, which changed something");
                            }
                        }
                        Ok(Value::Array(answers)) => {
                            for (at, answer) in answers.iter().enumerate() {
                                let is_error =
                                    matches!(answer, Value::BulkString(_) | Value::SimpleString(_));
                                texts += usize::from(is_error);
                                if is_error && holds[at] == 1 && held[at] == 0 {
                                    fault("a grant without an answer");
                                }
                                let is_left = |name: &str| !name.starts_with("a ") && name != "seen a";
                                let is_granted =
                                    now[at] == "w" || [":w", " w w"].iter().any(|w| now[at].contains(w));
                                let mut others = contents[2 + at].split(',').step_by(2);
                                let is_kept = others.all(|name| !is_left(name) || now[2 + at].contains(name));
                                if is_error && !is_kept && !is_granted {
                                    fault("a waiter or its mark left the queue");
                                }
                            }
                        }
                        Ok(_) => fault("no list"),
                    }
                }
            }
        }
    }
    let few: Vec<_> = wrong.iter().take(30).cloned().collect();
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), few.join("\n"));
    assert!(texts > 5000 && errors > 100, "only {texts} texts and {errors} errors");
    println!("{texts} texts, {errors} errors");
}
