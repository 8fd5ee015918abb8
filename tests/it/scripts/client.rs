//! Requests to the scripts, sent as a program in any language would.

use redis::Value;
use redis::aio::MultiplexedConnection;

use crate::support::raw::{Verb, force_of, only, script};
use crate::support::{Server, connect};

/// The keys of the tests' lock.
pub const KEYS: [&str; 3] = ["k", "{k}:waiters", "{k}:fence"];

/// Entries of the queue with this score or a larger one are marks, not waiters.
pub const MARKS: &str = "4503599627370496";

/// The answer for one lock: one integer is final; two are a busy lock, or a proposal that is too
/// low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Final(i64),
    Busy,
    Low { highest: i64 },
}
use Answer::{Busy, Final, Low};

/// One request for one lock, with words by their names.
#[derive(Clone, Debug)]
pub struct Request {
    pub verb: Verb,
    words: Vec<(&'static str, String)>,
}

impl Request {
    /// A request of a kind: `mutex`, `reentrant`, or a side of a read-write lock.
    pub fn new(kind: &str, verb: &str, attempt: &str) -> Request {
        let request = Request { verb: Verb::of(kind, verb), words: Vec::new() };
        if request.verb.has("attempt") { request.with("attempt", attempt) } else { request }
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Request {
        self.words.push((name, value.to_owned()));
        self
    }

    /// Sets the owner, if the kind has owners.
    pub fn owner(self, owner: &str) -> Request {
        if self.verb.has("owner") { self.with("owner", owner) } else { self }
    }

    /// Adds the words with which an acquire queues and a release leaves the queue.
    pub fn queued(self) -> Request {
        self.with("claim_ms", "3000")
    }

    /// What is requested, for people: `mutex acquire`, `rwlock release, force`.
    pub fn title(&self) -> String {
        let force = if self.words.iter().any(|(name, _)| *name == "force") { ", force" } else { "" };
        format!("{} {}{force}", self.verb.script, self.verb.name)
    }

    pub fn arguments(&self) -> Vec<String> {
        self.verb.arguments(&self.words)
    }

    pub async fn send(&self, client: &Client) -> Answer {
        self.try_send(client).await.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    pub async fn try_send(&self, client: &Client) -> redis::RedisResult<Answer> {
        let mut command = redis::cmd("EVAL");
        command.arg(script(&self.verb.script));
        self.query(command, client).await
    }

    /// Sends EVALSHA with a sum from SCRIPT LOAD.
    pub async fn send_sum(&self, client: &Client, sum: &str) -> Answer {
        let mut command = redis::cmd("EVALSHA");
        command.arg(sum);
        self.query(command, client).await.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    async fn query(&self, mut command: redis::Cmd, client: &Client) -> redis::RedisResult<Answer> {
        command.arg(KEYS.len()).arg(&KEYS).arg(self.arguments());
        let answer: Value = command.query_async(&mut client.0.clone()).await?;
        Ok(match only(answer) {
            Value::Int(number) => Final(number),
            Value::Array(items) => match &items[..] {
                [Value::Int(-8), Value::Int(highest)] => Low { highest: *highest },
                [Value::Int(0..), Value::Int(_)] => Busy,
                [Value::Int(status), ..] if self.verb.name == "inspect" => Final(*status),
                _ => panic!("{self:?} answers {items:?}"),
            },
            other => panic!("{self:?} answers {other:?}"),
        })
    }
}

/// A connection to the server of a test.
#[derive(Clone)]
pub struct Client(MultiplexedConnection);

impl Client {
    pub async fn of(server: &Server) -> Client {
        Client(server.connection().await)
    }

    /// A connection with the user of this address.
    pub async fn at(url: &str) -> Client {
        Client(connect(url).await.unwrap())
    }

    pub async fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub async fn try_run<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut self.0.clone()).await
    }

    pub async fn run_bytes(&self, words: &[&[u8]]) {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| _ = command.arg(*word));
        command.query_async::<()>(&mut self.0.clone()).await.unwrap();
    }

    /// The number of waiters for the lock.
    pub async fn waiters(&self) -> u64 {
        self.run(&["ZCOUNT", KEYS[1], "-inf", &format!("({MARKS}")]).await
    }

    pub async fn exists(&self, key: &str) -> bool {
        self.run(&["EXISTS", key]).await
    }

    pub async fn flush(&self) {
        self.run::<()>(&["FLUSHALL"]).await;
    }

    /// The server's clock, in microseconds.
    pub async fn time(&self) -> u64 {
        let (seconds, micros): (u64, u64) = self.run(&["TIME"]).await;
        seconds * 1_000_000 + micros
    }
}

/// The requests for a lock of one kind: on one server, or on a node of a quorum.
#[derive(Clone, Copy, Debug)]
pub struct Acquire {
    pub kind: &'static str,
    pub is_for_quorum: bool,
}

impl Acquire {
    /// These kinds, on one server and on a node of a quorum.
    pub fn all(kinds: &[&'static str]) -> Vec<Acquire> {
        let both = |kind| [false, true].map(|is_for_quorum| Acquire { kind, is_for_quorum });
        kinds.iter().copied().flat_map(both).collect()
    }

    /// A request without fencing.
    pub fn unfenced(self, owner: &str, attempt: &str) -> Request {
        Request::new(self.kind, "acquire", attempt).with("ttl_ms", "60000").owner(owner)
    }

    /// A request with fencing: on a quorum, with this proposal.
    pub fn fenced(self, owner: &str, attempt: &str, proposal: u64) -> Request {
        let request = self.unfenced(owner, attempt);
        if self.is_for_quorum {
            request.with("proposal", &proposal.to_string())
        } else {
            request.with("min_token", "7")
        }
    }

    pub fn release(self, owner: &str, attempt: &str) -> Request {
        Request::new(self.kind, "release", attempt).owner(owner)
    }

    pub fn force(self, attempt: &str) -> Request {
        Request::new(self.kind, "release", attempt).with("force", force_of(self.kind))
    }

    pub fn renew(self, owner: &str, attempt: &str) -> Request {
        Request::new(self.kind, "renew", attempt).with("ttl_ms", "60000").owner(owner)
    }

    /// Only for the sides of a read-write lock.
    pub fn downgrade(self, owner: &str, attempt: &str) -> Request {
        Request::new(self.kind, "downgrade", attempt).with("ttl_ms", "60000").owner(owner)
    }

    pub fn inspect(self) -> Request {
        Request::new(self.kind, "inspect", "")
    }
}
