//! [`Failure`]: why a request has no reply, whether it may have run, and whether it may work later.
//! [`Ability`]: what the server lacks then. [`NodeReplies`]: what each node of a quorum replied.

use std::fmt;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::task::JoinError;

use super::error_replies::{
    closed, io_error, is_demoted, is_error_reply, is_of_tls, is_out_of_memory, is_transient_reply,
    is_unserved, refuses_writes, too_slow, was_redirected, was_refused,
};
use crate::error::{Context, Error, NodeAnswer, NodeOutcome, Operation, ReasonChain};

/// Why a request has no usable reply.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    cause: Cause,
    /// Whether the request may have had an effect, or may have one later.
    may_have_run: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Cause {
    /// There was no connection, so the request was not sent.
    Unsent(RedisError),
    /// The connection broke or stayed silent, or the server refused the request.
    Sent(RedisError),
    /// A companion key of the lock has unexpected contents.
    Corrupt {
        key: String,
        problem: &'static str,
        source: RedisError,
    },
    /// A reply outside the script's contract.
    Reply {
        script: &'static str,
        reply: String,
    },
    Unreplicated {
        confirmed: i64,
        required: u32,
    },
    NotAdmitted,
    /// The server refused the request, since it came too late to be granted.
    Late,
    /// The runtime that made connections and waited for replies has shut down.
    RuntimeEnded,
    /// Too few nodes of a quorum gave the same reply.
    NoQuorum(NodeReplies),
}

impl Failure {
    pub(super) fn new(cause: Cause, may_have_run: bool) -> Failure {
        Failure { cause, may_have_run }
    }

    /// There is no connection.
    pub(crate) fn unsent(source: RedisError) -> Failure {
        let cause = if is_cancelled(&source) { Cause::RuntimeEnded } else { Cause::Unsent(source) };
        Failure::new(cause, false)
    }

    /// Adds an earlier delivery of the same request, which may have run or may run later: then that
    /// failure is reported.
    pub(super) fn after(self, earlier: Option<Failure>) -> Failure {
        match (earlier, &self.cause) {
            (Some(_), Cause::RuntimeEnded) => self.with_effect_if(true),
            (Some(earlier), _) => earlier,
            (None, _) => self,
        }
    }

    pub(super) fn indeterminate(source: RedisError) -> Failure {
        Failure::new(Cause::Sent(source), true)
    }

    /// The tasks that waited for a reply have ended with their runtime.
    pub(super) fn runtime_ended() -> Failure {
        Failure::new(Cause::RuntimeEnded, true)
    }

    /// The replies of several nodes allow no decision.
    pub(crate) fn no_majority(answers: NodeReplies) -> Failure {
        let may_have_run = answers.failures().any(|failure| failure.may_have_run);
        Failure::new(Cause::NoQuorum(answers), may_have_run)
    }

    /// A connection was closed, and another one has taken its place.
    pub(crate) fn replaced() -> Failure {
        Failure::indeterminate(closed())
    }

    /// Adds the cause of an error reply: this key has unexpected contents.
    pub(super) fn because_of(self, key: &str, problem: &'static str) -> Failure {
        match self.cause {
            Cause::Sent(source) => {
                Failure::new(Cause::Corrupt { key: key.to_owned(), problem, source }, self.may_have_run)
            }
            cause => Failure { cause, ..self },
        }
    }

    /// Adds the cause of an error reply: the user may not run these commands, as far as is known.
    pub(super) fn because_of_rights(mut self, missing: &[String]) -> Failure {
        if !missing.is_empty() {
            let kind = ErrorKind::Server(ServerErrorKind::NoPerm);
            let source = (kind, "a command was refused", format!("the scripts need {}", missing.join(" ")));
            self.cause = Cause::Sent(source.into());
        }
        self
    }

    /// The server's error reply, if there is one.
    pub(super) fn error_reply(&self) -> Option<&RedisError> {
        match &self.cause {
            Cause::Sent(source) if is_error_reply(source) => Some(source),
            _ => None,
        }
    }

    /// The same failure, of a request that had an effect on some nodes, or may have had one when it
    /// was sent before.
    pub(crate) fn with_effect_if(self, may_have_run: bool) -> Failure {
        Failure { may_have_run: self.may_have_run || may_have_run, ..self }
    }

    /// The same failure, for a request that was not sent because of it.
    pub(crate) fn of_other_request(self) -> Failure {
        Failure { may_have_run: false, ..self }
    }

    /// Whether the request may have had an effect, or may have one later.
    pub(crate) fn is_indeterminate(&self) -> bool {
        self.may_have_run
    }

    /// What the server is not able to do, if this shows that it fails for now.
    pub(super) fn lacks(&self) -> Option<Ability> {
        match &self.cause {
            _ if !self.is_transient() => None,
            Cause::Unreplicated { required, .. } => Some(Ability::Replicate(*required)),
            Cause::Sent(source) if is_out_of_memory(source) => Some(Ability::Store),
            Cause::Sent(source) if refuses_writes(source) || is_demoted(source) => Some(Ability::Write),
            Cause::Sent(source) if was_redirected(source) && !is_unserved(source) => None,
            Cause::Unsent(_) | Cause::Sent(_) => Some(Ability::Reply),
            _ => None,
        }
    }

