//! The pages: no dead link, on a git host or in the crate's documentation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The pages that are in the crate's documentation, and those that are not.
fn pages() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let guide: Vec<_> = guide.filter(|path| !path.ends_with("links.md")).collect();
    let others =
        ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "lua/README.md", "lua/quorum/README.md"];
    let others = others.into_iter().map(|name| root.join(name)).collect();
    ([root.join("README.md")].into_iter().chain(guide).collect(), others)
}

/// The lines of a page outside of code, with code spans removed.
fn prose(page: &str) -> String {
    let mut in_code = false;
    let mut text = String::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// The destinations of `[text](destination)`, and the definitions `[label]: destination`.
fn links(text: &str) -> (Vec<String>, BTreeMap<String, String>) {
    let inline = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
    let definition = |line: &str| {
        let (label, destination) = line.strip_prefix('[')?.split_once("]: ")?;
        Some((label.to_lowercase(), destination.to_owned()))
    };
    (inline.collect(), text.lines().filter_map(definition).collect())
}

/// The labels of `[text][label]`.
fn labels(text: &str) -> BTreeSet<String> {
    let used = text.split("][").skip(1).filter_map(|rest| Some(rest.split_once(']')?.0.to_lowercase()));
    used.collect()
}

/// The anchors of a page's headings, as git hosts and rustdoc make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

fn is_relative(destination: &str) -> bool {
    !destination.contains("://") && !destination.starts_with('#') && !destination.starts_with("crate::")
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let (guide, others) = pages();
    for page in guide.iter().chain(&others) {
        let text = prose(&std::fs::read_to_string(page).unwrap());
        let (inline, definitions) = links(&text);
        for label in labels(&text) {
            assert!(definitions.contains_key(&label), "{}: [{label}] is not defined", page.display());
        }
        for destination in inline.iter().chain(definitions.values()).filter(|link| !link.contains("://")) {
            let (file, anchor) = destination.split_once('#').unwrap_or((destination, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {destination} does not exist", page.display());
            if !anchor.is_empty() {
                let headings = anchors(&prose(&std::fs::read_to_string(&target).unwrap()));
                assert!(headings.contains(anchor), "{}: {destination} has no such heading", page.display());
            }
        }
    }
}

/// A relative link is dead in the crate's documentation, unless `docs/links.md` leads it elsewhere.
/// rustdoc checks the definitions there.
#[test]
fn links_of_the_guide_lead_somewhere_in_the_crates_documentation() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (_, replaced) = links(&std::fs::read_to_string(root.join("docs/links.md")).unwrap());
    assert!(replaced.values().all(|destination| !is_relative(destination)), "{replaced:?}");
    for page in pages().0 {
        let (inline, definitions) = links(&prose(&std::fs::read_to_string(&page).unwrap()));
        let dead: Vec<_> = inline.iter().filter(|link| is_relative(link)).collect();
        assert!(dead.is_empty(), "{}: use a label of docs/links.md for {dead:?}", page.display());
        for (label, destination) in definitions.iter().filter(|(_, destination)| is_relative(destination)) {
            let known = replaced.contains_key(label);
            assert!(known, "{}: docs/links.md has no [{label}] for {destination}", page.display());
        }
    }
}
