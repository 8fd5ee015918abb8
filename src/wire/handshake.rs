//! [`Handshake`]: what is queried on a new connection. [`Membership`]: which servers the nodes of a
//! quorum are.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::facts::{Facts, info_field, text};
use super::servers::Connection;
use crate::diagnosis::{Check, Finding};
use crate::error::NodeProblem;
use crate::fencing::FencingToken;
use crate::guarded::Guarded;
use crate::traces::event;

/// What is queried on a new connection of a node.
pub(super) struct Handshake {
    /// How long the server may stay silent.
    pub(super) limit: Duration,
    /// In a quorum: the node's place, and the membership.
    pub(super) place: Option<(usize, Arc<Membership>)>,
    pub(super) label: Arc<str>,
    /// Whether this client has checked the node's servers for settings that endanger locks.
    pub(super) is_examined: Arc<AtomicBool>,
}

impl Handshake {
    /// Returns the server's run id, in a quorum, and its clock in microseconds.
    pub(super) async fn run(
        &self,
        connection: &Connection,
    ) -> Result<(Option<Arc<str>>, Option<u64>), RedisError> {
        let run = match &self.place {
            Some((place, membership)) => membership.admit(*place, connection, self.limit).await?,
            None => None,
        };
        match connection.time(self.limit).await {
            Ok(answer) => {
                let time = server_time(&answer)?;
                self.examine(connection);
                Ok((run, Some(time)))
            }
            // Without this right, the minimum token rises with the first reply that carries a time.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok((run, None)),
            Err(error) => Err(error),
        }
    }

    /// Warns of servers that evict keys and, in a quorum, of servers that lose locks in a restart:
    /// once, in a task of its own, and only if the user has the right to query it. No lock waits
    /// for that.
    fn examine(&self, connection: &Connection) {
        if cfg!(not(feature = "tracing")) || self.is_examined.swap(true, Ordering::Relaxed) {
            return;
        }
        let (connection, label, limit) = (connection.clone(), Arc::clone(&self.label), self.limit);
        let (is_in_quorum, is_guarded) = match &self.place {
            Some((_, membership)) => (true, membership.is_strict),
            None => (false, false),
        };
        tokio::spawn(async move {
            for facts in Facts::ask(&connection, &label, limit).await.into_iter().flatten() {
                let matters = |finding: &Finding| {
                    finding.verdict.is_danger()
                        && (finding.check == Check::Eviction
                            || finding.check == Check::Persistence && is_in_quorum)
                };
                for _finding in facts.findings(false, is_guarded).into_iter().filter(matters) {
                    event!(warn, finding = %_finding, "a server may lose locks: see the finding");
                }
            }
        });
    }
}

/// The server's clock in microseconds, from a reply to `TIME`.
fn server_time(reply: &Value) -> Result<u64, RedisError> {
    let (seconds, micros): (u64, u64) = redis::from_redis_value_ref(reply)?;
    let time = seconds.checked_mul(1_000_000).and_then(|time| time.checked_add(micros));
    time.filter(|time| *time < FencingToken::LIMIT).ok_or_else(|| {
        let text = format!("{seconds} s and {micros} us");
        RedisError::from((ErrorKind::UnexpectedReturnType, "the reply to TIME is out of range", text))
    })
}

/// The run id of each node of a quorum, as far as it is known, or why the node may not be part of
/// it.
pub(crate) struct Membership {
    nodes: Guarded<Vec<Result<Option<Arc<str>>, NodeProblem>>>,
    labels: Vec<String>,
    /// Which nodes have replied that they have no vote.
    has_no_vote: Vec<AtomicBool>,
    /// Whether the quorum is guarded: a node that restarts has no vote for a while, and one without
    /// a run id has none.
    pub(super) is_strict: bool,
}

impl Membership {
    pub(crate) fn new(labels: Vec<String>, is_strict: bool) -> Membership {
        let nodes = Guarded::new(vec![Ok(None); labels.len()]);
        let has_no_vote = labels.iter().map(|_| AtomicBool::new(false)).collect();
        Membership { nodes, labels, has_no_vote, is_strict }
    }

    /// Logs that a node has no vote: once, until it votes again.
    pub(super) fn note(&self, node: usize, has_refused: bool) {
        if self.has_no_vote[node].swap(has_refused, Ordering::Relaxed) != has_refused && has_refused {
            let _node = &self.labels[node];
            event!(warn, server = %_node, "a node has no vote since it started or lost its data: call Locks::rejoin");
        }
    }

    /// Why a node may not be part of the quorum, as its last connection found.
    pub(crate) fn problem(&self, node: usize) -> Option<NodeProblem> {
        self.nodes.lock()[node].clone().err()
    }

    /// Queries a server for its identity, on a new connection. An error: the server must not vote.
    pub(super) async fn admit(
        &self,
        node: usize,
        connection: &Connection,
        limit: Duration,
    ) -> Result<Option<Arc<str>>, RedisError> {
        let info = match connection.query(&redis::cmd("INFO"), limit).await {
            Err(error) if !self.is_strict && is_denied(&error) => String::new(),
            info => text(info?).unwrap_or_default(),
        };
        let run: Option<Arc<str>> = info_field(&info, "run_id").map(Arc::from);
        if run.is_none() {
            event!(warn, server = %self.labels[node], "a node has no run id in its INFO: data loss in a restart is not noticed");
        }
        self.check_member(node, run, info_field(&info, "role")).map_err(|problem| {
            let text = "the node may not be part of the quorum";
            RedisError::from((ErrorKind::InvalidClientConfig, text, problem.to_string()))
        })
    }

    /// A server that does not identify itself is indistinguishable from others, and is treated as a
    /// different one.
    fn check_member(
        &self,
        node: usize,
        run: Option<Arc<str>>,
        role: Option<&str>,
    ) -> Result<Option<Arc<str>>, NodeProblem> {
        let mut nodes = self.nodes.lock();
        let mut others = nodes.iter().enumerate().filter(|(other, _)| *other != node);
        let same = others.find(|(_, known)| run.is_some() && known.as_ref() == Ok(&run));
        let member = match same {
            Some((other, _)) => Err(NodeProblem::SameServer { other: self.labels[other].clone() }),
            None if role == Some("slave") => Err(NodeProblem::Replica),
            None if self.is_strict && run.is_none() => Err(NodeProblem::Unidentified),
            None => Ok(run),
        };
        nodes[node].clone_from(&member);
        member
    }
}

/// Whether a server refuses a query to all users, or to ours.
fn is_denied(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;

    #[test]
    fn a_clock_that_no_server_has_is_an_error() {
        let time = |seconds: &str, micros: &str| {
            let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
            server_time(&Value::Array(vec![text(seconds), text(micros)])).ok()
        };
        assert_eq!(time("1800000000", "5"), Some(1_800_000_000_000_005));
        for (seconds, micros) in
            [("9999999999999999999", "0"), ("1", "18446744073709551615"), ("9007199255", "0"), ("-1", "0")]
        {
            assert_eq!(time(seconds, micros), None, "{seconds} {micros}");
        }
    }
}
