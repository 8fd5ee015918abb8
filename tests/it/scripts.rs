//! The scripts as a product of their own: contract, idempotence, bytes.

mod requests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support::Server;

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
        for file in std::fs::read_dir(&kind).unwrap().map(|entry| entry.unwrap().path()) {
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

/// Where the script of a kind is.
fn path(kind: &str, verb: &str) -> String {
    match (kind, verb) {
        ("read" | "write", "acquire" | "force") => format!("rwlock/{kind}_{verb}"),
        ("read" | "write", _) => format!("rwlock/{verb}"),
        _ => format!("{kind}/{verb}"),
    }
}

/// Every kind with the scripts that acquire it: on one server, and on a node of a quorum.
fn acquires(kinds: &[&'static str]) -> Vec<(&'static str, String)> {
    let of = |kind: &'static str| [(kind, path(kind, "acquire")), (kind, format!("quorum/{kind}_acquire"))];
    kinds.iter().copied().flat_map(of).collect()
}

#[tokio::test]
async fn scripts_have_the_sums_that_are_published_and_that_a_server_gives_them() {
    let server = Server::start().await;
    let published = std::fs::read_to_string(folder().join("SHA1SUMS")).unwrap();
    let mut loaded = String::new();
    for (name, text) in scripts() {
        let sum: String = server.run(&["SCRIPT", "LOAD", &text]).await;
        loaded += &format!("{sum}  {name}.lua\n");
    }
    assert_eq!(published, loaded, "lua/SHA1SUMS should be:\n{loaded}");
}

#[test]
fn scripts_declare_what_they_use_in_their_headers() {
    let used = |text: &str, table: &str| -> BTreeSet<u32> {
        let pieces = text.split(table).skip(1);
        pieces.filter_map(|rest| rest.strip_prefix('[')?.split(']').next()?.parse().ok()).collect()
    };
    for (name, text) in scripts() {
        let header: String =
            text.lines().take_while(|line| line.starts_with("--")).map(|line| format!("{line}\n")).collect();
        let body = &text[header.len()..];
        assert!(header.starts_with(&format!("-- {name}.lua: ")), "{name} begins with its name");
        assert!(header.contains("-- Returns"), "{name} says what it answers");
        for table in ["KEYS", "ARGV"] {
            let (declared, used) = (used(&header, table), used(body, table));
            assert!(declared.is_superset(&used), "{name} uses {table}{used:?}, declares {declared:?}");
            assert_eq!(
                declared.iter().copied().max().unwrap_or(0) as usize,
                declared.len(),
                "{name}: {table}"
            );
            let ignored = |index: &u32| {
                header.lines().any(|line| {
                    line.contains(&format!("{table}[{index}]"))
                        && (line.contains("ignored") || line.contains("empty"))
                })
            };
            for index in declared.difference(&used) {
                assert!(
                    ignored(index),
                    "{name} declares {table}[{index}], does not use it, and does not say so"
                );
            }
        }
    }
}

#[test]
fn scripts_keep_the_rules_of_the_house() {
    for (name, text) in scripts() {
        assert!(!text.starts_with("#!"), "{name}: Redis 6.2 knows no shebang");
        assert!(text.ends_with('\n') && !text.contains('\r') && text.is_ascii(), "{name}: plain lines");
        assert!(text.lines().all(|line| line.len() <= 120), "{name}: long lines");
        for (_, call) in text.match_indices("call('").map(|(at, _)| (at, &text[at + 6..])) {
            let (verb, rest) = call.split_once('\'').unwrap();
            assert_eq!(verb, verb.to_uppercase(), "{name}: commands are in capitals");
            let literal = rest.starts_with(", KEYS[");
            assert!(literal || ["TIME", "PUBLISH"].contains(&verb), "{name}: {verb} takes KEYS[i] literally");
        }
        for forbidden in
            ["'KEYS'", "'SCAN'", "'INFO'", "'CONFIG'", "cjson", "cmsgpack", "redis.log", "math.random"]
        {
            assert!(!text.contains(forbidden), "{name} uses {forbidden}");
        }
        // A number of 16 digits loses some of them in `..`.
        assert!(
            !text.contains(".. token") && !text.contains(".. time"),
            "{name}: numbers need string.format"
        );
    }
}

/// The rights in the README are those that the scripts and the connections need, and no others.
#[test]
fn scripts_need_the_rights_that_are_documented() {
    let mut needed: BTreeSet<String> =
        ["eval", "evalsha", "subscribe", "ping", "hello", "time"].map(str::to_owned).into();
    for (_, text) in scripts().iter().filter(|(name, _)| !name.starts_with("fenced")) {
        needed.extend(
            text.split("call('").skip(1).filter_map(|rest| Some(rest.split_once('\'')?.0.to_lowercase())),
        );
    }
    let readme = include_str!("../../README.md");
    let line = readme.lines().find(|line| line.starts_with("ACL SETUSER")).unwrap();
    let given: BTreeSet<String> = line.split(" +").skip(1).map(str::to_owned).collect();
    assert_eq!(given, needed);
}
