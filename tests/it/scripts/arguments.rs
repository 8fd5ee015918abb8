//! Arguments: each is checked, whatever the state of the lock.

use super::client::{Answer, Client, KEYS, NODE, Request};
use super::{script, scripts};
use crate::support::Server;
use Answer::{Busy, Final};

/// A value that each script accepts.
fn well_formed(argument: &str) -> &'static str {
    match argument {
        "attempt" => "a",
        "owner" | "only_from" => "o",
        "ttl_ms" | "token_ttl_ms" => "60000",
        "min_token" => "7",
        "proposal" => "1000",
        "purpose" => "nested",
        "claim_ms" => "3000",
        "channel" => "lock:wake:00000000000000000000000000000001",
        "max_depth" | "max_readers" => "9",
        "queued_at" => "5",
        "grant_before" => "4000000000000000",
        "remember" => "1",
        "run" => "run",
        other => panic!("the tests do not know the argument {other}"),
    }
}

/// Values that no script accepts.
fn malformed(script: &str, argument: &str) -> Vec<String> {
    let list: &[&str] = match argument {
        "attempt" => &["", " ", "a b", " a", "a "],
        // Without an owner, the attempt is the owner, except for a re-entrant lock.
        "owner" if script.contains("reentrant") => &["", "o p", " o", "o ", ":o", "mode"],
        "owner" | "only_from" => &["o p", " o", "o ", ":o"],
        "ttl_ms" => {
            &["", "0", "-5", "250.5", "0.5", "1s", "1e3", "1e20", "200000000000000", "nan", "inf", "05"]
        }
        "token_ttl_ms" => &["0", "-5", "1.5", "x", "1e3", "200000000000000"],
        "min_token" => &[
            "x",
            "-7",
            "+7",
            " 7",
            "0x7",
            "7.0",
            "1.5",
            "1e3",
            "=7",
            "nan",
            "inf",
            "1e400",
            "4503599627370496",
            "1790000000000000000",
        ],
        "proposal" => &["x", "0", "-7", "1.5", "=7", "nan", "inf", "4503599627370495"],
        "purpose" => &["x", ">", "Nested"],
        "claim_ms" => &["0", "-1", "1.5", "x", "1e3", "60001", "100000"],
        "channel" => {
            &["app:commands", "wake", "wake:1", "a b:wake:0123456789abcdef0123456789abcdef", "device:wake:42"]
        }
        "max_depth" => &["0", "-1", "1.5", "x", "nan", "1025", "0x10", "+5", " 5", "1e2"],
        "max_readers" => &["0", "-1", "1.5", "x", "nan", "100001", "0x10", "+5"],
        "queued_at" => &["0", "-1", "+5", "0x5", "1.5", "x", "nan", "4503599627370496"],
        "grant_before" => &["x", "nan", "inf", "-5", "+5", "0x5", "1.5"],
        "remember" => &["0", "2", "yes"],
        _ => &[],
    };
    let long = match argument {
        "attempt" => vec!["a".repeat(129)],
        "owner" | "only_from" => vec!["o".repeat(257)],
        "channel" => [
            format!("{}:wake:{}", "c".repeat(250), "1".repeat(32)),
            format!("wake:{}", "1".repeat(31)),
            format!("wake:{}~", "1".repeat(31)),
            format!("wake:{}", "1".repeat(33)),
            format!("wake:{}~~", "1".repeat(32)),
            format!("wake:{}g", "1".repeat(31)),
        ]
        .to_vec(),
        _ => vec![],
    };
    list.iter().map(|&value| value.to_owned()).chain(long).collect()
}

/// The arguments of a script that have no default.
fn required(script: &str) -> &'static [&'static str] {
    match script {
        "mutex/release" | "rwlock/release" => &["attempt"],
        "reentrant/release" => &["attempt", "owner"],
        "reentrant/acquire" | "reentrant/renew" | "quorum/reentrant_acquire" => {
            &["attempt", "ttl_ms", "owner"]
        }
        _ if script.ends_with("force") => &["attempt"],
        _ => &["attempt", "ttl_ms"],
    }
}

/// All scripts that take an attempt.
fn verbs() -> Vec<String> {
    let names = scripts().into_iter().map(|(name, _)| name);
    let verbs = ["acquire", "renew", "release", "force", "downgrade"];
    let verbs: Vec<_> = names.filter(|name| verbs.iter().any(|verb| name.ends_with(verb))).collect();
    assert_eq!(verbs.len(), 20, "{verbs:?}");
    verbs
}

