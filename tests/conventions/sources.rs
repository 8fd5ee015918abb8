//! Conventions of the code: arrows run one way, and only `wire` names the client library.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

pub fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The layers, lowest first. A file may use its own layer and those below.
const LAYERS: [(&str, &[&str]); 4] = [
    (
        "values",
        &[
            "clock",
            "deployment",
            "diagnosis",
            "error",
            "events",
            "fenced",
            "fencing",
            "guarded",
            "inspection",
            "labels",
            "measure",
            "name",
            "options",
            "owner",
            "shorten",
            "simulation",
            "ticket",
            "traces",
        ],
    ),
    ("wire", &["wire"]),
    ("lease", &["lease"]),
    ("kinds", &["all", "queries", "locks", "mutex", "reentrant", "rwlock", "transfer", "blocking"]),
];

/// The files of two layers, lowest first. A file uses only those before it.
const INSIDE: [(&str, &str); 2] = [
    (
        "wire",
        "answers error_replies failure script server_clock request transport connecting refused_connection \
         seeds sentinel sending batcher master slot_table first_reply masters \
         slot_learning cluster \
         connection endpoint servers facts handshake shared_connection script_failure outage \
         node votes nodes asking together late_notifications mailboxes subscriber wakeups",
    ),
    (
        "lease",
        "kind validity turn attempt verbs lease_end lease lease_report held_work kept_leases schedule keeper new_connection renewal shared_poll recent_locks local_queue client \
         lock_request manual_renewal release reply_tally grant_clock attempt_guard cohort owned_lease \
         progress wait_loop joint_hold hold acquire",
    ),
];

fn layer(module: &str) -> usize {
    LAYERS
        .iter()
        .position(|(_, modules)| modules.contains(&module))
        .unwrap_or_else(|| panic!("{module} is in no layer"))
}

/// The code of a file, without its comments.
fn code(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

fn word(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The modules of the crate that a file names, alone or in a list: `crate::{clock::Moment, wire}`.
fn used(code: &str) -> Vec<&str> {
    let mut used = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            used.push(word(rest));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (at, letter) in list.char_indices() {
            match letter {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    used.push(word(list[start..at].trim_start()));
                    start = at + 1;
                }
                '}' => depth -= 1,
                _ => {}
            }
            if letter == '}' && depth == 0 && start == at + 1 {
                break;
            }
        }
    }
    used.retain(|module| !module.is_empty());
    used
}

#[test]
fn modules_are_found_in_lists() {
    let code =
        "use crate::clock::Moment;\nuse crate::{\n    lease::{Kind, Lease},\n    wire,\n};\nuse x::{y};";
    assert_eq!(used(code), ["clock", "lease", "wire"]);
}

#[test]
fn arrows_run_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in sources(&root) {
        let module = file.strip_prefix(&root).unwrap().iter().next().unwrap().to_str().unwrap();
        let module = module.strip_suffix(".rs").unwrap_or(module);
        if module == "lib" {
            continue;
        }
        let code = code(&file);
        for used in used(&code) {
            let used = if used == "FencingToken" { "fencing" } else { used };
            assert!(layer(used) <= layer(module), "{} looks up at {used}", file.display());
        }
        let names_redis = code.contains("redis::") || code.contains("use redis");
        // Constructors, the sources of errors, and a write that is no lock's.
        let may = ["wire", "locks", "error", "fenced"].contains(&module);
        assert!(may || !names_redis, "{} names the client library", file.display());
    }
}

/// The program is a crate of its own, so it has only the public API. One of its files knows the
/// client library: that which says where the servers are.
#[test]
fn one_file_of_the_program_names_the_client_library() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cli/src");
    let names = |file: &PathBuf| code(file).contains("redis::");
    let naming: Vec<_> = sources(&root).into_iter().filter(names).collect();
    assert_eq!(naming, [root.join("servers.rs")]);
}

/// A wall clock may jump. One file asks whether it agrees with that of a server.
#[test]
fn only_the_doctor_reads_the_wall_clock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = ["src", "cli/src"].into_iter().flat_map(|folder| sources(&root.join(folder)));
    let reading: Vec<_> = all.filter(|file| code(file).contains("SystemTime")).collect();
    assert_eq!(reading, [root.join("src/wire/facts.rs")]);
}

