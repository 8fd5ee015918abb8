//! Requests to the scripts, sent without this crate's client, as a program in any language would.

use redis::{RedisResult, Value};
use serde_json::Value as Json;

use super::binary::repository;
use super::{Kind, Server};

/// Members of a queue with a smaller score are waiters; the others are marks.
pub const WAITERS: &str = "(4503599627370496";

fn file(name: &str) -> String {
    std::fs::read_to_string(repository().join("lua").join(name)).unwrap()
}

/// The text of the script of a kind: `mutex`, `reentrant`, `rwlock`, `node` or `fenced`.
pub fn script(kind: &str) -> String {
    file(&format!("{kind}.lua"))
}

/// A verb of a script, and the names of its words in their order, from `lua/protocol.json`.
#[derive(Clone, Debug)]
pub struct Verb {
    pub script: String,
    pub name: String,
    /// The words of each lock.
    pub words: Vec<String>,
    /// The words that all locks share.
    pub shared: Vec<String>,
}

impl Verb {
    pub fn new(script: &str, name: &str) -> Verb {
        let protocol: Json = serde_json::from_str(&file("protocol.json")).unwrap();
        let verbs = protocol["verbs"].as_array().unwrap();
        let entry = verbs.iter().find(|entry| entry["kind"] == script && entry["verb"] == name);
        let entry = entry.unwrap_or_else(|| panic!("lua/protocol.json has no {script} {name}"));
        let names = |field: &str| {
            let names = entry[field].as_array().unwrap().iter();
            names.map(|name| name.as_str().unwrap().to_owned()).collect()
        };
        Verb { script: script.into(), name: name.into(), words: names("words"), shared: names("shared") }
    }

    /// The verb with which a kind is acquired; `renew`, `release` and `inspect` are the same for
    /// both sides of a read-write lock.
    pub fn of(kind: &str, name: &str) -> Verb {
        match (kind, name) {
            ("read" | "write", "acquire") => Verb::new("rwlock", kind),
            ("read" | "write", _) => Verb::new("rwlock", name),
            _ => Verb::new(kind, name),
        }
    }

    pub fn has(&self, word: &str) -> bool {
        self.words.iter().chain(&self.shared).any(|name| name == word)
    }

    /// The arguments of a request for one lock, with words by their names. The shared words that
    /// are not given at the end are not sent; others are empty.
    pub fn arguments(&self, given: &[(&str, String)]) -> Vec<String> {
        for (name, _) in given {
            assert!(self.has(name), "{} {} has no {name}", self.script, self.name);
        }
        let find = |name: &String| given.iter().rev().find(|(word, _)| word == name).map(|(_, value)| value);
        let shared: Vec<_> = self.shared.iter().map(find).collect();
        let sent = shared.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let words = self.words.iter().map(find).chain(shared[..sent].iter().copied());
        let words = words.map(|word| word.cloned().unwrap_or_default());
        std::iter::once(self.name.clone()).chain(words).collect()
    }
}

/// The word `force` of a release that revokes a lock of this kind.
pub fn force_of(kind: &str) -> &str {
    if ["read", "write"].contains(&kind) { kind } else { "1" }
}

/// The answer for the only lock of a request.
pub fn only(answer: Value) -> Value {
    match answer {
        Value::Array(mut answers) if answers.len() == 1 => answers.remove(0),
        Value::Int(-5) => Value::Int(-5),
        other => panic!("no list of one answer: {other:?}"),
    }
}

/// Words of a request, by their names.
pub type Words = Vec<(&'static str, String)>;

/// One lock of one kind on one server, by its key.
#[derive(Clone, Copy)]
pub struct RawLock<'a> {
    pub server: &'a Server,
    pub kind: Kind,
    pub key: &'a str,
}

/// One waiter: its claim, and the channel on which it is notified, if there is one.
#[derive(Clone, Copy)]
pub struct RawWaiter<'a> {
    pub claim_ms: u64,
    pub channel: &'a str,
}

