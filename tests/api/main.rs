#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
//! Compares the public API in rustdoc with the checked-in list `tests/api/public.txt`.
//!
//! `UPDATE_API=1 cargo test --all-features --test api` writes the list. The changelog must explain
//! its difference: a removed or changed line breaks programs.
//!
//! The list is made from the HTML pages, since rustdoc's JSON needs a nightly toolchain. It has the
//! crate's own items: fields, variants, methods and implementations of traits. It has no blanket
//! implementations and no re-exports from other crates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use redlatch::{Error, Locks, Mutex, MutexGuard, NodeStatus, Owner, ReentrantGuard, ReentrantLock};

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/api/public.txt");

/// Implementations that the compiler derives, with names that differ between its versions.
const DERIVED: [&str; 4] = ["Freeze for", "UnwindSafe for", "UnsafeUnpin for", "StructuralPartialEq for"];

/// Builds the pages of the crate, if its sources have changed, and returns their folder.
fn documented() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let arguments = ["doc", "--quiet", "--no-deps", "--all-features", "--lib", "--target-dir"];
    let mut cargo = Command::new(env!("CARGO"));
    // Else the build scripts of dependencies run again, for another package as it seems, and the
    // next build compiles those dependencies once more.
    let package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars().filter(|(name, _)| package(name)) {
        cargo.env_remove(name);
    }
    // Set for this test binary, so that it prints durations: the dependencies would be built again.
    cargo.env_remove("RUSTC_BOOTSTRAP");
    let made = cargo.args(arguments).arg(target).current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
    assert!(made.success(), "cargo doc: {made}");
    target.join("doc/redlatch")
}

/// The text between the first `from` and the next `to`, and the text after that.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<(&'a str, &'a str)> {
    let start = text.find(from)? + from.len();
    let length = text[start..].find(to)?;
    Some((&text[start..start + length], &text[start + length..]))
}

/// The text of a piece of HTML, with single spaces.
fn plain(html: &str) -> String {
    let mut text = String::new();
    let mut is_tag = false;
    for letter in html.chars() {
        match letter {
            '<' => is_tag = true,
            '>' => is_tag = false,
            _ if !is_tag => text.push(letter),
            _ => {}
        }
    }
    // Long signatures are broken into lines.
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    let text = text.replace("&#39;", "'").replace("&amp;", "&").replace('\u{a0}', " ");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.replace("( ", "(").replace(", )", ")")
}

/// The lines of one page: the declaration, then each method and implementation.
fn lines(name: &str, page: &str) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some((declared, _)) = between(page, "<pre class=\"rust item-decl\"><code>", "</code></pre>") {
        let declared = plain(declared);
        // Rustdoc folds long lists behind a button, "Show 12 fields": remove its text.
        let words: Vec<_> = declared.split(' ').collect();
        let folds =
            |at: usize| words[at] == "Show" && words.get(at + 1).is_some_and(|n| n.parse::<u32>().is_ok());
        let shown = (0..words.len()).filter(|at| !(0..3).any(|back| *at >= back && folds(at - back)));
        let declared: Vec<_> = shown.map(|at| words[at]).collect();
        lines.push(format!("{name}: {}", declared.join(" ")));
    }
    // Blanket implementations are the same for all types.
    let mut rest = page.split("id=\"blanket-implementations\"").next().unwrap_or(page);
    let mut within = String::new();
    while let Some((section, after)) = between(rest, "<section id=\"", "</section>") {
        rest = after;
        let Some((id, _)) = section.split_once('"') else { continue };
        let Some((_, header)) = section.split_once("class=\"code-header\">") else { continue };
        let header = header.split("</h3>").next().and_then(|header| header.split("</h4>").next());
        let header = plain(header.unwrap_or_default());
        if header.starts_with("impl") {
            within = header;
            if within.contains(" for ") && !DERIVED.iter().any(|word| within.contains(word)) {
                lines.push(format!("{name}: {within}"));
            }
        } else if !within.contains(" for ") && !id.starts_with("variant.") && id != "main-content" {
            // Not the methods of a trait's implementation, which are those of the trait.
            lines.push(format!("{name}: {header}"));
        }
    }
    lines
}

fn public_api() -> BTreeSet<String> {
    let pages = documented();
    let mut api = items(&pages, "");
    for module in ["blocking", "fenced"] {
        api.extend(items(&pages.join(module), &format!("{module}::")));
    }
    api
}

/// The items of one module, whose folder has a page of each.
fn items(folder: &Path, module: &str) -> BTreeSet<String> {
    let mut api = BTreeSet::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        let Some((kind, name)) = file.strip_suffix(".html").and_then(|file| file.split_once('.')) else {
            continue;
        };
        if ["struct", "enum", "trait", "fn", "macro", "constant", "type"].contains(&kind) {
            api.extend(lines(&format!("{module}{name}"), &std::fs::read_to_string(&path).unwrap()));
        }
    }
    api
}

#[test]
fn public_api_matches_the_checked_in_list() {
    let found = public_api();
    assert!(found.len() > 200, "only {} lines found: rustdoc's format may have changed", found.len());
    if std::env::var_os("UPDATE_API").is_some() {
        let text: String = found.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(LIST, text).unwrap();
        return;
    }
    let listed = std::fs::read_to_string(LIST).unwrap();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let removed: Vec<_> = listed.difference(&found).collect();
    let added: Vec<_> = found.difference(&listed).collect();
    assert!(
        removed.is_empty() && added.is_empty(),
        "the public API has changed; UPDATE_API=1 writes the list.\nremoved: {removed:#?}\nadded: {added:#?}"
    );
}

#[test]
fn public_types_are_send_and_sync() {
    fn send_sync<T: Send + Sync + Unpin + 'static>() {}
    send_sync::<Locks>();
    send_sync::<Mutex>();
    send_sync::<MutexGuard>();
    send_sync::<ReentrantLock>();
    send_sync::<ReentrantGuard>();
    send_sync::<Owner>();
    send_sync::<Error>();
    send_sync::<NodeStatus>();
}
