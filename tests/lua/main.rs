#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! The scripts that Redis receives are generated from the sources in `lua/src`: `scripts/lua`
//! writes them, and these tests fail if a checked-in file differs.

mod header;
mod sources;

use std::collections::{BTreeMap, BTreeSet};

use header::{Entry, Header};
use serde_json::{Map, Value, json};
use sources::{Sources, folder};

/// The version of the protocol: keys, arguments, answers and stored data.
const VERSION: u32 = 1;

/// Whether to write files that differ, instead of failing: `scripts/lua` sets the variable.
fn is_writing() -> bool {
    std::env::var_os("REDLATCH_WRITE_LUA").is_some()
}

/// Compares a file of `lua/` with the expected text, or writes it.
fn check(path: &str, expected: &str) {
    let file = folder().join(path);
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    if found == expected {
        return;
    }
    assert!(is_writing(), "lua/{path} differs from its sources: run scripts/lua, then review the difference");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, expected).unwrap();
}

#[test]
fn outputs_match_their_sources() {
    let outputs = Sources::read().outputs();
    let mut sums = String::new();
    for (name, text) in &outputs {
        check(&format!("{name}.lua"), text);
        sums += &format!("{}  {name}.lua\n", redis::Script::new(text).get_hash());
    }
    check("SHA1SUMS", &sums);
    for name in sources::checked_in() {
        assert!(outputs.contains_key(&name), "lua/{name}.lua has no source in lua/src");
    }
}

/// If two files have the same function, a correction of one of them leaves the other wrong.
#[test]
fn every_function_is_in_one_source_file_only() {
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for (file, text) in Sources::read().files() {
        for function in sources::functions(text) {
            let before = found.insert(function.clone(), file.to_owned());
            assert!(before.is_none(), "{file} and {} both define:\n{function}", before.unwrap());
        }
    }
    assert!(found.len() > 20, "only {} functions found", found.len());
}

#[test]
fn every_fragment_is_included() {
    let sources = Sources::read();
    for fragment in sources.fragments() {
        let line = format!("--@include {fragment}");
        let includes = |text: &str| text.lines().any(|found| found.trim_start() == line);
        assert!(
            sources.files().any(|(_, text)| includes(text)),
            "no source includes lua/src/lib/{fragment}.lua"
        );
    }
}

/// `protocol.json` has the contracts of all scripts, for programs. It is generated from the
/// headers.
#[test]
fn protocol_json_matches_the_headers() {
    let sources = Sources::read();
    let outputs = sources.outputs();
    let mut scripts = Map::new();
    for (name, source) in sources.scripts() {
        let header = Header::parse(name, source);
        let argument = |entry: &Entry| match entry.default() {
            Some(default) => json!({ "name": entry.name, "text": entry.meaning(), "default": default }),
            None => json!({ "name": entry.name, "text": entry.text }),
        };
        let answer = |entry: Entry| json!({ "answer": entry.name, "text": entry.text });
        let script = json!({
            "file": format!("{name}.lua"),
            "sha1": redis::Script::new(&outputs[name]).get_hash(),
            "summary": header.summary,
            "keys": header.keys.iter().map(argument).collect::<Value>(),
            "arguments": header.arguments.iter().map(argument).collect::<Value>(),
            "answers": header.answers().map(answer).collect::<Value>(),
            "refusals": header.refusals().map(answer).collect::<Value>(),
            "notes": header.notes,
        });
        scripts.insert(name.to_owned(), script);
    }
    let protocol = json!({ "version": VERSION, "scripts": scripts });
    check("protocol.json", &format!("{protocol:#}\n"));
}

/// The pages for clients in other languages.
fn pages() -> [(&'static str, String); 2] {
    ["README.md", "quorum/README.md"]
        .map(|page| (page, std::fs::read_to_string(folder().join(page)).unwrap()))
}

#[test]
fn pages_mention_every_argument_and_refusal() {
    let [(_, page), (_, quorum)] = pages();
    for (name, source) in Sources::read().scripts() {
        let (file, page) =
            if name.starts_with("quorum/") { ("quorum/README.md", &quorum) } else { ("README.md", &page) };
        let header = Header::parse(name, source);
        let heading = format!("\n### `{name}`\n");
        let (_, rest) =
            page.split_once(&heading).unwrap_or_else(|| panic!("{file} has no heading {heading:?}"));
        let section = rest.split("\n#").next().unwrap();
        let words = section.split_whitespace().collect::<Vec<_>>().join(" ");
        let signature = header.signature();
        assert!(words.contains(&signature), "{file}, {name}: the signature should be\n{signature}");
        for Entry { name: argument, .. } in header.keys.iter().chain(&header.arguments) {
            assert!(page.contains(&format!("`{argument}`")), "{file} has no `{argument}`, of {name}");
        }
        for Entry { name: refusal, .. } in header.refusals() {
            let is_there = words.contains(&format!("`{refusal}`"));
            assert!(is_there, "{file}: the section {name} has no `{refusal}`");
        }
    }
}

#[test]
fn acl_allows_exactly_the_commands_that_the_kinds_use() {
    let [(_, page), _] = pages();
    let line = page.lines().find(|line| line.starts_with("ACL SETUSER ")).unwrap();
    let allowed: BTreeSet<String> =
        line.split(' ').filter_map(|word| word.strip_prefix('+')).map(str::to_owned).collect();
    let outputs = Sources::read().outputs();
    let kinds =
        outputs.iter().filter(|(name, _)| !name.starts_with("quorum/") && !name.starts_with("fenced/"));
    let mut used: BTreeSet<String> = kinds.flat_map(|(_, text)| sources::commands(text)).collect();
    let outside = ["eval", "evalsha", "subscribe", "ping", "hello", "publish", "time"];
    used.extend(outside.map(str::to_owned));
    assert_eq!(allowed, used);
}

#[test]
fn comment_lines_fit_into_100_columns() {
    for (file, text) in Sources::read().files() {
        for line in text.lines().filter(|line| line.trim_start().starts_with("--")) {
            assert!(line.chars().count() <= 100, "lua/src/{file}.lua: {line}");
        }
    }
}
