#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! The files of the archive `lua/` agree with each other: the sums, the headers of the scripts,
//! `protocol.json` and the page.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const SCRIPTS: [&str; 5] = ["fenced", "mutex", "node", "reentrant", "rwlock"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn protocol() -> Value {
    serde_json::from_str(&read("protocol.json")).unwrap()
}

/// The header of a script: its first comment, without marks.
fn header(script: &str) -> String {
    let text = read(&format!("{script}.lua"));
    let lines = text.lines().map_while(|line| line.strip_prefix("--"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The words of a text, without the brackets around what may be left out.
fn words(text: &str) -> String {
    let words: Vec<&str> =
        text.split(|letter: char| letter.is_whitespace() || "[],".contains(letter)).collect();
    words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

/// The published package has no repository, and all its files are of the archive.
#[test]
fn sums_cover_every_file() {
    if !folder().join("../.git").exists() {
        eprintln!("left out: the files of the archive are those in git, and there is no repository here");
        return;
    }
    let command = "git ls-files | grep -vx SHA1SUMS | LC_ALL=C sort | xargs sha1sum";
    let output = Command::new("sh").args(["-c", command]).current_dir(folder()).output().unwrap();
    let expected = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && !expected.is_empty());
    assert_eq!(read("SHA1SUMS"), expected, "write it: cd lua; {command} >SHA1SUMS");
}

#[test]
fn scripts_name_project_version_and_licence_first() {
    for script in SCRIPTS {
        let text = read(&format!("{script}.lua"));
        let first = text.lines().take(3).collect::<Vec<_>>().join(" ");
        let version = format!("wire version {}", protocol()["version"]);
        for part in ["redlatch", &version, "MIT OR Apache-2.0"] {
            assert!(first.contains(part), "lua/{script}.lua does not begin with {part:?}");
        }
    }
}

/// The first number of a package's version is that of the protocol.
#[test]
fn packages_have_one_version_and_name_their_licences() {
    let version = format!("{}.0.0", protocol()["version"]);
    let parts = [
        ("python/pyproject.toml", vec![format!("\nversion = \"{version}\"")]),
        ("python/README.md", vec![]),
        ("node/package.json", vec![format!("\"version\": \"{version}\"")]),
        (
            "node/package-lock.json",
            vec![format!("\"name\": \"redlatch-node\",\n  \"version\": \"{version}\"")],
        ),
        ("node/README.md", vec![format!("redlatch-node-{version}.tgz")]),
        ("go/README.md", vec![format!("lua/v{version}")]),
        ("java/pom.xml", vec![format!("-client</artifactId>\n  <version>{version}</version>")]),
        ("java/README.md", vec![format!("-client</artifactId>\n  <version>{version}</version>")]),
    ];
    for (name, mut parts) in parts {
        match name.rsplit_once('/').unwrap().1 {
            "README.md" => parts.extend(["\nSupported: ".to_owned(), format!("| {version} |")]),
            "package-lock.json" => {}
            _ => parts.push("MIT OR Apache-2.0".to_owned()),
        }
        let text = read(&format!("clients/{name}"));
        for part in parts {
            assert!(text.contains(&part), "lua/clients/{name} has no {part:?}");
        }
    }
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        assert_eq!(read(licence), read(&format!("../{licence}")), "lua/{licence}");
    }
}

#[test]
fn lines_fit_into_100_columns() {
    for script in SCRIPTS {
        for line in read(&format!("{script}.lua")).lines() {
            assert!(line.len() <= 100, "lua/{script}.lua: {line}");
        }
    }
}

/// Each verb of `protocol.json` has a line in the header of its script with the same words in the
/// same order; and the header names each word, answer and refusal.
#[test]
fn headers_agree_with_protocol_json() {
    let protocol = protocol();
    for entry in protocol["verbs"].as_array().unwrap() {
        let script = entry["kind"].as_str().unwrap();
        let header = header(script);
        let all = words(&header);
        let own: Vec<&str> = entry["verb"].as_str().into_iter().chain(names(&entry["words"])).collect();
        let (own, shared) = (own.join(" "), names(&entry["shared"]).join(" "));
        let rest = all.split_once(&own).map(|(_, rest)| rest);
        let rest = rest.unwrap_or_else(|| panic!("the header of lua/{script}.lua has no line {own:?}"));
        assert!(rest.contains(&shared), "the header of lua/{script}.lua, {own}: no {shared:?}");
        let answers = ["answers", "refusals"].map(|field| entry[field].as_object().unwrap());
        for answer in answers.into_iter().flat_map(|answers| answers.keys()) {
            let first = answer.split([',', '.', ' ']).next().unwrap();
            assert!(all.contains(first), "the header of lua/{script}.lua has no answer {answer}");
        }
    }
}

/// A word that a verb has is explained once, in `protocol.json` and on the page.
#[test]
fn every_word_is_explained() {
    let (protocol, page) = (protocol(), read("README.md"));
    let explained: BTreeSet<&str> =
        protocol["words"].as_object().unwrap().keys().map(String::as_str).collect();
    let verbs = protocol["verbs"].as_array().unwrap().iter();
    let used = verbs.flat_map(|entry| [names(&entry["words"]), names(&entry["shared"])]).flatten();
    let used: BTreeSet<&str> = used.collect();
    assert_eq!(explained, used);
    for word in used {
        assert!(page.contains(&format!("`{word}`")), "lua/README.md has no `{word}`");
    }
}

#[test]
fn page_names_every_refusal() {
    let (protocol, page) = (protocol(), read("README.md"));
    for entry in protocol["verbs"].as_array().unwrap() {
        for refusal in
            entry["refusals"].as_object().unwrap().keys().filter(|refusal| refusal.starts_with('-'))
        {
            assert!(page.contains(&format!("`{refusal}`")), "lua/README.md has no `{refusal}`");
        }
    }
}

/// A script can be read and taken alone, so functions that several need stand in each: in the same
/// words, so that who knows one script knows them.
#[test]
fn functions_of_several_scripts_are_the_same() {
    let function = |script: &str, name: &str| -> Option<String> {
        let text = read(&format!("{script}.lua"));
        let begin = text.find(&format!("local function {name}("))?;
        Some(text[begin..begin + text[begin..].find("\nend\n").unwrap()].to_owned())
    };
    for (name, scripts) in [
        ("up_to", 3),
        ("is_channel", 3),
        ("next_tokens", 3),
        ("recall", 3),
        ("to_answer", 3),
        ("unless_wrong_type", 3),
        ("is_alive", 3),
        ("clean", 3),
        ("is_attempt", 2),
        ("enqueue", 2),
        ("refuse_proposal", 2),
        ("accept", 2),
        ("record_end", 2),
    ] {
        let found: Vec<String> = ["mutex", "reentrant", "rwlock"][..scripts]
            .iter()
            .filter_map(|script| function(script, name))
            .collect();
        assert_eq!(found.len(), scripts, "{name}");
        assert!(found.iter().all(|text| *text == found[0]), "{name} differs:\n{}", found.join("\n\n"));
    }
}
