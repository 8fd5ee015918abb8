//! Names of requests: a test checks by them which requests a future was dropped at.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

/// The name of a call, like `mutex/acquire` or `rwlock/write_acquire`, or of another command. It is
/// followed, where it applies, by:
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
    let script = script.expect("a script of the crate");
    let word = |index: usize| String::from_utf8_lossy(words.get(index).copied().unwrap_or_default());
    let keys: usize = word(2).parse().unwrap();
    let verb = word(3 + keys);
    let has_owner = usize::from(script != "mutex");
    // `lua/README.md` has the words of each lock, and those that all locks share.
    let shared = |own: usize, place: usize| word(3 + keys + 1 + (own + has_owner) * (keys / 3) + place);
    let mark = match &*verb {
        "release" if shared(2, 1) == "1" => " for good",
        "acquire" | "read" | "write" => match &*shared(3, 8 + has_owner) {
            "nested" => " nested",
            "repair" => " repair",
            "" => "",
            other => panic!("{other:?} is no purpose"),
        },
        _ => "",
    };
    // Each kind's requests to acquire have one word in common.
    let verb = if ["read", "write"].contains(&&*verb) { verb + "_acquire" } else { verb };
    format!("{script}/{verb}{how}{mark}")
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
    let entries = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/lua")).read_dir().unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    files
        .filter(|file| file.extension().is_some_and(|ending| ending == "lua"))
        .map(|file| {
            let source = std::fs::read_to_string(&file).unwrap();
            let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
            (redis::Script::new(&source).get_hash().as_bytes().to_vec(), name)
        })
        .collect()
});

fn script_name(source: &[u8]) -> String {
    let sha1 = redis::Script::new(std::str::from_utf8(source).unwrap()).get_hash().to_owned();
    NAMES.get(sha1.as_bytes()).cloned().expect("a script of the crate")
}

#[test]
fn request_name_shows_script_and_purpose() {
    let sources = [
        include_str!("../../lua/mutex.lua"),
        include_str!("../../lua/rwlock.lua"),
        include_str!("../../lua/node.lua"),
    ];
    let [mutex, rwlock, node] = sources.map(|source| redis::Script::new(source).get_hash().to_owned());
    let of = |words: &str| {
        let mut cmd = redis::Cmd::new();
        words.split(' ').for_each(|word| _ = cmd.arg(word));
        request_name(&cmd.get_packed_command())
    };
    assert_eq!(of("WAIT 1 100"), "WAIT");
    assert_eq!(of(&format!("EVALSHA {node} 1 node survey")), "node/survey");
    assert_eq!(of(&format!("EVALSHA {mutex} 3 k w f release a  1")), "mutex/release");
    assert_eq!(of(&format!("EVALSHA {mutex} 3 k w f release a  0 1")), "mutex/release for good");
    assert_eq!(of(&format!("EVALSHA {mutex} 6 k l w x f g release a b   0 1")), "mutex/release for good");
    assert_eq!(of(&format!("EVALSHA {rwlock} 3 k w f release a 1  0  9")), "rwlock/release");
    let mut by_source = redis::Cmd::new();
    for word in ["EVAL", sources[1], "3", "k", "w", "f", "release", "a", "", "", "0", "1"] {
        by_source.arg(word);
    }
    assert_eq!(request_name(&by_source.get_packed_command()), "rwlock/release by source for good");
    let acquire = of(&format!("EVALSHA {mutex} 4 k w f n acquire a  7 9        repair run"));
    assert_eq!(acquire, "mutex/acquire repair");
    assert_eq!(of(&format!("EVALSHA {rwlock} 3 k w f read a   7 9")), "rwlock/read_acquire");
    let acquire = of(&format!("EVALSHA {rwlock} 3 k w f write a   7 9         nested"));
    assert_eq!(acquire, "rwlock/write_acquire nested");
}
