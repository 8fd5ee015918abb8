//! [`ManyScript`]: one script call for many locks. Requests of many callers that wait for the same
//! connection are combined into such calls, which cost a server less than half as much.
//!
//! A script for many locks handles the common case of each lock: it is free, or nothing waits for
//! it. For any other case it changes nothing, and the request is sent alone.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use redis::{Arg, Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::error_reply::was_refused;
use super::script::Script;

/// The answer for a lock whose request is to be sent alone.
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
}

/// A command, and how it may be combined with others.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) cmd: Cmd,
    pub(super) many: Option<&'static ManyScript>,
}

impl From<Cmd> for Request {
    fn from(cmd: Cmd) -> Request {
        Request { cmd, many: None }
    }
}

impl Request {
    /// The first key of a request for one lock.
    fn lock(&self) -> &[u8] {
        self.cmd.args_iter().nth(3).map(word).unwrap_or_default()
    }
}

fn word(argument: Arg<&[u8]>) -> &[u8] {
    if let Arg::Simple(word) = argument { word } else { &[] }
}

/// The words of `EVALSHA sha1 numkeys key… argument…`.
struct Words<'a> {
    all: Vec<&'a [u8]>,
    keys: usize,
}

impl<'a> Words<'a> {
    fn of(cmd: &'a Cmd) -> Words<'a> {
        let all: Vec<_> = cmd.args_iter().map(word).collect();
        let keys = all.get(2).and_then(|word| std::str::from_utf8(word).ok()?.parse().ok()).unwrap_or(0);
        Words { all, keys }
    }

    fn key(&self, place: usize) -> &'a [u8] {
        self.all.get(3 + place).copied().unwrap_or_default()
    }

    /// An argument that was omitted has its default, like an empty one.
    fn argument(&self, place: usize) -> &'a [u8] {
        self.all.get(3 + self.keys + place).copied().unwrap_or_default()
    }
}

/// One call for some of the requests of a batch.
pub(super) struct Combined {
    /// Their places in the batch.
    pub(super) members: Vec<usize>,
    /// `None`: one request, as it is.
    pub(super) many: Option<&'static ManyScript>,
}

/// Combines the requests of a batch that have the same script and the same shared arguments.
/// Returns the calls with their commands.
pub(super) fn combine(requests: &mut [Request]) -> Vec<(Combined, Cmd)> {
    let words: Vec<Option<Words<'_>>> =
        requests.iter().map(|request| request.many.map(|_| Words::of(&request.cmd))).collect();
    let mut calls: Vec<Combined> = Vec::new();
    for (place, request) in requests.iter().enumerate() {
        let same = |call: &&mut Combined| {
            let (Some(many), Some(one), Some(first)) = (request.many, &words[place], &words[call.members[0]])
            else {
                return false;
            };
            call.many.is_some_and(|other| std::ptr::eq(other, many))
                && many.shared.iter().all(|place| one.argument(*place) == first.argument(*place))
        };
        match calls.iter_mut().find(same) {
            Some(call) => call.members.push(place),
            None => calls.push(Combined { members: vec![place], many: request.many }),
        }
    }
    for call in &mut calls {
        call.many = call.many.filter(|_| call.members.len() > 1);
    }
    let command = |call: &Combined| {
        let words: Vec<_> = call.members.iter().filter_map(|place| words[*place].as_ref()).collect();
        call.many.map(|many| many.command(&words, false))
    };
    let commands: Vec<_> = calls.iter().map(command).collect();
    let command = |(call, command): (Combined, Option<Cmd>)| {
        let command = command.unwrap_or_else(|| std::mem::take(&mut requests[call.members[0]].cmd));
        (call, command)
    };
    calls.into_iter().zip(commands).map(command).collect()
}

impl ManyScript {
    /// The call for these requests; by the script's source for a server that does not know it.
    fn command(&self, words: &[&Words<'_>], by_source: bool) -> Cmd {
        let count = 3 + self.shared.len() + words.len() * (self.keys.len() + self.own.len());
        let mut cmd = Cmd::with_capacity(count, 512 + words.len() * 256);
        match by_source {
            true => cmd.arg("EVAL").arg(self.script.source()),
            false => cmd.arg("EVALSHA").arg(self.script.sha1()),
        };
        cmd.arg(words.len() * self.keys.len());
        for one in words {
            for place in self.keys {
                cmd.arg(one.key(*place));
            }
        }
        for place in self.shared {
            cmd.arg(words.first().map_or(&[][..], |one| one.argument(*place)));
        }
        for one in words {
            for place in self.own {
                cmd.arg(one.argument(*place));
            }
        }
        cmd
    }
}

impl Combined {
    /// The call with the script's source, if it is one for many locks.
    pub(super) fn by_source(&self, requests: &[Request]) -> Option<Cmd> {
        let words: Vec<_> = self.members.iter().map(|place| Words::of(&requests[*place].cmd)).collect();
        Some(self.many?.command(&words.iter().collect::<Vec<_>>(), true))
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

/// For how long a lock counts as contended after a request for it had to be sent alone, in seconds.
const CONTENDED: u64 = 1;
/// The bits of a slot that hold a time.
const TIME_BITS: u32 = 24;

/// The locks that were not free lately: combining requests for them would only add a round trip.
/// Of bounded size: of two locks that share a slot, the later one is remembered.
#[derive(Debug)]
pub(super) struct ContendedLocks {
    start: Instant,
    /// The hash of a lock, with the second in which it was seen in place of the lowest bits.
    slots: Box<[AtomicU64]>,
}

impl ContendedLocks {
    pub(super) fn new() -> ContendedLocks {
        ContendedLocks { start: Instant::now(), slots: (0..1024).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn note(&self, request: &Request) {
        let (slot, hash) = self.slot(request);
        slot.store(hash | self.now(), Ordering::Relaxed);
    }

    pub(super) fn contain(&self, request: &Request) -> bool {
        let (slot, hash) = self.slot(request);
        let seen = slot.load(Ordering::Relaxed);
        seen != 0 && seen >> TIME_BITS == hash >> TIME_BITS && self.now() - (seen ^ hash) <= CONTENDED
    }

    fn slot(&self, request: &Request) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        request.lock().hash(&mut hasher);
        let hash = hasher.finish();
        let place = hash as usize % self.slots.len();
        (&self.slots[place], hash >> TIME_BITS << TIME_BITS)
    }

    /// Seconds since the start, from 1.
    fn now(&self) -> u64 {
        self.start.elapsed().as_secs() + 1
    }
}