/// The state of the lock when the request arrives.
#[derive(Clone, Copy, Debug)]
enum Lock {
    Free,
    /// Free, while another attempt waits.
    Contention,
    /// Another attempt holds it, and this one waits.
    Busy,
    /// This attempt holds it.
    Held,
    /// Another attempt of the same owner holds it.
    Nested,
}

const LOCKS: [Lock; 5] = [Lock::Free, Lock::Contention, Lock::Busy, Lock::Held, Lock::Nested];

impl Lock {
    /// Creates the lock in this state, with the script's kind.
    async fn prepare(self, client: &Client, script: &str) {
        client.flush().await;
        let (acquire, held_by) = match script {
            _ if script.contains("mutex") => ("mutex/acquire", None),
            _ if script.contains("reentrant") => ("reentrant/acquire", Some("o")),
            _ if script.contains("read") => ("rwlock/read_acquire", Some("o")),
            _ => ("rwlock/write_acquire", Some("o")),
        };
        let rival = if acquire == "rwlock/read_acquire" { "rwlock/write_acquire" } else { acquire };
        let take = async |script, owner: &str, attempt| {
            let arguments = [("attempt", attempt), ("ttl_ms", "60000"), ("min_token", "7")];
            Request::new(script, &arguments).owner(owner).queued().send(client).await
        };
        match self {
            Lock::Free => {}
            Lock::Contention => {
                assert!(matches!(take(rival, "p", "b").await, Final(1..)));
                assert_eq!(take(acquire, "q", "c").await, Busy);
                client.run::<()>(&["DEL", KEYS[0]]).await;
            }
            Lock::Busy => {
                assert!(matches!(take(rival, "p", "b").await, Final(1..)));
                assert_eq!(take(acquire, "o", "a").await, Busy);
            }
            Lock::Held => assert!(matches!(take(acquire, "o", "a").await, Final(1..))),
            Lock::Nested => {
                assert!(matches!(take(acquire, held_by.unwrap_or_default(), "b").await, Final(1..)));
            }
        }
    }
}

/// A request with all arguments.
fn complete(script: &str) -> Request {
    let request = Request::new(script, &[]);
    let names = request.names().to_vec();
    names.iter().fold(request, |request, name| request.with(name, well_formed(name)))
}

