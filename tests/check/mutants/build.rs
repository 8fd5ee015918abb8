//! The copy that is broken, and how it is built.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Edit;

/// What cargo needs of the crate.
const PARTS: [&str; 9] =
    ["Cargo.toml", "Cargo.lock", "README.md", "docs", "src", "lua", "tests", "benches", "examples"];

/// A copy of the crate, beside what is built of it.
pub struct Tree(PathBuf);

impl Tree {
    /// A copy of what is there now.
    pub fn copy() -> Tree {
        let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let tree = Tree(crate_root.join("target/mutants"));
        // Left by an earlier time, if it is there.
        let _ = std::fs::remove_dir_all(tree.root());
        for part in PARTS {
            copy(&crate_root.join(part), &tree.root().join(part));
        }
        tree
    }

    fn root(&self) -> PathBuf {
        self.0.join("tree")
    }

    /// Where the runs leave what they say.
    pub fn runs(&self) -> PathBuf {
        self.0.join("runs")
    }

    /// Does something while the copy has a mistake.
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
            .args(["test", "--quiet", "--no-run", "--all-features", "--test", target])
            .args(["--message-format", "json"])
            .current_dir(self.root())
            .env("CARGO_TARGET_DIR", self.0.join("target"))
            // Nobody looks into it, and it takes half of the time.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_TEST_DEBUG", "0")
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        let said = String::from_utf8(built.stdout).unwrap();
        let messages: Vec<serde_json::Value> =
            said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if !built.status.success() {
            let errors: Vec<&str> =
                messages.iter().filter_map(|message| message["message"]["rendered"].as_str()).collect();
            panic!("it does not build:\n{}", errors.concat());
        }
        let mut binaries = messages.iter().filter_map(|message| message["executable"].as_str());
        binaries.next_back().expect("cargo says what it built").into()
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
        // What others have built there is not part of it.
        if name != "target" {
            copy(&from.join(&name), &to.join(&name));
        }
    }
}
