//! The scripts by themselves: headers, arguments, replies, idempotence, durations.

mod archive;
mod arguments;
mod channels;
mod client;
#[cfg(target_os = "linux")]
mod durations;
mod limits;
mod many;
mod many_malformed;
mod memory;
mod queues;
mod repeated_requests;
mod rwlock;
mod subscriber;
mod tokens;
mod vectors;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support::Server;

/// A script with a fixed amount of work. It takes about 3 ms, half of what a script may take.
pub const YARDSTICK: &str = "
    redis.call('ZADD', KEYS[1], 1, 'a', 2, 'b')
    for _ = 1, 1600 do redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES') end
    redis.call('DEL', KEYS[1])";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")
}

/// Every script: its name, like `mutex/acquire`, and its text.
fn scripts() -> Vec<(String, String)> {
    let mut scripts = Vec::new();
    for kind in std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir() && !path.ends_with("src"))
    {
        let files = std::fs::read_dir(&kind).unwrap().map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "lua")) {
            let name = file.strip_prefix(folder()).unwrap().with_extension("").to_str().unwrap().to_owned();
            scripts.push((name, std::fs::read_to_string(&file).unwrap()));
        }
    }
    scripts.sort();
    assert!(scripts.len() >= 11, "{}", scripts.len());
    scripts
}

fn script(name: &str) -> String {
    std::fs::read_to_string(folder().join(name).with_extension("lua")).unwrap()
}

#[tokio::test]
async fn scripts_have_the_published_sums_on_a_server() {
    let server = Server::start().await;
    let published = std::fs::read_to_string(folder().join("SHA1SUMS")).unwrap();
    let mut loaded = String::new();
    for (name, text) in scripts() {
        let sum: String = server.run(&["SCRIPT", "LOAD", &text]).await;
        loaded += &format!("{sum}  {name}.lua\n");
    }
    assert_eq!(published, loaded, "lua/SHA1SUMS should be:\n{loaded}");
}

/// The names in `local a, b = unpack(ARGV)`.
fn unpacked(body: &str) -> Vec<String> {
    let names = body.split_once("= unpack(ARGV)").and_then(|(before, _)| before.rsplit_once("local "));
    let names = names.map_or("", |(_, names)| names);
    names.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
}

#[test]
fn scripts_headers_declare_all_keys_and_arguments() {
    let indices = |text: &str, table: &str| -> BTreeSet<usize> {
        let pieces = text.split(table).skip(1);
        pieces.filter_map(|rest| rest.strip_prefix('[')?.split(']').next()?.parse().ok()).collect()
    };
    for (name, text) in scripts() {
        let header: String =
            text.lines().take_while(|line| line.starts_with("--")).map(|line| format!("{line}\n")).collect();
        let body = &text[header.len()..];
        assert!(header.starts_with(&format!("-- {name}: ")), "{name}: the header begins with the name");
        assert!(header.contains("\n-- Returns"), "{name}: the header names the reply");
        for table in ["KEYS", "ARGV"] {
            let declared: Vec<usize> = header
                .lines()
                .filter_map(|line| {
                    line.strip_prefix(&format!("-- {table}["))?.split(']').next()?.parse().ok()
                })
                .collect();
            assert_eq!(declared, (1..=declared.len()).collect::<Vec<_>>(), "{name}: {table} in order");
            let declared = BTreeSet::from_iter(declared);
            let used = indices(body, table);
            assert!(declared.is_superset(&used), "{name} uses {table}{used:?}, declares {declared:?}");
            // All verbs take all keys of the lock, also keys that they do not use.
            let is_common = |index: &usize| table == "KEYS" && *index <= 3;
            let is_unpacked = table == "ARGV" && body.contains("unpack(ARGV)") || name.ends_with("_many");
            let unused: Vec<_> = declared.difference(&used).filter(|index| !is_common(index)).collect();
            assert!(
                unused.is_empty() || is_unpacked,
                "{name} declares {table}{unused:?} and does not use it"
            );
        }
        let names = unpacked(body);
        if body.contains("unpack(ARGV)") {
            assert_eq!(names, client::declared(&text), "{name}: names of the arguments");
        }
        for argument in names {
            let words = body.split(|c: char| !c.is_alphanumeric() && c != '_');
            let uses = words.filter(|word| *word == argument).count();
            assert!(uses > 1, "{name} does not use {argument}");
        }
    }
}

#[test]
fn scripts_follow_the_style_rules() {
    for (name, text) in scripts() {
        assert!(!text.starts_with("#!"), "{name}: Redis 6.2 accepts no shebang");
        assert!(text.ends_with('\n') && !text.contains('\r') && text.is_ascii(), "{name}: plain lines");
        assert!(text.lines().all(|line| line.len() <= 120), "{name}: long lines");
        for (_, call) in text.match_indices("call('").map(|(at, _)| (at, &text[at + 6..])) {
            let (verb, rest) = call.split_once('\'').unwrap();
            assert_eq!(verb, verb.to_uppercase(), "{name}: commands are in capitals");
            let literal = rest.starts_with(", KEYS[");
            // A script for many locks asks for all of them at once.
            let literal = literal || name.ends_with("_many") && rest.starts_with(", unpack(");
            assert!(literal || ["TIME", "PUBLISH"].contains(&verb), "{name}: {verb} takes KEYS[i] literally");
        }
        for forbidden in
            ["'KEYS'", "'SCAN'", "'INFO'", "'CONFIG'", "cjson", "cmsgpack", "redis.log", "math.random"]
        {
            assert!(!text.contains(forbidden), "{name} uses {forbidden}");
        }
        // The operator `..` rounds a number of 16 digits.
        assert!(
            !text.contains(".. token") && !text.contains(".. time"),
            "{name}: numbers need string.format"
        );
    }
}

/// The README lists exactly the rights that the scripts and the connections need.
#[test]
fn scripts_need_exactly_the_documented_rights() {
    let mut needed: BTreeSet<String> =
        ["eval", "evalsha", "subscribe", "ping", "hello", "time"].map(str::to_owned).into();
    for (_, text) in scripts().iter().filter(|(name, _)| !name.starts_with("fenced")) {
        needed.extend(
            text.split("call('").skip(1).filter_map(|rest| Some(rest.split_once('\'')?.0.to_lowercase())),
        );
    }
    let readme = include_str!("../../docs/rights.md");
    let line = readme.lines().find(|line| line.starts_with("ACL SETUSER")).unwrap();
    let given: BTreeSet<String> = line.split(" +").skip(1).map(str::to_owned).collect();
    assert_eq!(given, needed);
}