#[tokio::test]
async fn malformed_argument_is_refused_and_changes_nothing() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut wrong = Vec::new();
    for script in verbs() {
        for lock in LOCKS {
            lock.prepare(&client, &script).await;
            let mut before = client.state().await;
            for argument in complete(&script).names() {
                for value in malformed(&script, argument) {
                    // First with all other arguments left out, then with all of them.
                    let short = required(&script).iter().fold(Request::new(&script, &[]), |request, name| {
                        request.with(name, well_formed(name))
                    });
                    for request in [short, complete(&script)] {
                        let answer = request.with(argument, &value).try_send(&client).await;
                        let state = client.state().await;
                        if !matches!(answer, Ok(Final(-5))) || state != before {
                            wrong.push(format!("{script} {lock:?} {argument} {value:?}: {answer:?}"));
                            lock.prepare(&client, &script).await;
                            before = client.state().await;
                        }
                    }
                }
            }
            assert!(wrong.len() < 20, "{wrong:#?}");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The arguments of admissions to a quorum, and of writes to a fenced resource.
#[tokio::test]
async fn malformed_admissions_and_resource_writes_change_nothing() {
    let server = Server::start().await;
    let admit = async |arguments: &[&str]| {
        let script = script("quorum/admit");
        server.run::<redis::Value>(&[&["EVAL", &script, "1", NODE], arguments].concat()).await
    };
    let long = "x".repeat(129);
    let malformed: [&[&str]; 17] = [
        &[],
        &["run"],
        &["", "ticket"],
        &["run", ""],
        &[&long, "ticket"],
        &["run", &long],
        &["run", "ticket", "7"],
        &["run", "ticket", "7", "0"],
        &["run", "ticket", "7", "-5"],
        &["run", "ticket", "7", "1.5"],
        &["run", "ticket", "7", "200000000000000"],
        &["run", "ticket", "", "x"],
        &["run", "ticket", "x", "1000"],
        &["run", "ticket", "-7", "1000"],
        &["run", "ticket", "nan", "1000"],
        &["run", "ticket", "1.5", "1000"],
        &["run", "ticket", "1790000000000000000", "1000"], // nanoseconds
    ];
    for begun in [false, true] {
        if begun {
            assert_ne!(admit(&["run", "ticket"]).await, redis::Value::Int(-5));
        }
        let before: Vec<String> = server.run(&["HGETALL", NODE]).await;
        for arguments in malformed {
            assert_eq!(admit(arguments).await, redis::Value::Int(-5), "{arguments:?}");
            assert_eq!(server.run::<Vec<String>>(&["HGETALL", NODE]).await, before, "{arguments:?}");
        }
    }
    assert_eq!(admit(&["run", "ticket", "7", "1000"]).await, redis::Value::Int(1));
    assert_eq!(
        admit(&["run", "ticket", "7"]).await,
        redis::Value::Int(-5),
        "an incomplete admission of an admitted run is refused"
    );

    let write = async |arguments: &[&str]| {
        let script = script("fenced/set");
        let words = [&["EVAL", &script, "2", "{v}", "{v}:token"], arguments].concat();
        server.try_run::<bool>(&words).await
    };
    assert!(write(&["7", "first"]).await.unwrap());
    let malformed: [&[&str]; 10] = [
        &[],
        &["8"],
        &["", "x"],
        &["0", "x"],
        &["-8", "x"],
        &["8.5", "x"],
        &["1e3", "x"],
        &["nan", "x"],
        &["9007199254740992", "x"],
        &["12345678901234567890", "x"],
    ];
    for arguments in malformed {
        assert!(write(arguments).await.is_err(), "{arguments:?}");
    }
    assert!(!write(&["6", "late"]).await.unwrap());
    let kept: (String, String) = server.run(&["MGET", "{v}", "{v}:token"]).await;
    assert_eq!(kept, ("first".to_owned(), "7".to_owned()));
    server.run::<()>(&["SET", "{v}:token", "foreign"]).await;
    assert!(write(&["9", "x"]).await.is_err(), "the second key is no token");
    assert_eq!(server.run::<String>(&["GET", "{v}"]).await, "first");
}

#[tokio::test]
async fn argument_with_default_may_be_left_out_or_empty() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for script in verbs() {
        let count = complete(&script).names().len();
        for lock in LOCKS {
            for given in 0..=count {
                lock.prepare(&client, &script).await;
                let request = complete(&script).first(given);
                let answer = request.send(&client).await;
                let suffices = given >= required(&script).len()
                    && required(&script)
                        .iter()
                        .all(|name| request.names()[..given].contains(&(*name).to_owned()));
                assert_eq!(answer == Final(-5), !suffices, "{script} {lock:?} first {given}: {answer:?}");
            }
            for argument in complete(&script).names() {
                if required(&script).contains(&argument.as_str()) {
                    continue;
                }
                lock.prepare(&client, &script).await;
                let answer = complete(&script).with(argument, "").send(&client).await;
                assert_ne!(answer, Final(-5), "{script} {lock:?} without {argument}");
            }
        }
    }
}

/// A renewal never ends or shortens the attempt's hold.
#[tokio::test]
async fn renew_refuses_ttl_out_of_range() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for script in ["mutex/renew", "reentrant/renew", "rwlock/renew"] {
        Lock::Held.prepare(&client, script).await;
        let renew = |ttl_ms| Request::new(script, &[("attempt", "a"), ("ttl_ms", ttl_ms)]).owner("o");
        for ttl_ms in ["0", "-5", "1.5", "", "200000000000000", "10000000000"] {
            assert_eq!(renew(ttl_ms).send(&client).await, Final(-5), "{script} {ttl_ms:?}");
            let left: i64 = client.run(&["PTTL", KEYS[0]]).await;
            assert!((1..=60_000).contains(&left), "{script} {ttl_ms:?}: {left}");
        }
        assert!(matches!(renew("9999999999").send(&client).await, Final(1..)), "{script}");
        let left: i64 = client.run(&["PTTL", KEYS[0]]).await;
        assert!((9_999_900_000..=9_999_999_999).contains(&left), "{script}: {left}");
    }
}

/// A hold whose expiry time exceeds the range of integers once excluded no other writer.
#[tokio::test]
async fn longest_ttl_excludes_other_holders() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for script in verbs().iter().filter(|script| script.ends_with("acquire")) {
        client.flush().await;
        let rival =
            if script.ends_with("read_acquire") { script.replace("read", "write") } else { script.clone() };
        let take = |script: &str, attempt, ttl_ms| {
            Request::new(script, &[("attempt", attempt), ("ttl_ms", ttl_ms)]).owner(attempt)
        };
        // The same beside another hold, where the hold is stored with its expiry time.
        for attempt in ["a", "a2"] {
            let answer = take(&rival, attempt, "9999999999").owner("o").send(&client).await;
            let expected = if script.contains("mutex") && attempt == "a2" { Busy } else { Final(0) };
            assert_eq!(answer, expected, "{rival} {attempt}");
        }
        assert_eq!(take(script, "b", "60000").send(&client).await, Busy, "{script}");
        assert_eq!(take(&rival, "c", "200000000000000").send(&client).await, Final(-5), "{rival}");
    }
}
