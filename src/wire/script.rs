//! [`Script`]: a file of `lua/`, called by the SHA1 of its bytes. [`Call`]: one call of a script,
//! with its keys and arguments.
//!
//! [`Reply`]: what comes back. [`ManyScript`]: one call for many locks.
//!
//! Requests of many callers that wait for the same connection are combined into calls for many
//! locks, which cost a server little more than half as much. Such a script handles the common case
//! of each lock: it is free, or nothing waits for it. For any other case it changes nothing, and
//! the request is sent alone.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use uuid::Uuid;

use super::failure::{Failure, was_refused};
use crate::clock::Moment;
use crate::shorten::shortened;

/// The slot of a cluster that a request is for.
#[cfg(feature = "cluster")]
pub(super) type Slot = redis::cluster_routing::Slot;
#[cfg(not(feature = "cluster"))]
pub(super) type Slot = std::convert::Infallible;

/// One file of `lua/`, the bytes that Redis receives.
#[derive(Debug)]
pub(crate) struct Script {
    name: &'static str,
    source: &'static str,
    sha1: OnceLock<String>,
}

impl Script {
    pub(crate) const fn new(name: &'static str, source: &'static str) -> Script {
        Script { name, source, sha1: OnceLock::new() }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn source(&self) -> &'static str {
        self.source
    }

    pub(super) fn sha1(&self) -> &str {
        self.sha1.get_or_init(|| redis::Script::new(self.source).get_hash().to_owned())
    }
}

/// A script with its keys and arguments, ready to be sent any number of times.
#[derive(Clone, Debug)]
pub(crate) struct Call<'a> {
    script: &'static Script,
    keys: Vec<Cow<'a, str>>,
    args: Vec<Arg<'a>>,
    id_suffix: Cow<'a, str>,
    replicas: Option<(u32, Duration)>,
    is_read_only: bool,
    many: Option<&'static ManyScript>,
}

#[derive(Clone, Debug)]
enum Arg<'a> {
    Text(Cow<'a, str>),
    /// An id, as 32 digits, with the suffix of the call. Written into the request, so that no
    /// attempt has to keep it as a text.
    Id(Uuid),
    Number(u64),
    /// The default. Trailing defaults are not sent.
    Default,
    /// The minimum token, read when the request leaves: a new connection may have raised it.
    MinimumToken,
    /// The server's clock this long after the request leaves, as far as the clock is known.
    Until(Duration),
    /// The run id of the server that receives the request.
    Run,
}