/// No two files of a layer need each other, so each can be read alone, from the lowest one up.
#[test]
fn arrows_run_one_way_inside_a_layer() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (folder, files) in INSIDE {
        let files: Vec<&str> = files.split_whitespace().collect();
        for file in sources(&root.join(folder)).into_iter().filter(|file| !file.ends_with("mod.rs")) {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let place = files.iter().position(|other| *other == name);
            let place = place.unwrap_or_else(|| panic!("{folder}/{name}.rs has no place"));
            // A file of a folder inside a layer says so of what the rest of the layer may use.
            let code = code(&file).replace(&format!("pub(in crate::{folder})"), "pub");
            let whole = format!("crate::{folder}");
            assert!(!code.contains(&whole), "{name} looks up at the whole of {folder}");
            for rest in code.split("super::").skip(1).filter(|rest| !rest.is_empty()) {
                let used = word(rest);
                let is_own_test = rest.starts_with('*');
                let below = files[..place].contains(&used);
                assert!(is_own_test || below, "{folder}/{name}.rs looks up at {used}");
            }
        }
    }
}

/// The files of the program, and those of the benchmarks, need each other in no circle: each can be
/// read after those that it uses.
#[test]
fn arrows_run_in_no_circle() {
    for folder in ["cli/src", "benches/suite"] {
        let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
        let names: Vec<&str> = files.iter().map(|file| file.file_stem().unwrap().to_str().unwrap()).collect();
        let codes: Vec<String> = files.iter().map(|file| code(file).replace("super::", "crate::")).collect();
        let mut left: Vec<(&str, Vec<&str>)> =
            names.iter().copied().zip(codes.iter().map(|code| used(code))).collect();
        loop {
            let before: Vec<&str> = left.iter().map(|(name, _)| *name).collect();
            left.retain(|(name, used)| used.iter().any(|other| other != name && before.contains(other)));
            if left.len() == before.len() {
                break;
            }
        }
        assert!(left.is_empty(), "in circles, or above one: {left:#?}");
    }
}

/// What connects to servers knows no lock: of the files beside its folder it uses only what the
/// errors of a connection mean, and the calls that it sends as they are.
#[test]
fn servers_know_no_lock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/wire/servers");
    for file in sources(&root) {
        let code = code(&file).replace("pub(in crate::wire)", "pub");
        let at = file.display();
        for rest in code.split("super::super::").skip(1) {
            let is_free = ["error_replies", "request"].contains(&word(rest));
            assert!(is_free, "{at} uses {}", word(rest));
        }
        for used in used(&code) {
            assert!(["clock", "guarded", "measure", "simulation"].contains(&used), "{at} uses {used}");
        }
        let says =
            |word: &str| code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|said| said == word);
        for word in ["Call", "Word", "Name", "Script", "Reply", "token", "lease", "ttl", "waiter", "holder"] {
            assert!(!says(word), "{at} says {word}");
        }
    }
}

/// A file is found by its name, also in a list of names without folders.
#[test]
fn no_two_files_share_a_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = std::collections::BTreeMap::new();
    let files = ["src", "cli/src"].iter().flat_map(|folder| sources(&root.join(folder)));
    for file in files.filter(|file| !file.ends_with("mod.rs")) {
        let before = names.insert(file.file_name().unwrap().to_owned(), file.clone());
        assert!(before.is_none(), "{before:?} and {file:?}");
    }
}

/// Comments are read beside the code. Tables and links cannot be wrapped.
#[test]
fn comments_fit_into_100_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["src", "cli", "tests", "benches", "examples", "scripts", "lua", ".ci"];
    let files = folders.iter().flat_map(|folder| sources(&root.join(folder)));
    for file in files.filter(|file| {
        !file.components().any(|part| ["target", "node_modules"].map(OsStr::new).contains(&part.as_os_str()))
    }) {
        let mark = match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs" | "go" | "java" | "mjs" | "js") => "//",
            Some("lua") => "--",
            None | Some("sh" | "py" | "toml") => "#",
            _ => continue,
        };
        let text = std::fs::read_to_string(&file).unwrap();
        let behind_code = format!("; {mark} ");
        for line in text.lines() {
            if !line.trim_start().starts_with(mark) && !line.contains(&behind_code) {
                continue;
            }
            let comment = line.trim_start().trim_start_matches(['/', '!', '-', '#']).trim_start();
            let wraps = !comment.starts_with('|') && !comment.contains("](http");
            assert!(!wraps || line.chars().count() <= 100, "{}: {line}", file.display());
        }
    }
}

