//! The record of a run, in a file beside the histories of its workers: `--judge` reads both.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Plan, topology_name, topology_named};
use crate::run::Record;

#[derive(Serialize, Deserialize)]
struct RecordFile<R> {
    seconds: u64,
    seed: u64,
    topology: String,
    linger: u64,
    sets: u64,
    faults: Vec<Fault>,
    record: R,
}

const NAME: &str = "record.json";

pub fn write(plan: &Plan, record: &Record, directory: &Path) {
    let Plan { seconds, seed, linger, sets, ref faults, topology } = *plan;
    let (topology, faults) = (topology_name(topology).to_owned(), faults.clone());
    let file = RecordFile { seconds, seed, topology, linger, sets, faults, record };
    fs::write(directory.join(NAME), serde_json::to_string(&file).unwrap()).unwrap();
}

pub fn read(directory: &Path) -> Result<(Plan, Record), String> {
    let path = directory.join(NAME);
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = fs::read_to_string(&path).map_err(|error| wrong(&error))?;
    let file: RecordFile<Record> = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    let RecordFile { seconds, seed, topology, linger, sets, faults, record } = file;
    let topology = topology_named(&topology).ok_or_else(|| wrong(&topology))?;
    Ok((Plan { seconds, seed, topology, linger, sets, faults }, record))
}

/// The directories of all runs in a `--keep` directory, in the order of their seeds.
pub fn runs(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let wrong = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut runs = Vec::new();
    for entry in fs::read_dir(directory).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        // A run that broke off left no record: `read` reports that.
        if path.is_dir() {
            runs.push(path);
        }
    }
    runs.sort_by_key(|path| (path.as_os_str().len(), path.clone()));
    if runs.is_empty() { Err(format!("{}: has no kept run", directory.display())) } else { Ok(runs) }
}