impl<'a> Call<'a> {
    pub(crate) fn new(script: &'static Script, keys: &[&'a str]) -> Call<'a> {
        let keys = keys.iter().map(|key| Cow::Borrowed(*key)).collect();
        let (args, id_suffix) = (Vec::with_capacity(8), Cow::Borrowed(""));
        Call { script, keys, args, id_suffix, replicas: None, is_read_only: false, many: None }
    }

    pub(crate) fn key(mut self, key: String) -> Call<'a> {
        self.keys.push(Cow::Owned(key));
        self
    }

    pub(crate) fn text(self, text: &'a str) -> Call<'a> {
        self.arg(Arg::Text(Cow::Borrowed(text)))
    }

    /// Adds an id and what follows it: the same for all ids of a call.
    pub(crate) fn id(mut self, id: Uuid, suffix: &'a str) -> Call<'a> {
        self.id_suffix = Cow::Borrowed(suffix);
        self.arg(Arg::Id(id))
    }

    pub(crate) fn owned_text(self, text: String) -> Call<'a> {
        self.arg(Arg::Text(Cow::Owned(text)))
    }

    pub(crate) fn number(self, number: u64) -> Call<'a> {
        self.arg(Arg::Number(number))
    }

    /// Adds an argument that may have its default.
    pub(crate) fn optional(self, number: Option<u64>) -> Call<'a> {
        self.arg(number.map_or(Arg::Default, Arg::Number))
    }

    pub(crate) fn default(self) -> Call<'a> {
        self.arg(Arg::Default)
    }

    /// Sets until when, on the server's clock, the request may have an effect; no limit by default.
    pub(crate) fn until(self, span: Option<Duration>) -> Call<'a> {
        self.arg(span.map_or(Arg::Default, Arg::Until))
    }

    /// Whether the server refuses the request if it arrives late.
    pub(super) fn may_be_late(&self) -> bool {
        self.args.iter().any(|arg| matches!(arg, Arg::Until(_)))
    }

    pub(crate) fn minimum_token(self) -> Call<'a> {
        self.arg(Arg::MinimumToken)
    }

    pub(crate) fn run(self) -> Call<'a> {
        self.arg(Arg::Run)
    }

    /// Whether only an admitted node grants the request.
    pub(super) fn is_guarded(&self) -> bool {
        self.args.iter().any(|arg| matches!(arg, Arg::Run))
    }

    fn arg(mut self, arg: Arg<'a>) -> Call<'a> {
        self.args.push(arg);
        self
    }

    /// Sets how many replicas must confirm the write, and how long to wait for them.
    pub(crate) fn replicated(mut self, replicas: Option<(u32, Duration)>) -> Call<'a> {
        self.replicas = replicas;
        self
    }

    /// Sets the script that may run the call together with calls for other locks.
    pub(crate) fn with_others(mut self, many: Option<&'static ManyScript>) -> Call<'a> {
        self.many = many;
        self
    }

    /// Marks that the script writes nothing: the right to read suffices for it.
    pub(crate) fn read_only(mut self) -> Call<'a> {
        self.is_read_only = true;
        self
    }

    /// Whether to send the call in its read-only form, after this refusal. Not at first: servers
    /// before Redis 7 do not know that form.
    pub(super) fn may_be_read(&self, error: &RedisError) -> bool {
        self.is_read_only && error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
    }

    pub(super) fn replicas(&self) -> Option<(u32, Duration)> {
        self.replicas
    }

    pub(crate) fn script(&self) -> &'static Script {
        self.script
    }

    /// The keys beside the lock's own, if the call uses them: the last token, and the queue.
    pub(super) fn companions(&self) -> Option<[&str; 2]> {
        let [_, fence, waiters, ..] = self.keys.as_slice() else { return None };
        Some([fence, waiters])
    }

    /// The same call, for a task that outlives what it borrows from.
    pub(super) fn to_owned(&self) -> Call<'static> {
        let own = |text: &Cow<'_, str>| Cow::Owned(text.to_string());
        let arg = |arg: &Arg<'_>| match arg {
            Arg::Text(text) => Arg::Text(own(text)),
            Arg::Id(id) => Arg::Id(*id),
            Arg::Number(number) => Arg::Number(*number),
            Arg::Default => Arg::Default,
            Arg::MinimumToken => Arg::MinimumToken,
            Arg::Until(span) => Arg::Until(*span),
            Arg::Run => Arg::Run,
        };
        Call {
            script: self.script,
            keys: self.keys.iter().map(own).collect(),
            args: self.args.iter().map(arg).collect(),
            id_suffix: own(&self.id_suffix),
            replicas: self.replicas,
            is_read_only: self.is_read_only,
            many: self.many,
        }
    }
}

/// A call with the values that only the receiving node knows.
pub(super) struct PreparedCall<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) minimum_token: u64,
    /// The server's clock; 0 if it is not known.
    pub(super) clock: u64,
    pub(super) run: &'a str,
    /// Sent in its read-only form: the server refuses it if it writes.
    pub(super) is_read_only: bool,
}

