//! Requests to the scripts, sent as a program in any language would.

use redis::aio::MultiplexedConnection;

use super::script;
use crate::support::Server;

/// The keys of the tests' lock, and the key of a node of a guarded quorum.
pub const KEYS: [&str; 3] = ["k", "{k}:fence", "{k}:waiters"];
pub const NODE: &str = "{}node";

/// Entries of the queue with this score or a larger one are marks, not waiters.
pub const MARKS: &str = "4503599627370496";

/// A script's answer: one integer is final; two are a busy lock, or a proposal that is too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Final(i64),
    Busy,
    Low { highest: i64 },
}
use Answer::{Busy, Final, Low};

/// One request to a script. Its arguments are given by the names that the header of the script
/// declares.
#[derive(Clone, Debug)]
pub struct Request {
    pub script: String,
    names: Vec<String>,
    arguments: Vec<Option<String>>,
    keys: Vec<&'static str>,
}

/// The names of the arguments in a header, in order.
pub fn declared(script: &str) -> Vec<String> {
    let lines = script.lines().take_while(|line| line.starts_with("--"));
    let words = lines.filter_map(|line| line.strip_prefix("-- ARGV[")?.split_once(']'));
    words.map(|(_, rest)| rest.split_whitespace().next().unwrap().to_owned()).collect()
}

impl Request {
    pub fn new(name: &str, arguments: &[(&str, &str)]) -> Request {
        let names = declared(&script(name));
        let keys = if name.ends_with("renew") { &KEYS[..1] } else { &KEYS[..] };
        let request = Request {
            script: name.to_owned(),
            arguments: vec![None; names.len()],
            names,
            keys: keys.to_vec(),
        };
        arguments.iter().fold(request, |request, (name, value)| request.with(name, value))
    }

    pub fn with(mut self, name: &str, value: &str) -> Request {
        let index = self.names.iter().position(|known| known == name);
        self.arguments[index.unwrap_or_else(|| panic!("{} has no {name}", self.script))] = Some(value.into());
        self
    }

    /// Sets the owner, if the script has that argument.
    pub fn owner(self, owner: &str) -> Request {
        if self.names.iter().any(|name| name == "owner") { self.with("owner", owner) } else { self }
    }

    /// Adds the arguments with which an acquire queues and a release leaves the queue.
    pub fn queued(self) -> Request {
        self.with("claim_ms", "3000")
    }

    /// Adds the key of a guarded quorum's node.
    pub fn guarded(mut self) -> Request {
        self.keys.push(NODE);
        self
    }

