//! The pages: no dead link, on a git host, in the crate's documentation, or in its package.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

const SOURCES: &str = "https://docs.rs/crate/redlatch/latest/source/";
const ITEMS: &str = "https://docs.rs/redlatch/latest/redlatch/";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The pages that are in the crate's documentation, and those that are not.
fn pages() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let guide = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    // The crate's documentation cannot show the plots of docs/benchmarks.md.
    let is_guide = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == "md")
            && !path.ends_with("links.md")
            && !path.ends_with("benchmarks.md")
    };
    let guide: Vec<_> = guide.filter(is_guide).collect();
    let others = [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "benches/peers/README.md",
        "docs/benchmarks.md",
        "lua/README.md",
        "lua/clients/README.md",
        "lua/clients/go/README.md",
        "lua/clients/java/README.md",
        "lua/clients/node/README.md",
        "lua/clients/python/README.md",
        "lua/vectors/README.md",
        "tests/README.md",
    ];
    let others = others.into_iter().map(|name| root().join(name)).filter(|path| path.exists()).collect();
    ([root().join("README.md")].into_iter().chain(guide).collect(), others)
}

/// The links of a page, outside of code.
#[derive(Default)]
struct Links {
    /// `[text](destination)`
    inline: Vec<String>,
    /// `[text][label]`, and `[label]`
    labels: BTreeSet<String>,
    /// `[label]: destination`. If there are several, the first one counts.
    definitions: BTreeMap<String, String>,
}

