//! [`Facts`]: what servers say of themselves, as far as the rights of the client's user allow.

use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, Value};

use super::connection::Connection;
use crate::diagnosis::{self, Check, Finding, Verdict};

/// What one server says of itself.
pub(crate) struct Facts {
    server: String,
    info: String,
    appendfsync: Option<String>,
    min_replicas: Option<String>,
}

impl Facts {
    /// Asks every server behind a connection that grants locks: one, or all masters of a cluster. A
    /// server that refuses all of it is there all the same, under the name of the `node`. An error
    /// if there is no answer.
    pub(super) async fn ask(
        connection: &Connection,
        node: &str,
        limit: Duration,
    ) -> Result<Vec<Facts>, RedisError> {
        let config = |name: &str| redis::cmd("CONFIG").arg("GET").arg(name).clone();
        let infos = texts(connection, &redis::cmd("INFO"), limit).await?;
        let fsyncs = texts(connection, &config("appendfsync"), limit).await?;
        let replicas = texts(connection, &config("min-replicas-to-write"), limit).await?;
        let of = |texts: &[(Option<String>, String)], server: &Option<String>| {
            texts.iter().find(|(other, _)| other == server).map(|(_, text)| text.clone())
        };
        let mut servers: Vec<_> = infos.iter().chain(&fsyncs).chain(&replicas).map(|(it, _)| it).collect();
        servers.sort();
        servers.dedup();
        if servers.is_empty() {
            servers.push(&None);
        }
        let facts = servers.into_iter().map(|server| Facts {
            server: server.clone().unwrap_or_else(|| node.to_owned()),
            info: of(&infos, server).unwrap_or_default(),
            appendfsync: of(&fsyncs, server),
            min_replicas: of(&replicas, server),
        });
        Ok(facts.collect())
    }

    fn field(&self, name: &str) -> Option<&str> {
        let value = self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map(str::trim).filter(|value| !value.is_empty())
    }

    /// What they mean for locks. If the client `waits` for replicas, a failover loses less; if a
    /// quorum is `guarded`, a node that restarts has no vote, whatever it has forgotten.
    pub(crate) fn findings(&self, waits: bool, guarded: bool) -> Vec<Finding> {
        let persistence = match diagnosis::persistence(self.field("aof_enabled"), self.appendfsync.as_deref())
        {
            Verdict::Danger { .. } if guarded => Verdict::Fine,
            verdict => verdict,
        };
        let (role, count) = (self.field("role"), self.field("connected_slaves"));
        [
            (Check::Version, diagnosis::version(self.field("redis_version"))),
            (Check::Eviction, diagnosis::eviction(self.field("maxmemory"), self.field("maxmemory_policy"))),
            (Check::Persistence, persistence),
            (Check::Replicas, diagnosis::replicas(role, count, self.min_replicas.as_deref(), waits)),
        ]
        .into_iter()
        .map(|(check, verdict)| Finding { server: self.server.clone(), check, verdict })
        .collect()
    }
}

/// The texts that servers answer with, by server; none of those that refuse.
async fn texts(
    connection: &Connection,
    request: &Cmd,
    limit: Duration,
) -> Result<Vec<(Option<String>, String)>, RedisError> {
    let answers = match connection.send_to_masters(request, limit).await {
        Err(error) if matches!(error.kind(), ErrorKind::Server(_)) => Vec::new(),
        answers => answers?,
    };
    let text = |(server, answer)| Some((server, text(answer)?));
    Ok(answers.into_iter().filter_map(text).collect())
}

/// The text of an answer to `INFO`, or the value in one to `CONFIG GET`.
fn text(answer: Value) -> Option<String> {
    match answer {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        Value::VerbatimString { text, .. } => Some(text),
        Value::SimpleString(text) => Some(text),
        Value::Array(mut words) => text(words.pop()?),
        Value::Map(mut pairs) => text(pairs.pop()?.1),
        _ => None,
    }
}

impl Connection {
    /// Sends a request to every server that grants locks: to the one, or to each master of a
    /// cluster, by its address.
    async fn send_to_masters(
        &self,
        request: &Cmd,
        limit: Duration,
    ) -> Result<Vec<(Option<String>, Value)>, RedisError> {
        match self {
            Connection::Server(_) => Ok(vec![(None, self.send(request, limit).await?)]),
            #[cfg(feature = "cluster")]
            Connection::Cluster(connection) => {
                let answers = super::cluster::ask_masters(connection.clone(), request.clone());
                tokio::time::timeout(limit, answers).await.map_err(|_| super::connection::too_slow())?
            }
        }
    }
}
