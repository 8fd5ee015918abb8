//! [`Error`]: why a call failed. Its variants are what happened: the limit elapsed, the lease was
//! lost, the server failed.

mod config;
mod context;
mod text;

use std::fmt::{self, Display};
use std::time::Duration;

use crate::events::LossReason;
use crate::name::{Name, NameError};

pub use config::{ConfigError, MembersError, NodeProblem};
pub use context::{Context, Operation};
pub(crate) use text::{Chain, MAX_NAMES, NO_VOTE, ReasonChain, lacks_unnamed_right};

/// Why a call on a lock did not succeed.
///
/// A lock that another client holds is no error: a `try_` call returns `None`. [The table of
/// errors](crate::guide::errors) says what to do about each.
///
/// The text names the operation, the lock, the server where there is one, and the reason. It does
/// not repeat the [source](std::error::Error::source), so log both.
///
/// The source is the client library's error: it can be downcast to [`redis::RedisError`]. That of
/// [`Unconfirmed`](Error::Unconfirmed) is an `Error`.
///
/// ```
/// use std::error::Error as _;
///
/// fn code(error: &redlatch::Error) -> Option<&str> {
///     error.source()?.downcast_ref::<redis::RedisError>()?.code()
/// }
/// ```
#[non_exhaustive]
pub enum Error {
    /// The caller's limit elapsed before the lock was granted. What was granted meanwhile is
    /// released in the background. Transient.
    TimedOut {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The limit that the caller set.
        limit: Duration,
        /// The lock was in use: a server has said so, or another task of this client had it. If
        /// false, no server had replied: the limit is short, or the server silent.
        was_busy: bool,
        /// The task, or the thread outside of tasks, held the lock itself: a nested call without
        /// the owner of the outer one, or a mutex that was locked twice. It is looked for among
        /// 10,000 leases of the client at most.
        holds_itself: bool,
    },
    /// The lease ended while its guard was held, or before its grant arrived: another client may
    /// hold the lock by now. Transient if the operation was [`Operation::Acquire`].
    Lost {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// Why, as the log says. `None`: the grant came too late, or the hold of a ticket is gone.
        reason: Option<LossReason>,
    },
    /// The guard was released or leaked while the work of [`while_held`](crate::Lease::while_held)
    /// ran under its lease: the work was dropped. [`Lease::end`](crate::Lease::end)
    /// distinguishes the two.
    Released {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// The client was [closed](crate::Locks::close): it acquires no more locks, and releases those
    /// that it held. `close` reports those that it could not release.
    Closed {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// [`Locks::close`](crate::Locks::close) could not release everything within its limit: the
    /// servers may hold these locks until their TTLs expire. Releases continue in the background
    /// while the client lives. Transient and indeterminate.
    Unreleased {
        /// The number of holds and places in queues.
        count: usize,
        /// Their locks, each once; the first 32.
        names: Vec<Name>,
        /// The limit that the caller set.
        limit: Duration,
    },
    /// There was nothing to release: the server had already ended this hold.
    NotHeld {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// The reply to a release was lost, and the lock has had another holder since. So it is unknown
    /// whether the lease was valid until its release. The lock is no longer held.
    ///
    /// Indeterminate.
    Unconfirmed {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// How the reply was lost: the source.
        cause: Box<Error>,
    },
    /// Other tasks of this client have a part in the hold, so it cannot become a
    /// [`Ticket`](crate::Ticket).
    SharedHold {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// The [`Ticket`](crate::Ticket) is for another lock. No request was sent.
    WrongTicket {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// What differs: the name or the kind.
        differs: &'static str,
    },
    /// The owner has [`Options::max_depth`](crate::Options::max_depth) holds already.
    TooDeep {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The number of the owner's holds.
        depth: u32,
    },
    /// The owner reads and wants to write, and so does another reader: each would wait for the
    /// other to release its hold. Release all holds of this owner and retry; if the caller of your
    /// function has one of them, return this error to that caller.
    WouldDeadlock {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// [`Options::max_readers`](crate::Options::max_readers) readers hold the lock or wait for it.
    /// Owners that already hold it are not refused. Transient.
    TooManyReaders {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The limit.
        limit: u32,
    },
    /// The lock's key holds something other than this kind of lock. The key was not changed: delete
    /// it by hand if nothing needs it.
    WrongType {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// What the key holds.
        found: &'static str,
    },
    /// A companion key of the lock, its fencing counter or its queue, holds something else. The key
    /// was not changed: repair or delete it. A new fencing counter continues with the server's
    /// clock.
    ///
    /// Indeterminate if the script may have written before it read that key.
    Corrupt {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: &'static str,
        /// The server's error reply: the source.
        cause: redis::RedisError,
    },
    /// The server could not be reached, did not reply in time, or refused the request.
    /// [`is_transient`](Error::is_transient) and [`is_indeterminate`](Error::is_indeterminate)
    /// distinguish these.
    Redis {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The client library's error: the source.
        cause: redis::RedisError,
    },
    /// The runtime on which the client was made has ended, and so have the client's connections and
    /// renewals. Make another client on a runtime that lasts. Indeterminate if a request had been
    /// sent.
    RuntimeEnded {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// The server's reply is outside the script's contract. Indeterminate.
    Reply {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The script.
        script: &'static str,
        /// The reply.
        reply: String,
    },
    /// Fewer replicas than [`Options::replicas`](crate::Options::replicas) requires have confirmed
    /// the grant, which is released. Transient and indeterminate.
    TooFewReplicas {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// The number of replicas that confirmed.
        confirmed: u64,
        /// The required number.
        required: u32,
    },
    /// This node of a [guarded](crate::RestartGuard) quorum has no vote: it is new, has restarted
    /// or has lost data. See [`Locks::rejoin`](crate::Locks::rejoin).
    NotAdmitted {
        /// Which operation failed, on which lock and server.
        context: Context,
    },
    /// No majority of the nodes of a quorum gave the same reply. Transient unless lasting failures
    /// prevent a majority; indeterminate if any node may have run the request.
    NoQuorum {
        /// Which operation failed, on which lock and server.
        context: Context,
        /// Every node, and its reply.
        nodes: Vec<NodeOutcome>,
    },
    /// [`Locks::reentrant_in_scope`](crate::Locks::reentrant_in_scope) or
    /// [`rwlock_in_scope`](crate::Locks::rwlock_in_scope) was called outside of
    /// [`Owner::scope`](crate::Owner::scope), so it is unknown which holds would nest.
    NoOwner {
        /// The lock.
        name: Name,
    },
    /// The text is not a valid lock name.
    Name(NameError),
    /// [`Locks::all`](crate::Locks::all) cannot have these locks together.
    Members(MembersError),
    /// The client's settings are invalid or contradict each other.
    Config(ConfigError),
}

impl Error {
    /// Returns which operation failed, on which lock and server. `None` if it was
    /// none, and for [`Unreleased`](Error::Unreleased), which lists its locks.
    #[must_use]
    pub fn context(&self) -> Option<&Context> {
        match self {
            Error::TimedOut { context, .. }
            | Error::Lost { context, .. }
            | Error::Released { context }
            | Error::Closed { context }
            | Error::NotHeld { context }
            | Error::Unconfirmed { context, .. }
            | Error::SharedHold { context }
            | Error::WrongTicket { context, .. }
            | Error::TooDeep { context, .. }
            | Error::WouldDeadlock { context }
            | Error::TooManyReaders { context, .. }
            | Error::WrongType { context, .. }
            | Error::Corrupt { context, .. }
            | Error::Redis { context, .. }
            | Error::RuntimeEnded { context }
            | Error::Reply { context, .. }
            | Error::TooFewReplicas { context, .. }
            | Error::NotAdmitted { context }
            | Error::NoQuorum { context, .. } => Some(context),
            Error::Unreleased { .. }
            | Error::NoOwner { .. }
            | Error::Name(_)
            | Error::Members(_)
            | Error::Config(_) => None,
        }
    }

    /// Returns whether the same call may succeed later without any repair. False for unknown
    /// failures, such as an error code that no server documents.
    ///
    /// Pause before a retry: during an outage that the client already knows, calls fail at once. A
    /// release consumes its guard, and the client retries it in the background: for a failed
    /// release, this says whether that retry may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Error::TimedOut { .. } | Error::TooManyReaders { .. } | Error::Unreleased { .. } => true,
            Error::Lost { context, .. } => context.operation() == Operation::Acquire,
            Error::Unconfirmed { .. } => false,
            other => other.context().is_some_and(Context::is_transient),
        }
    }

    /// Returns whether the request may have taken effect, or may do so later.
    ///
    /// The client follows up in the background: it releases a lock that it may have acquired, and
    /// repeats a release that may not have run. So this matters to the caller only for `release`,
    /// `downgrade` and `force_release`.
    #[must_use]
    pub fn is_indeterminate(&self) -> bool {
        match self {
            Error::Unconfirmed { .. } | Error::Unreleased { .. } => true,
            other => other.context().is_some_and(Context::is_indeterminate),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Redis { cause, .. } | Error::Corrupt { cause, .. } => Some(cause),
            Error::Unconfirmed { cause, .. } => Some(cause),
            // This error shows their texts, so they are not its sources.
            Error::Name(error) => error.source(),
            Error::Members(error) => error.source(),
            Error::Config(error) => error.source(),
            _ => None,
        }
    }
}

/// The sentence with its sources: what `main` prints if it returns an error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Chain(self).fmt(f)
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Error {
        Error::Name(error)
    }
}

impl From<MembersError> for Error {
    fn from(error: MembersError) -> Error {
        Error::Members(error)
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Error {
        Error::Config(error)
    }
}

/// The outcome of one node of a quorum. Its text includes the causes of a failure.
#[non_exhaustive]
#[derive(Debug)]
pub struct NodeOutcome {
    /// The node's address.
    pub node: String,
    /// The node's answer.
    pub answer: NodeAnswer,
}

/// The answer of one node of a quorum.
#[non_exhaustive]
#[derive(Debug)]
pub enum NodeAnswer {
    /// The node ran the request, or may vote.
    Granted,
    /// Another client holds the lock on this node, or there was nothing to do.
    Refused,
    /// The node received no request, or the client did not wait for its reply.
    Pending,
    /// The node could not be reached, or did not reply in time.
    Silent(Error),
    /// The node replied with an error.
    Failed(Error),
}

impl NodeAnswer {
    pub(crate) fn failed(error: Error) -> NodeAnswer {
        match &error {
            Error::Redis { cause, .. } if cause.kind() == redis::ErrorKind::Io => NodeAnswer::Silent(error),
            _ => NodeAnswer::Failed(error),
        }
    }

    /// Returns why the node failed, if it did.
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        match self {
            NodeAnswer::Silent(error) | NodeAnswer::Failed(error) => Some(error),
            NodeAnswer::Granted | NodeAnswer::Refused | NodeAnswer::Pending => None,
        }
    }
}
