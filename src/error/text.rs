//! The texts of errors: `could not <verb> lock "<name>" on <server>: <reason>`.
//!
//! The text of an error does not repeat its source: a reporter prints both. Only a list of nodes
//! includes the causes, since an error has one source.

use std::error::Error as StdError;
use std::fmt;

use super::{Context, Error, NodeAnswer, NodeOutcome, Operation};
use crate::name::Name;

/// The maximum number of locks that an error names.
pub(crate) const MAX_NAMES: usize = 32;

/// The text for a node without a vote.
pub(crate) const NO_VOTE: &str =
    "the node has no vote: it is new, has restarted or has lost data; call Locks::rejoin";

/// An error followed by its sources, for a log.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0, f)?;
        sources(self.0, f)
    }
}

fn sources(error: &(dyn StdError + 'static), f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut last = error.to_string();
    for source in std::iter::successors(error.source(), |&source| source.source()) {
        let text = source.to_string();
        // Errors of the client library repeat the text of their own sources.
        if !last.contains(&text) {
            write!(f, ": {text}")?;
        }
        last = text;
    }
    Ok(())
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.operation(), self.lock()) {
            (operation, Some(lock)) => write!(f, "{} lock {:?}", operation.verb(), lock.as_str())?,
            (Operation::Close, None) => f.write_str("close the client")?,
            (Operation::ListNodes, None) => f.write_str("list the nodes")?,
            (Operation::Rejoin, None) => f.write_str("let the nodes rejoin")?,
            (operation, None) => f.write_str(operation.verb())?,
        }
        match (self.server(), self.operation()) {
            (Some(server), Operation::Connect) => write!(f, " to {server}"),
            (Some(server), _) => write!(f, " on {server}"),
            (None, _) => Ok(()),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(context) = self.context() {
            write!(f, "could not {context}: ")?;
        }
        Reason(self).fmt(f)
    }
}

/// Why an operation failed, without naming the operation.
struct Reason<'a>(&'a Error);

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Error::TimedOut { limit, was_busy: false, .. } => {
                write!(f, "no server had replied within {limit:?}")
            }
            Error::TimedOut { limit, holds_itself, .. } => {
                if limit.is_zero() {
                    f.write_str("the lock was not free")?;
                } else {
                    write!(f, "the lock was not free within {limit:?}")?;
                }
                if *holds_itself {
                    f.write_str(
                        ": the task that waits holds it; a nested call needs the owner of the outer one, \
                         as with reentrant_in_scope or rwlock_in_scope",
                    )?;
                }
                Ok(())
            }
            Error::Lost { reason: None, .. } => {
                f.write_str("the lease was lost; another client may hold the lock")
            }
            Error::Lost { reason: Some(reason), .. } => {
                write!(f, "the lease was lost: {reason}; another client may hold the lock")
            }
            Error::Released { .. } => {
                f.write_str("the guard was released or leaked while work ran under its lease")
            }
            Error::Closed { .. } => f.write_str("the client was closed"),
            Error::Unreleased { count, names, limit } => unreleased(*count, names, *limit, f),
            Error::NotHeld { .. } => {
                f.write_str("the server had already ended the hold; the work may not have been exclusive")
            }
            Error::Unconfirmed { .. } => f.write_str(
                "the reply was lost, and the lock has had another holder since; \
                 this request released it, or it had been lost before",
            ),
            Error::SharedHold { .. } => {
                f.write_str("other tasks of this client use the same hold, so it has to stay here")
            }
            Error::WrongTicket { differs, .. } => {
                write!(f, "the ticket is for another lock: its {differs} differs")
            }
            Error::TooDeep { depth, .. } => {
                write!(f, "the owner already has {depth} holds, the limit set by max_depth")
            }
            Error::WouldDeadlock { .. } => f.write_str(
                "another reader of the lock waits to write: release all holds of this owner, then retry",
            ),
            Error::TooManyReaders { limit, .. } => {
                write!(f, "{limit} readers hold the lock or wait for it, the limit set by max_readers")
            }
            Error::WrongType { context, found } => match context.lock() {
                Some(lock) => write!(f, "the key {:?} holds {found}", lock.key()),
                None => write!(f, "the key holds {found}"),
            },
            Error::Corrupt { key, problem, .. } => {
                write!(f, "the companion key {key:?} {problem}; repair or delete it")
            }
            Error::Redis { context, cause } => redis_failed(context, cause, f),
            Error::RuntimeEnded { .. } => f.write_str(
                "the runtime on which the client was made has ended: \
                 make another client on a runtime that lasts",
            ),
            Error::Reply { script, reply, .. } => {
                write!(f, "the script {script} replied {reply}, which is outside its contract")
            }
            Error::TooFewReplicas { confirmed, required, .. } => {
                write!(
                    f,
                    "only {confirmed} of {required} required replicas confirmed the grant, which is released"
                )
            }
            Error::NotAdmitted { .. } => f.write_str(NO_VOTE),
            Error::NoQuorum { nodes, .. } => no_quorum(nodes, f),
            Error::NoOwner { name } => write!(
                f,
                "the lock {:?} has no owner here: call it inside Owner::scope, or name the owner",
                name.as_str()
            ),
            Error::Name(error) => error.fmt(f),
            Error::Members(error) => error.fmt(f),
            Error::Config(error) => error.fmt(f),
        }
    }
}

