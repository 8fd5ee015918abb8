//! The command line of `scripts/check`.

use crate::mutants::{self, Mutant, TestMutant, all_test_mutants};
use crate::plan::{Fault, topology_named};
use crate::support::Topology;

pub const HELP: &str = include_str!("help.txt");

/// The faults of `--short`: they exist on every topology, and include every lane, with faults that
/// outlast a lease and faults that do not.
const SHORT: [Fault; 6] = [
    Fault::WorkerKilled,
    Fault::WorkerStopped,
    Fault::HalfOpen,
    Fault::RepliesDropped,
    Fault::ServerRestarted,
    Fault::ClientKill,
];

#[derive(Clone, Debug)]
pub struct Arguments {
    pub seconds: u64,
    pub seed: u64,
    pub seeds: u64,
    pub topology: Option<Topology>,
    pub faults: Vec<Fault>,
    pub linger: u64,
    pub sets: u64,
    pub list: bool,
    pub table: bool,
    pub keep: Option<std::path::PathBuf>,
    /// A directory of kept runs to judge again.
    pub judge: Option<std::path::PathBuf>,
    pub mutants: bool,
    /// The mutants to run; empty: all.
    pub chosen: Vec<&'static Mutant>,
    pub tested_mutants: bool,
    /// The tested mutants to run; empty: all.
    pub chosen_test_mutants: Vec<&'static TestMutant>,
}

pub fn read(words: &[String]) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        seconds: 60,
        seed: 1,
        seeds: 1,
        topology: None,
        faults: Vec::new(),
        linger: 200,
        sets: 40,
        list: false,
        table: false,
        keep: None,
        judge: None,
        mutants: false,
        chosen: Vec::new(),
        tested_mutants: false,
        chosen_test_mutants: Vec::new(),
    };
    let mut names = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number =
            |text: &String| text.parse::<u64>().map_err(|_| format!("{word}: {text} is not a number"));
        match word.as_str() {
            "--seconds" => arguments.seconds = number(value()?)?,
            "--seed" => arguments.seed = number(value()?)?,
            "--seeds" => arguments.seeds = number(value()?)?,
            "--topology" => {
                let name = value()?;
                let found = topology_named(name).ok_or_else(|| format!("no topology is called {name}"))?;
                arguments.topology = Some(found);
            }
            "--fault" => {
                let name = value()?;
                let found = Fault::ALL.iter().find(|fault| fault.name() == name);
                arguments
                    .faults
                    .push(*found.ok_or_else(|| format!("no fault is called {name}: see --list"))?);
            }
            "--short" => {
                (arguments.seeds, arguments.seconds) = (5, 38);
                arguments.faults = SHORT.to_vec();
            }
            "--linger" => arguments.linger = number(value()?)?,
            "--sets" => arguments.sets = number(value()?)?,
            "--list" => arguments.list = true,
            "--mutants" => arguments.mutants = true,
            "--tested-mutants" => arguments.tested_mutants = true,
            "--mutant" => names.push(value()?),
            "--table" => arguments.table = true,
            "--keep" => arguments.keep = Some(from_caller(value()?)),
            "--judge" => arguments.judge = Some(from_caller(value()?)),
            _ => return Err(format!("unknown argument: {word}")),
        }
    }
    for name in names {
        let unknown = || format!("no mutant is called {name}");
        if arguments.tested_mutants {
            let found = all_test_mutants().find(|mutant| mutant.name == name);
            arguments.chosen_test_mutants.push(found.ok_or_else(unknown)?);
        } else {
            let found = mutants::all().find(|mutant| mutant.name == name);
            arguments.chosen.push(found.ok_or_else(unknown)?);
        }
    }
    let splits = |letter: char| letter.is_whitespace() || letter == ':';
    if let Some(directory) = &arguments.keep
        && directory.display().to_string().contains(splits)
    {
        return Err(format!(
            "--keep: {}: must not contain blanks or colons, which separate preloaded libraries",
            directory.display()
        ));
    }
    if arguments.seconds < 10 {
        return Err("--seconds: at least 10".to_owned());
    }
    for (word, number) in [("--linger", arguments.linger), ("--sets", arguments.sets)] {
        if number == 0 {
            return Err(format!("{word}: at least 1"));
        }
    }
    if arguments.seeds == 0 {
        return Err("--seeds: at least 1".to_owned());
    }
    if arguments.seed.checked_add(arguments.seeds).is_none() {
        return Err(format!("--seed: {} + {} is too large", arguments.seed, arguments.seeds));
    }
    Ok(arguments)
}

/// Resolves a path against the caller's directory: `scripts/check` changes the directory, and
/// passes the caller's in a variable.
fn from_caller(path: &str) -> std::path::PathBuf {
    let caller = std::env::var_os("REDLATCH_CALLED_FROM").unwrap_or_default();
    std::path::PathBuf::from(caller).join(path)
}
