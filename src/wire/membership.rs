//! The nodes of a quorum, told apart: one server must not vote twice, nor a copy of another one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::connection::Connection;
use super::connection::too_slow;
use crate::error::NodeProblem;
use crate::event::event;

/// Which run of which server each node of a quorum is, as far as that is known.
#[derive(Debug)]
pub(crate) struct Membership {
    runs: Mutex<Vec<Option<Arc<str>>>>,
    labels: Vec<String>,
    problems: Mutex<Vec<Option<NodeProblem>>>,
    /// Which have answered that they have no vote.
    refuse: Vec<AtomicBool>,
    /// A node that does not say who it is has no vote.
    strict: bool,
}

impl Membership {
    pub(crate) fn new(labels: Vec<String>, strict: bool) -> Membership {
        let (runs, problems) = (vec![None; labels.len()], vec![None; labels.len()]);
        let refuse = labels.iter().map(|_| AtomicBool::new(false)).collect();
        Membership { runs: Mutex::new(runs), labels, problems: Mutex::new(problems), refuse, strict }
    }

    /// Says that a node has no vote: once, until it has one again.
    pub(super) fn note(&self, node: usize, refuses: bool) {
        if self.refuse[node].swap(refuses, Ordering::Relaxed) != refuses && refuses {
            let _node = &self.labels[node];
            event!(warn, node = %_node, "a node has no vote since it started or lost its data: call Locks::rejoin");
        }
    }

    /// Whether it is that of a guarded quorum, in which a node that starts again has no vote.
    pub(super) fn is_strict(&self) -> bool {
        self.strict
    }

    /// Why a node may not be part of the quorum, as it was found when it was connected to last.
    pub(crate) fn problem(&self, node: usize) -> Option<NodeProblem> {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)[node].clone()
    }

    /// Asks a server who it is, on a new connection. An error for one that must not vote.
    pub(super) async fn admit(
        &self,
        node: usize,
        connection: &Connection,
        limit: std::time::Duration,
    ) -> Result<Option<Arc<str>>, RedisError> {
        let info = match tokio::time::timeout(limit, connection.send(&redis::cmd("INFO"), limit)).await {
            Ok(info) => info,
            Err(_) => return Err(too_slow()),
        };
        let info = match info {
            Err(error) if !self.strict && is_denied(&error) => String::new(),
            info => text(info?),
        };
        let field = |name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim).filter(|value| !value.is_empty())
        };
        let run: Option<Arc<str>> = field("run_id").map(Arc::from);
        if run.is_none() {
            event!(warn, node = %self.labels[node], "a node does not say who it is");
        }
        let problem = self.check_member(node, run.as_ref(), field("role"));
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)[node].clone_from(&problem);
        match problem {
            None => Ok(run),
            Some(problem) => {
                let text = "the node may not be part of the quorum";
                Err(RedisError::from((ErrorKind::InvalidClientConfig, text, problem.to_string())))
            }
        }
    }

    /// Who does not say who it is cannot be told from others, and is taken for another one.
    fn check_member(&self, node: usize, run: Option<&Arc<str>>, role: Option<&str>) -> Option<NodeProblem> {
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut others = runs.iter().enumerate().filter(|(other, _)| *other != node);
        let same = others.find(|(_, known)| run.is_some() && known.as_ref() == run);
        let problem = match same {
            Some((other, _)) => Some(NodeProblem::SameServer { other: self.labels[other].clone() }),
            None if role == Some("slave") => Some(NodeProblem::Replica),
            None if self.strict && run.is_none() => Some(NodeProblem::Unidentified),
            None => None,
        };
        runs[node] = if problem.is_none() { run.cloned() } else { None };
        problem
    }
}

/// Whether a server does not answer that to anybody, or not to us.
fn is_denied(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError))
}

fn text(info: Value) -> String {
    match info {
        Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Value::VerbatimString { text, .. } => text,
        _ => String::new(),
    }
}
