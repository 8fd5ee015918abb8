//! [`Script`]: a file of `lua/`, called by the SHA1 of its bytes. [`Call`]: one call of a script,
//! with its keys and words. [`Reply`]: the answer to it.
//!
//! A call stays structured until it is written (`request.rs`), so that calls for many locks can be
//! combined.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::Value;
use uuid::Uuid;

use super::answers::TOO_LOW;
use super::failure::{Cause, Failure};
use crate::clock::Moment;
use crate::fencing::FencingToken;
use crate::name::Name;
use crate::shorten::shortened;

/// One file of `lua/`, the bytes that Redis receives.
#[derive(Debug)]
pub(crate) struct Script {
    pub(super) source: &'static str,
    sha1: OnceLock<String>,
}

impl Script {
    pub(crate) const fn new(source: &'static str) -> Script {
        Script { source, sha1: OnceLock::new() }
    }

    pub(super) fn sha1(&self) -> &str {
        self.sha1.get_or_init(|| redis::Script::new(self.source).get_hash().to_owned())
    }
}

/// One call of a script, as `lua/README.md` specifies it, ready to be sent any number of times.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(super) script: &'static Script,
    /// For errors, such as `mutex/acquire`: it ends with the verb.
    pub(super) name: &'static str,
    /// `None`: the call is about the node alone.
    pub(super) lock: Option<Name>,
    /// The key of a guarded quorum's node.
    pub(super) node: Option<Arc<str>>,
    /// The words of the lock.
    pub(super) own: Vec<Word>,
    /// The words that a call for many locks has once.
    pub(super) shared: Vec<Word>,
    pub(super) replicas: Option<(u32, Duration)>,
    pub(super) may_combine: bool,
    /// It needs only the key of its lock, and names no other: while a slot moves, a server refuses
    /// calls for several keys that are not all there.
    pub(super) has_one_key: bool,
    pub(super) is_read_only: bool,
    /// The calls of all its locks, if it is for several, of which all are granted or none.
    group: Vec<Arc<Call>>,
}

/// A word of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Empty. Trailing defaults are not sent.
    Default,
    Text(Arc<str>),
    /// An id, as 32 digits, and the suffix that all ids of a client have. Only written into the
    /// request, so that no attempt has to keep it as a text.
    Id(Uuid, Arc<str>),
    Number(u64),
    /// The minimum token, read when the request is written: a new connection may have raised it.
    MinimumToken,
    /// The server's clock this long after the request is written, as far as the clock is known.
    Until(Duration),
    /// The run id of the server that receives the request.
    Run,
    /// Whether the call is for all of its locks or none; empty if each is for itself.
    All,
}

impl From<u64> for Word {
    fn from(number: u64) -> Word {
        Word::Number(number)
    }
}

impl From<&str> for Word {
    fn from(text: &str) -> Word {
        Word::Text(text.into())
    }
}

impl<T: Into<Word>> From<Option<T>> for Word {
    fn from(word: Option<T>) -> Word {
        word.map_or(Word::Default, T::into)
    }
}

impl From<&Arc<str>> for Word {
    fn from(text: &Arc<str>) -> Word {
        Word::Text(Arc::clone(text))
    }
}

impl Call {
    /// A call about a lock.
    pub(crate) fn new(script: &'static Script, name: &'static str, lock: &Name) -> Call {
        Call::of(script, name, Some(lock.clone()))
    }

    /// A call about the node that has this key.
    pub(crate) fn about_node(script: &'static Script, name: &'static str, key: &str) -> Call {
        Call::of(script, name, None).at_node(key).alone()
    }

    fn of(script: &'static Script, name: &'static str, lock: Option<Name>) -> Call {
        Call {
            script,
            name,
            lock,
            node: None,
            own: Vec::with_capacity(4),
            shared: Vec::with_capacity(11),
            replicas: None,
            may_combine: true,
            has_one_key: false,
            is_read_only: false,
            group: Vec::new(),
        }
    }

