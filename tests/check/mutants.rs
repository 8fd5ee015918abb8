//! Checks the checker: breaks a copy of the crate in one way after the other, and has the judge find each.

mod build;
mod table;
mod test_run;
mod tested;
mod tested_client;
mod tested_quorum;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::plan::topology_name;
use crate::support::Topology;
use build::Tree;
pub use table::MUTANTS;
pub use test_run::{Tested, all as all_tested, run as run_tested};
use tested::TESTED;
use tested_client::TESTED_CLIENT;
use tested_quorum::TESTED_QUORUM;

/// The crate with one mistake, and the run that is to show it.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    edits: &'static [Edit],
    setting: Setting,
    /// One of these must be violated. That of another rule is an accident.
    rules: &'static [&'static str],
}

/// How the crate is run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting {
    topology: Topology,
    seconds: u64,
    linger: u64,
    faults: &'static [&'static str],
}

/// What is replaced in a file.
#[derive(Debug)]
struct Edit {
    file: &'static str,
    from: &'static str,
    /// How often it is there.
    times: usize,
    to: &'static str,
}

impl Edit {
    /// The file that it changes.
    ///
    /// # Panics
    /// If that has changed since the mistake was written.
    fn source(&self, root: &Path) -> String {
        let text = std::fs::read_to_string(root.join(self.file)).unwrap();
        let found = text.matches(self.from).count();
        assert_eq!(found, self.times, "{} has changed: how often it has\n{}", self.file, self.from);
        text
    }
}

/// Whether each mistake can still be made: otherwise that is found out only when all are looked
/// for.
pub fn are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tested = all_tested().flat_map(|mutant| mutant.edits);
    for edit in MUTANTS.iter().flat_map(|mutant| mutant.edits).chain(tested) {
        edit.source(root);
    }
}

/// How long a run may take beyond its time, to begin and to end.
const BESIDE: Duration = Duration::from_secs(150);

/// All of them, unless some are chosen. Before them, the crate as it is runs in each of their settings: what is
/// violated then says nothing about a mistake.
pub fn run(chosen: &[&'static Mutant]) -> ExitCode {
    let mutants = if chosen.is_empty() { MUTANTS.iter().collect() } else { chosen.to_vec() };
    let tree = Tree::copy();
    let quiet = controls(&tree, &mutants);
    let mut caught = 0;
    for mutant in &mutants {
        let start = Instant::now();
        let binary = tree.with(mutant.edits, |tree| tree.build("check"));
        let output = tree.runs().join(mutant.name);
        let found = mutant.find(&binary, &output);
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
    if quiet && caught == mutants.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether the unbroken crate violates nothing in any of the settings.
fn controls(tree: &Tree, mutants: &[&'static Mutant]) -> bool {
    let binary = tree.build("check");
    let mut settings: Vec<Setting> = Vec::new();
    for mutant in mutants {
        if !settings.contains(&mutant.setting) {
            settings.push(mutant.setting);
        }
    }
    let mut loud = 0;
    for (number, setting) in settings.iter().enumerate() {
        let output = tree.runs().join(format!("unbroken-{number}"));
        let heard = match setting.run(&binary, &output) {
            Ok((status, violated)) if violated.is_empty() && status.success() => continue,
            Ok((status, violated)) => format!("violated: {violated:?}, and it ended with {status}"),
            Err(why) => why,
        };
        loud += 1;
        println!("LOUD without a mistake: {setting:?} ({heard}; {})", output.display());
    }
    println!("{} of {} settings quiet without a mistake", settings.len() - loud, settings.len());
    loud == 0
}

impl Mutant {
    /// The rule that was violated.
    fn find(&self, binary: &Path, output: &Path) -> Result<&'static str, String> {
        let (status, violated) = self.setting.run(binary, output)?;
        let rule = self.rules.iter().find(|rule| violated.contains(**rule));
        match rule {
            Some(_) if status.success() => Err("its run did not fail".to_owned()),
            Some(rule) => Ok(rule),
            None if violated.is_empty() => Err(format!("nothing is violated; its run ended with {status}")),
            None => Err(format!("only violated: {violated:?}")),
        }
    }
}

impl Setting {
    /// How it ended, and which rules were violated.
    fn run(&self, binary: &Path, output: &Path) -> Result<(ExitStatus, BTreeSet<String>), String> {
        // Left by an earlier time, if it is there.
        let _ = std::fs::remove_dir_all(output);
        std::fs::create_dir_all(output).unwrap();
        let said = output.join("output.txt");
        let mut child = Command::new(binary)
            .args(["--topology", topology_name(self.topology)])
            .args(["--seconds", &self.seconds.to_string(), "--linger", &self.linger.to_string()])
            .args(self.faults.iter().flat_map(|fault| ["--fault", fault]))
            .args(["--keep".as_ref(), output.as_os_str()])
            .stdout(File::create(&said).unwrap())
            .stderr(File::create(output.join("errors.txt")).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > Duration::from_secs(self.seconds) + BESIDE {
                child.kill().unwrap();
                child.wait().unwrap();
                return Err("its run does not come to an end".to_owned());
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let said = std::fs::read_to_string(said).unwrap();
        let violated = said
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("violated: ")?.split(':').next())
            .map(str::to_owned)
            .collect();
        Ok((status, violated))
    }
}
