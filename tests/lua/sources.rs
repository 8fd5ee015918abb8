//! The sources in `lua/src`, and the scripts that are generated from them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const INCLUDE: &str = "--@include ";

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")
}

/// Every source by its path without the ending: `lib/clock`, `mutex/acquire`.
pub struct Sources(BTreeMap<String, String>);

impl Sources {
    pub fn read() -> Sources {
        let files = names(&folder().join("src")).into_iter().map(|name| {
            let path = folder().join("src").join(&name).with_extension("lua");
            (name, std::fs::read_to_string(path).unwrap())
        });
        Sources(files.collect())
    }

    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }

    pub fn fragments(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter_map(|name| name.strip_prefix("lib/"))
    }

    /// The sources of scripts, without the fragments.
    pub fn scripts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(|(name, _)| !name.starts_with("lib/"))
    }

    /// The scripts for Redis: each line that includes a fragment is replaced by the fragment.
    pub fn outputs(&self) -> BTreeMap<String, String> {
        let output = |(name, text): (&str, &str)| {
            let mark = format!("-- {name}: generated from its source in lua/src, do not edit.\n");
            (name.to_owned(), mark + &self.expand(name, text, 0))
        };
        self.scripts().map(output).collect()
    }

    fn expand(&self, name: &str, text: &str, depth: usize) -> String {
        assert!(depth < 8, "{name}: the fragments include each other in a circle");
        let mut output = String::new();
        for line in text.lines() {
            let indent = &line[..line.len() - line.trim_start().len()];
            match line.trim_start().strip_prefix(INCLUDE) {
                Some(fragment) => {
                    let lines = self.0.get(&format!("lib/{fragment}"));
                    let lines =
                        lines.unwrap_or_else(|| panic!("{name} includes {fragment}, which does not exist"));
                    for line in self.expand(fragment, lines, depth + 1).lines() {
                        output += if line.is_empty() { "" } else { indent };
                        output += line;
                        output.push('\n');
                    }
                }
                None => {
                    output += line;
                    output.push('\n');
                }
            }
        }
        output
    }
}

/// The names of the checked-in scripts.
pub fn checked_in() -> Vec<String> {
    names(&folder()).into_iter().filter(|name| !name.starts_with("src/")).collect()
}

/// The functions of a source, each from its first line to its last.
pub fn functions(text: &str) -> Vec<String> {
    let mut functions = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.trim_start().starts_with("local function ") {
            let end = format!("{indent}end");
            let length = lines[at..].iter().position(|line| **line == end).unwrap_or(0);
            functions.push(lines[at..=at + length].join("\n"));
        }
    }
    functions
}

/// The Lua files in a folder and its subfolders, without the ending.
fn names(top: &Path) -> Vec<String> {
    let (mut names, mut folders) = (Vec::new(), vec![top.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "lua") {
                names.push(path.strip_prefix(top).unwrap().with_extension("").to_str().unwrap().to_owned());
            }
        }
    }
    names.sort();
    names
}

/// The commands that a script calls, in lower case.
pub fn commands(text: &str) -> impl Iterator<Item = String> {
    let calls = text.split("call('").skip(1);
    calls.map(|rest| rest.split('\'').next().unwrap().to_lowercase())
}
