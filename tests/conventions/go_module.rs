//! The paths of the Go module begin with one address, which `scripts/go-module` sets.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The Go files and pages of a folder, without what a package manager or a build has put there.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() && !path.ends_with("node_modules") && !path.ends_with("target") {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "go" || extension == "md") {
            found.push(path);
        }
    }
    found
}

/// Whether a word is the path of this module or of its client: it begins with a host.
fn is_path(word: &str) -> bool {
    let host = word.split('/').next().unwrap();
    let is_host = host.contains('.') && host.chars().all(|letter| letter.is_alphanumeric() || letter == '.');
    is_host && !host.starts_with('.') && (word.ends_with("/lua") || word.contains("/lua/clients/go"))
}

#[test]
fn paths_of_the_go_module_have_one_address() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = read_to_string(root.join("lua/go.mod")).unwrap();
    let module = text.lines().next().unwrap().strip_prefix("module ").unwrap();
    let address = module.strip_suffix("/lua").expect("the module is the folder lua");
    let mut count = 0;
    for file in files(&root.join("lua")) {
        let text = read_to_string(&file).unwrap();
        let words = text.split(|letter: char| letter.is_whitespace() || "\"'`=()[]<>@,".contains(letter));
        for word in words.filter(|word| is_path(word)) {
            let is_own = word == module || word == format!("{module}/clients/go");
            assert!(is_own, "{}: {word}, but lua/go.mod has {module}: scripts/go-module", file.display());
            count += 1;
        }
    }
    assert!(count >= 6, "{count}");
    let manifest: toml::Table = read_to_string(root.join("Cargo.toml")).unwrap().parse().unwrap();
    if let Some(repository) = manifest["package"].get("repository") {
        assert_eq!(repository.as_str().unwrap(), format!("https://{address}"), "Cargo.toml: repository");
    }
}
