//! Scripts: the files in `lua/`, called by the SHA1 of their bytes.

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};

/// One file of `lua/`, the bytes that Redis gets.
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

    fn sha1(&self) -> &str {
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
}

#[derive(Clone, Debug)]
enum Arg<'a> {
    Text(Cow<'a, str>),
    Number(u64),
    /// Its default. What is left out at the end is not sent.
    Default,
    /// The latest server time known when the request leaves: a new connection may have raised it.
    Floor,
    /// The server's clock this much after the request leaves, as far as the clock is known.
    Until(Duration),
    /// Which run of the server it is sent to.
    Run,
}

impl<'a> Call<'a> {
    pub(crate) fn new(script: &'static Script, keys: &[&'a str]) -> Call<'a> {
        let keys = keys.iter().map(|key| Cow::Borrowed(*key)).collect();
        Call { script, keys, args: Vec::with_capacity(8), replicas: None, only_reads: false }
    }

    /// One key more.
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

    /// An argument that may have its default.
    pub(crate) fn optional(self, number: Option<u64>) -> Call<'a> {
        self.arg(number.map_or(Arg::Default, Arg::Number))
    }

    /// An argument that has its default.
    pub(crate) fn default(self) -> Call<'a> {
        self.arg(Arg::Default)
    }

    /// Until when on the server's clock the request may have an effect; no limit by default.
    pub(crate) fn until(self, span: Option<Duration>) -> Call<'a> {
        self.arg(span.map_or(Arg::Default, Arg::Until))
    }

    /// Whether the server refuses the request if it comes late.
    pub(super) fn may_be_late(&self) -> bool {
        self.args.iter().any(|arg| matches!(arg, Arg::Until(_)))
    }

    pub(crate) fn floor(self) -> Call<'a> {
        self.arg(Arg::Floor)
    }

    pub(crate) fn run(self) -> Call<'a> {
        self.arg(Arg::Run)
    }

    /// Whether only a node that was admitted grants it.
    pub(super) fn is_guarded(&self) -> bool {
        self.args.iter().any(|arg| matches!(arg, Arg::Run))
    }

    fn arg(mut self, arg: Arg<'a>) -> Call<'a> {
        self.args.push(arg);
        self
    }

    /// What it writes counts only once so many replicas have it.
    pub(crate) fn replicated(mut self, replicas: Option<(u32, Duration)>) -> Call<'a> {
        self.replicas = replicas;
        self
    }

    /// Its script writes nothing: a user with the right to read is enough for it.
    pub(crate) fn only_reads(mut self) -> Call<'a> {
        self.only_reads = true;
        self
    }

    /// Whether to send it as one that reads, after it was refused like this. Not at first: servers
    /// before Redis 7 do not know how.
    pub(super) fn may_be_read(&self, error: &RedisError) -> bool {
        self.only_reads && error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
    }

    pub(super) fn replicas(&self) -> Option<(u32, Duration)> {
        self.replicas
    }

    pub(crate) fn script(&self) -> &'static Script {
        self.script
    }

    /// The keys beside that of the lock, if it uses them: the last token, and the queue.
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
            Arg::Floor => Arg::Floor,
            Arg::Until(span) => Arg::Until(*span),
            Arg::Run => Arg::Run,
        };
        Call {
            script: self.script,
            keys: self.keys.iter().map(own).collect(),
            args: self.args.iter().map(arg).collect(),
            replicas: self.replicas,
            only_reads: self.only_reads,
        }
    }
}

/// A call with what only the node knows that it is sent to.
pub(super) struct PreparedCall<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) floor: u64,
    /// The server's clock; 0 if it is not known.
    pub(super) clock: u64,
    pub(super) run: &'a str,
    /// Sent as a request that reads: the server refuses it if it writes.
    pub(super) reads: bool,
}

impl PreparedCall<'_> {
    pub(super) fn by_sha1(&self) -> Cmd {
        self.cmd(if self.reads { "EVALSHA_RO" } else { "EVALSHA" }, self.call.script.sha1())
    }

    /// The same call with the source in place of the SHA1, for a server that does not know it (any
    /// more). Not `SCRIPT LOAD`: that is one more right and, in a cluster, a request to every node.
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
                Arg::Floor => cmd.arg(self.floor),
                Arg::Until(_) if self.clock == 0 => cmd.arg(""),
                Arg::Until(span) => cmd.arg(self.clock + u64::try_from(span.as_micros()).unwrap_or(0)),
                Arg::Run => cmd.arg(self.run),
            };
        }
        cmd
    }
}
