//! The common parts of all reports: the measured server, the targets, and the file.

use std::fs;

use serde::Serialize;

use super::Outcome;
use super::plan::Plan;
use super::server::{Server, repository};

#[derive(Debug, Serialize)]
pub(crate) struct Head {
    pub(crate) command: String,
    pub(crate) server: String,
    server_binary: String,
    pub(crate) cores: usize,
    /// Empty where the system does not say it.
    pub(crate) processor: String,
}

impl Head {
    pub(crate) async fn new(plan: &Plan, server: &Server) -> Outcome<Head> {
        Ok(Head {
            command: plan.command.clone(),
            server: server.observer().await?.version().await?,
            server_binary: server.binary().display().to_string(),
            cores: std::thread::available_parallelism()?.get(),
            processor: processor(),
        })
    }

    pub(crate) fn print(&self) {
        println!("{} ({}), {} cores", self.server, self.server_binary, self.cores);
        println!("REDLATCH_SERVER={} {}", self.server_binary, self.command);
    }
}

/// A limit for a figure, and whether the figure meets it.
#[derive(Debug, Serialize)]
pub(crate) struct Target {
    pub(crate) limit: String,
    pub(crate) measured: f64,
    pub(crate) met: bool,
}

impl Target {
    pub(crate) fn at_most(limit: impl Into<String>, measured: f64, most: f64) -> Target {
        Target { limit: limit.into(), measured, met: measured <= most }
    }

    pub(crate) fn at_least(limit: impl Into<String>, measured: f64, least: f64) -> Target {
        Target { limit: limit.into(), measured, met: measured >= least }
    }
}

pub(crate) fn print_targets(targets: &[Target]) {
    println!();
    for target in targets {
        let verdict = if target.met { "met" } else { "missed" };
        println!("target: {} ({:.2}): {verdict}", target.limit, target.measured);
    }
}

/// Writes a file in `target`, for programs.
pub(crate) fn write(name: &str, report: &impl Serialize) -> Outcome<()> {
    let directory = repository()?.join("target");
    fs::create_dir_all(&directory)?;
    fs::write(directory.join(name), serde_json::to_string_pretty(report)? + "\n")?;
    println!("\nwritten to target/{name}");
    Ok(())
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let name = fields.find(|(name, _)| name.trim() == "model name");
    name.map(|(_, name)| name.trim().to_owned()).unwrap_or_default()
}
