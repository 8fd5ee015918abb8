//! Answers of scripts.

use redis::Value;

use super::{Failure, Script};
use crate::clock::Moment;
use crate::shorten::shortened;

/// The first of two numbers, if the second is a token that is as large as the one proposed, or larger.
const TOO_LOW: i64 = -8;

/// A request that came after the time until which it may be granted; or its attempt was ended.
pub(super) const LATE: i64 = -1;

/// A node that has not been admitted to its quorum.
pub(super) const NOT_ADMITTED: i64 = -9;

/// What a script answered.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(super) script: &'static Script,
    pub(super) value: Value,
    /// Before the request was written: whatever it was granted counts from then.
    pub(crate) sent: Moment,
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
                [Value::Int(TOO_LOW), Value::Int(highest)] => Ok(Answer::TooLow(*highest)),
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
        Failure::reply(self.script, described(&self.value))
    }

    pub(super) fn is_number(&self, number: i64) -> bool {
        self.value == Value::Int(number)
    }

    /// Whether it is one integer, `least` or more.
    pub(super) fn is_number_from(&self, least: i64) -> bool {
        matches!(self.value, Value::Int(number) if number >= least)
    }
}

/// An answer that no script gives, for the text of an error. Items of an array may name a holder,
/// which a log must not show in full.
fn described(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(described_item).collect::<Vec<_>>().join(", "))
        }
        other => format!("{other:?}"),
    }
}

fn described_item(item: &Value) -> String {
    match item {
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => format!("{:?}", shortened(&String::from_utf8_lossy(bytes))),
        Value::SimpleString(text) => format!("{:?}", shortened(text)),
        other => described(other),
    }
}

/// What a verb answers with, as `lua/README.md` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Positive: done; 0: not; negative: refused.
    Final(i64),
    /// Free in so many milliseconds at most, and the server's clock in microseconds.
    Busy(i64, i64),
    /// Refused: a number as large as this was accepted before.
    TooLow(i64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unexpected_answer_does_not_show_a_holder() {
        let name = "8743c9c0-0795-4907-87fd-6c719a6b4586";
        let holder = Value::Array(vec![Value::BulkString(name.into()), Value::Int(7)]);
        let text = described(&Value::Array(vec![Value::Int(1), Value::SimpleString(name.into()), holder]));
        assert_eq!(text, "[1, \"8743c9c0…\", [\"8743c9c0…\", 7]]");
    }
}
