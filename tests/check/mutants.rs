//! Checks the checker: makes one mistake after the other in a copy of the crate, and expects that
//! the judge finds each.

mod build;
mod client_test_mutants;
mod finding_mutants;
mod lease_test_mutants;
mod planted_mutants;
mod quorum_test_mutants;
mod table;
mod test_mutants;
mod test_run;
mod turn_mutants;
mod turn_runs;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::plan::topology_name;
use crate::support::Topology;
use build::Tree;
use client_test_mutants::CLIENT_TEST_MUTANTS;
use finding_mutants::FINDING_MUTANTS;
use lease_test_mutants::LEASE_TEST_MUTANTS;
use planted_mutants::PLANTED_MUTANTS;
use quorum_test_mutants::QUORUM_TEST_MUTANTS;
use table::MUTANTS;
use test_mutants::TEST_MUTANTS;
pub use test_run::{TestMutant, all as all_test_mutants, run as run_test_mutants};
use turn_mutants::TURN_MUTANTS;
use turn_runs::TURN_RUNS;

/// The crate with one mistake, and the run that must show it.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    edits: &'static [Edit],
    setting: Setting,
    /// One of these rules must be violated. A violation of another rule does not count: the mistake
    /// may have caused it by chance.
    rules: &'static [&'static str],
}

/// The arguments of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting {
    topology: Topology,
    seconds: u64,
    linger: u64,
    sets: u64,
    faults: &'static [&'static str],
}

/// A replacement in a file.
#[derive(Debug)]
struct Edit {
    file: &'static str,
    /// It occurs once.
    from: &'static str,
    to: &'static str,
}

impl Edit {
    /// Reads the file to edit.
    ///
    /// # Panics
    /// If the file does not contain the text to replace: it may have changed since the mutant was
    /// written.
    fn source(&self, root: &Path) -> String {
        let text = std::fs::read_to_string(root.join(self.file)).unwrap();
        let found = text.matches(self.from).count();
        assert_eq!(found, 1, "{} has changed: occurrences of\n{}", self.file, self.from);
        text
    }
}

/// Panics if the text of an edit no longer occurs, or a test that is to find one. Every run of the
/// checker calls this, since the mutants themselves run rarely.
pub fn assert_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tested = all_test_mutants().flat_map(|mutant| mutant.edits);
    for edit in all().flat_map(|mutant| mutant.edits).chain(tested) {
        edit.source(root);
    }
    let suite = text_below(&root.join("tests/it"));
    for mutant in all_test_mutants() {
        let name = mutant.test.rsplit("::").next().unwrap_or(mutant.test);
        assert!(
            suite.contains(&format!("fn {name}(")),
            "there is no test {}, of {}",
            mutant.test,
            mutant.name
        );
    }
}

/// The text of all sources in this folder.
fn text_below(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let text = |path: PathBuf| match path.is_dir() {
        true => text_below(&path),
        false => std::fs::read_to_string(path).unwrap(),
    };
    entries.map(text).collect()
}

/// What a run prints, in its folder.
const STDOUT: &str = "output.txt";

/// How many runs search for one mistake. Some show only if a fault comes at a certain moment: a
/// worker that is stopped while it is notified, for instance. A run that violates a rule proves the
/// mistake; one that does not proves nothing.
const SEEDS: u64 = 3;

/// How much longer than its duration a run may take, since it starts and stops servers.
const OVERHEAD: Duration = Duration::from_secs(150);

/// All mistakes that the judge must find.
pub fn all() -> impl Iterator<Item = &'static Mutant> {
    MUTANTS.iter().chain(TURN_RUNS)
}