impl PreparedCall<'_> {
    pub(super) fn by_sha1(&self) -> Cmd {
        self.cmd(if self.is_read_only { "EVALSHA_RO" } else { "EVALSHA" }, self.call.script.sha1())
    }

    /// The same, for a connection that may combine it with others.
    pub(super) fn request(&self) -> Request {
        let many = self.call.many.filter(|_| !self.is_read_only);
        let minimum = self.call.args.iter().position(|arg| matches!(arg, Arg::MinimumToken));
        Request { many, minimum, ..Request::from(self.by_sha1()) }
    }

    /// The same call by its source, for a server that does not know the script. Not `SCRIPT LOAD`:
    /// that takes one more right and, in a cluster, a request to every node.
    pub(super) fn by_source(&self) -> Cmd {
        self.cmd(if self.is_read_only { "EVAL_RO" } else { "EVAL" }, self.call.script.source)
    }

    fn cmd(&self, verb: &str, script: &str) -> Cmd {
        let Call { keys, args, id_suffix, .. } = self.call;
        let size = 256 + script.len() + keys.iter().map(|key| key.len()).sum::<usize>();
        let mut cmd = Cmd::with_capacity(3 + keys.len() + args.len(), size);
        cmd.arg(verb).arg(script).arg(keys.len());
        for key in keys {
            cmd.arg(&**key);
        }
        let sent = args.iter().rposition(|arg| !matches!(arg, Arg::Default)).map_or(0, |last| last + 1);
        for arg in &args[..sent] {
            match arg {
                Arg::Default => cmd.arg(""),
                Arg::Text(text) => cmd.arg(&**text),
                Arg::Id(id) => {
                    let mut digits = Uuid::encode_buffer();
                    let digits = &*id.simple().encode_lower(&mut digits);
                    if id_suffix.is_empty() { cmd.arg(digits) } else { cmd.arg([digits, id_suffix].concat()) }
                }
                Arg::Number(number) => cmd.arg(number),
                Arg::MinimumToken => cmd.arg(self.minimum_token),
                Arg::Until(_) if self.clock == 0 => cmd.arg(""),
                Arg::Until(span) => cmd.arg(self.clock + u64::try_from(span.as_micros()).unwrap_or(0)),
                Arg::Run => cmd.arg(self.run),
            };
        }
        cmd
    }
}

pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// The answer for a lock that needs a request of its own.
const SEND_ALONE: i64 = -10;
/// The answer for all locks, if an argument is malformed. Alone, only that request is refused.
const MALFORMED: i64 = -5;

/// A script for many locks, and which words it takes of each request for one lock.
#[derive(Debug)]
pub(crate) struct ManyScript {
    pub(crate) script: Script,
    /// The keys, by their places in the request.
    pub(crate) keys: &'static [usize],
    /// The arguments that must be the same for all locks.
    pub(crate) shared: &'static [usize],
    /// The arguments of each lock.
    pub(crate) own: &'static [usize],
    /// It releases locks, so it goes ahead of a batch's other calls.
    pub(crate) frees: bool,
}

/// A command, and how it may be combined with others.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) cmd: Cmd,
    pub(super) many: Option<&'static ManyScript>,
    /// The place of the minimum token among the arguments. The largest one is right for others as
    /// well: their tokens must be larger than their own.
    minimum: Option<usize>,
    /// It is sent ahead of those that wait.
    pub(super) is_urgent: bool,
    /// In a cluster: all keys of a call must be of one slot.
    pub(super) slot: Option<Slot>,
}

impl From<Cmd> for Request {
    fn from(cmd: Cmd) -> Request {
        Request { cmd, many: None, minimum: None, is_urgent: false, slot: None }
    }
}

impl Request {
    /// A request that others wait for.
    pub(super) fn urgent(cmd: Cmd) -> Request {
        Request { is_urgent: true, ..Request::from(cmd) }
    }

    /// The first key of a request for one lock.
    pub(super) fn lock(&self) -> &[u8] {
        self.cmd.args_iter().nth(3).map(word).unwrap_or_default()
    }
}

fn word(argument: redis::Arg<&[u8]>) -> &[u8] {
    if let redis::Arg::Simple(word) = argument { word } else { &[] }
}

