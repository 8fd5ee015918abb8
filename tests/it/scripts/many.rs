//! Scripts for many locks: each lock gets the answer of the script for one lock and is left in the
//! same state, or it gets -10 and is not changed.

use std::collections::BTreeSet;

use redis::Value;

use super::client::{Client, declared, path};
use super::script;
use crate::support::Server;

const ALONE: i64 = -10;
pub(super) const KINDS: [&str; 4] = ["mutex", "reentrant", "read", "write"];

/// What a request finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Free,
    FreeWithoutCounter,
    FreeWithWaiter,
    /// Another attempt was ended.
    FreeWithMark,
    Ended,
    Own,
    OwnWithWaiter,
    OwnWithMark,
    OwnNested,
    OtherAttempt,
    OtherOwner,
    ForeignString,
    ForeignList,
    CorruptCounter,
    FullCounter,
    CorruptQueue,
}

const STATES: [State; 16] = [
    State::Free,
    State::FreeWithoutCounter,
    State::FreeWithWaiter,
    State::FreeWithMark,
    State::Ended,
    State::Own,
    State::OwnWithWaiter,
    State::OwnWithMark,
    State::OwnNested,
    State::OtherAttempt,
    State::OtherOwner,
    State::ForeignString,
    State::ForeignList,
    State::CorruptCounter,
    State::FullCounter,
    State::CorruptQueue,
];

/// The TTL of a renewal: twice that of an acquire.
const RENEWED: &str = "120000";

/// The client proposes this token, on one node of a quorum.
pub(super) const PROPOSAL: &str = "5000";

pub(super) struct LockFixture {
    pub(super) client: Client,
    pub(super) kind: &'static str,
    /// With the scripts of a quorum.
    pub(super) is_proposing: bool,
}

impl LockFixture {
    fn script(&self, verb: &str) -> String {
        if self.is_proposing && verb == "acquire" {
            format!("quorum/{}_acquire", self.kind)
        } else {
            path(self.kind, verb)
        }
    }

