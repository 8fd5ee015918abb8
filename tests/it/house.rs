//! The house: arrows run one way, and only `wire` names the client library.

use std::path::{Path, PathBuf};

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() { files.extend(sources(&path)) } else { files.push(path) }
    }
    files
}

/// The floors, from the ground up. A file may use its own floor and those below.
const FLOORS: [(&str, &[&str]); 4] = [
    (
        "values",
        &[
            "clock",
            "diagnosis",
            "error",
            "event",
            "fencing",
            "inspection",
            "labels",
            "name",
            "options",
            "owner",
            "shorten",
        ],
    ),
    ("wire", &["wire"]),
    ("lease", &["lease"]),
    ("kinds", &["lock", "locks", "mutex", "reentrant", "rwlock"]),
];

fn floor(module: &str) -> usize {
    FLOORS
        .iter()
        .position(|(_, modules)| modules.contains(&module))
        .unwrap_or_else(|| panic!("{module}: no floor"))
}

#[test]
fn house_arrows_run_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in sources(&root) {
        let module = file.strip_prefix(&root).unwrap().iter().next().unwrap().to_str().unwrap();
        let module = module.strip_suffix(".rs").unwrap_or(module);
        if module == "lib" {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let used = if used == "FencingToken" { "fencing" } else { &used };
                assert!(floor(used) <= floor(module), "{} looks up at {used}: {line}", file.display());
            }
        }
        let names_redis = text.lines().any(|line| {
            let line = line.trim_start();
            !line.starts_with("//") && (line.contains("redis::") || line.contains("use redis"))
        });
        // Constructors, and the sources of errors.
        let may =
            module == "wire" || ["locks", "error"].contains(&module) || file.ends_with("lease/client.rs");
        assert!(may || !names_redis, "{} names the client library", file.display());
    }
}

#[test]
fn house_lease_names_no_kind_and_wire_no_lease() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let forbidden =
        [("lease", &["reader", "writer", "reentrant", "rwlock"][..]), ("wire", &["lease", "owner", "ttl"])];
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
fn house_public_enums_may_grow() {
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
fn house_files_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "tests", "benches", "examples"] {
        for file in sources(&root.join(folder)) {
            if file.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let lines = std::fs::read_to_string(&file).unwrap().lines().count();
            let most = if folder == "examples" { 500 } else { 420 };
            assert!(lines <= most, "{} has {lines} lines", file.display());
        }
    }
}
