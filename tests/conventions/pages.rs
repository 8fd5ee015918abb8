//! The pages: no dead link, on a git host, in the crate's documentation, or in its package.

use std::collections::BTreeSet;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use crate::links::{Links, assert_exists, assert_links_exist, split};
use crate::sources::sources;

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
        "lua/clients/conformance/README.md",
        "lua/clients/go/README.md",
        "lua/clients/java/README.md",
        "lua/clients/node/README.md",
        "lua/clients/python/README.md",
        "lua/clients/python/guide.md",
        "lua/vectors/README.md",
        "tests/README.md",
    ];
    let others = others.into_iter().map(|name| root().join(name)).filter(|path| path.exists()).collect();
    ([root().join("README.md")].into_iter().chain(guide).collect(), others)
}

fn is_relative(destination: &str) -> bool {
    !destination.contains("://")
        && !["#", "crate::", "data:"].iter().any(|start| destination.starts_with(start))
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
    replaced.extend(pictures);
    assert!(replaced.values().all(|destination| !is_relative(destination)), "{replaced:?}");
    // The README is compiled as a test, and is no page of the documentation.
    for page in pages().0.into_iter().filter(|page| !page.ends_with("README.md")) {
        let links = Links::of(&page);
        let dead: Vec<_> = links.inline.iter().filter(|link| is_relative(link)).collect();
        assert!(dead.is_empty(), "{}: use a label of docs/links.md for {dead:?}", page.display());
        for (label, destination) in links.definitions {
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
            format!(" \"{name}\",\n")
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
    let files: BTreeSet<String> = ["src", "cli", "tests", "lua", "docs", "scripts", "benches", "examples"]
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

/// The page of the architecture says which test keeps each invariant.
#[test]
fn invariants_name_tests_that_exist() {
    let page = read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, section) = page.split_once("\n## Invariants\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let invariants: Vec<&str> = section.split("\n- ").skip(1).collect();
    assert!(invariants.len() > 20, "{invariants:?}");
    let tests: Vec<String> = ["src", "cli", "tests"]
        .iter()
        .flat_map(|folder| sources(&root().join(folder)))
        .map(|file| read_to_string(file).unwrap())
        .collect();
    for invariant in invariants {
        // The last one of a group is followed by the heading of the next.
        let (text, _) = invariant.split_once("\n\n").unwrap_or((invariant, ""));
        let named = text.trim_end().strip_suffix("`)").and_then(|text| text.rsplit_once("(`"));
        let (_, name) = named.unwrap_or_else(|| panic!("no test: {text}"));
        // A test, or one of the suite's behaviours, which its macro makes tests of.
        let begins = |line: &str| {
            let line = line.trim_start().trim_start_matches("pub ").trim_start_matches("async ");
            line.strip_prefix("fn ")
                .and_then(|line| line.strip_prefix(name))
                .is_some_and(|rest| rest.starts_with(['(', '<']))
        };
        let is_test = |(line, above): (&str, &str)| {
            begins(line) && (above.contains("test") || line.contains("pub async"))
        };
        let is_there = |file: &String| file.lines().skip(1).zip(file.lines()).any(is_test);
        assert!(tests.iter().any(is_there), "there is no test {name}: {invariant}");
    }
}