    /// What all locks of a call share.
    fn shared(&self, fenced: bool) -> &'static [&'static str] {
        match (self.is_proposing, fenced) {
            (true, _) => &["60000", ""],
            (false, true) => &["60000", "7", ""],
            (false, false) => &["60000", "", ""],
        }
    }

    /// Runs the script for one lock.
    async fn one(&self, verb: &str, lock: &str, arguments: &[(&str, &str)]) -> Value {
        let name = self.script(verb);
        let names = declared(&script(&name));
        let value =
            |name: &String| arguments.iter().find(|(known, _)| known == name).map_or("", |found| found.1);
        let words: Vec<&str> = names.iter().map(value).collect();
        let [lock, fence, waiters] = keys(lock);
        self.eval(&name, &[&lock, &fence, &waiters], &words).await
    }

    /// Runs the script for many locks, with attempt `a` of owner `o` for each.
    async fn many(&self, verb: &str, locks: &[String], fenced: bool) -> Vec<i64> {
        let name = self.script(verb) + "_many";
        let shared = match verb {
            "acquire" => self.shared(fenced),
            "renew" => &[RENEWED],
            _ => &[],
        };
        let (mut names, mut arguments) = (Vec::new(), shared.to_vec());
        for lock in locks {
            let [lock, fence, waiters] = keys(lock);
            names.extend(match verb {
                "acquire" => vec![lock, fence, waiters],
                "renew" => vec![lock],
                _ if name.starts_with("rwlock") => vec![lock],
                _ => vec![lock, waiters],
            });
            arguments.push("a");
            if self.kind != "mutex" {
                arguments.push("o");
            }
            if self.is_proposing && verb == "acquire" {
                arguments.push(if fenced { PROPOSAL } else { "" });
            }
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        match self.eval(&name, &names, &arguments).await {
            Value::Array(answers) => answers.into_iter().map(number).collect(),
            other => panic!("{name}: {other:?}"),
        }
    }

    pub(super) async fn eval(&self, name: &str, keys: &[&str], arguments: &[&str]) -> Value {
        let (text, count) = (script(name), keys.len().to_string());
        let words = ["EVAL", &text, &count].into_iter().chain(keys.iter().copied());
        let words: Vec<&str> = words.chain(arguments.iter().copied()).collect();
        self.client.try_run(&words).await.unwrap_or_else(|error| Value::SimpleString(error.to_string()))
    }

    async fn acquire(&self, lock: &str, attempt: &str, owner: &str, token: bool, claim: &str) -> Value {
        let (min_token, proposal) = if token { ("7", PROPOSAL) } else { ("", "") };
        let words = [("attempt", attempt), ("owner", owner), ("ttl_ms", "60000"), ("claim_ms", claim)];
        let tokens = [("min_token", min_token), ("proposal", proposal)];
        self.one("acquire", lock, &[&words[..], &tokens].concat()).await
    }

    async fn renew(&self, lock: &str) -> Value {
        self.one("renew", lock, &[("attempt", "a"), ("owner", "o"), ("ttl_ms", RENEWED)]).await
    }

    /// Whether a lock lasts for longer than what `prepare` made.
    async fn is_extended(&self, lock: &str) -> bool {
        self.client.run::<i64>(&["PTTL", lock]).await > 60_000
    }

    async fn release(&self, lock: &str) -> Value {
        self.one("release", lock, &[("attempt", "a"), ("owner", "o")]).await
    }

    /// Leaves a mark for a minute.
    async fn end(&self, lock: &str, attempt: &str) {
        self.one("release", lock, &[("attempt", attempt), ("owner", "o"), ("remember", "1")]).await;
    }

    async fn prepare(&self, state: State, lock: &str) {
        let [key, fence, waiters] = keys(lock);
        let run = async |words: &[&str]| drop(self.client.run::<Value>(words).await);
        if state != State::FreeWithoutCounter {
            run(&["SET", &fence, "1000", "PX", "3600000"]).await;
        }
        // A reader and a writer never hold the lock together, so this one makes others wait.
        let busy = || LockFixture {
            client: self.client.clone(),
            kind: if self.kind == "read" { "write" } else { self.kind },
            is_proposing: false,
        };
        match state {
            State::Free | State::FreeWithoutCounter => {}
            State::FreeWithWaiter => {
                busy().acquire(lock, "x", "p", true, "").await;
                self.acquire(lock, "y", "q", true, "3000").await;
                run(&["DEL", &key]).await;
            }
            State::FreeWithMark => self.end(lock, "x").await,
            State::Ended => self.end(lock, "a").await,
            State::Own => drop(self.acquire(lock, "a", "o", true, "").await),
            State::OwnWithMark => {
                self.end(lock, "x").await;
                self.acquire(lock, "a", "o", true, "").await;
            }
            State::OwnWithWaiter => {
                self.acquire(lock, "a", "o", true, "").await;
                busy().acquire(lock, "y", "q", true, "3000").await;
            }
            State::OwnNested => {
                self.acquire(lock, "a", "o", true, "").await;
                self.acquire(lock, "b", "o", true, "").await;
            }
            State::OtherAttempt => drop(self.acquire(lock, "b", "o", true, "").await),
            State::OtherOwner => drop(busy().acquire(lock, "b", "p", true, "").await),
            State::ForeignString => run(&["SET", &key, "foreign"]).await,
            State::ForeignList => run(&["RPUSH", &key, "foreign"]).await,
            State::CorruptCounter => run(&["SET", &fence, "abc"]).await,
            State::FullCounter => run(&["SET", &fence, "9007199254740992"]).await,
            State::CorruptQueue => run(&["SET", &waiters, "abc"]).await,
        }
    }

    /// The contents of a lock's keys, as far as they do not depend on the time.
    async fn contents(&self, lock: &str) -> String {
        let [key, fence, waiters] = keys(lock);
        let kept: i64 = self.client.run(&["PTTL", &fence]).await;
        let fence: Result<u64, _> = self.client.try_run(&["GET", &fence]).await;
        // A counter that begins with the clock is different for each lock.
        let fence = fence.map(|token| if token > 1 << 50 { 1 << 50 } else { token });
        let string: Result<Option<String>, _> = self.client.try_run(&["GET", &key]).await;
        let hash: Result<Vec<String>, _> = self.client.try_run(&["HGETALL", &key]).await;
        let hash = hash.map(|words| {
            // The hold of one reader among several carries the time at which it ends.
            words.concat().split(|letter: char| letter.is_ascii_digit()).collect::<String>()
        });
        let kind: String = self.client.run(&["TYPE", &key]).await;
        let ended: Result<u64, _> = self.client.try_run(&["ZCARD", &waiters]).await;
        let kept = if kept > 3_500_000 { "an hour".to_owned() } else { kept.to_string() };
        format!("{string:?} {hash:?} {fence:?} for {kept} {ended:?} {kind}")
    }
}

