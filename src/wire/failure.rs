//! [`Failure`]: why there is no answer, whether the request may have run, and whether it may work
//! later. [`NodeReplies`]: what each node of a quorum answered.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::task::JoinError;

use super::quorum::Nodes;
use super::refusal::{is_demoted, is_error_reply, refuses_writes, was_refused};
use super::replies::Vote;
use super::{Node, Reply, Script};
use crate::clock::Moment;
use crate::error::{Context, Error, NodeAnswer, NodeOutcome, Operation, ReasonChain};

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    cause: Cause,
    /// The request may have had, or may yet have, an effect.
    may_have_run: bool,
}

#[derive(Clone, Debug)]
enum Cause {
    /// No connection: the request was not sent.
    Unsent(RedisError),
    /// The connection broke or stayed silent, or the server refused the request.
    Sent(RedisError),
    /// A key that the script uses beside that of the lock holds something else.
    Corrupt {
        key: String,
        problem: &'static str,
        source: RedisError,
    },
    /// An answer outside the contract of the script.
    Reply {
        script: &'static str,
        reply: String,
    },
    Unreplicated {
        have: i64,
        want: u32,
    },
    NotAdmitted,
    /// The tasks that would have made a connection, or waited for an answer, are gone.
    RuntimeEnded,
    /// Too few of several nodes have answered alike.
    NoQuorum(NodeReplies),
}

impl Failure {
    fn new(cause: Cause, may_have_run: bool) -> Failure {
        Failure { cause, may_have_run }
    }

    /// There is no connection.
    pub(crate) fn unsent(source: RedisError) -> Failure {
        let cause = if is_cancelled(&source) { Cause::RuntimeEnded } else { Cause::Unsent(source) };
        Failure::new(cause, false)
    }

    /// The same after an earlier delivery, which may have run, or run later: that is what is
    /// reported.
    pub(super) fn after(self, earlier: Option<Failure>) -> Failure {
        match (earlier, &self.cause) {
            (Some(_), Cause::RuntimeEnded) => self.with_effect(),
            (Some(earlier), _) => earlier,
            (None, _) => self,
        }
    }

    /// A request that was refused has not run. Unless it was `resent` perhaps: then it is the last
    /// delivery that was refused.
    pub(super) fn sent(source: RedisError, resent: bool) -> Failure {
        let may_have_run = resent || !was_refused(&source);
        Failure::new(Cause::Sent(source), may_have_run)
    }

    pub(super) fn indeterminate(source: RedisError) -> Failure {
        Failure::new(Cause::Sent(source), true)
    }

    pub(super) fn reply(script: &'static Script, reply: String) -> Failure {
        Failure::new(Cause::Reply { script: script.name(), reply }, true)
    }

    pub(super) fn unreplicated(have: i64, want: u32) -> Failure {
        Failure::new(Cause::Unreplicated { have, want }, true)
    }

    pub(super) fn not_admitted() -> Failure {
        Failure::new(Cause::NotAdmitted, false)
    }

    /// The tasks that waited for an answer are gone.
    pub(super) fn runtime_ended() -> Failure {
        Failure::new(Cause::RuntimeEnded, true)
    }

    /// What several nodes came to.
    pub(crate) fn no_quorum(answers: NodeReplies) -> Failure {
        let may_have_run = answers.failures().any(|failure| failure.may_have_run);
        Failure::new(Cause::NoQuorum(answers), may_have_run)
    }

    /// Why, where the server's answer was an error: this key is not what the script takes it for.
    pub(super) fn because_of(self, key: &str, problem: &'static str) -> Failure {
        match self.cause {
            Cause::Sent(source) => {
                Failure::new(Cause::Corrupt { key: key.to_owned(), problem, source }, self.may_have_run)
            }
            cause => Failure { cause, ..self },
        }
    }

    /// The answer of a server that is an error.
    pub(super) fn error_reply(&self) -> Option<&RedisError> {
        match &self.cause {
            Cause::Sent(source) if is_error_reply(source) => Some(source),
            _ => None,
        }
    }

    /// The same, of a request that had an effect on some of the nodes, or of one that was sent
    /// before and may have had one.
    pub(crate) fn with_effect(self) -> Failure {
        self.with_effect_if(true)
    }

