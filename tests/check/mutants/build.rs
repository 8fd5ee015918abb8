//! The copy of the crate in which mistakes are made, and its builds.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Edit;

/// The files and folders of the crate that cargo needs.
const PARTS: [&str; 10] =
    ["Cargo.toml", "Cargo.lock", "README.md", "docs", "src", "cli", "lua", "tests", "benches", "examples"];

/// A folder with a copy of the crate, its build and the outputs of its runs.
pub struct Tree(PathBuf);

impl Tree {
    /// Copies the crate as it is now.
    pub fn copy() -> Tree {
        let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let tree = Tree(crate_root.join("target/mutants"));
        // The folder exists only if mutants ran before.
        let _ = std::fs::remove_dir_all(tree.root());
        for part in PARTS {
            copy(&crate_root.join(part), &tree.root().join(part));
        }
        tree
    }

    fn root(&self) -> PathBuf {
        self.0.join("tree")
    }

    /// The folder for the outputs of the runs.
    pub fn runs(&self) -> PathBuf {
        self.0.join("runs")
    }

    /// Makes a mistake in the copy, runs `act`, and undoes the mistake.
    pub fn with<T>(&self, edits: &[Edit], act: impl FnOnce(&Tree) -> T) -> T {
        let mut originals = Vec::new();
        for edit in edits {
            let path = self.root().join(edit.file);
            let text = edit.source(&self.root());
            std::fs::write(&path, text.replace(edit.from, edit.to)).unwrap();
            originals.push((path, text));
        }
        let done = act(self);
        for (path, text) in originals.into_iter().rev() {
            std::fs::write(path, text).unwrap();
        }
        done
    }

    /// Builds a test binary of the copy: `check` is the fault checker, `it` has the tests.
    pub fn build(&self, target: &str) -> PathBuf {
        let built = Command::new("cargo")
            .args(["test", "--quiet", "--no-run", "--package", "redlatch", "--all-features"])
            .args(["--test", target, "--message-format", "json"])
            .current_dir(self.root())
            .env("CARGO_TARGET_DIR", self.0.join("target"))
            // Debug information takes half of the build's time, and is not used.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_TEST_DEBUG", "0")
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        let printed = String::from_utf8(built.stdout).unwrap();
        let messages: Vec<serde_json::Value> =
            printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if !built.status.success() {
            let errors: Vec<&str> =
                messages.iter().filter_map(|message| message["message"]["rendered"].as_str()).collect();
            panic!("the copy does not build:\n{}", errors.concat());
        }
        let tests = messages.iter().filter(|message| message["target"]["kind"][0] == "test");
        let mut binaries = tests.filter_map(|message| message["executable"].as_str());
        binaries.next_back().expect("cargo names the binary").into()
    }
}

fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
        return;
    }
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        // A build is not part of the sources.
        if name != "target" {
            copy(&from.join(&name), &to.join(&name));
        }
    }
}