pub(super) fn keys(lock: &str) -> [String; 3] {
    [lock.to_owned(), format!("{{{lock}}}:fence"), format!("{{{lock}}}:waiters")]
}

fn number(value: Value) -> i64 {
    if let Value::Int(number) = value { number } else { panic!("{value:?}") }
}

/// Answers without the time: how long a lock is busy, and tokens that begin with the clock.
fn timeless(answer: &Value) -> String {
    match answer {
        Value::Int(token) if *token > 1 << 50 => "a token from the clock".to_owned(),
        Value::Array(_) => "busy".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::SimpleString(text) => text.clone(),
        other => panic!("the answer is {other:?}"),
    }
}

/// Runs `verb` for locks in these states at once, and beside it for one lock after the other.
/// Returns the states in which the script for many locks leaves the request to that for one.
async fn compare(
    kind: &'static str,
    verb: &str,
    (proposes, fenced): (bool, bool),
    states: &[State],
) -> BTreeSet<State> {
    let server = Server::start().await;
    let before = LockFixture { client: Client::of(&server).await, kind, is_proposing: false };
    let fixture = LockFixture { client: before.client.clone(), kind, is_proposing: proposes };
    let names = |prefix: &str| -> Vec<String> {
        (0..states.len()).map(|number| format!("{prefix}{number}")).collect()
    };
    let (many, single) = (names("m"), names("s"));
    for ((state, many), single) in states.iter().copied().zip(&many).zip(&single) {
        before.prepare(state, many).await;
        before.prepare(state, single).await;
        assert_eq!(fixture.contents(many).await, fixture.contents(single).await, "{state:?}");
    }
    let mut before = Vec::new();
    for lock in &many {
        before.push(fixture.contents(lock).await);
    }
    let answers = fixture.many(verb, &many, fenced).await;
    let mut alone = BTreeSet::new();
    for (place, state) in states.iter().copied().enumerate() {
        let one = async |lock: &str| match verb {
            "acquire" => fixture.acquire(lock, "a", "o", fenced, "").await,
            "renew" => fixture.renew(lock).await,
            _ => fixture.release(lock).await,
        };
        let is_extended = answers[place] != ALONE && verb == "renew";
        assert_eq!(
            fixture.is_extended(&many[place]).await,
            is_extended,
            "{} {state:?}",
            fixture.script(verb)
        );
        let expected = one(&single[place]).await;
        let case = format!("{} {state:?}", fixture.script(verb));
        if answers[place] == ALONE {
            alone.insert(state);
            assert_eq!(fixture.contents(&many[place]).await, before[place], "{case}");
            assert_eq!(timeless(&one(&many[place]).await), timeless(&expected), "{case}");
        } else {
            assert_eq!(timeless(&Value::Int(answers[place])), timeless(&expected), "{case}");
        }
        assert_eq!(fixture.contents(&many[place]).await, fixture.contents(&single[place]).await, "{case}");
    }
    // A second delivery changes nothing, and the script for one lock repeats its answer.
    let mut before = Vec::new();
    for lock in &many {
        before.push(fixture.contents(lock).await);
    }
    if verb == "acquire" {
        let again = fixture.many(verb, &many, fenced).await;
        for (place, state) in states.iter().copied().enumerate() {
            assert_eq!(again[place], ALONE, "{kind} {state:?}");
            assert_eq!(fixture.contents(&many[place]).await, before[place], "{kind} {state:?}");
            if answers[place] != ALONE {
                let repeated = fixture.acquire(&many[place], "a", "o", fenced, "").await;
                assert_eq!(number(repeated), answers[place], "{kind} {state:?}");
            }
        }
    }
    alone
}

