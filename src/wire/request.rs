//! [`PreparedCall`]: a call with what is known of the node that receives it. [`Batch`]: the
//! requests of many callers, as calls for many locks, which cost a server little more than half.

use std::sync::Arc;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use uuid::Uuid;

use super::answers;
use super::error_replies::was_refused;
use super::script::{Call, Word};
use super::server_clock::ServerClock;
use crate::clock::Moment;
use crate::name::Name;

/// The slot of a cluster that a request is for.
#[cfg(feature = "cluster")]
pub(super) type Slot = redis::cluster_routing::Slot;
/// Without the feature, no client has a cluster.
#[cfg(not(feature = "cluster"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Slot;

#[cfg(not(feature = "cluster"))]
impl Slot {
    pub(super) fn new(_: u16) -> Option<Slot> {
        None
    }

    pub(super) fn for_key(_: impl AsRef<[u8]>) -> Slot {
        Slot
    }
}

/// The part of a node whose requests fail together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Shard {
    /// The one server, or all masters of a cluster.
    All,
    /// By its address.
    Master(String),
    /// The slots that no master serves, as far as is known.
    Unserved,
}

/// Whether the keys of both locks are in one slot of a cluster.
pub(super) fn have_one_slot(one: &Name, other: &Name) -> bool {
    Slot::for_key(one.key()) == Slot::for_key(other.key())
}

/// The most locks that a call may have.
const MAX_LOCKS: usize = 128;

const NOT_SERVED: Value = Value::Int(answers::NOT_SERVED);

const UNKNOWN_SCRIPT: ErrorKind = ErrorKind::Server(ServerErrorKind::NoScript);

/// A call, and what is known of the node that receives it.
#[derive(Clone, Debug)]
pub(super) struct PreparedCall {
    pub(super) call: Arc<Call>,
    pub(super) clock: Arc<ServerClock>,
    /// The run id of the server, where that was queried.
    pub(super) run: Option<Arc<str>>,
    /// In a cluster: all keys of a call must be of one slot.
    pub(super) slot: Option<Slot>,
    /// Sent in its read-only form: the server refuses it if it writes.
    pub(super) is_read_only: bool,
    /// Not combined with others.
    pub(super) is_alone: bool,
}

/// A reply, and a time before its request was written.
#[derive(Clone, Debug)]
pub(super) struct TimedReply {
    pub(super) value: Value,
    pub(super) sent: Moment,
}

/// How a call names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Sha1,
    /// For a server that does not know the script. Not `SCRIPT LOAD`: that takes one more right
    /// and, in a cluster, a request to every node.
    Source,
}

impl PreparedCall {
    /// Whether it may become one call with others.
    pub(super) fn may_combine(&self) -> bool {
        self.call.may_combine && !self.is_alone && !self.is_read_only
    }

    /// The same call, with the slot of its keys.
    pub(super) fn with_slot(self) -> PreparedCall {
        let slot = self.call.first_key().map(Slot::for_key);
        PreparedCall { slot, ..self }
    }

    fn may_share_call(&self, other: &PreparedCall) -> bool {
        let (one, two) = (&self.call, &other.call);
        self.may_combine()
            && other.may_combine()
            && self.slot == other.slot
            && std::ptr::eq(one.script, two.script)
            && one.name == two.name
            && one.shared == two.shared
            && one.node == two.node
    }

    /// The bytes of one call for all locks of these requests.
    pub(super) fn write(requests: &[&PreparedCall], form: Form) -> Cmd {
        let Some(first) = requests.first() else { return Cmd::new() };
        let Call { script, own, shared, node, .. } = &*first.call;
        let calls: Vec<&Call> = requests.iter().flat_map(|request| request.call.members()).collect();
        let locks = || calls.iter().filter_map(|call| call.lock.as_ref());
        let keys = 3 * locks().count() + usize::from(node.is_some());
        let words = 4 + keys + own.len() * calls.len() + shared.len();
        let mut cmd = Cmd::with_capacity(words, 64 * words);
        match (form, first.is_read_only) {
            (Form::Sha1, false) => cmd.arg("EVALSHA").arg(script.sha1()),
            (Form::Sha1, true) => cmd.arg("EVALSHA_RO").arg(script.sha1()),
            (Form::Source, false) => cmd.arg("EVAL").arg(script.source),
            (Form::Source, true) => cmd.arg("EVAL_RO").arg(script.source),
        };
        cmd.arg(keys);
        for key in [Name::key, Name::waiters, Name::fence] {
            let key = if first.call.has_one_key { Name::key } else { key };
            locks().for_each(|lock| _ = cmd.arg(key(lock)));
        }
        cmd.arg(node.as_deref()).arg(first.call.verb());
        for place in 0..own.len() {
            let words = calls.iter().filter_map(|call| call.own.get(place));
            words.for_each(|word| first.write_word(word, &mut cmd));
        }
        let sent = shared.iter().rposition(|word| !first.call.is_default(word)).map_or(0, |last| last + 1);
        shared.iter().take(sent).for_each(|word| first.write_word(word, &mut cmd));
        cmd
    }

