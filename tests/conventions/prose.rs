//! Prose: the paragraphs of pages and comments are short.

use std::path::Path;

use crate::sources::sources;

/// The paragraphs of a page, or of the comments of a source: without code, tables and headings.
fn paragraphs(text: &str, mark: Option<&str>) -> Vec<String> {
    let (mut paragraphs, mut is_code) = (vec![String::new()], false);
    for line in text.lines() {
        let text = match mark {
            Some(mark) => {
                line.trim_start().strip_prefix(mark).map(|rest| rest.trim_start_matches(['/', '!']))
            }
            None => Some(line),
        };
        let text = text.map(str::trim).unwrap_or_default();
        is_code = (is_code || text.starts_with("```")) && !(is_code && text.starts_with("```"));
        let begins = ["- ", "* "].iter().any(|mark| text.starts_with(mark))
            || text.split_once(". ").is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if text.is_empty() || text.starts_with(['|', '#', '`']) && text.starts_with("```") || begins {
            paragraphs.push(String::new());
        }
        let is_prose = !is_code && !text.starts_with(['|', '#']) && !text.starts_with("```");
        if let Some(paragraph) = paragraphs.last_mut().filter(|_| is_prose) {
            *paragraph += &format!("{text} ");
        }
    }
    paragraphs
}

/// Counts sentences, without a label in bold before them. What is quoted as code has none.
fn sentences(paragraph: &str) -> usize {
    let text = paragraph
        .trim_start_matches(|letter: char| !letter.is_alphabetic() && letter != '*' && letter != '`');
    let text = match text.strip_prefix("**").and_then(|text| text.split_once("**")) {
        Some((_label, text)) => text,
        None => text,
    };
    let text: String =
        text.split('`').enumerate().map(|(place, part)| if place % 2 == 0 { part } else { "X" }).collect();
    let is_end = |word: &str| word.trim_end_matches(['"', ')', '*', '_']).ends_with(['.', '!', '?']);
    let begins = |word: &str| {
        word.trim_start_matches(['"', '(', '*', '_', '[']).starts_with(|letter: char| !letter.is_lowercase())
    };
    let words: Vec<&str> = text.split_whitespace().collect();
    let ends = words
        .iter()
        .enumerate()
        .filter(|(place, word)| is_end(word) && words.get(place + 1).is_none_or(|next| begins(next)));
    ends.count()
}

#[test]
fn paragraphs_have_at_most_three_sentences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["src", "cli", "tests", "benches", "examples", "docs", "lua"];
    let names = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"];
    let files = folders.iter().flat_map(|folder| sources(&root.join(folder)));
    for file in files.chain(names.map(|name| root.join(name))) {
        let mark = match file.extension().and_then(|extension| extension.to_str()) {
            Some("md") => None,
            Some("rs" | "go" | "java" | "mjs") => Some("//"),
            _ => continue,
        };
        if file
            .components()
            .any(|part| ["target", "node_modules"].contains(&&*part.as_os_str().to_string_lossy()))
        {
            continue;
        }
        for paragraph in paragraphs(&std::fs::read_to_string(&file).unwrap(), mark) {
            assert!(sentences(&paragraph) <= 3, "{}: {paragraph}", file.display());
        }
    }
}