    /// What the server is able to do all the same.
    pub(super) fn shows(&self) -> Option<Ability> {
        match &self.cause {
            Cause::Unreplicated { .. } => Some(Ability::Store),
            Cause::RuntimeEnded | Cause::NoQuorum(_) => None,
            _ if self.is_no_reply() || self.lacks() == Some(Ability::Reply) => None,
            _ => Some(Ability::Reply),
        }
    }

    /// Whether the server sent no reply at all.
    pub(crate) fn is_no_reply(&self) -> bool {
        match &self.cause {
            Cause::Unsent(_) => true,
            Cause::Sent(source) => !is_error_reply(source),
            _ => false,
        }
    }

    /// Whether this is an error reply with which no known server refuses a request, such as a
    /// proxy's: it does not say whether the next request may succeed.
    pub(crate) fn is_unlisted(&self) -> bool {
        self.error_reply().is_some_and(|error| !was_refused(error))
    }

    /// The number of required replicas, if too few confirmed.
    pub(crate) fn replicas(&self) -> Option<u32> {
        match &self.cause {
            Cause::Unreplicated { required, .. } => Some(*required),
            Cause::NoQuorum(answers) => answers.failures().find_map(Failure::replicas),
            _ => None,
        }
    }

    /// Whether the same request may succeed later without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match &self.cause {
            Cause::Unsent(source) | Cause::Sent(source) => {
                let is_mistake = matches!(
                    source.kind(),
                    ErrorKind::AuthenticationFailed
                        | ErrorKind::InvalidClientConfig
                        | ErrorKind::RESP3NotSupported
                        | ErrorKind::MasterNameNotFoundBySentinel
                );
                !is_mistake && !is_of_tls(source) && (!is_error_reply(source) || is_transient_reply(source))
            }
            Cause::Corrupt { .. } | Cause::Reply { .. } | Cause::NotAdmitted | Cause::RuntimeEnded => false,
            Cause::Unreplicated { .. } | Cause::Late => true,
            Cause::NoQuorum(answers) => {
                let lasting = answers.failures().filter(|failure| !failure.is_transient()).count();
                lasting <= answers.max_failures
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
        let context = context.with_verdict(self.is_transient(), self.may_have_run);
        if self.is_end_of_runtime() {
            return Error::RuntimeEnded { context };
        }
        match self.cause {
            Cause::Unsent(cause) | Cause::Sent(cause) => Error::Redis { context, cause },
            Cause::Corrupt { key, problem, source: cause } => Error::Corrupt { context, key, problem, cause },
            Cause::Reply { script, reply } => Error::Reply { context, script, reply },
            Cause::Unreplicated { confirmed, required } => {
                Error::TooFewReplicas { confirmed: u64::try_from(confirmed).unwrap_or(0), required, context }
            }
            Cause::NotAdmitted => Error::NotAdmitted { context },
            Cause::Late => Error::Redis { context, cause: too_slow() },
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

/// What a server is able to do, each with all before it. An outage is the lack of one, and ends
/// once a request shows it: a full server still releases, and a busy lock of a server that refuses
/// writes is still found busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ability {
    /// It replies, and runs scripts.
    Reply,
    Write,
    /// Its memory has room for a lock.
    Store,
    /// So many replicas confirm what was written.
    Replicate(u32),
}

/// Whether the error comes from a cancelled task: a runtime cancels its tasks as it shuts down.
fn is_cancelled(error: &RedisError) -> bool {
    let task = io_error(error).and_then(|source| source.get_ref()?.downcast_ref::<JoinError>());
    task.is_some_and(JoinError::is_cancelled)
}

/// What each node of a quorum replied, by its address.
#[derive(Clone, Debug)]
pub(crate) struct NodeReplies {
    nodes: Vec<(String, NodeReply)>,
    /// The maximum number of failed nodes with which the others still decide.
    pub(crate) max_failures: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum NodeReply {
    Granted,
    Refused,
    /// The node was not asked, or its reply was not awaited.
    Pending,
    Failed(Failure),
}

impl NodeReplies {
    /// No node has been asked yet.
    pub(super) fn of(labels: &[String], max_failures: usize) -> NodeReplies {
        let nodes = labels.iter().map(|label| (label.clone(), NodeReply::Pending)).collect();
        NodeReplies { nodes, max_failures }
    }

    pub(crate) fn with(mut self, node: usize, answer: NodeReply) -> NodeReplies {
        if let Some((_, before)) = self.nodes.get_mut(node) {
            *before = answer;
        }
        self
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.nodes.iter().filter_map(|(_, answer)| match answer {
            NodeReply::Failed(failure) => Some(failure),
            _ => None,
        })
    }

    /// The outcome of each node, for the caller of an operation.
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
        self.nodes.into_iter().map(outcome).collect()
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
