//! Scripts: the files in `lua/`, called by the SHA1 of their bytes.

use std::sync::OnceLock;

use redis::{Arg, Cmd, ToRedisArgs};

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
pub(crate) struct Call {
    script: &'static Script,
    by_sha1: Cmd,
}

impl Call {
    pub(crate) fn new(script: &'static Script, keys: &[&str]) -> Call {
        let mut by_sha1 = Cmd::with_capacity(3 + keys.len() + 6, 512);
        by_sha1.arg("EVALSHA").arg(script.sha1()).arg(keys.len()).arg(keys);
        Call { script, by_sha1 }
    }

    pub(crate) fn arg(mut self, arg: impl ToRedisArgs) -> Call {
        self.by_sha1.arg(arg);
        self
    }

    pub(crate) fn script(&self) -> &'static Script {
        self.script
    }

    pub(super) fn by_sha1(&self) -> &Cmd {
        &self.by_sha1
    }

    /// The same call with the source in place of the SHA1, for a server that does not know it (any
    /// more). Not `SCRIPT LOAD`: that is one more right and, in a cluster, a request to every node.
    pub(super) fn by_source(&self) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(self.script.source);
        for arg in self.by_sha1.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                cmd.arg(bytes);
            }
        }
        cmd
    }
}