/// The words of requests of a batch: `EVALSHA sha1 numkeys key… argument…`.
struct BatchWords<'a> {
    all: Vec<&'a [u8]>,
    /// Where those of each request are, its number of keys, and the place of its minimum token.
    requests: Vec<(Range<usize>, usize, Option<usize>)>,
}

impl<'a> BatchWords<'a> {
    /// Only the words of requests that may be combined.
    fn of(requests: &'a [Request]) -> BatchWords<'a> {
        let (mut all, mut places) = (Vec::with_capacity(requests.len() * 16), Vec::new());
        for request in requests {
            let start = all.len();
            if request.many.is_some() {
                all.extend(request.cmd.args_iter().map(word));
            }
            let keys = all.get(start + 2).and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
            places.push((start..all.len(), keys.unwrap_or(0), request.minimum));
        }
        BatchWords { all, requests: places }
    }

    fn word(&self, request: usize, place: usize) -> &'a [u8] {
        self.all[self.requests[request].0.clone()].get(place).copied().unwrap_or_default()
    }

    /// An argument that was omitted has its default, like an empty one.
    fn argument(&self, request: usize, place: usize) -> &'a [u8] {
        self.word(request, 3 + self.requests[request].1 + place)
    }

    fn is_minimum(&self, request: usize, place: usize) -> bool {
        self.requests[request].2 == Some(place)
    }

    /// An argument of a call for all of these requests.
    fn shared_argument(&self, requests: &[usize], place: usize) -> &'a [u8] {
        let arguments = requests.iter().map(|request| self.argument(*request, place));
        match requests.first() {
            Some(first) if self.is_minimum(*first, place) => {
                arguments.max_by_key(|digits| (digits.len(), *digits)).unwrap_or_default()
            }
            Some(first) => self.argument(*first, place),
            None => &[],
        }
    }
}

/// One call for some of the requests of a batch.
pub(super) struct CombinedCall {
    /// Their places in the batch.
    pub(super) members: Vec<usize>,
    /// `None`: one request, as it is.
    pub(super) many: Option<&'static ManyScript>,
}

/// Combines the requests of a batch that have the same script and the same shared arguments, but
/// for the minimum token.
/// Returns the calls with their commands.
pub(super) fn combine(requests: &mut [Request]) -> Vec<(CombinedCall, Cmd)> {
    let words = BatchWords::of(requests);
    let mut calls: Vec<CombinedCall> = Vec::new();
    for (place, request) in requests.iter().enumerate() {
        let same = |call: &&mut CombinedCall| {
            let (Some(many), first) = (request.many, call.members[0]) else { return false };
            call.many.is_some_and(|other| std::ptr::eq(other, many))
                && request.slot == requests[first].slot
                && many.shared.iter().all(|shared| {
                    words.is_minimum(place, *shared) && words.is_minimum(first, *shared)
                        || words.argument(place, *shared) == words.argument(first, *shared)
                })
        };
        match calls.iter_mut().find(same) {
            Some(call) => call.members.push(place),
            None => calls.push(CombinedCall { members: vec![place], many: request.many }),
        }
    }
    // Once the other nodes have answered a release, the next request for the lock may be in the
    // same batch here as that release: ahead of it, it would find the lock taken.
    calls.sort_by_key(|call| !call.many.is_some_and(|many| many.frees));
    for call in &mut calls {
        call.many = call.many.filter(|_| call.members.len() > 1);
    }
    let command = |call: &CombinedCall| call.many.map(|many| many.command(&words, &call.members, false));
    let commands: Vec<_> = calls.iter().map(command).collect();
    let command = |(call, command): (CombinedCall, Option<Cmd>)| {
        let command = command.unwrap_or_else(|| std::mem::take(&mut requests[call.members[0]].cmd));
        (call, command)
    };
    calls.into_iter().zip(commands).map(command).collect()
}

