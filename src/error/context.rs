//! [`Context`]: which operation failed, on which lock and server.

use std::fmt;

use crate::name::Name;

/// The operation that failed, its lock and its server, and whether the request may have run. Every
/// [`Error`](crate::Error) of an operation on a lock has one.
///
/// ```
/// fn label(error: &redlatch::Error) -> String {
///     match error.context() {
///         Some(context) => format!("redlatch_{}_failed", context.operation().verb()),
///         None => "redlatch_refused_an_argument".to_owned(),
///     }
/// }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Context(Box<Details>);

#[derive(Clone, PartialEq, Eq)]
struct Details {
    operation: Operation,
    lock: Option<Name>,
    server: Option<String>,
    is_transient: bool,
    is_indeterminate: bool,
}

/// The operation of a call that failed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A client connects.
    Connect,
    /// A call acquires a lock: `lock`, `read`, `write`, and their forms with `try_` and `_timeout`.
    Acquire,
    /// Work runs under a lease.
    Hold,
    /// A call [renews](crate::Lease::renew) a lease at once.
    Renew,
    /// A guard is released.
    Release,
    /// A guard becomes a [ticket](crate::Ticket).
    Transfer,
    /// A lock adopts a [ticket](crate::Ticket).
    Adopt,
    /// A hold to write becomes a hold to read.
    Downgrade,
    /// A call reads the state of a lock: `inspect`, `is_locked`, `is_held_by`.
    Inspect,
    /// A call revokes a lock.
    ForceRelease,
    /// A call lists the nodes of a quorum.
    ListNodes,
    /// A call admits nodes of a guarded quorum again.
    Rejoin,
    /// A call closes the client.
    Close,
}

impl Operation {
    /// Returns the operation as one word, in lower case.
    #[must_use]
    pub fn verb(self) -> &'static str {
        match self {
            Operation::Connect => "connect",
            Operation::Acquire => "acquire",
            Operation::Hold => "hold",
            Operation::Renew => "renew",
            Operation::Release => "release",
            Operation::Transfer => "transfer",
            Operation::Adopt => "adopt",
            Operation::Downgrade => "downgrade",
            Operation::Inspect => "inspect",
            Operation::ForceRelease => "force-release",
            Operation::ListNodes => "list",
            Operation::Rejoin => "rejoin",
            Operation::Close => "close",
        }
    }
}

/// Omits the flags of the request: [`Error::is_transient`](crate::Error::is_transient) also
/// considers the variant of the error.
impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("operation", &self.operation())
            .field("lock", &self.lock().map(Name::as_str))
            .field("server", &self.server())
            .finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn new(operation: Operation) -> Context {
        Context(Box::new(Details {
            operation,
            lock: None,
            server: None,
            is_transient: false,
            is_indeterminate: false,
        }))
    }

    pub(crate) fn of(operation: Operation, lock: &Name) -> Context {
        let mut context = Context::new(operation);
        context.0.lock = Some(lock.clone());
        context
    }

    pub(crate) fn on(mut self, server: &str) -> Context {
        self.0.server = Some(server.to_owned());
        self
    }

    /// Sets whether a retry may help, and whether the request may have taken effect.
    pub(crate) fn with_verdict(mut self, is_transient: bool, is_indeterminate: bool) -> Context {
        (self.0.is_transient, self.0.is_indeterminate) = (is_transient, is_indeterminate);
        self
    }

    /// Returns the operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// Returns the lock; `None` if the operation concerns the client or its nodes.
    #[must_use]
    pub fn lock(&self) -> Option<&Name> {
        self.0.lock.as_ref()
    }

    /// Returns the server's address, Sentinel's name of the master, `cluster`, or `pool`. `None` on
    /// a quorum: [`Error::NoQuorum`](crate::Error::NoQuorum) lists its nodes.
    #[must_use]
    pub fn server(&self) -> Option<&str> {
        self.0.server.as_deref()
    }

    pub(super) fn is_transient(&self) -> bool {
        self.0.is_transient
    }

    pub(super) fn is_indeterminate(&self) -> bool {
        self.0.is_indeterminate
    }
}