fn redis_failed(context: &Context, cause: &redis::RedisError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(match (cause.code().is_some(), context.is_indeterminate()) {
        (_, false) if cause.kind() == redis::ErrorKind::AuthenticationFailed => {
            "the server refused the user name or the password"
        }
        (true, false) => "the server refused the request",
        (true, true) if lacks_unnamed_right(cause) => "the user lacks a right, which ACL LOG names",
        (true, true) if lacks_right(cause) => "the user lacks a right",
        (true, true) => "the server replied with an error, and may have run the request",
        _ if cause.kind() == redis::ErrorKind::Parse => "this is no server of the Redis protocol",
        (false, false) => "the server could not be reached",
        (false, true) if cause.is_connection_refusal() => {
            "no reply arrived, and then the server was away; the request may have taken effect"
        }
        (false, true) => "no reply arrived; the request may have taken effect",
    })
}

/// Whether the server refused a command inside a script, and names it.
fn lacks_right(cause: &redis::RedisError) -> bool {
    let detail = cause.detail().unwrap_or_default();
    cause.code() == Some("NOPERM") || detail.contains("no permissions to run the")
}

/// The same, of a server that does not name it.
pub(crate) fn lacks_unnamed_right(cause: &redis::RedisError) -> bool {
    cause.detail().is_some_and(|detail| detail.contains("can't run this command"))
}

fn unreleased(
    count: usize,
    names: &[Name],
    limit: std::time::Duration,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let listed: Vec<_> = names.iter().map(|name| format!("{:?}", name.as_str())).collect();
    let more = if names.len() == MAX_NAMES { " and possibly others" } else { "" };
    let listed = listed.join(", ");
    if count == 1 && names.len() == 1 {
        return write!(
            f,
            "lock {listed} was not released within {limit:?}: the servers may hold it until its TTL expires"
        );
    }
    write!(f, "{count} holds or waiters were not released within {limit:?}: locks {listed}{more}; ")?;
    write!(f, "the servers may hold them until their TTLs expire")
}

/// `1 granted, 1 refused, 1 silent of 3 nodes; 2 must agree`, and why the others failed.
fn no_quorum(nodes: &[NodeOutcome], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let counted: Vec<_> = ["granted", "refused", "not awaited", "silent", "failed"]
        .into_iter()
        .map(|sort| (sort, nodes.iter().filter(|node| word(&node.answer) == sort).count()))
        .filter(|(sort, count)| *count > 0 || *sort == "granted")
        .map(|(sort, count)| format!("{count} {sort}"))
        .collect();
    write!(f, "no majority: {} of {} nodes; ", counted.join(", "), nodes.len())?;
    write!(f, "{} must agree", nodes.len() / 2 + 1)?;
    let answered = nodes.iter().filter(|node| node.answer.error().is_none()).count();
    if answered * 2 == nodes.len() {
        f.write_str(" (half of an even number is no majority: use an odd number of nodes)")?;
    }
    for node in nodes.iter().filter(|node| node.answer.error().is_some()) {
        write!(f, "; {node}")?;
    }
    Ok(())
}

fn word(answer: &NodeAnswer) -> &'static str {
    match answer {
        NodeAnswer::Granted => "granted",
        NodeAnswer::Refused => "refused",
        NodeAnswer::Pending => "not awaited",
        NodeAnswer::Silent(_) => "silent",
        NodeAnswer::Failed(_) => "failed",
    }
}

impl fmt::Display for NodeOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.node)?;
        match self.answer.error() {
            Some(error) => ReasonChain(error).fmt(f),
            None => f.write_str(word(&self.answer)),
        }
    }
}

/// The reason of a failure and its sources, for a log that names the server and the lock itself.
pub(crate) struct ReasonChain<'a>(pub(crate) &'a Error);

impl fmt::Display for ReasonChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Reason(self.0).fmt(f)?;
        sources(self.0, f)
    }
}
