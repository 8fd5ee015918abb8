//! Failures to get an answer: what they say of the request, and whether it may work later.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::Script;
use super::link::{is_demoted, refuses_writes};
use crate::error::{Error, NodeError};

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    script: &'static str,
    cause: Cause,
    /// The request may have had, or may yet have, an effect.
    unknown: bool,
}

#[derive(Clone, Debug)]
enum Cause {
    /// No connection: the request was not sent.
    Unsent(RedisError),
    /// The connection broke or stayed silent, or the server refused the request.
    Sent(RedisError),
    /// An answer outside the contract of the script.
    Reply(String),
    Unreplicated {
        have: i64,
        want: u32,
    },
    NotAdmitted,
    /// Too few of several nodes have answered.
    NoQuorum {
        of: usize,
        answered: usize,
        nodes: Vec<(String, Failure)>,
    },
}

impl Failure {
    pub(super) fn unsent(script: &'static Script, source: RedisError) -> Failure {
        Failure { script: script.name(), cause: Cause::Unsent(source), unknown: false }
    }

    /// A server that refuses a request has not run it: a script checks before it writes. Unless it was `resent`
    /// perhaps: then it is the last delivery that was refused.
    pub(super) fn sent(script: &'static Script, source: RedisError, resent: bool) -> Failure {
        let unknown = resent || !is_refusal(&source);
        Failure { script: script.name(), cause: Cause::Sent(source), unknown }
    }

    pub(super) fn unknown(script: &'static Script, source: RedisError) -> Failure {
        Failure { script: script.name(), cause: Cause::Sent(source), unknown: true }
    }

    pub(super) fn reply(script: &'static Script, reply: String) -> Failure {
        Failure { script: script.name(), cause: Cause::Reply(reply), unknown: true }
    }

    pub(super) fn unreplicated(script: &'static Script, have: i64, want: u32) -> Failure {
        Failure { script: script.name(), cause: Cause::Unreplicated { have, want }, unknown: true }
    }

    pub(super) fn not_admitted(script: &'static Script) -> Failure {
        Failure { script: script.name(), cause: Cause::NotAdmitted, unknown: false }
    }

    pub(super) fn no_quorum(
        script: &'static Script,
        of: usize,
        answered: usize,
        nodes: Vec<(String, Failure)>,
    ) -> Failure {
        let unknown = nodes.iter().any(|(_, failure)| failure.unknown);
        Failure { script: script.name(), cause: Cause::NoQuorum { of, answered, nodes }, unknown }
    }

    /// The failures of so many nodes that the others cannot decide, whatever was asked of them.
    pub(super) fn all_of(of: usize, nodes: Vec<(String, Failure)>) -> Option<Failure> {
        let (script, unknown) = (nodes.first()?.1.script, nodes.iter().any(|(_, failure)| failure.unknown));
        let answered = of.saturating_sub(nodes.len());
        Some(Failure { script, cause: Cause::NoQuorum { of, answered, nodes }, unknown })
    }

    /// The same trouble, met with by another request.
    pub(crate) fn during(mut self, script: &'static Script) -> Failure {
        self.script = script.name();
        if let Cause::NoQuorum { nodes, .. } = &mut self.cause {
            nodes.iter_mut().for_each(|(_, failure)| failure.script = script.name());
        }
        self
    }

    /// The same, of a request that had an effect on some of the nodes.
    pub(crate) fn with_effect(mut self) -> Failure {
        self.unknown = true;
        self
    }

    /// Whether the request may have had, or may yet have, an effect.
    pub(crate) fn is_unknown(&self) -> bool {
        self.unknown
    }

    /// Whether the server has said nothing at all.
    pub(crate) fn is_silence(&self) -> bool {
        match &self.cause {
            Cause::Unsent(_) => true,
            Cause::Sent(source) => !is_refusal(source),
            _ => false,
        }
    }

    /// How many replicas were wanted, if that is what failed.
    pub(crate) fn replicas(&self) -> Option<u32> {
        match &self.cause {
            Cause::Unreplicated { want, .. } => Some(*want),
            Cause::NoQuorum { nodes, .. } => nodes.iter().find_map(|(_, failure)| failure.replicas()),
            _ => None,
        }
    }

    /// Whether the same request may succeed later without anybody doing anything about it.
    pub(crate) fn is_passing(&self) -> bool {
        match &self.cause {
            Cause::Unsent(source) => {
                !matches!(source.kind(), ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig)
            }
            Cause::Sent(source) => !is_refusal(source) || passes(source),
            Cause::Reply(_) | Cause::NotAdmitted => false,
            Cause::Unreplicated { .. } => true,
            Cause::NoQuorum { of, nodes, .. } => {
                nodes.iter().filter(|(_, failure)| !failure.is_passing()).count() <= (of - 1) / 2
            }
        }
    }
}

fn is_refusal(source: &RedisError) -> bool {
    matches!(source.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// Errors of a server that starts, fails over, moves slots, cannot write for now, or is busy with somebody's script.
fn passes(source: &RedisError) -> bool {
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

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let script = failure.script;
        match failure.cause {
            Cause::Unsent(cause) | Cause::Sent(cause) => Error::Redis { script, cause },
            Cause::Reply(reply) => Error::Reply { script, reply },
            Cause::Unreplicated { have, want } => {
                Error::TooFewReplicas { have: u64::try_from(have).unwrap_or(0), want }
            }
            Cause::NotAdmitted => Error::NotAdmitted,
            Cause::NoQuorum { of, answered, nodes } => {
                let node = |(node, failure): (String, Failure)| NodeError { node, error: failure.into() };
                Error::NoQuorum { script, of, answered, nodes: nodes.into_iter().map(node).collect() }
            }
        }
    }
}
