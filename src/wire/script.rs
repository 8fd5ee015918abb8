//! Scripts: the files in `lua/`, called by the SHA1 of their bytes.

use std::sync::OnceLock;

use redis::Cmd;

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
#[derive(Debug)]
pub(crate) struct Call<'a> {
    script: &'static Script,
    keys: Vec<&'a str>,
    args: Vec<Arg<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    Text(&'a str),
    Number(u64),
    /// The latest server time known when the request leaves: a new connection may have raised it.
    Floor,
}

impl<'a> Call<'a> {
    pub(crate) fn new(script: &'static Script, keys: &[&'a str]) -> Call<'a> {
        Call { script, keys: keys.to_vec(), args: Vec::with_capacity(6) }
    }

    pub(crate) fn text(self, text: &'a str) -> Call<'a> {
        self.arg(Arg::Text(text))
    }

    pub(crate) fn number(self, number: u64) -> Call<'a> {
        self.arg(Arg::Number(number))
    }

    pub(crate) fn floor(self) -> Call<'a> {
        self.arg(Arg::Floor)
    }

    fn arg(mut self, arg: Arg<'a>) -> Call<'a> {
        self.args.push(arg);
        self
    }

    pub(crate) fn script(&self) -> &'static Script {
        self.script
    }

    pub(super) fn by_sha1(&self, floor: u64) -> Cmd {
        self.cmd("EVALSHA", self.script.sha1(), floor)
    }

    /// The same call with the source in place of the SHA1, for a server that does not know it (any
    /// more). Not `SCRIPT LOAD`: that is one more right and, in a cluster, a request to every node.
    pub(super) fn by_source(&self, floor: u64) -> Cmd {
        self.cmd("EVAL", self.script.source, floor)
    }

    fn cmd(&self, verb: &str, script: &str, floor: u64) -> Cmd {
        let size = 256 + script.len() + self.keys.iter().map(|key| key.len()).sum::<usize>();
        let mut cmd = Cmd::with_capacity(3 + self.keys.len() + self.args.len(), size);
        cmd.arg(verb).arg(script).arg(self.keys.len()).arg(&self.keys);
        for arg in &self.args {
            match arg {
                Arg::Text(text) => cmd.arg(text),
                Arg::Number(number) => cmd.arg(number),
                Arg::Floor => cmd.arg(floor),
            };
        }
        cmd
    }
}