    /// One call for the locks of several: the server grants all of them or none. They differ only
    /// in the words of each lock, and there is at least one.
    pub(crate) fn for_all(calls: Vec<Arc<Call>>) -> Call {
        Call { may_combine: false, group: calls.clone(), ..(*calls[0]).clone() }
    }

    /// Whether it is for several locks.
    pub(super) fn is_group(&self) -> bool {
        !self.group.is_empty()
    }

    /// It needs no key but that of its lock.
    pub(crate) fn of_one_key(self) -> Call {
        Call { has_one_key: true, ..self }
    }

    /// The calls of its locks: itself, unless it is for several.
    pub(super) fn members(&self) -> impl Iterator<Item = &Call> {
        let itself = (!self.is_group()).then_some(self);
        self.group.iter().map(Arc::as_ref).chain(itself)
    }

    /// Whether this shared word is written as an empty one.
    pub(super) fn is_default(&self, word: &Word) -> bool {
        *word == Word::Default || *word == Word::All && !self.is_group()
    }

    /// Adds the key of a guarded quorum's node.
    pub(crate) fn at_node(self, key: &str) -> Call {
        Call { node: Some(key.into()), ..self }
    }

    /// Adds a word of the lock.
    pub(crate) fn own(mut self, word: impl Into<Word>) -> Call {
        self.own.push(word.into());
        self
    }

    /// Adds a word that is shared by all locks of a call.
    pub(crate) fn shared(mut self, word: impl Into<Word>) -> Call {
        self.shared.push(word.into());
        self
    }

    /// Sets how many replicas must confirm the write, and how long to wait for them.
    pub(crate) fn replicated(self, replicas: Option<(u32, Duration)>) -> Call {
        Call { replicas, ..self }
    }

    /// Marks that the words of the lock have another meaning than one for each lock.
    pub(crate) fn alone(self) -> Call {
        Call { may_combine: false, ..self }
    }

    /// Marks that the script writes nothing: the right to read suffices for it.
    pub(crate) fn read_only(self) -> Call {
        Call { is_read_only: true, ..self }
    }

    /// A key that says which slot of a cluster the call is for.
    pub(super) fn first_key(&self) -> Option<&str> {
        self.lock.as_ref().map(Name::key).or(self.node.as_deref())
    }

    pub(super) fn verb(&self) -> &'static str {
        self.name.rsplit('/').next().unwrap_or_default()
    }

    /// Whether the server refuses the request if it arrives late.
    pub(super) fn may_be_late(&self) -> bool {
        self.shared.iter().any(|word| matches!(word, Word::Until(_)))
    }

    /// Whether only an admitted node grants the request.
    pub(super) fn is_guarded(&self) -> bool {
        self.shared.contains(&Word::Run)
    }
}

/// The reply of a script.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// Of its call.
    pub(super) name: &'static str,
    pub(super) value: Value,
    /// A time before the request was written: what it was granted counts from then.
    pub(crate) sent: Moment,
    /// The generation of the connection that it came through.
    pub(crate) generation: u64,
    /// It was sent again after its connection broke so: it may have run twice, or may run later.
    pub(crate) first_failure: Option<Failure>,
}

impl Reply {
    /// Why a request that had this outcome may have run unnoticed, or may yet run, if it may: it
    /// was never answered, or was sent twice.
    pub(crate) fn unknown_effect(outcome: &Result<Reply, Failure>) -> Option<&Failure> {
        match outcome {
            Ok(reply) => reply.first_failure.as_ref(),
            Err(failure) => Some(failure).filter(|failure| failure.is_indeterminate()),
        }
    }

    /// The answer of a verb: one integer, or the two of a busy lock.
    pub(crate) fn answer(&self) -> Result<Answer, Failure> {
        self.expected().ok_or_else(|| self.unexpected())
    }

