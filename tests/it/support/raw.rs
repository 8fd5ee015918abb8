//! Requests to the scripts, sent without this crate's client, as a program in any language would.

use std::path::Path;

use redis::{RedisResult, Value};

use super::{Kind, Server};

/// Members of a queue with a smaller score are waiters; the others are marks.
pub const WAITERS: &str = "(4503599627370496";

/// The text of a script.
pub fn script(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua").join(name).with_extension("lua");
    std::fs::read_to_string(path).unwrap()
}

/// The script of a kind: `acquire`, `release`, `renew`, `force` or `inspect`.
pub fn script_of(kind: Kind, verb: &str) -> String {
    match (kind, verb) {
        (Kind::Read | Kind::Write, "acquire" | "force") => format!("rwlock/{}_{verb}", kind.name()),
        (Kind::Read | Kind::Write, _) => format!("rwlock/{verb}"),
        _ => format!("{}/{verb}", kind.name()),
    }
}

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
    async fn words(&self, name: &str, arguments: &[String]) -> Vec<String> {
        let sum: String = self.server.run(&["SCRIPT", "LOAD", &script(name)]).await;
        let keys = [self.key.to_owned(), format!("{{{}}}:fence", self.key), self.queue()];
        let keys = if name.ends_with("renew") { &keys[..1] } else { &keys[..] };
        let head = ["EVALSHA".to_owned(), sum, keys.len().to_string()];
        head.iter().chain(keys).chain(arguments).cloned().collect()
    }

    pub async fn send(&self, name: &str, arguments: &[String]) -> RedisResult<Value> {
        let words = self.words(name, arguments).await;
        self.server.try_run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await
    }

    /// The attempt's id, and its owner if the kind has owners. Each attempt has an owner of its
    /// own.
    fn owned(self, attempt: &str) -> Vec<String> {
        match self.kind {
            Kind::Mutex => vec![attempt.to_owned()],
            _ => vec![attempt.to_owned(), format!("owner-{attempt}")],
        }
    }

    /// The arguments of an acquire request that asks for consecutive tokens.
    pub fn acquiring(self, attempt: &str, ttl_ms: u64, waiter: Option<RawWaiter<'_>>) -> Vec<String> {
        let mut arguments = self.owned(attempt);
        arguments.insert(1, ttl_ms.to_string());
        arguments.push("0".to_owned());
        if let Some(waiter) = waiter {
            arguments.extend([waiter.claim_ms.to_string(), waiter.channel.to_owned()]);
        }
        arguments
    }

    /// The token, if the lock is granted; `None`, if it is busy.
    pub async fn acquire(&self, attempt: &str, ttl_ms: u64, waiter: Option<RawWaiter<'_>>) -> Option<i64> {
        let arguments = self.acquiring(attempt, ttl_ms, waiter);
        match self.send(&script_of(self.kind, "acquire"), &arguments).await.unwrap() {
            Value::Int(token @ 0..) => Some(token),
            Value::Array(words) if words.len() == 2 => None,
            other => panic!("{attempt}: {other:?}"),
        }
    }

    /// The arguments of a release request that also leaves the queue and is remembered.
    pub fn releasing(self, attempt: &str, waiter: RawWaiter<'_>) -> Vec<String> {
        let mut arguments = self.owned(attempt);
        let rest = ["0", "1", &waiter.claim_ms.to_string(), waiter.channel].map(str::to_owned);
        arguments.extend(rest);
        arguments
    }

    pub async fn release(&self, attempt: &str) -> i64 {
        match self.send(&script_of(self.kind, "release"), &self.owned(attempt)).await.unwrap() {
            Value::Int(answer) => answer,
            other => panic!("{attempt}: {other:?}"),
        }
    }

    /// Queues waiters without a client, all in one batch.
    pub async fn queue_all(&self, attempts: impl Iterator<Item = String>, waiter: RawWaiter<'_>) {
        let name = script_of(self.kind, "acquire");
        let mut pipe = redis::pipe();
        for attempt in attempts {
            let words = self.acquiring(&attempt, 60_000, Some(waiter));
            if pipe.is_empty() {
                let _ = self.words(&name, &words).await;
            }
            let sum = redis::Script::new(&script(&name)).get_hash().to_owned();
            let cmd = pipe.cmd("EVALSHA").arg(sum).arg(3).arg(self.key);
            cmd.arg(format!("{{{}}}:fence", self.key)).arg(self.queue()).arg(words).ignore();
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