    /// Keeps only the first arguments and leaves the others out.
    pub fn first(mut self, count: usize) -> Request {
        self.arguments.truncate(count);
        self
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The words after EVAL or EVALSHA and the script. Arguments that are left out at the end are
    /// not sent; others are empty.
    fn words(&self) -> Vec<&str> {
        let given = self.arguments.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let arguments = self.arguments[..given].iter().map(|argument| argument.as_deref().unwrap_or(""));
        self.keys.iter().copied().chain(arguments).collect()
    }

    pub async fn send(&self, client: &Client) -> Answer {
        self.try_send(client).await.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    pub async fn try_send(&self, client: &Client) -> redis::RedisResult<Answer> {
        let mut command = redis::cmd("EVAL");
        command.arg(script(&self.script));
        self.query(command, client).await
    }

    /// Sends EVALSHA with a sum from SCRIPT LOAD.
    pub async fn send_sum(&self, client: &Client, sum: &str) -> Answer {
        let mut command = redis::cmd("EVALSHA");
        command.arg(sum);
        self.query(command, client).await.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    async fn query(&self, mut command: redis::Cmd, client: &Client) -> redis::RedisResult<Answer> {
        command.arg(self.keys.len()).arg(self.words());
        let answer: redis::Value = command.query_async(&mut client.0.clone()).await?;
        Ok(match answer {
            redis::Value::Int(number) => Final(number),
            redis::Value::Array(items) => match &items[..] {
                [redis::Value::Int(-8), redis::Value::Int(highest)] => Low { highest: *highest },
                [redis::Value::Int(0..), redis::Value::Int(_)] => Busy,
                [redis::Value::Int(status), ..] if self.script.ends_with("inspect") => Final(*status),
                _ => panic!("{self:?} answers {items:?}"),
            },
            other => panic!("{self:?} answers {other:?}"),
        })
    }

    /// Sends the request twice, and checks that the answer is the same and that the second delivery
    /// changes only the mark of a waiter's poll. Each grant writes all the same, for `WAIT`.
    pub async fn twice(&self, client: &Client) -> Answer {
        let first = self.send(client).await;
        let after_first = client.state().await;
        let written = client.writes().await;
        let second = self.send(client).await;
        if self.script.ends_with("acquire") && matches!(second, Final(0..)) {
            assert!(client.writes().await > written, "{self:?}");
        }
        if !self.script.ends_with("renew") {
            assert_eq!(first, second, "{self:?}");
        }
        assert_eq!(after_first, client.state().await, "{self:?}");
        second
    }
}

/// A connection to the server of a test.
#[derive(Clone)]
pub struct Client(MultiplexedConnection);

impl Client {
    pub async fn of(server: &Server) -> Client {
        Client(server.connection().await)
    }

    pub async fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub async fn try_run<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut self.0.clone()).await
    }

    /// The value of every key, without the marks of waiters' polls.
    pub async fn state(&self) -> Vec<(String, Vec<u8>)> {
        let mut state = Vec::new();
        let mut keys: Vec<String> = self.run(&["KEYS", "*"]).await;
        keys.sort();
        for key in keys {
            let held = if key == KEYS[2] && self.run::<String>(&["TYPE", &key]).await == "zset" {
                let members: Vec<(String, String)> =
                    self.run(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await;
                let members = members.into_iter().filter(|(member, _)| !member.starts_with("seen "));
                members.map(|(member, score)| format!("{member}={score}\n")).collect::<String>().into_bytes()
            } else {
                self.run(&["DUMP", &key]).await
            };
            state.push((key, held));
        }
        state
    }

    /// The number of writes, whether they changed a value or not.
    async fn writes(&self) -> u64 {
        let info: String = self.run(&["INFO", "persistence"]).await;
        info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")?.parse().ok()).unwrap()
    }

    /// The number of waiters for the lock.
    pub async fn waiters(&self) -> u64 {
        self.run(&["ZCOUNT", KEYS[2], "-inf", &format!("({MARKS}")]).await
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

/// A script that acquires a lock of one kind: on one server, or on a node of a quorum.
#[derive(Clone, Copy, Debug)]
pub struct Acquire {
    pub kind: &'static str,
    pub is_for_quorum: bool,
}

impl Acquire {
    /// The scripts of these kinds, on one server and on a node of a quorum.
    pub fn all(kinds: &[&'static str]) -> Vec<Acquire> {
        let both = |kind| [false, true].map(|is_for_quorum| Acquire { kind, is_for_quorum });
        kinds.iter().copied().flat_map(both).collect()
    }

    pub fn script(self) -> String {
        if self.is_for_quorum { format!("quorum/{}_acquire", self.kind) } else { path(self.kind, "acquire") }
    }

    /// A request without fencing.
    pub fn unfenced(self, owner: &str, attempt: &str) -> Request {
        Request::new(&self.script(), &[("attempt", attempt), ("ttl_ms", "60000")]).owner(owner)
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
        Request::new(&path(self.kind, "release"), &[("attempt", attempt)]).owner(owner)
    }

    pub fn force(self, attempt: &str) -> Request {
        Request::new(&path(self.kind, "force"), &[("attempt", attempt)])
    }

    pub fn renew(self, owner: &str, attempt: &str) -> Request {
        let arguments = [("attempt", attempt), ("ttl_ms", "60000")];
        Request::new(&path(self.kind, "renew"), &arguments).owner(owner)
    }
}

/// The name of the script of a kind.
pub fn path(kind: &str, verb: &str) -> String {
    match (kind, verb) {
        ("read" | "write", "acquire" | "force") => format!("rwlock/{kind}_{verb}"),
        ("read" | "write", _) => format!("rwlock/{verb}"),
        _ => format!("{kind}/{verb}"),
    }
}
