//! What a request is called, so that it can be said of a walk what it has passed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

/// `rwlock/write_acquire`, or the name of a command that is no script. Behind it, as far as it is so: `by source`;
/// `for good`, of a release after which a late request is refused; `>` or `~`, with which a token is proposed.
pub(super) fn word(request: &[u8]) -> String {
    let words = words(request);
    let (script, how) = match words.as_slice() {
        [b"EVALSHA", sha1, ..] => (NAMES.get(*sha1).cloned(), ""),
        [b"EVAL", source, ..] => (Some(name(source)), " by source"),
        [command, ..] => return String::from_utf8_lossy(command).into_owned(),
        [] => (None, ""),
    };
    let mut word = script.expect("a script of the crate") + how;
    if word.contains("release") && words.get(2) == Some(&b"4".as_slice()) {
        word += " for good";
    }
    for mark in [">", "~"] {
        let proposes = |word: &&[u8]| word.strip_prefix(mark.as_bytes()).is_some_and(is_number);
        if words.iter().any(proposes) {
            word = word + " " + mark;
        }
    }
    word
}

fn is_number(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_digit)
}

/// The words of a command: `*2`, and then `$3`, `GET`, and so on.
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

/// By SHA1.
static NAMES: LazyLock<HashMap<Vec<u8>, String>> = LazyLock::new(|| {
    let folders = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/lua")).read_dir().unwrap();
    let folders = folders.map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.is_dir() && !path.ends_with("src"));
    let files = folders.flat_map(|folder| folder.read_dir().unwrap()).map(|entry| entry.unwrap().path());
    files
        .map(|file| {
            let source = std::fs::read_to_string(file).unwrap();
            (redis::Script::new(&source).get_hash().as_bytes().to_vec(), name(source.as_bytes()))
        })
        .collect()
});

/// As the first line of a script says: `-- mutex/acquire.lua: ...`.
fn name(source: &[u8]) -> String {
    let line = source.split(|byte| *byte == b'\n').next().and_then(|line| line.strip_prefix(b"-- "));
    let name = line.and_then(|line| line.split(|byte| *byte == b'.').next()).expect("a script says its name");
    String::from_utf8_lossy(name).into_owned()
}

#[test]
fn requests_have_words() {
    let script = include_bytes!("../../../lua/rwlock/release.lua");
    let sha1 = redis::Script::new(std::str::from_utf8(script).unwrap()).get_hash().as_bytes().to_vec();
    let of = |words: &[&[u8]]| {
        let mut cmd = redis::Cmd::new();
        words.iter().for_each(|it| _ = cmd.arg(*it));
        word(&cmd.get_packed_command())
    };
    assert_eq!(of(&[b"WAIT", b"1", b"100"]), "WAIT");
    assert_eq!(of(&[b"EVALSHA", &sha1, b"3", b"4"]), "rwlock/release");
    assert_eq!(of(&[b"EVALSHA", &sha1, b"4", b">", b"~7a"]), "rwlock/release for good");
    assert_eq!(of(&[b"EVAL", script, b"3", b">17"]), "rwlock/release by source >");
}