    /// The same; `None` if it is outside the contract of the scripts.
    pub(crate) fn expected(&self) -> Option<Answer> {
        let is_possible = |number: i64| number.unsigned_abs() < FencingToken::LIMIT;
        let answer = match &self.value {
            Value::Int(number) if is_possible(*number) => Answer::Final(*number),
            Value::Array(items) => match items.as_slice() {
                [Value::Int(TOO_LOW), Value::Int(highest)] if is_possible(*highest) => {
                    Answer::TooLow(*highest)
                }
                [Value::Int(free_in), Value::Int(time)] if is_possible(*time) => {
                    Answer::Busy(*free_in, *time)
                }
                _ => return None,
            },
            _ => return None,
        };
        Some(answer)
    }

    /// The tokens of a call for `count` locks that were all granted.
    pub(crate) fn tokens(&self, count: usize) -> Option<Vec<u64>> {
        let token = |number: i64| u64::try_from(number).ok().filter(|token| *token < FencingToken::LIMIT);
        let tokens: Option<Vec<u64>> = self.numbers()?.into_iter().map(token).collect();
        tokens.filter(|tokens| tokens.len() == count)
    }

    /// Whether one of the locks of such a call is in use.
    pub(crate) fn has_busy_lock(&self) -> bool {
        let is_busy = |answer: &Value| match answer {
            Value::Array(answer) => {
                matches!(answer.as_slice(), [Value::Int(free_in), Value::Int(_)] if *free_in != TOO_LOW)
            }
            _ => false,
        };
        matches!(&self.value, Value::Array(answers) if answers.iter().any(is_busy))
    }

    /// The numbers of a list of integers.
    pub(crate) fn numbers(&self) -> Option<Vec<i64>> {
        let Value::Array(items) = &self.value else { return None };
        items.iter().map(|item| if let Value::Int(number) = item { Some(*number) } else { None }).collect()
    }

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
        Failure::new(Cause::Reply { script: self.name, reply: describe(&self.value) }, true)
    }

    pub(super) fn is_number(&self, number: i64) -> bool {
        self.value == Value::Int(number)
    }
}

/// Describes a reply that no script gives. Items of an array may name a holder: shortened.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(describe_item).collect::<Vec<_>>().join(", "))
        }
        other => format!("{other:?}"),
    }
}

fn describe_item(item: &Value) -> String {
    match item {
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => format!("{:?}", shortened(&String::from_utf8_lossy(bytes))),
        Value::SimpleString(text) => format!("{:?}", shortened(text)),
        other => describe(other),
    }
}

/// The answer of a verb, as specified in `lua/README.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Answer {
    /// Positive: done. 0: not done. Negative: refused.
    Final(i64),
    /// Busy: the milliseconds until the lock is free at the latest, and the server's clock in
    /// microseconds.
    Busy(i64, i64),
    /// Refused: this accepted number is at least as large as the proposal.
    TooLow(i64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_script_answers_are_unexpected() {
        let answer = |value| {
            let reply = Reply {
                name: "mutex/acquire",
                value,
                sent: Moment::now(),
                generation: 0,
                first_failure: None,
            };
            reply.answer().ok()
        };
        assert_eq!(answer(Value::Int((1 << 53) - 1)), Some(Answer::Final((1 << 53) - 1)));
        assert_eq!(answer(Value::Int(1 << 53)), None);
        assert_eq!(answer(Value::Int(i64::MIN)), None);
        assert_eq!(answer(Value::Array(vec![Value::Int(5), Value::Int(1 << 53)])), None);
        assert_eq!(answer(Value::Array(vec![Value::Int(-8), Value::Int(1 << 53)])), None);
    }

    #[test]
    fn an_unexpected_answer_does_not_show_a_holder() {
        let name = "8743c9c0-0795-4907-87fd-6c719a6b4586";
        let holder = Value::Array(vec![Value::BulkString(name.into()), Value::Int(7)]);
        let text = describe(&Value::Array(vec![Value::Int(1), Value::SimpleString(name.into()), holder]));
        assert_eq!(text, "[1, \"8743c9c0…\", [\"8743c9c0…\", 7]]");
    }
}