    pub(crate) fn with_effect_if(mut self, may_have_run: bool) -> Failure {
        self.may_have_run |= may_have_run;
        self
    }

    /// The same trouble, of a request that was not sent because of it.
    pub(crate) fn of_another(mut self) -> Failure {
        self.may_have_run = false;
        self
    }

    /// Whether the request may have had, or may yet have, an effect.
    pub(crate) fn is_indeterminate(&self) -> bool {
        self.may_have_run
    }

    /// Whether the server has said nothing at all.
    pub(crate) fn is_no_reply(&self) -> bool {
        match &self.cause {
            Cause::Unsent(_) => true,
            Cause::Sent(source) => !is_error_reply(source),
            _ => false,
        }
    }

    /// Whether it is an error reply that no server is known to refuse a request with, as of a
    /// proxy: it does not say whether the next request fares better.
    pub(crate) fn is_unlisted(&self) -> bool {
        self.error_reply().is_some_and(|error| !was_refused(error))
    }

    /// How many replicas were wanted, if that is what failed.
    pub(crate) fn replicas(&self) -> Option<u32> {
        match &self.cause {
            Cause::Unreplicated { want, .. } => Some(*want),
            Cause::NoQuorum(answers) => answers.failures().find_map(Failure::replicas),
            _ => None,
        }
    }

    /// Whether the same request may succeed later without anybody doing anything about it.
    pub(crate) fn is_transient(&self) -> bool {
        match &self.cause {
            Cause::Unsent(source) => {
                !matches!(source.kind(), ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig)
            }
            Cause::Sent(source) => !is_error_reply(source) || is_transient_reply(source),
            Cause::Corrupt { .. } | Cause::Reply { .. } | Cause::NotAdmitted | Cause::RuntimeEnded => false,
            Cause::Unreplicated { .. } => true,
            Cause::NoQuorum(answers) => {
                let lasting = answers.failures().filter(|failure| !failure.is_transient()).count();
                lasting <= answers.max_failures()
            }
        }
    }

    fn is_end_of_runtime(&self) -> bool {
        match &self.cause {
            Cause::RuntimeEnded => true,
            Cause::NoQuorum(answers) => answers.failures().any(Failure::is_end_of_runtime),
            _ => false,
        }
    }

    /// The error for the caller of an operation.
    pub(crate) fn error(self, context: Context) -> Error {
        let context = context.judged(self.is_transient(), self.may_have_run);
        if self.is_end_of_runtime() {
            return Error::RuntimeEnded { context };
        }
        match self.cause {
            Cause::Unsent(cause) | Cause::Sent(cause) => Error::Redis { context, cause },
            Cause::Corrupt { key, problem, source: cause } => Error::Corrupt { context, key, problem, cause },
            Cause::Reply { script, reply } => Error::Reply { context, script, reply },
            Cause::Unreplicated { have, want } => {
                Error::TooFewReplicas { have: u64::try_from(have).unwrap_or(0), want, context }
            }
            Cause::NotAdmitted => Error::NotAdmitted { context },
            Cause::RuntimeEnded => Error::RuntimeEnded { context },
            Cause::NoQuorum(answers) => {
                let nodes = answers.outcomes(&context);
                Error::NoQuorum { context, nodes }
            }
        }
    }
}

/// For a log that names the server itself.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ReasonChain(&self.clone().error(Context::new(Operation::Connect))).fmt(f)
    }
}

/// Whether it comes from a task that was cancelled: a runtime does that as it ends.
fn is_cancelled(error: &RedisError) -> bool {
    let Some(source) = error.source() else { return false };
    // The client library shares the error that it was made of.
    let source = source.downcast_ref::<Arc<dyn StdError + Send + Sync>>();
    let source = source.and_then(|shared| shared.downcast_ref::<std::io::Error>());
    let task = source.and_then(|source| source.get_ref()?.downcast_ref::<JoinError>());
    task.is_some_and(JoinError::is_cancelled)
}

/// Errors of a server that starts, fails over, moves slots, cannot write for now, or is busy with
/// another script.
fn is_transient_reply(source: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    matches!(
        source.kind(),
        ErrorKind::Server(
            Kind::BusyLoading
                | Kind::ReadOnly
                | Kind::TryAgain
                | Kind::ClusterDown
                | Kind::MasterDown
                | Kind::Moved
                | Kind::Ask
        )
    ) || source.code() == Some("BUSY")
        || is_demoted(source)
        || refuses_writes(source)
}