    fn write_word(&self, word: &Word, cmd: &mut Cmd) {
        match word {
            Word::Text(text) => cmd.arg(&**text),
            Word::Id(id, suffix) => {
                let mut digits = Uuid::encode_buffer();
                let digits = &*id.simple().encode_lower(&mut digits);
                if suffix.is_empty() { cmd.arg(digits) } else { cmd.arg([digits, suffix].concat()) }
            }
            Word::Number(number) => cmd.arg(number),
            Word::MinimumToken => cmd.arg(self.clock.minimum_token()),
            Word::Until(span) if self.clock.latest() > 0 => {
                cmd.arg(self.clock.now() + u64::try_from(span.as_micros()).unwrap_or(0))
            }
            Word::All if !self.call.is_default(word) => cmd.arg(1),
            Word::Default | Word::All | Word::Until(_) => cmd.arg(""),
            Word::Run => cmd.arg(self.run.as_deref().unwrap_or_default()),
        };
    }

    /// The answers to the locks of a call.
    fn answers(&self, reply: Result<Value, RedisError>, count: usize) -> Vec<Result<Value, RedisError>> {
        match reply {
            Ok(Value::Array(answers)) if answers.len() == count && self.call.lock.is_some() => {
                answers.into_iter().map(|answer| error_in(&answer).map_or(Ok(answer), Err)).collect()
            }
            reply => vec![reply; count],
        }
    }
}

/// The error of one lock, which a call for many locks answers as a text. As if the server had sent
/// it as an error reply.
fn error_in(answer: &Value) -> Option<RedisError> {
    let Value::BulkString(text) = answer else { return None };
    let line: Vec<u8> = text.iter().map(|byte| if b"\r\n".contains(byte) { b' ' } else { *byte }).collect();
    match redis::parse_redis_value(&[b"-", &*line, b"\r\n"].concat()) {
        Ok(value) => value.extract_error().err(),
        Err(error) => Some(error),
    }
}

/// Whether one lock of a call may be the reason for this error: a server checks the rights on all
/// keys before it runs a script.
fn concerns_one(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) && was_refused(error)
}

/// Requests that are sent together, as few calls. What a call leaves follows it:
/// - a call whose script the server does not know, by its source,
/// - the locks that a call has not served,
/// - one by one, the locks of a call that was refused, since the user may lack rights for one.
pub(super) struct Batch<'a> {
    requests: &'a [PreparedCall],
    /// The calls to be sent next, by the places of their members.
    calls: Vec<(Vec<usize>, Form)>,
    rounds_left: usize,
    /// The reply to each request.
    pub(super) replies: Vec<Result<TimedReply, RedisError>>,
    /// Before any of them was written.
    sent: Moment,
}

impl<'a> Batch<'a> {
    pub(super) fn new(requests: &'a [PreparedCall]) -> Batch<'a> {
        let (calls, sent) = (combine(requests), Moment::now());
        let replies = requests.iter().map(|_| Ok(TimedReply { value: NOT_SERVED, sent })).collect();
        // Each round serves the first lock of each call, or finds one of three errors: the user has
        // no right to a lock, and its script is not known, which may happen twice.
        Batch { requests, calls, rounds_left: requests.len() + 3, replies, sent }
    }

    /// The commands to be sent next. Empty: all requests are answered.
    pub(super) fn commands(&self) -> Vec<Cmd> {
        let command = |(call, form): &(Vec<usize>, Form)| {
            let members: Vec<_> = call.iter().map(|place| &self.requests[*place]).collect();
            PreparedCall::write(&members, *form)
        };
        self.calls.iter().map(command).collect()
    }

    /// Records the replies to the commands.
    pub(super) fn record(&mut self, replies: Vec<Result<Value, RedisError>>) {
        let calls = std::mem::take(&mut self.calls);
        let mut sources = Vec::new();
        for ((call, form), reply) in calls.into_iter().zip(replies) {
            let first = &self.requests[call[0]];
            match reply {
                Err(error) if form == Form::Sha1 && error.kind() == UNKNOWN_SCRIPT => {
                    // Once is enough for all calls of the script.
                    let sha1 = first.call.script.sha1();
                    let form = if sources.contains(&sha1) { Form::Sha1 } else { Form::Source };
                    sources.push(sha1);
                    self.calls.push((call, form));
                }
                Err(error) if call.len() > 1 && concerns_one(&error) => {
                    self.calls.extend(call.into_iter().map(|place| (vec![place], Form::Sha1)));
                }
                reply => {
                    let mut unserved = Vec::new();
                    for (place, answer) in call.iter().zip(first.answers(reply, call.len())) {
                        if matches!(answer, Ok(NOT_SERVED)) {
                            unserved.push(*place);
                        }
                        self.replies[*place] = answer.map(|value| TimedReply { value, sent: self.sent });
                    }
                    if !unserved.is_empty() {
                        self.calls.push((unserved, Form::Sha1));
                    }
                }
            }
        }
        self.rounds_left -= 1;
        if self.rounds_left == 0 {
            self.calls.clear();
        }
    }
}

/// The requests of a batch as few calls: each has the places of its members.
fn combine(requests: &[PreparedCall]) -> Vec<(Vec<usize>, Form)> {
    let mut calls: Vec<(Vec<usize>, Form)> = Vec::new();
    for (place, request) in requests.iter().enumerate() {
        let joins = |(call, _): &&mut (Vec<usize>, Form)| {
            call.len() < MAX_LOCKS && requests[call[0]].may_share_call(request)
        };
        match calls.iter_mut().find(joins) {
            Some((call, _)) => call.push(place),
            None => calls.push((vec![place], Form::Sha1)),
        }
    }
    // Once the other nodes have answered a release, the next request for the lock may be in the
    // same batch here as that release: ahead of it, it would find the lock taken.
    calls.sort_by_key(|(call, _)| requests[call[0]].call.verb() != "release");
    calls
}

#[cfg(test)]
mod tests {
    use super::super::script::Script;
    use super::*;

