//! Checks the checker: breaks a copy of the crate in one way after the other, and has the judge find each.

mod build;
mod table;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::plan::topology_name;
use crate::support::Topology;
use build::Tree;
pub use table::MUTANTS;

/// The crate with one mistake, and the run that is to show it.
#[derive(Debug)]
pub struct Mutant {
    pub name: &'static str,
    edits: &'static [Edit],
    topology: Topology,
    seconds: u64,
    seed: u64,
    linger: u64,
    faults: &'static [&'static str],
    /// One of these must be violated. That of another rule is an accident.
    rules: &'static [&'static str],
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

/// How long a run may take beyond its time, to begin and to end.
const BESIDE: Duration = Duration::from_secs(150);

/// All of them, unless some are chosen.
pub fn run(chosen: &[&'static Mutant]) -> ExitCode {
    let mutants = if chosen.is_empty() { MUTANTS.iter().collect() } else { chosen.to_vec() };
    let tree = Tree::copy();
    let mut caught = 0;
    for mutant in &mutants {
        let start = Instant::now();
        let binary = tree.with(mutant.edits, |tree| tree.build());
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
    if caught == mutants.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Mutant {
    /// The rule that was violated.
    fn find(&self, binary: &Path, output: &Path) -> Result<&'static str, String> {
        // Left by an earlier time, if it is there.
        let _ = std::fs::remove_dir_all(output);
        std::fs::create_dir_all(output).unwrap();
        let said = output.join("output.txt");
        let mut child = Command::new(binary)
            .args(["--topology", topology_name(self.topology)])
            .args(["--seconds", &self.seconds.to_string(), "--seed", &self.seed.to_string()])
            .args(["--linger", &self.linger.to_string()])
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
        let violated: BTreeSet<&str> = said
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("violated: ")?.split(':').next())
            .collect();
        let rule = self.rules.iter().find(|rule| violated.contains(*rule));
        match rule {
            Some(_) if status.success() => Err("its run did not fail".to_owned()),
            Some(rule) => Ok(rule),
            None if violated.is_empty() => Err(format!("nothing is violated; its run ended with {status}")),
            None => Err(format!("only violated: {violated:?}")),
        }
    }
}