impl RawLock<'_> {
    pub fn queue(&self) -> String {
        format!("{{{}}}:waiters", self.key)
    }

    /// All words of a request, starting with `EVALSHA`.
    async fn request(&self, verb: &str, words: &Words) -> Vec<String> {
        let verb = Verb::of(self.kind.name(), verb);
        let sum: String = self.server.run(&["SCRIPT", "LOAD", &script(&verb.script)]).await;
        let keys = [self.key.to_owned(), self.queue(), format!("{{{}}}:fence", self.key)];
        let head = ["EVALSHA".to_owned(), sum, "3".to_owned()].into_iter().chain(keys);
        head.chain(verb.arguments(words)).collect()
    }

    /// The answer for this lock.
    pub async fn send(&self, verb: &str, words: &Words) -> RedisResult<Value> {
        let words = self.request(verb, words).await;
        self.server.try_run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await.map(only)
    }

    /// The attempt's id, and its owner if the kind has owners. Each attempt has an owner of its
    /// own.
    pub fn owned(self, attempt: &str) -> Words {
        let mut words = vec![("attempt", attempt.to_owned())];
        if self.kind != Kind::Mutex {
            words.push(("owner", format!("owner-{attempt}")));
        }
        words
    }

    /// An acquire request that asks for consecutive tokens.
    pub fn acquiring(self, attempt: &str, ttl_ms: u64, waiter: Option<RawWaiter<'_>>) -> Words {
        let mut words = self.owned(attempt);
        words.extend([("ttl_ms", ttl_ms.to_string()), ("min_token", "0".to_owned())]);
        words.extend(waiter.into_iter().flat_map(RawWaiter::words));
        words
    }

    /// The token, if the lock is granted; `None`, if it is busy.
    pub async fn acquire(&self, attempt: &str, ttl_ms: u64, waiter: Option<RawWaiter<'_>>) -> Option<i64> {
        match self.send("acquire", &self.acquiring(attempt, ttl_ms, waiter)).await.unwrap() {
            Value::Int(token @ 0..) => Some(token),
            Value::Array(words) if words.len() == 2 => None,
            other => panic!("{attempt}: {other:?}"),
        }
    }

    /// A release request that also leaves the queue and is remembered.
    pub fn releasing(self, attempt: &str, waiter: RawWaiter<'_>) -> Words {
        let mut words = self.owned(attempt);
        words.extend([("min_token", "0".to_owned()), ("remember", "1".to_owned())]);
        words.extend(waiter.words());
        words
    }

    /// A release request that revokes the lock from any holder.
    pub fn forcing(self, attempt: &str) -> Words {
        vec![("attempt", attempt.to_owned()), ("force", force_of(self.kind.name()).to_owned())]
    }

    pub async fn release(&self, attempt: &str) -> i64 {
        match self.send("release", &self.owned(attempt)).await.unwrap() {
            Value::Int(answer) => answer,
            other => panic!("{attempt}: {other:?}"),
        }
    }

    /// Queues waiters without a client, all in one batch.
    pub async fn queue_all(&self, attempts: impl Iterator<Item = String>, waiter: RawWaiter<'_>) {
        let mut pipe = redis::pipe();
        for attempt in attempts {
            let words = self.request("acquire", &self.acquiring(&attempt, 60_000, Some(waiter))).await;
            pipe.cmd(&words[0]).arg(&words[1..]).ignore();
        }
        let _: () = pipe.query_async(&mut self.server.connection().await).await.unwrap();
    }

    /// Writes dead waiters into the queue: they were last seen a second after the epoch.
    pub async fn add_dead(&self, count: u64) {
        let lane = if self.kind == Kind::Read { -(1 << 52) } else { 0 };
        let mut add = redis::cmd("ZADD");
        add.arg(self.queue());
        for number in 0..count {
            let (owner, depth) = if self.kind == Kind::Mutex { ("", "") } else { ("o", " 255") };
            let text = format!("dead-{number} {} 3000  {owner}{depth}", self.kind.name());
            add.arg(1_000_000 + number as i64 + lane).arg(text);
        }
        let _: () = add.query_async(&mut self.server.connection().await).await.unwrap();
        self.server.run::<()>(&["PEXPIRE", &self.queue(), "60000"]).await;
    }

    /// The waiters in their order, with their scores.
    pub async fn waiters(&self) -> Vec<(String, f64)> {
        self.server.run(&["ZRANGEBYSCORE", &self.queue(), "-inf", WAITERS, "WITHSCORES"]).await
    }
}

impl RawWaiter<'_> {
    fn words(self) -> Words {
        vec![("claim_ms", self.claim_ms.to_string()), ("channel", self.channel.to_owned())]
    }
}
