//! Names of requests: a test checks by them which requests a future was dropped at.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

/// The name of a script, like `rwlock/write_acquire`, or of another command. It is followed, where
/// it applies, by:
/// - `by source`, for EVAL;
/// - `for good`, for a release after which a late acquire is refused;
/// - `nested` or `repair`, the purpose of an acquire request to a node of a quorum.
pub(super) fn request_name(request: &[u8]) -> String {
    let words = words(request);
    let (script, how) = match words.as_slice() {
        [b"EVALSHA", sha1, ..] => (NAMES.get(*sha1).cloned(), ""),
        [b"EVAL", source, ..] => (Some(script_name(source)), " by source"),
        [command, ..] => return String::from_utf8_lossy(command).into_owned(),
        [] => (None, ""),
    };
    let mut name = script.expect("a script of the crate");
    let argument = |index: usize| {
        let keys: usize = std::str::from_utf8(words[2]).unwrap().parse().unwrap();
        String::from_utf8_lossy(words.get(3 + keys + index).copied().unwrap_or_default())
    };
    // Scripts of a mutex have no argument for an owner.
    let owner = usize::from(!name.contains("mutex"));
    let mark = match name.split_once('/') {
        Some((_, "release")) if argument(2 + owner) == "1" => " for good",
        Some(("quorum", verb)) if verb.ends_with("acquire") => match &*argument(3 + owner) {
            "nested" => " nested",
            "repair" => " repair",
            "" => "",
            other => panic!("{other:?} is no purpose"),
        },
        _ => "",
    };
    name += how;
    name + mark
}

/// The words of a command, which is `*2`, then `$3`, `GET`, and so on.
fn words(request: &[u8]) -> Vec<&[u8]> {
    let mut words = Vec::new();
    let mut rest = request;
    while let Some(end) = rest.windows(2).position(|end| end == b"\r\n") {
        let (line, behind) = (&rest[..end], &rest[end + 2..]);
        rest = behind;
        if let Some(length) = line.strip_prefix(b"$") {
            let length: usize = std::str::from_utf8(length).unwrap().parse().unwrap();
            words.push(&rest[..length]);
            rest = &rest[length + 2..];
        }
    }
    words
}

/// The names of all scripts, by SHA1.
static NAMES: LazyLock<HashMap<Vec<u8>, String>> = LazyLock::new(|| {
    let folders = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/lua")).read_dir().unwrap();
    let folders = folders.map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.is_dir() && !path.ends_with("src"));
    let files = folders.flat_map(|folder| folder.read_dir().unwrap()).map(|entry| entry.unwrap().path());
    files
        .filter(|file| file.extension().is_some_and(|ending| ending == "lua"))
        .map(|file| {
            let source = std::fs::read_to_string(file).unwrap();
            (redis::Script::new(&source).get_hash().as_bytes().to_vec(), script_name(source.as_bytes()))
        })
        .collect()
});

/// The name in the first line of a script: `-- mutex/acquire: ...`.
fn script_name(source: &[u8]) -> String {
    let line = source.split(|byte| *byte == b'\n').next().and_then(|line| line.strip_prefix(b"-- "));
    let name = line
        .and_then(|line| line.split(|byte| b".:".contains(byte)).next())
        .expect("a script begins with its name");
    String::from_utf8_lossy(name).into_owned()
}

#[test]
fn request_name_shows_script_and_purpose() {
    let sources = [
        include_str!("../../lua/mutex/release.lua"),
        include_str!("../../lua/rwlock/release.lua"),
        include_str!("../../lua/quorum/mutex_acquire.lua"),
        include_str!("../../lua/quorum/read_acquire.lua"),
        include_str!("../../lua/quorum/inspect.lua"),
    ];
    let [mutex, rwlock, quorum, read, inspect] =
        sources.map(|source| redis::Script::new(source).get_hash().to_owned());
    let of = |words: &[&str]| {
        let mut cmd = redis::Cmd::new();
        words.iter().for_each(|word| _ = cmd.arg(*word));
        request_name(&cmd.get_packed_command())
    };
    assert_eq!(of(&["WAIT", "1", "100"]), "WAIT");
    assert_eq!(of(&["EVALSHA", &inspect, "1", "node"]), "quorum/inspect");
    assert_eq!(of(&["EVALSHA", &mutex, "3", "k", "f", "w", "1", "1"]), "mutex/release");
    assert_eq!(of(&["EVALSHA", &mutex, "3", "k", "f", "w", "a", "0", "1"]), "mutex/release for good");
    assert_eq!(of(&["EVALSHA", &rwlock, "3", "k", "f", "w", "a", "o", "1", "", "9"]), "rwlock/release");
    let is_final = ["EVAL", sources[1], "3", "k", "f", "w", "a", "", "0", "1"];
    assert_eq!(of(&is_final), "rwlock/release by source for good");
    let acquire = ["EVALSHA", &quorum, "4", "k", "f", "w", "n", "a", "9", "7", "repair", "3"];
    assert_eq!(of(&acquire), "quorum/mutex_acquire repair");
    let acquire = ["EVALSHA", &read, "3", "k", "f", "w", "a", "9", "o", "7"];
    assert_eq!(of(&acquire), "quorum/read_acquire");
    assert_eq!(of(&[&acquire[..], &["nested"]].concat()), "quorum/read_acquire nested");
}
