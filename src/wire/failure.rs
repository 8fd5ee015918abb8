//! [`Failure`]: why a request has no reply, whether it may have run, and whether it may work later.
//! [`NodeReplies`]: what each node of a quorum replied. Below them: which error replies refuse a
//! script before it runs.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::task::JoinError;

use crate::error::{Context, Error, NodeAnswer, NodeOutcome, Operation, ReasonChain};

/// Why a request has no usable reply.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    cause: Cause,
    /// Whether the request may have had an effect, or may have one later.
    may_have_run: bool,
}

#[derive(Clone, Debug)]
enum Cause {
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
    /// The runtime that made connections and waited for replies has shut down.
    RuntimeEnded,
    /// Too few nodes of a quorum gave the same reply.
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

    /// Adds an earlier delivery of the same request, which may have run or may run later: then that
    /// failure is reported.
    pub(super) fn after(self, earlier: Option<Failure>) -> Failure {
        match (earlier, &self.cause) {
            (Some(_), Cause::RuntimeEnded) => self.with_effect(),
            (Some(earlier), _) => earlier,
            (None, _) => self,
        }
    }

    pub(super) fn sent(source: RedisError, may_have_run: bool) -> Failure {
        Failure::new(Cause::Sent(source), may_have_run)
    }

    pub(super) fn indeterminate(source: RedisError) -> Failure {
        Failure::new(Cause::Sent(source), true)
    }

    pub(super) fn reply(script: &'static str, reply: String) -> Failure {
        Failure::new(Cause::Reply { script, reply }, true)
    }

    pub(super) fn unreplicated(confirmed: i64, required: u32) -> Failure {
        Failure::new(Cause::Unreplicated { confirmed, required }, true)
    }

