//! Figures that several pages have are the same on all of them.

use std::fs::read_to_string;
use std::path::Path;

fn page(name: &str) -> String {
    read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// The part of a page between two texts.
fn between<'a>(page: &'a str, start: &str, end: &str) -> &'a str {
    let (_, rest) = page.split_once(start).unwrap_or_else(|| panic!("no {start:?}"));
    rest.split_once(end).unwrap_or_else(|| panic!("no {end:?} after {start:?}")).0
}

/// The words of a text that are a number with a comma or a point, such as `365,000` or `1.97`.
fn figures(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_ascii_digit() && !",.".contains(letter))
        .map(|word| word.trim_matches([',', '.']))
        .filter(|word| word.contains([',', '.']))
}

/// A new run of the benchmarks changes the page, and the README with it.
#[test]
fn speed_of_the_readme_is_that_of_the_benchmarks() {
    let (readme, benchmarks) = (page("README.md"), page("docs/benchmarks.md"));
    let speed: Vec<&str> = figures(between(&readme, "## How fast", "**Safety**")).collect();
    assert!(speed.len() >= 6, "{speed:?}");
    for figure in speed {
        // The tables have 365 k and 6.1 k.
        let cell = match figure.split_once(',') {
            Some((thousands, "000")) => format!("{thousands} k"),
            Some((thousands, rest)) => format!("{thousands}.{} k", rest.trim_end_matches('0')),
            None => figure.to_owned(),
        };
        let is_shown =
            benchmarks.contains(&format!("| {cell} |")) || benchmarks.contains(&format!(" {cell}, "));
        assert!(is_shown, "README.md has {figure}, docs/benchmarks.md no cell {cell}");
    }
}

#[test]
fn safety_of_the_readme_is_that_of_the_pages() {
    let readme = page("README.md");
    let safety: Vec<&str> = figures(between(&readme, "**Safety**", "[How safe]")).collect();
    assert_eq!(safety.len(), 3, "{safety:?}");
    let lost_holds = between(&readme, "of a promise; ", "were still trusted").trim();
    let lost_holds = format!("{} were still trusted", lost_holds.replace('\n', " "));
    for name in ["docs/how-safe.md", "docs/testing.md"] {
        let text = page(name);
        for figure in safety.iter().copied().chain([&*lost_holds]) {
            assert!(text.contains(figure), "README.md has {figure}, {name} has not");
        }
    }
}

/// The table has one row for each mistake that the checker must find.
#[test]
fn pages_count_the_mistakes_of_the_checker() {
    let files = ["tests/check/mutants/table.rs", "tests/check/mutants/turn_runs.rs"];
    let count = files.map(|file| page(file).matches("\n    Mutant {").count()).iter().sum::<usize>();
    let (testing, summary) = (page("docs/testing.md"), page("docs/how-safe.md"));
    let rows = between(&testing, "| mistake | found by |\n|---|---|\n", "\n\n").lines().count();
    assert_eq!(rows, count, "rows of the table in docs/testing.md");
    assert!(summary.contains(&format!("in {count} known ways")), "docs/how-safe.md: {count} ways");
    let found = |page: &str| {
        let (before, _) = page.split_once(&format!(" of {count} mistakes were found")).unwrap();
        before.rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!(found(&testing), found(&summary));
}
