//! Answers of scripts, and failures to get one.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::Script;
use crate::error::Error;

/// What a script answered.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(super) script: &'static Script,
    pub(super) value: Value,
    /// Through which connection it came.
    pub(crate) generation: u64,
    /// The request was sent again after its connection broke like this: it may have run twice, or run
    /// again later.
    pub(crate) resent: Option<Failure>,
}

impl Reply {
    /// The answer of a verb: one integer, or the two of a lock that is busy.
    pub(crate) fn answer(&self) -> Result<Answer, Failure> {
        match &self.value {
            Value::Int(number) => Ok(Answer::Final(*number)),
            Value::Array(items) => match items.as_slice() {
                [Value::Int(free_in), Value::Int(time)] => Ok(Answer::Busy(*free_in, *time)),
                _ => Err(self.unexpected()),
            },
            _ => Err(self.unexpected()),
        }
    }

    /// The items of a longer answer, as text.
    pub(crate) fn texts(&self) -> Result<Vec<String>, Failure> {
        let Value::Array(items) = &self.value else { return Err(self.unexpected()) };
        let text = |item: &Value| match item {
            Value::Int(number) => Some(number.to_string()),
            // Other libraries hold locks under tokens of any bytes.
            Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        };
        items.iter().map(text).collect::<Option<_>>().ok_or_else(|| self.unexpected())
    }

    pub(crate) fn unexpected(&self) -> Failure {
        let cause = Cause::Reply(format!("{:?}", self.value));
        Failure { script: self.script.name(), cause }
    }
}

/// What a verb answers with, as `lua/README.md` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Positive: done; 0: not; negative: refused.
    Final(i64),
    /// Free in so many milliseconds at most, and the server's clock in microseconds.
    Busy(i64, i64),
}

/// Why there is no answer.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    script: &'static str,
    cause: Cause,
}

#[derive(Clone, Debug)]
enum Cause {
    /// No connection: the request was not sent.
    Unsent(RedisError),
    /// The connection broke or stayed silent: the request may have run, and may yet run.
    Unknown(RedisError),
    /// The server refused the request, which therefore had no effect: a script checks before it writes.
    Refused(RedisError),
    /// An answer outside the contract of the script.
    Reply(String),
}

impl Failure {
    pub(super) fn unsent(script: &'static Script, source: RedisError) -> Failure {
        Failure { script: script.name(), cause: Cause::Unsent(source) }
    }

    pub(super) fn sent(script: &'static Script, source: RedisError) -> Failure {
        let refused = matches!(source.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
        let cause = if refused { Cause::Refused(source) } else { Cause::Unknown(source) };
        Failure { script: script.name(), cause }
    }

    /// The same trouble, met with by another request.
    pub(crate) fn during(self, script: &'static Script) -> Failure {
        Failure { script: script.name(), ..self }
    }

    /// Whether the request may have had, or may yet have, an effect.
    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self.cause, Cause::Unknown(_) | Cause::Reply(_))
    }

    /// Whether the same request may succeed later without anybody doing anything about it.
    pub(crate) fn is_passing(&self) -> bool {
        match &self.cause {
            Cause::Unsent(source) => {
                !matches!(source.kind(), ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig)
            }
            Cause::Unknown(_) => true,
            Cause::Refused(source) => passes(source),
            Cause::Reply(_) => false,
        }
    }
}

/// Errors of a server that starts, fails over, moves slots, or is busy with somebody's script.
fn passes(source: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    matches!(
        source.kind(),
        ErrorKind::Server(
            Kind::BusyLoading | Kind::ReadOnly | Kind::TryAgain | Kind::ClusterDown | Kind::MasterDown
        )
    ) || source.code() == Some("BUSY")
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let script = failure.script;
        match failure.cause {
            Cause::Unsent(source) | Cause::Unknown(source) | Cause::Refused(source) => {
                Error::Redis { script, source }
            }
            Cause::Reply(reply) => Error::Reply { script, reply },
        }
    }
}