/// A page is read as text as well. Tables, links and code cannot be wrapped.
#[test]
fn pages_fit_into_100_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["docs", "lua", "tests", "benches/peers"];
    let pages = folders.iter().flat_map(|folder| sources(&root.join(folder)));
    let names = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];
    for page in pages.chain(names.map(|name| root.join(name))) {
        let is_page = page.extension().is_some_and(|ending| ending == "md");
        if !is_page || page.ends_with("docs/benchmarks.md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for paragraphs in text.split("\n```").step_by(2) {
            let wraps = |line: &&str| !line.starts_with(['|', '[', '#']);
            for line in paragraphs.lines().skip(1).filter(wraps) {
                assert!(line.chars().count() <= 100, "{}: {line}", page.display());
            }
        }
    }
}

/// Python reports such a line only when the file runs, and not every check runs every file.
#[test]
fn no_file_has_the_marks_of_a_merge() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["src", "cli", "lua", "docs", "examples", "tests", "benches", "scripts"];
    for file in folders.iter().flat_map(|folder| sources(&root.join(folder))) {
        let text = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
        let is_mark = |line: &str| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ");
        assert!(!text.lines().any(is_mark), "{}", file.display());
    }
}

#[test]
fn lease_names_no_kind_or_topology_and_wire_no_lease() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let forbidden = [
        // Neither a kind nor a topology.
        (
            "lease",
            &[
                "reader",
                "readers",
                "writer",
                "writers",
                "reentrant",
                "rwlock",
                "sentinel",
                "cluster",
                "quorum",
            ][..],
        ),
        ("wire", &["lease", "owner", "ttl"]),
    ];
    for (folder, words) in forbidden {
        for file in sources(&root.join(folder)) {
            let text = std::fs::read_to_string(&file).unwrap();
            for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
                for word in words {
                    let says =
                        line.to_lowercase().split(|c: char| !c.is_alphanumeric()).any(|said| said == *word);
                    assert!(!says, "{} says {word}: {line}", file.display());
                }
            }
        }
    }
}

#[test]
fn public_enums_may_grow() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in sources(&root) {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (number, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("pub enum ")) {
            let attributes = lines[..number].iter().rev().take_while(|line| line.starts_with("#["));
            let may_grow = attributes.into_iter().any(|line| *line == "#[non_exhaustive]");
            assert!(may_grow, "{}: {line} is not non_exhaustive", file.display());
        }
    }
}

#[test]
fn files_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "cli", "tests", "benches", "examples"] {
        for file in sources(&root.join(folder)) {
            if file.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let lines = std::fs::read_to_string(&file).unwrap().lines().count();
            let most = match folder {
                "src" => 400,
                "examples" => 500,
                _ => 420,
            };
            assert!(lines <= most, "{} has {lines} lines", file.display());
        }
    }
}

/// Tests are outside of `src`, and what they need of it is behind one feature.
#[test]
fn src_contains_no_test_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // `simulation.rs` replaces the transport, and the clock that goes with it.
    let behind_the_feature = ["src/clock.rs", "src/lib.rs", "src/wire/servers/transport.rs"];
    for file in ["src", "cli/src"].iter().flat_map(|folder| sources(&root.join(folder))) {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("#[path"), "{} has another file's module", file.display());
        let name = file.strip_prefix(root).unwrap().to_str().unwrap();
        // A unit test may use the clock.
        let is_hook =
            text.replace("#[cfg(all(test, feature = \"simulation\"))]", "").contains("\"simulation\"");
        assert!(!is_hook || behind_the_feature.contains(&name), "{} has a hook for tests", file.display());
    }
}

/// What a function promises when it fails or is dropped is written beside it.
#[test]
fn public_futures_say_how_they_fail_and_are_cancelled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut missing = Vec::new();
    for file in sources(&root) {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (number, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("pub async fn ")) {
            let before = lines[..number].iter().rev();
            let docs: Vec<_> =
                before.take_while(|line| line.starts_with("///") || line.starts_with('#')).collect();
            let has = |heading: &str| docs.iter().any(|line| line.trim_start_matches("/// ") == heading);
            let signature = text[text.find(line).unwrap()..].split('{').next().unwrap();
            let at = format!("{}: {line}", file.display());
            let only_reads = ["inspect", "is_locked", "is_held_by", "nodes"]
                .iter()
                .any(|name| line.contains(&format!(" {name}(")));
            let says = docs.iter().any(|line| {
                ["/// Cancel safe: ", "/// Not cancel safe: "].iter().any(|start| line.starts_with(start))
            });
            if has("# Cancel safety") == only_reads || says == only_reads {
                missing.push(format!("{at}: cancel safety"));
            }
            if signature.contains("Result<") && !has("# Errors") {
                missing.push(format!("{at}: errors"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
