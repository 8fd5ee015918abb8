//! Checks the tests: makes one mistake after the other in a copy of the crate, builds the tests,
//! and runs the one that must find it.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::build::Tree;
use super::{
    CLIENT_TEST_MUTANTS, Edit, FINDING_MUTANTS, LEASE_TEST_MUTANTS, PLANTED_MUTANTS, QUORUM_TEST_MUTANTS,
    TEST_MUTANTS, TURN_MUTANTS,
};

/// The crate with one mistake, and the test that must fail on it.
#[derive(Debug)]
pub struct TestMutant {
    pub name: &'static str,
    pub(super) edits: &'static [Edit],
    /// The whole name of a test of the binary `it`. An ignored test is run as well.
    pub(super) test: &'static str,
}

/// How long one test may take.
const LIMIT: Duration = Duration::from_secs(180);

/// The mutants of all tables.
pub fn all() -> impl Iterator<Item = &'static TestMutant> {
    let others = CLIENT_TEST_MUTANTS.iter().chain(QUORUM_TEST_MUTANTS).chain(FINDING_MUTANTS);
    TEST_MUTANTS.iter().chain(others).chain(LEASE_TEST_MUTANTS).chain(TURN_MUTANTS).chain(PLANTED_MUTANTS)
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Passed,
    Failed,
    /// The run proves nothing, for this reason.
    Unknown(String),
}

/// Runs the chosen mutants, or all of them. Before them, the unbroken copy runs each of their
/// tests, which must pass: the failure of a test then proves that it found the mistake.
pub fn run(chosen: &[&'static TestMutant]) -> ExitCode {
    let mutants: Vec<_> = if chosen.is_empty() { all().collect() } else { chosen.to_vec() };
    let tree = Tree::copy();
    std::fs::create_dir_all(tree.runs()).unwrap();
    let passed = controls(&tree, &mutants);
    let mut caught = 0;
    for mutant in &mutants {
        let start = Instant::now();
        let output = tree.runs().join(format!("{}.txt", mutant.name));
        // A test may read a script when it runs, so the mistake is undone only after the test.
        let outcome = tree.with(mutant.edits, |tree| run_test(&tree.build("it"), mutant.test, &output));
        let seconds = start.elapsed().as_secs();
        if outcome == Outcome::Failed {
            caught += 1;
            println!("caught: {} by {} ({seconds} s)", mutant.name, mutant.test);
        } else {
            println!("MISSED: {} ({}: {outcome:?}; {})", mutant.name, mutant.test, output.display());
        }
    }
    println!("{caught} of {} tested mutants caught", mutants.len());
    if passed && caught == mutants.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs all named tests without a mistake. Returns whether all pass.
fn controls(tree: &Tree, mutants: &[&'static TestMutant]) -> bool {
    let binary = tree.build("it");
    let tests: BTreeSet<&str> = mutants.iter().map(|mutant| mutant.test).collect();
    let mut failed = 0;
    for (number, test) in tests.iter().enumerate() {
        let output = tree.runs().join(format!("unbroken-{number}.txt"));
        let outcome = run_test(&binary, test, &output);
        if outcome != Outcome::Passed {
            failed += 1;
            println!("FAILED without a mistake: {test} ({outcome:?}; {})", output.display());
        }
    }
    println!("{} of {} tests pass without a mistake", tests.len() - failed, tests.len());
    failed == 0
}

/// Runs one test by its whole name. If no test has that name, the outcome is unknown.
fn run_test(binary: &Path, test: &str, output: &Path) -> Outcome {
    let file = File::create(output).unwrap();
    let mut child = Command::new(binary)
        .args(["--exact", test, "--include-ignored"])
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            return Outcome::Unknown(format!("the test has not ended after {LIMIT:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let text = std::fs::read_to_string(output).unwrap();
    let result = text.lines().find_map(|line| line.strip_prefix("test result: ")).unwrap_or_default();
    if result.starts_with("ok. 1 passed; 0 failed;") {
        Outcome::Passed
    } else if result.starts_with("FAILED. 0 passed; 1 failed;") {
        Outcome::Failed
    } else {
        Outcome::Unknown(format!("the result of the run: {result:?}"))
    }
}
