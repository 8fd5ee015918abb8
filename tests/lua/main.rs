#![allow(unreachable_pub, reason = "a test binary has no outside")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! The scripts that Redis gets are made of the sources in `lua/src`: `scripts/lua` writes them, and
//! these tests fail where what is checked in differs.

mod sources;

use std::collections::BTreeMap;

use sources::{Sources, folder};

/// Set by `scripts/lua`: write what differs instead of failing.
fn writes() -> bool {
    std::env::var_os("REDLATCH_WRITE_LUA").is_some()
}

/// Compares a file of `lua/` with what it should hold, or writes it.
fn check(path: &str, expected: &str) {
    let file = folder().join(path);
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    if found == expected {
        return;
    }
    assert!(writes(), "lua/{path} is not what its sources say: run scripts/lua and look at the difference");
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

/// A function that stands twice is mended once, and forgotten once.
#[test]
fn functions_stand_in_one_source_file() {
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for (file, text) in Sources::read().files() {
        for function in sources::functions(text) {
            let before = found.insert(function.clone(), file.to_owned());
            assert!(before.is_none(), "{file} and {} both have:\n{function}", before.unwrap());
        }
    }
    assert!(found.len() > 20, "{} functions", found.len());
}

#[test]
fn every_fragment_is_included() {
    let sources = Sources::read();
    for fragment in sources.fragments() {
        let line = format!("--@include {fragment}\n");
        let uses = sources.files().filter(|(_, text)| text.contains(&line)).count();
        assert!(uses > 0, "lua/src/lib/{fragment}.lua is included nowhere");
    }
}
