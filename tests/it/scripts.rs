//! The scripts by themselves: style, rights, full servers, work; and the vectors.

mod archive;
mod client;
#[cfg(target_os = "linux")]
mod full_server;
mod half_refused;
mod memory;
mod missing_rights;
mod paused;
mod queues;
mod rwlock;
mod subscriber;
mod vectors;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::support::raw::script;

/// The kinds, and what belongs to them: each is a script, `lua/<name>.lua`.
const SCRIPTS: [&str; 5] = ["fenced", "mutex", "node", "reentrant", "rwlock"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")
}

/// Every script: its name, and its text.
fn scripts() -> BTreeMap<String, String> {
    SCRIPTS.into_iter().map(|name| (name.to_owned(), script(name))).collect()
}

#[test]
fn scripts_follow_the_style_rules() {
    for (name, text) in scripts() {
        assert!(!text.starts_with("#!"), "{name}: Redis 6.2 accepts no shebang");
        assert!(text.ends_with('\n') && !text.contains('\r') && text.is_ascii(), "{name}: plain lines");
        for (_, rest) in text.match_indices("call('").map(|(at, _)| (at, &text[at + 6..])) {
            let verb = rest.split('\'').next().unwrap();
            assert_eq!(verb, verb.to_uppercase(), "{name}: commands are in capitals");
        }
        for forbidden in
            ["'KEYS'", "'SCAN'", "'INFO'", "'CONFIG'", "cjson", "cmsgpack", "redis.log", "math.random"]
        {
            assert!(!text.contains(forbidden), "{name} uses {forbidden}");
        }
        // The operator `..` rounds a number of 16 digits.
        for number in [".. token", ".. time"] {
            let mut rest = text.split(number).skip(1);
            let is_word =
                |rest: &str| rest.starts_with(|next: char| next.is_alphanumeric() || "_[.".contains(next));
            assert!(rest.all(is_word), "{name}: {number} needs string.format");
        }
    }
}

/// The commands of the scripts, in lower case.
fn commands() -> BTreeSet<String> {
    let scripts = scripts();
    let texts = scripts.iter().filter(|(name, _)| *name != "fenced").map(|(_, text)| text);
    let calls = texts.flat_map(|text| text.split("call('").skip(1));
    calls.map(|rest| rest.split('\'').next().unwrap().to_lowercase()).collect()
}

/// Two pages list exactly the rights that the scripts and the connections need.
#[test]
fn scripts_need_exactly_the_documented_rights() {
    let mut needed = commands();
    needed.extend(["eval", "evalsha", "subscribe", "ping", "hello", "time"].map(str::to_owned));
    for page in [include_str!("../../docs/rights.md"), include_str!("../../lua/README.md")] {
        let line = page.lines().find(|line| line.starts_with("ACL SETUSER")).unwrap();
        let given: BTreeSet<String> = line.split(" +").skip(1).map(str::to_owned).collect();
        assert_eq!(given, needed);
    }
}