/// Runs the chosen mutants, or all of them. Before them, the unbroken crate runs in each of their
/// settings: a rule that it violates proves nothing about a mistake.
pub fn run(chosen: &[&'static Mutant]) -> ExitCode {
    let mutants = if chosen.is_empty() { all().collect() } else { chosen.to_vec() };
    let tree = Tree::copy();
    let passed = controls(&tree, &mutants);
    let mut caught = 0;
    for mutant in &mutants {
        let start = Instant::now();
        let binary = tree.with(mutant.edits, |tree| tree.build("check"));
        let output = tree.runs().join(mutant.name);
        let mut found = Err(String::new());
        for seed in 1..=SEEDS {
            found = mutant.find(&binary, &output, seed);
            match &found {
                Ok(_) => break,
                Err(why) => println!("not found: {} with seed {seed} ({why})", mutant.name),
            }
        }
        let seconds = start.elapsed().as_secs();
        match found {
            Ok(rule) => {
                caught += 1;
                println!("caught: {} by {rule} ({seconds} s)", mutant.name);
            }
            Err(why) => println!("MISSED: {} ({why}; {})", mutant.name, output.display()),
        }
    }
    println!("{caught} of {} mutants caught", mutants.len());
    if passed && caught == mutants.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the unbroken crate in each setting. Returns whether no run violates a rule.
fn controls(tree: &Tree, mutants: &[&'static Mutant]) -> bool {
    let binary = tree.build("check");
    let mut settings: Vec<Setting> = Vec::new();
    for mutant in mutants {
        if !settings.contains(&mutant.setting) {
            settings.push(mutant.setting);
        }
    }
    let mut failed = 0;
    for (number, setting) in settings.iter().enumerate() {
        let output = tree.runs().join(format!("unbroken-{number}"));
        let failure = match setting.run(&binary, &output, 1) {
            Ok((status, violated)) if violated.is_empty() && status.success() => continue,
            Ok((status, violated)) => {
                let result = std::fs::read_to_string(output.join(STDOUT)).unwrap();
                let summary = result.lines().last().unwrap_or_default();
                format!("violated: {violated:?}; the run ended with {status}: {summary}")
            }
            Err(why) => why,
        };
        failed += 1;
        println!("FAILED without a mistake: {setting:?} ({failure}; {})", output.display());
    }
    println!("{} of {} settings pass without a mistake", settings.len() - failed, settings.len());
    failed == 0
}

impl Mutant {
    /// Runs the mutant. Returns the violated rule, or why the mistake was not found.
    fn find(&self, binary: &Path, output: &Path, seed: u64) -> Result<&'static str, String> {
        let (status, violated) = self.setting.run(binary, output, seed)?;
        let rule = self.rules.iter().find(|rule| violated.contains(**rule));
        match rule {
            Some(_) if status.success() => Err("the run did not fail".to_owned()),
            Some(rule) => Ok(rule),
            None if violated.is_empty() => Err(format!("no rule is violated; the run ended with {status}")),
            None => Err(format!("only violated: {violated:?}")),
        }
    }
}

impl Setting {
    /// Runs the checker. Returns its exit status and the violated rules.
    fn run(&self, binary: &Path, output: &Path, seed: u64) -> Result<(ExitStatus, BTreeSet<String>), String> {
        // The folder exists only if mutants ran before.
        let _ = std::fs::remove_dir_all(output);
        std::fs::create_dir_all(output).unwrap();
        let stdout = output.join(STDOUT);
        let mut child = Command::new(binary)
            .args(["--topology", topology_name(self.topology)])
            .args(["--seconds", &self.seconds.to_string(), "--linger", &self.linger.to_string()])
            .args(["--sets", &self.sets.to_string(), "--seed", &seed.to_string()])
            .args(self.faults.iter().flat_map(|fault| ["--fault", fault]))
            .args(["--keep".as_ref(), output.as_os_str()])
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(output.join("errors.txt")).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        let limit = Duration::from_secs(self.seconds) + OVERHEAD;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > limit {
                child.kill().unwrap();
                child.wait().unwrap();
                return Err(format!("the run did not end within {limit:?}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let printed = std::fs::read_to_string(stdout).unwrap();
        let violated = printed
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("violated: ")?.split(':').next())
            .map(str::to_owned)
            .collect();
        Ok((status, violated))
    }
}