/// Marks of ended attempts do not matter. A read-write lock has another layout beside a queue,
/// which marks are in.
fn has_marks(kind: &str) -> bool {
    matches!(kind, "mutex" | "reentrant")
}

#[tokio::test]
async fn scripts_for_many_locks_acquire_what_is_free() {
    for kind in KINDS {
        for tokens @ (proposes, fenced) in [(false, true), (false, false), (true, true), (true, false)] {
            // Without another state beside them, one EXISTS decides for all.
            let free = [State::Free, State::FreeWithoutCounter, State::Free];
            assert_eq!(compare(kind, "acquire", tokens, &free).await, BTreeSet::new());
            let alone = compare(kind, "acquire", tokens, &STATES).await;
            let mut common = vec![State::Free, State::FreeWithoutCounter];
            if has_marks(kind) {
                common.push(State::FreeWithMark);
            }
            if !fenced {
                common.extend([State::CorruptCounter, State::FullCounter]);
            }
            for state in STATES {
                let case = format!("{kind} {state:?}, proposes: {proposes}, fenced: {fenced}");
                assert_eq!(alone.contains(&state), !common.contains(&state), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn scripts_for_many_locks_release_what_nothing_waits_for() {
    for kind in KINDS {
        assert_eq!(compare(kind, "release", (false, true), &[State::Own; 3]).await, BTreeSet::new());
        let alone = compare(kind, "release", (false, true), &STATES).await;
        for state in STATES {
            // The release of a mutex finds its hold, whatever else the tests did to it.
            let nested = state == State::OwnNested && kind == "mutex";
            let marked = state == State::OwnWithMark && has_marks(kind);
            let common = state == State::Own || marked || nested;
            assert_eq!(alone.contains(&state), !common, "{kind} {state:?}");
        }
    }
}

#[tokio::test]
async fn scripts_for_many_locks_renew_what_their_attempts_hold() {
    for kind in KINDS {
        assert_eq!(compare(kind, "renew", (false, true), &[State::Own; 3]).await, BTreeSet::new());
        let alone = compare(kind, "renew", (false, true), &STATES).await;
        let common: &[State] = match kind {
            "mutex" | "reentrant" => {
                &[State::Own, State::OwnWithWaiter, State::OwnWithMark, State::OwnNested]
            }
            _ => &[State::Own],
        };
        for state in STATES {
            assert_eq!(alone.contains(&state), !common.contains(&state), "{kind} {state:?}");
        }
    }
}

/// Two requests of one call for the same lock: the second one comes after the first.
#[tokio::test]
async fn scripts_for_many_locks_grant_and_release_a_lock_once() {
    let server = Server::start().await;
    for kind in KINDS {
        for proposes in [false, true] {
            let fixture = LockFixture { client: Client::of(&server).await, kind, is_proposing: proposes };
            let names = ["m", "n", "m"].map(|name| format!("{name}-{kind}-{proposes}"));
            let answers = fixture.many("acquire", &names, true).await;
            assert!(answers[0] > 0 && answers[1] > 0, "{kind} {answers:?}");
            assert_eq!(answers[2], ALONE, "{kind}");
            assert_eq!(fixture.many("release", &names, true).await, [1, 1, ALONE], "{kind}");
            assert!(
                !fixture.client.exists(&names[0]).await && !fixture.client.exists(&names[1]).await,
                "{kind}"
            );
        }
    }
}