    static SCRIPT: Script = Script::new("return 1");

    fn request(lock: &str, call: &str) -> PreparedCall {
        let (name, words) = match call {
            "acquire" => ("mutex/acquire", [Word::Number(9), Word::MinimumToken, Word::Default]),
            _ => ("mutex/release", [Word::MinimumToken, Word::Default, Word::Default]),
        };
        let call = Call::new(&SCRIPT, name, &Name::new("", lock).unwrap()).own(lock).own(Word::Default);
        PreparedCall {
            call: Arc::new(words.into_iter().fold(call, Call::shared)),
            clock: Arc::new(ServerClock::new(true)),
            run: None,
            slot: None,
            is_read_only: false,
            is_alone: false,
        }
    }

    fn error(line: &str) -> Result<Value, RedisError> {
        redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap().extract_error()
    }

    fn words(commands: &[Cmd]) -> Vec<String> {
        let word = |word: redis::Arg<&[u8]>| match word {
            redis::Arg::Simple(word) => String::from_utf8(word.to_vec()).unwrap(),
            _ => panic!("no word"),
        };
        let words = |cmd: &Cmd| cmd.args_iter().map(word).skip(2).collect::<Vec<_>>().join(" ");
        commands.iter().map(words).collect()
    }

    #[test]
    fn calls_with_equal_shared_words_are_combined_and_releases_go_first() {
        let requests = [request("a", "acquire"), request("b", "release"), request("c", "acquire")];
        assert_eq!(
            words(&Batch::new(&requests).commands()),
            [
                "3 b {b}:waiters {b}:fence release b  0",
                "6 a c {a}:waiters {c}:waiters {a}:fence {c}:fence acquire a c   9 0",
            ]
        );
    }

    #[test]
    fn what_a_call_leaves_is_sent_again() {
        let requests = [request("a", "acquire"), request("b", "acquire"), request("c", "acquire")];
        let mut batch = Batch::new(&requests);
        batch.record(vec![error("NOSCRIPT No matching script.")]);
        assert!(batch.commands()[0].args_iter().any(|word| word == redis::Arg::Simple(b"EVAL")));
        batch.record(vec![Ok(Value::Array(vec![Value::Int(1), NOT_SERVED, NOT_SERVED]))]);
        assert!(words(&batch.commands())[0].starts_with("6 b c "), "{:?}", words(&batch.commands()));
        batch.record(vec![error("NOPERM No permissions to access a key")]);
        assert_eq!(batch.commands().len(), 2);
        batch.record(vec![
            Ok(Value::Array(vec![Value::Int(2)])),
            error("NOPERM No permissions to access a key"),
        ]);
        assert!(batch.commands().is_empty());
        let [a, b, c] = batch.replies.try_into().unwrap();
        assert_eq!((a.unwrap().value, b.unwrap().value), (Value::Int(1), Value::Int(2)));
        assert_eq!(c.unwrap_err().code(), Some("NOPERM"));
    }

    #[test]
    fn an_error_of_one_lock_is_that_of_its_request() {
        let requests = [request("a", "acquire"), request("b", "acquire")];
        let mut batch = Batch::new(&requests);
        let text = "WRONGTYPE Operation against a key holding the wrong kind of value";
        batch.record(vec![Ok(Value::Array(vec![Value::BulkString(text.into()), Value::Int(7)]))]);
        let [a, b] = batch.replies.try_into().unwrap();
        assert_eq!(a.unwrap_err(), error(text).unwrap_err());
        assert_eq!(b.unwrap().value, Value::Int(7));
    }

    #[test]
    fn a_server_that_serves_nothing_is_not_asked_for_ever() {
        let requests = [request("a", "acquire"), request("b", "acquire")];
        let mut batch = Batch::new(&requests);
        let mut rounds = 0;
        while !batch.commands().is_empty() {
            batch.record(vec![Ok(Value::Array(vec![NOT_SERVED; 2]))]);
            rounds += 1;
        }
        assert_eq!((rounds, batch.replies.len()), (5, 2));
    }
}