impl Links {
    fn of(page: &Path) -> Links {
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

    fn destinations(&self) -> impl Iterator<Item = &String> {
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
fn label(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// The anchors of a page's headings, as git hosts and rustdoc make them.
fn anchors(page: &Path) -> BTreeSet<String> {
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
fn assert_exists(file: &Path, anchor: Option<&str>, link: &str) {
    assert!(file.exists(), "{link}: there is no {}", file.display());
    if let Some(anchor) = anchor {
        assert!(anchors(file).contains(anchor), "{link}: {} has no heading #{anchor}", file.display());
    }
}

fn split(destination: &str) -> (&str, Option<&str>) {
    destination.split_once('#').map_or((destination, None), |(file, anchor)| (file, Some(anchor)))
}

fn is_relative(destination: &str) -> bool {
    !destination.contains("://")
        && !["#", "crate::", "data:"].iter().any(|start| destination.starts_with(start))
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

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let (guide, others) = pages();
    guide.iter().chain(&others).for_each(|page| assert_links_exist(page));
}

/// A relative link is dead in the crate's documentation, unless `docs/links.md` leads it elsewhere.
/// rustdoc checks the definitions there.
#[test]
fn links_of_the_guide_lead_somewhere_in_the_crates_documentation() {
    let mut replaced = Links::of(&root().join("docs/links.md")).definitions;
    let pictures = Links::of(&root().join("docs/images/embedded.md")).definitions;
    let lib = read_to_string(root().join("src/lib.rs")).unwrap();
    replaced.extend(pictures.clone());
    assert!(replaced.values().all(|destination| !is_relative(destination)), "{replaced:?}");
    for page in pages().0 {
        let links = Links::of(&page);
        let dead: Vec<_> = links.inline.iter().filter(|link| is_relative(link)).collect();
        assert!(dead.is_empty(), "{}: use a label of docs/links.md for {dead:?}", page.display());
        let name = page.strip_prefix(root()).unwrap().to_str().unwrap();
        let start = "embedded.md\")]\n";
        let shown = lib.split(start).skip(1).any(|rest| rest.lines().take(2).any(|line| line.contains(name)));
        for (label, destination) in links.definitions {
            assert!(shown || !pictures.contains_key(&label), "src/lib.rs has no pictures for {name}");
            let Some(other) = replaced.get(&label) else {
                let page = page.display();
                assert!(!is_relative(&destination), "{page}: docs/links.md has no [{label}]: {destination}");
                continue;
            };
            // A git host and the documentation lead to the same item.
            if let Some(item) = destination.strip_prefix(ITEMS) {
                assert_eq!(path_of(item), *other, "{}: [{label}]", page.display());
            }
        }
    }
}

/// The file of a module of the guide: `ten_minutes` is docs/ten-minutes.md.
fn page_of(module: &str) -> String {
    format!("docs/{}.md", module.replace('_', "-"))
}

/// `enum.Error.html#variant.Lost` is `crate::Error::Lost`.
fn path_of(item: &str) -> String {
    let (file, member) = split(item);
    let name = file.trim_end_matches(".html").split_once('.').map_or(file, |(_, name)| name);
    let member = member.and_then(|member| member.split_once('.'));
    member.map_or(format!("crate::{name}"), |(_, member)| format!("crate::{name}::{member}"))
}

/// A file that is not in the package has no page on docs.rs.
#[test]
fn links_to_docs_rs_lead_to_what_is_published() {
    let manifest: toml::Table = read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let included =
        manifest["package"]["include"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    let included: Vec<&str> = included.map(|text| text.trim_matches('/').trim_end_matches('*')).collect();
    let (guide, others) = pages();
    for page in guide.iter().chain(&others).chain([&root().join("docs/links.md")]) {
        for destination in Links::of(page).destinations() {
            let link = format!("{}: {destination}", page.display());
            let (address, anchor) = split(destination);
            if let Some(file) = address.strip_prefix(SOURCES) {
                assert_exists(&root().join(file), anchor, &link);
                assert!(included.iter().any(|start| file.starts_with(start)), "{link} is not in the package");
            } else if let Some(item) = address.strip_prefix(ITEMS).filter(|item| !item.ends_with(".html")) {
                let page = item.trim_end_matches('/').strip_prefix("guide/").map(page_of);
                assert_exists(&root().join(page.unwrap_or_else(|| panic!("{link}: no page"))), anchor, &link);
            }
        }
    }
}

/// rustdoc checks the paths of items, but not the headings of pages.
#[test]
fn links_of_items_lead_to_headings_of_the_guide() {
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            for link in read_to_string(&path).unwrap().split("(crate::guide::").skip(1) {
                let (link, _) = link.split_once(')').unwrap();
                let (page, anchor) = split(link);
                assert_exists(&root().join(page_of(page)), anchor, &path.display().to_string());
            }
        }
    }
}

/// A page that no module includes is not in the crate's documentation.
#[test]
fn pages_of_the_guide_are_modules_of_the_crate() {
    let lib = read_to_string(root().join("src/lib.rs")).unwrap();
    for page in pages().0 {
        let name = page.file_name().unwrap().to_str().unwrap();
        let include = if name == "README.md" {
            "include_str!(\"../README.md\")".into()
        } else {
            format!("/docs/{name}\")")
        };
        assert!(lib.contains(&include), "src/lib.rs does not include {name}");
    }
}

/// The map and the list of tests name files: those exist.
#[test]
fn pages_name_files_that_exist() {
    let named_as = |folder: &str| {
        let mut names = BTreeSet::from([format!("{folder}/")]);
        let mut folders = vec![root().join(folder)];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                let relative = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
                if path.is_dir() {
                    names.insert(relative.clone() + "/");
                    folders.push(path);
                } else {
                    names.insert(relative);
                }
            }
        }
        names
    };
    let files: BTreeSet<String> = ["src", "tests", "lua", "docs", "scripts", "benches", "examples"]
        .iter()
        .flat_map(|folder| named_as(folder))
        .collect();
    for page in ["ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md", "docs/design.md", "docs/testing.md"]
    {
        let text = read_to_string(root().join(page)).unwrap();
        let words = text.split('`').skip(1).step_by(2);
        for word in
            words.filter(|word| word.ends_with(".rs") || word.ends_with(".lua") || word.ends_with('/'))
        {
            let exists = files.iter().any(|file| {
                file.ends_with(word)
                    && (file.len() == word.len() || file[..file.len() - word.len()].ends_with('/'))
            });
            assert!(exists || word.contains(['*', '<', ' ']), "{page} names {word}, which does not exist");
        }
    }
}

/// A reader searches the page of faults for a line of a log: a text that changes in the code has to
/// change there.
#[test]
fn texts_on_the_page_of_faults_are_those_of_the_code() {
    let mut code = String::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                // A literal of several lines is one text.
                let lines = read_to_string(&path).unwrap();
                code.extend(lines.split("\\\n").enumerate().map(|(number, part)| {
                    if number == 0 { part.to_owned() } else { part.trim_start().to_owned() }
                }));
            }
        }
    }
    let page = read_to_string(root().join("docs/faults.md")).unwrap();
    let rows =
        page.lines().filter_map(|line| line.strip_prefix("| ")).map(|row| row.split(" | ").next().unwrap());
    let mut checked = 0;
    for text in rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(|text| text.contains(' ')) {
        // Numbers, names and an ellipsis stand for what the code fills in.
        for part in text.split(|letter: char| letter.is_ascii_digit() || "…\"".contains(letter)) {
            if part.trim().len() >= 8 {
                assert!(code.contains(part), "docs/faults.md: no text of src has {part:?}");
                checked += 1;
            }
        }
    }
    assert!(checked > 30, "only {checked} texts were found");
}
