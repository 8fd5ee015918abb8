//! [`Script`]: a file of `lua/`, called by the SHA1 of its bytes. [`ScriptLoader`]: sends the
//! source once to a server that does not know it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::batcher::{Batcher, SentFlag, TimedReply};
use super::many::{ManyScript, Request};

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
    replicas: Option<(u32, Duration)>,
    only_reads: bool,
    many: Option<&'static ManyScript>,
}

#[derive(Clone, Debug)]
enum Arg<'a> {
    Text(Cow<'a, str>),
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
        Call { script, keys, args: Vec::with_capacity(8), replicas: None, only_reads: false, many: None }
    }

    /// Adds a key.
    pub(crate) fn key(mut self, key: String) -> Call<'a> {
        self.keys.push(Cow::Owned(key));
        self
    }

    pub(crate) fn text(self, text: &'a str) -> Call<'a> {
        self.arg(Arg::Text(Cow::Borrowed(text)))
    }

    pub(crate) fn owned(self, text: String) -> Call<'a> {
        self.arg(Arg::Text(Cow::Owned(text)))
    }

    pub(crate) fn number(self, number: u64) -> Call<'a> {
        self.arg(Arg::Number(number))
    }

    /// Adds an argument that may have its default.
    pub(crate) fn optional(self, number: Option<u64>) -> Call<'a> {
        self.arg(number.map_or(Arg::Default, Arg::Number))
    }

    /// Adds an argument with its default.
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

    /// Sets how many replicas must confirm the write before it counts, and how long to wait for
    /// them.
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
    pub(crate) fn only_reads(mut self) -> Call<'a> {
        self.only_reads = true;
        self
    }

    /// Whether to send the call in its read-only form, after this refusal. Not at first: servers
    /// before Redis 7 do not know that form.
    pub(super) fn may_be_read(&self, error: &RedisError) -> bool {
        self.only_reads && error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
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
            replicas: self.replicas,
            only_reads: self.only_reads,
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
    pub(super) reads: bool,
}

impl PreparedCall<'_> {
    pub(super) fn by_sha1(&self) -> Cmd {
        self.cmd(if self.reads { "EVALSHA_RO" } else { "EVALSHA" }, self.call.script.sha1())
    }

    /// The same call with the source in place of the SHA1, for a server that does not know the
    /// script. Not `SCRIPT LOAD`: that takes one more right and, in a cluster, a request to every
    /// node.
    pub(super) fn by_source(&self) -> Cmd {
        self.cmd(if self.reads { "EVAL_RO" } else { "EVAL" }, self.call.script.source)
    }

    fn cmd(&self, verb: &str, script: &str) -> Cmd {
        let Call { keys, args, .. } = self.call;
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

/// Sends a script's source where its SHA1 is not known. After a restart or SCRIPT FLUSH, 20,000
/// requests in flight would otherwise each send several kilobytes.
#[derive(Debug, Default)]
pub(super) struct ScriptLoader {
    tickets: AtomicU64,
    /// The ticket of the request that sends a source; 0 if none does.
    sender: AtomicU64,
    /// How often a source was sent.
    sent: AtomicU64,
    /// Notified when the sender is done.
    done: Notify,
}

/// How often a request waits for another one to send a source: about the number of scripts. A
/// cluster has several servers that may not know them.
const MAX_WAITS: u32 = 8;

/// How long it waits each time before it sends the source itself. The other request may belong to a
/// future that is not polled any more, and would keep all requests of its client waiting.
const MAX_WAIT: Duration = Duration::from_millis(250);

impl ScriptLoader {
    pub(super) async fn run(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let mut turn = None;
        for _ in 0..MAX_WAITS {
            let seen = self.sent.load(Ordering::SeqCst);
            let request = Request { cmd: call.by_sha1(), many: call.call.many.filter(|_| !call.reads) };
            match batcher.send(request, sent).await {
                Err(error) if is_unknown_script(&error) => {}
                answer => return answer,
            }
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if self.sent.load(Ordering::SeqCst) != seen {
                continue; // another request has sent the source meanwhile
            }
            turn = LoadTurn::take(self, 0);
            if turn.is_none() {
                let sender = self.sender.load(Ordering::SeqCst);
                if timeout(MAX_WAIT, done).await.is_err() {
                    turn = LoadTurn::take(self, sender);
                }
            }
            if turn.is_some() {
                break;
            }
        }
        let answer = self.send_source(batcher, call, sent).await;
        drop(turn);
        answer
    }

    /// Sent ahead of the queue: the queued requests need it as well.
    async fn send_source(
        &self,
        batcher: &Batcher,
        call: &PreparedCall<'_>,
        sent: &SentFlag,
    ) -> Result<TimedReply, RedisError> {
        let answer = batcher.send_at_once(call.by_source(), sent).await;
        self.sent.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// Runs a pipeline of calls. Each script's source is sent once, then the others again by SHA1.
    /// Between two commands of a pipeline another client may flush the scripts again, so calls that
    /// fail then are sent by source.
    pub(super) async fn run_all(
        &self,
        batcher: &Batcher,
        calls: &[PreparedCall<'_>],
        limit: Duration,
    ) -> Vec<Result<Value, RedisError>> {
        let mut answers = batcher.send_all(calls.iter().map(PreparedCall::by_sha1).collect(), limit).await;
        for by_source in [false, true] {
            let unknown: Vec<usize> = (0..answers.len())
                .filter(|&index| answers[index].as_ref().is_err_and(is_unknown_script))
                .collect();
            if unknown.is_empty() {
                break;
            }
            let mut sources = HashSet::new();
            let again = unknown.iter().map(|&index| {
                let call = &calls[index];
                if sources.insert(call.call.script().name()) || by_source {
                    call.by_source()
                } else {
                    call.by_sha1()
                }
            });
            let again = again.collect();
            for (index, answer) in unknown.into_iter().zip(batcher.send_all(again, limit).await) {
                answers[index] = answer;
            }
            self.sent.fetch_add(1, Ordering::SeqCst);
        }
        answers
    }
}

/// The right to send a source, until it is dropped or another request takes it over.
struct LoadTurn<'a> {
    loader: &'a ScriptLoader,
    ticket: u64,
}

impl<'a> LoadTurn<'a> {
    /// Takes the turn from the request with this ticket, if that still has it.
    fn take(loader: &'a ScriptLoader, from: u64) -> Option<LoadTurn<'a>> {
        let ticket = loader.tickets.fetch_add(1, Ordering::SeqCst) + 1;
        let taken = loader.sender.compare_exchange(from, ticket, Ordering::SeqCst, Ordering::SeqCst);
        taken.is_ok().then_some(LoadTurn { loader, ticket })
    }
}

impl Drop for LoadTurn<'_> {
    fn drop(&mut self) {
        let _taken_over =
            self.loader.sender.compare_exchange(self.ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
        self.loader.done.notify_waiters();
    }
}
