//! The links of a page, and whether they lead somewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::read_to_string;
use std::path::Path;

/// The links of a page, outside of code.
#[derive(Default)]
pub struct Links {
    /// `[text](destination)`
    pub inline: Vec<String>,
    /// `[text][label]`, and `[label]`
    pub labels: BTreeSet<String>,
    /// `[label]: destination`. If there are several, the first one counts.
    pub definitions: BTreeMap<String, String>,
}

impl Links {
    pub fn of(page: &Path) -> Links {
        let mut links = Links::default();
        let mut prose = String::new();
        for line in prose_lines(&read_to_string(page).unwrap()) {
            let definition = line.strip_prefix('[').and_then(|line| line.split_once("]: "));
            match definition {
                Some((name, to)) => _ = links.definitions.entry(label(name)).or_insert(to.to_owned()),
                None => prose += &format!("{line}\n"),
            }
        }
        let mut rest = prose.as_str();
        while let Some((mark, after)) = rest.find(['`', '[']).map(|at| (&rest[at..=at], &rest[at + 1..])) {
            let Some((text, after)) = after.split_once(if mark == "`" { '`' } else { ']' }) else { break };
            rest = after;
            if mark == "`" {
                continue;
            }
            if let Some((destination, after)) = after.strip_prefix('(').and_then(|text| text.split_once(')'))
            {
                links.inline.push(destination.to_owned());
                rest = after;
            } else if let Some((name, after)) = after.strip_prefix('[').and_then(|text| text.split_once(']'))
            {
                links.labels.insert(label(name));
                rest = after;
            } else if !text.trim().is_empty() {
                // `[ ]` is a box of a checklist.
                links.labels.insert(label(text));
            }
        }
        links
    }

    pub fn destinations(&self) -> impl Iterator<Item = &String> {
        self.inline.iter().chain(self.definitions.values())
    }
}

fn prose_lines(page: &str) -> Vec<&str> {
    let mut in_code = false;
    let is_prose = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    };
    page.lines().filter(is_prose).collect()
}

/// Labels differ neither by case nor by line breaks.
pub fn label(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// The anchors of a page's headings, as git hosts and rustdoc make them.
pub fn anchors(page: &Path) -> BTreeSet<String> {
    let text = read_to_string(page).unwrap();
    let headings = prose_lines(&text).into_iter().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Fails unless `file#anchor` exists.
pub fn assert_exists(file: &Path, anchor: Option<&str>, link: &str) {
    assert!(file.exists(), "{link}: there is no {}", file.display());
    if let Some(anchor) = anchor {
        assert!(anchors(file).contains(anchor), "{link}: {} has no heading #{anchor}", file.display());
    }
}

pub fn split(destination: &str) -> (&str, Option<&str>) {
    destination.split_once('#').map_or((destination, None), |(file, anchor)| (file, Some(anchor)))
}

/// Fails if a link of a page has no definition, or leads to a file or heading that does not exist.
pub fn assert_links_exist(page: &Path) {
    let links = Links::of(page);
    for label in &links.labels {
        assert!(links.definitions.contains_key(label), "{}: [{label}] is not defined", page.display());
    }
    for label in links.definitions.keys() {
        assert!(links.labels.contains(label), "{}: [{label}] is not used", page.display());
    }
    for destination in links.destinations().filter(|link| !link.contains("://")) {
        let (file, anchor) = split(destination);
        let target = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
        assert_exists(&target, anchor, &format!("{}: {destination}", page.display()));
    }
}