impl ManyScript {
    /// The call for these requests; by the script's source for a server that does not know it.
    fn command(&self, words: &BatchWords<'_>, members: &[usize], has_source: bool) -> Cmd {
        let count = 3 + self.shared.len() + members.len() * (self.keys.len() + self.own.len());
        let mut cmd = Cmd::with_capacity(count, 512 + members.len() * 256);
        match has_source {
            true => cmd.arg("EVAL").arg(self.script.source()),
            false => cmd.arg("EVALSHA").arg(self.script.sha1()),
        };
        cmd.arg(members.len() * self.keys.len());
        for member in members {
            for place in self.keys {
                cmd.arg(words.word(*member, 3 + *place));
            }
        }
        for place in self.shared {
            cmd.arg(words.shared_argument(members, *place));
        }
        for member in members {
            for place in self.own {
                cmd.arg(words.argument(*member, *place));
            }
        }
        cmd
    }
}

impl CombinedCall {
    /// The call with the script's source, if it is one for many locks.
    pub(super) fn by_source(&self, requests: &[Request]) -> Option<Cmd> {
        Some(self.many?.command(&BatchWords::of(requests), &self.members, true))
    }

    /// The reply to each member. `None`: its request is to be sent alone.
    pub(super) fn replies(
        &self,
        reply: Result<Value, RedisError>,
    ) -> impl Iterator<Item = Option<Result<Value, RedisError>>> {
        let (is_many, count) = (self.many.is_some(), self.members.len());
        let mut answers = match reply {
            Ok(Value::Array(answers)) if is_many && answers.len() == count => Ok(answers.into_iter()),
            reply => Err(reply),
        };
        (0..count).map(move |_| match &mut answers {
            Ok(answers) => answers.next().filter(|answer| *answer != Value::Int(SEND_ALONE)).map(Ok),
            Err(reply) if is_many && concerns_one(reply) => None,
            Err(reply) => Some(reply.clone()),
        })
    }
}

/// Whether a reply to a call for many locks may be due to one of them: then nothing was changed.
fn concerns_one(reply: &Result<Value, RedisError>) -> bool {
    match reply {
        Ok(value) => *value == Value::Int(MALFORMED),
        Err(error) => error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) && was_refused(error),
    }
}

/// The first of two numbers in a refusal; the second is an accepted token that is at least as large
/// as the proposed one.
const TOO_LOW: i64 = -8;

/// Refuses a request that arrives after its `grant_before`, or an attempt that has ended.
pub(super) const LATE: i64 = -1;

/// Refuses a request at a node that was not admitted to its quorum.
pub(super) const NOT_ADMITTED: i64 = -9;

/// The reply of a script.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(super) script: &'static Script,
    pub(super) value: Value,
    /// A time before the request was written: what it was granted counts from then.
    pub(crate) sent: Moment,
    /// The generation of the connection that it came through.
    pub(crate) generation: u64,
    /// It was sent again after its connection broke so: it may have run twice, or may run later.
    pub(crate) first_failure: Option<Failure>,
}

impl Reply {
    /// The answer of a verb: one integer, or the two of a busy lock.
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
        Failure::reply(self.script.name(), describe(&self.value))
    }

    pub(super) fn is_number(&self, number: i64) -> bool {
        self.value == Value::Int(number)
    }

    /// Whether the reply is one integer of at least `least`.
    pub(super) fn is_number_from(&self, least: i64) -> bool {
        matches!(self.value, Value::Int(number) if number >= least)
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    fn an_unexpected_answer_does_not_show_a_holder() {
        let name = "8743c9c0-0795-4907-87fd-6c719a6b4586";
        let holder = Value::Array(vec![Value::BulkString(name.into()), Value::Int(7)]);
        let text = describe(&Value::Array(vec![Value::Int(1), Value::SimpleString(name.into()), holder]));
        assert_eq!(text, "[1, \"8743c9c0…\", [\"8743c9c0…\", 7]]");
    }
}