    pub(super) fn not_admitted() -> Failure {
        Failure::new(Cause::NotAdmitted, false)
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

    /// Adds the cause of an error reply: this key has unexpected contents.
    pub(super) fn because_of(self, key: &str, problem: &'static str) -> Failure {
        match self.cause {
            Cause::Sent(source) => {
                Failure::new(Cause::Corrupt { key: key.to_owned(), problem, source }, self.may_have_run)
            }
            cause => Failure { cause, ..self },
        }
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
    pub(crate) fn with_effect(self) -> Failure {
        self.with_effect_if(true)
    }

    pub(crate) fn with_effect_if(mut self, may_have_run: bool) -> Failure {
        self.may_have_run |= may_have_run;
        self
    }

    /// The same failure, for a request that was not sent because of it.
    pub(crate) fn of_other_request(mut self) -> Failure {
        self.may_have_run = false;
        self
    }

    /// Whether the request may have had an effect, or may have one later.
    pub(crate) fn is_indeterminate(&self) -> bool {
        self.may_have_run
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
            Cause::Unsent(source) => {
                !matches!(source.kind(), ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig)
                    && !refuses_database(source)
            }
            Cause::Sent(source) => !is_error_reply(source) || is_transient_reply(source),
            Cause::Corrupt { .. } | Cause::Reply { .. } | Cause::NotAdmitted | Cause::RuntimeEnded => false,
            Cause::Unreplicated { .. } => true,
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

/// Whether the error comes from a cancelled task: a runtime cancels its tasks as it shuts down.
fn is_cancelled(error: &RedisError) -> bool {
    let Some(source) = error.source() else { return false };
    // The client library shares the error that caused it.
    let source = source.downcast_ref::<Arc<dyn StdError + Send + Sync>>();
    let source = source.and_then(|shared| shared.downcast_ref::<std::io::Error>());
    let task = source.and_then(|source| source.get_ref()?.downcast_ref::<JoinError>());
    task.is_some_and(JoinError::is_cancelled)
}

/// Whether the server has no database of the number that the URL names. The client library keeps
/// no code of that reply.
fn refuses_database(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
        && error.detail().is_some_and(|detail| detail.contains("DB index"))
}

/// Errors of a server that starts, fails over, moves slots, cannot write for now, or runs another
/// script.
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

/// Error codes with which a server refuses a request before it has written anything.
///
/// A server checks all but the last four before it runs a script. Those four stop a script at its
/// first write: whether memory is short is decided as the script starts, and the other three
/// conditions do not change while it runs (`scriptVerifyWriteCommandAllow` and `scriptVerifyOOM` in
/// Redis 7, `luaRedisGenericCommand` in Redis 6.2).
const REFUSED: &[&str] = &[
    "NOSCRIPT",    // unknown SHA1
    "NOAUTH",      // not authenticated
    "WRONGPASS",   // authentication failed
    "NOPERM",      // the user may not run EVALSHA, or not with these keys
    "DENIED",      // protected mode
    "LOADING",     // the data set is being loaded
    "BUSY",        // another script is running
    "MASTERDOWN",  // a replica that must not serve stale data
    "CLUSTERDOWN", // slots are not served
    "MOVED",       // another node serves the slot
    "ASK",         // another node has the keys
    "TRYAGAIN",    // keys of one request are on two nodes while their slot moves
    "CROSSSLOT",   // keys of one request are in several slots
    "READONLY",    // a replica
    "OOM",         // maxmemory is reached
    "MISCONF",     // the server cannot save
    "NOREPLICAS",  // min-replicas-to-write
];

/// Codes that Redis 6.2 wraps into the error of the script that they stopped.
const STOP_AT_FIRST_WRITE: &[&str] = &["READONLY", "OOM", "MISCONF", "NOREPLICAS"];

/// Errors without a code with which a server refuses a request that it cannot run.
const UNKNOWN_COMMAND: &[&str] =
    &["unknown command", "wrong number of arguments for 'eval", "max number of clients reached"];

/// Whether the server sent an error reply.
pub(super) fn is_error_reply(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// Whether this error reply says that the request has not run.
pub(super) fn was_refused(error: &RedisError) -> bool {
    if !is_error_reply(error) {
        return false;
    }
    let detail = error.detail().unwrap_or_default();
    let code = error.code().unwrap_or_default();
    if STOP_AT_FIRST_WRITE.iter().any(|code| is_wrapped(detail, code)) {
        return true;
    }
    // Redis reports a refused command within a script as ERR, other servers with this code. By then
    // the script may have written.
    if code == "NOPERM" && detail.contains("script") {
        return false;
    }
    REFUSED.contains(&code) || code == "ERR" && UNKNOWN_COMMAND.iter().any(|text| detail.starts_with(text))
}

/// Whether a server of a cluster replied that another one serves the slot, or none at the moment:
/// it has not run the request. Errors of other kinds may be those of another request: the library
/// fails all requests in flight when it cannot learn the slots.
pub(super) fn was_redirected(error: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    matches!(error.kind(), ErrorKind::Server(Kind::Moved | Kind::Ask | Kind::TryAgain | Kind::ClusterDown))
}

/// Whether Redis 6 wrapped an error with this code into that of the script.
fn is_wrapped(detail: &str, code: &str) -> bool {
    detail.starts_with("Error running script") && detail.contains(&format!(": -{code} "))
}

/// Whether the server is a replica: its reply to a script, which Redis 6 wraps into the script's
/// error, and to `WAIT`, before and while it waits.
pub(super) fn is_demoted(error: &RedisError) -> bool {
    let says = |text: &str| error.detail().is_some_and(|detail| detail.contains(text));
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.code() == Some("UNBLOCKED")
        || says("READONLY You can't write")
        || says("WAIT cannot be used with replica")
}

/// Whether a master refuses writes, for lack of replicas or because it cannot save: the request has
/// written nothing.
pub(super) fn refuses_writes(error: &RedisError) -> bool {
    lacks_replicas(error) || says(error, "MISCONF")
}

pub(super) fn lacks_replicas(error: &RedisError) -> bool {
    says(error, "NOREPLICAS")
}

/// Whether an error has this code, by itself or wrapped by Redis 6 into the script's error.
fn says(error: &RedisError, code: &str) -> bool {
    error.code() == Some(code) || error.detail().is_some_and(|detail| detail.contains(&format!("-{code} ")))
}

/// Whether no reply came.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error()
}

/// Nothing more is sent on this connection.
pub(super) fn closed() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
}

pub(super) fn too_slow() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
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

    /// An error reply as a connection parses it.
    fn error_reply(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn was_refused_knows_what_runs_before_a_script_and_at_its_first_write() {
        for line in [
            "NOSCRIPT No matching script. Please use EVAL.",
            "NOAUTH Authentication required.",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
            "NOPERM User app has no permissions to run the 'evalsha' command",
            "NOPERM No permissions to access a key",
            "LOADING Redis is loading the dataset in memory",
            "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "CLUSTERDOWN Hash slot not served",
            "MOVED 3999 127.0.0.1:6381",
            "ASK 3999 127.0.0.1:6381",
            "TRYAGAIN Multiple keys request during rehashing of slot",
            "CROSSSLOT Keys in request don't hash to the same slot",
            "READONLY You can't write against a read only replica.",
            "READONLY You can't write against a read only replica. script: 47, on @user_script:9.",
            "ERR Error running script (call to f_47): @user_script:9: @user_script: 9: -READONLY You can't \
             write against a read only replica. ",
            "OOM command not allowed when used memory > 'maxmemory'. script: 47, on @user_script:9.",
            "ERR Error running script (call to f_47): @user_script:9: -OOM command not allowed when used \
             memory > 'maxmemory'.",
            "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
            "NOREPLICAS Not enough good replicas to write.",
            "ERR unknown command 'EVALSHA', with args beginning with: '47' ",
            "ERR unknown command `EVALSHA`, with args beginning with: `47`, ",
            "ERR wrong number of arguments for 'evalsha' command",
            "ERR max number of clients reached",
        ] {
            assert!(was_refused(&error_reply(line)), "{line}");
        }
    }

    #[test]
    fn was_refused_is_false_of_errors_that_may_come_after_a_write() {
        for line in [
            "ERR upstream failure",
            "upstream failure",
            "ERR The user executing the script can't run this command or subcommand script: 47",
            "ERR ACL failure in script: User app has no permissions to run the 'incr' command",
            "NOPERM ACL failure in script: User app has no permissions to run the 'incr' command",
            "ERR value is not an integer or out of range",
            "ERR Error running script (call to f_47): @user_script:9: WRONGTYPE Operation against a key",
            "WRONGTYPE Operation against a key holding the wrong kind of value script: 47",
            "ERR Unknown Redis command called from script script: 47",
            "ERR Wrong number of args calling Redis command from script script: 47",
            "ERR Script killed by user with SCRIPT KILL.",
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            "EXECABORT Transaction discarded because of previous errors.",
            "UNAVAILABLE no backend",
        ] {
            assert!(!was_refused(&error_reply(line)), "{line}");
        }
        assert!(!was_refused(&RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))));
    }
}
