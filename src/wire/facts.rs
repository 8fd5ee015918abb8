//! [`Facts`]: what servers report about their settings, for the doctor.

use std::time::{Duration, SystemTime};

use redis::{ErrorKind, RedisError, Value};

use super::servers::{Connection, RepliesByServer};
use crate::clock::Moment;
use crate::diagnosis::{self, Check, Finding, Verdict};

/// What one server reports about itself.
pub(crate) struct Facts {
    server: String,
    /// Why it cannot be used: one of the masters of a cluster, for instance.
    failure: Option<String>,
    info: String,
    appendfsync: Option<String>,
    min_replicas: Option<String>,
    /// By how many milliseconds its clock is ahead of this machine's.
    clock_ahead: Option<i64>,
}

impl Facts {
    /// Queries every server behind a connection that grants locks: one, or all masters of a
    /// cluster. A server that refuses all queries is listed under the `node`'s label. Fails if
    /// there is no reply.
    pub(super) async fn ask(
        connection: &Connection,
        node: &str,
        limit: Duration,
    ) -> Result<Vec<Facts>, RedisError> {
        let config = |name: &str| redis::cmd("CONFIG").arg("GET").arg(name).clone();
        let infos = connection.send_to_masters(&redis::cmd("INFO"), limit).await?;
        let fsyncs = connection.send_to_masters(&config("appendfsync"), limit).await?;
        let replicas = connection.send_to_masters(&config("min-replicas-to-write"), limit).await?;
        let (asked_at, asked) = (SystemTime::now(), Moment::now());
        let times = connection.send_to_masters(&redis::cmd("TIME"), limit).await?;
        // Half-way between the request and the last reply.
        let now = asked_at + Moment::now().since(asked) / 2;
        let of = |replies: &RepliesByServer, server: &Option<String>| {
            let (_, reply) = replies.iter().find(|(other, _)| other == server)?;
            reply.as_ref().ok().cloned()
        };
        let mut servers: Vec<_> =
            infos.iter().chain(&fsyncs).chain(&replicas).map(|(server, _)| server).collect();
        servers.sort();
        servers.dedup();
        if servers.is_empty() {
            servers.push(&None);
        }
        let facts = servers.into_iter().map(|server| Facts {
            server: server.clone().unwrap_or_else(|| node.to_owned()),
            failure: infos.iter().find_map(|(other, reply)| {
                let error = reply.as_ref().err().filter(|_| other == server)?;
                (!matches!(error.kind(), ErrorKind::Server(_))).then(|| error.to_string())
            }),
            info: of(&infos, server).and_then(text).unwrap_or_default(),
            appendfsync: of(&fsyncs, server).and_then(text),
            min_replicas: of(&replicas, server).and_then(text),
            clock_ahead: of(&times, server).and_then(|time| ahead_of(now, time)),
        });
        Ok(facts.collect())
    }

    fn field(&self, name: &str) -> Option<&str> {
        info_field(&self.info, name)
    }

    /// What the facts mean for locks. `has_confirmation`: the client waits for replicas, so a
    /// failover loses less. `is_guarded`: a node of the quorum that restarts has no vote, whatever
    /// it lost.
    pub(crate) fn findings(&self, has_confirmation: bool, is_guarded: bool) -> Vec<Finding> {
        if let Some(failure) = &self.failure {
            let verdict = diagnosis::unusable(failure);
            return vec![Finding { server: self.server.clone(), check: Check::Connection, verdict }];
        }
        let persistence = match diagnosis::persistence(self.field("aof_enabled"), self.appendfsync.as_deref())
        {
            Verdict::Danger { .. } if is_guarded => Verdict::Fine,
            verdict => verdict,
        };
        let (role, count) = (self.field("role"), self.field("connected_slaves"));
        [
            (Check::Version, diagnosis::version(self.field("redis_version"))),
            (Check::Eviction, diagnosis::eviction(self.field("maxmemory"), self.field("maxmemory_policy"))),
            (Check::Persistence, persistence),
            (
                Check::Replicas,
                diagnosis::replicas(role, count, self.min_replicas.as_deref(), has_confirmation),
            ),
            (Check::Clock, diagnosis::clock(self.clock_ahead)),
        ]
        .into_iter()
        .map(|(check, verdict)| Finding { server: self.server.clone(), check, verdict })
        .collect()
    }
}

/// By how many milliseconds a reply to `TIME` is ahead of this machine's clock.
fn ahead_of(here: SystemTime, time: Value) -> Option<i64> {
    let (seconds, micros): (u64, u32) = redis::from_redis_value(time).ok()?;
    let there = i128::from(seconds) * 1_000 + i128::from(micros) / 1_000;
    let here = i128::try_from(here.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_millis()).ok()?;
    i64::try_from(there - here).ok()
}

/// The text of a reply to `INFO`, or the value in a reply to `CONFIG GET`.
pub(super) fn text(answer: Value) -> Option<String> {
    match answer {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        Value::VerbatimString { text, .. } => Some(text),
        Value::SimpleString(text) => Some(text),
        Value::Array(mut words) => text(words.pop()?),
        Value::Map(mut pairs) => text(pairs.pop()?.1),
        _ => None,
    }
}

/// A field of the reply to `INFO`.
pub(super) fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.map(str::trim).filter(|value| !value.is_empty())
}