/// What each node of a quorum came to, by its address.
#[derive(Clone, Debug)]
pub(crate) struct NodeReplies(Vec<(String, NodeReply)>);

#[derive(Clone, Debug)]
pub(crate) enum NodeReply {
    Granted,
    Refused,
    /// It was not asked, or its answer was not waited for.
    Pending,
    Failed(Failure),
}

impl NodeReplies {
    /// Of these nodes, nobody has been asked yet.
    pub(crate) fn of(labels: &[String]) -> NodeReplies {
        NodeReplies(labels.iter().map(|label| (label.clone(), NodeReply::Pending)).collect())
    }

    pub(crate) fn with(mut self, node: usize, answer: NodeReply) -> NodeReplies {
        if let Some((_, before)) = self.0.get_mut(node) {
            *before = answer;
        }
        self
    }

    /// Takes what nodes said to one request, where a "yes" is a number of at least `least`, or a
    /// longer answer.
    pub(crate) fn with_votes(self, least: i64, votes: Vec<Vote>) -> NodeReplies {
        votes.into_iter().fold(self, |answers, (node, outcome)| {
            let answer = match outcome {
                Ok(reply) => answered(&reply, least),
                Err(failure) => NodeReply::Failed(failure),
            };
            answers.with(node, answer)
        })
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.0.iter().filter_map(|(_, answer)| match answer {
            NodeReply::Failed(failure) => Some(failure),
            _ => None,
        })
    }

    /// So many may fail, and the others decide.
    pub(crate) fn max_failures(&self) -> usize {
        self.0.len().saturating_sub(1) / 2
    }

    /// The same for the caller of an operation.
    pub(crate) fn outcomes(self, context: &Context) -> Vec<NodeOutcome> {
        let outcome = |(node, answer): (String, NodeReply)| {
            let answer = match answer {
                NodeReply::Granted => NodeAnswer::Granted,
                NodeReply::Refused => NodeAnswer::Refused,
                NodeReply::Pending => NodeAnswer::Pending,
                NodeReply::Failed(failure) => NodeAnswer::failed(failure.error(context.clone().on(&node))),
            };
            NodeOutcome { node, answer }
        };
        self.0.into_iter().map(outcome).collect()
    }
}

impl Nodes {
    /// Since when so many have failed that the others cannot decide, and how, if they have, to who
    /// wants so many replicas.
    pub(crate) fn outage(&self, replicas: u32) -> Option<(Moment, Failure)> {
        if let Some(node) = self.single() {
            return node.outage(replicas);
        }
        let outage = |(place, node): (usize, &Arc<Node>)| node.outage(replicas).map(|it| (it, place));
        let outages: Vec<_> = self.each_node().filter_map(outage).collect();
        let mut begins: Vec<Moment> = outages.iter().map(|((since, _), _)| *since).collect();
        begins.sort();
        // One more than may fail.
        let since = *begins.get(self.max_failures())?;
        let answers =
            outages.into_iter().fold(NodeReplies::of(self.labels()), |answers, ((_, failure), place)| {
                answers.with(place, NodeReply::Failed(failure))
            });
        Some((since, Failure::no_quorum(answers)))
    }
}

fn answered(reply: &Reply, least: i64) -> NodeReply {
    match &reply.value {
        Value::Int(number) if *number >= least => NodeReply::Granted,
        // What a script sees of a lock; a busy lock is answered with two integers.
        Value::Array(items) if items.len() > 2 && items.first() == Some(&Value::Int(1)) => NodeReply::Granted,
        Value::Int(_) | Value::Array(_) => NodeReply::Refused,
        _ => NodeReply::Failed(reply.unexpected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_cancelled_task_is_the_end_of_its_runtime() {
        let task = tokio::spawn(std::future::pending::<()>());
        task.abort();
        let error = RedisError::from(std::io::Error::other(task.await.unwrap_err()));
        assert!(Failure::unsent(error).is_end_of_runtime());
        let refused = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        assert!(!Failure::unsent(refused).is_end_of_runtime());
    }
}
