//! On which cores the server and its clients run.
//!
//! With one task, a round trip is mostly the time that it takes to wake somebody up, and that differs by
//! several times between a core that is busy and another one that sleeps. The scheduler moves processes
//! between the two as it likes, so without a say in it the figures are those of a lottery.

use std::process::{Command, Stdio};

use serde::Serialize;

use super::Outcome;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Placement {
    /// Wherever the scheduler puts them.
    Anywhere,
    /// The server has a core of its own: the nearest thing here to a machine of its own.
    Apart,
    /// All on one core, where nothing has to be woken up: what is left is work.
    Together,
}

impl Placement {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Placement::Anywhere => "anywhere",
            Placement::Apart => "apart",
            Placement::Together => "one core",
        }
    }
}

/// The cores that this process may use, and a way to narrow them down.
#[derive(Debug)]
pub(crate) struct Cores {
    list: Vec<usize>,
    server: u32,
}

impl Cores {
    /// `None` where there is nothing to choose, or no `taskset` to choose with.
    pub(crate) fn of(server: u32) -> Option<Cores> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let cores = Cores { list: parse_list(allowed.trim())?, server };
        (cores.list.len() > 1 && cores.place(Placement::Anywhere).is_ok()).then_some(cores)
    }

    pub(crate) fn place(&self, placement: Placement) -> Outcome<()> {
        let (first, others) = self.list.split_at(1);
        let (server, clients) = match placement {
            Placement::Anywhere => (&self.list[..], &self.list[..]),
            Placement::Apart => (first, others),
            Placement::Together => (first, first),
        };
        pin(self.server, server)?;
        pin(std::process::id(), clients)
    }
}

/// `0-3,8` and the like.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut list = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        list.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(list)
}

/// All threads of a process.
fn pin(process: u32, cores: &[usize]) -> Outcome<()> {
    let list = cores.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let status = Command::new("taskset")
        .args(["--all-tasks", "--cpu-list", "--pid", &list, &process.to_string()])
        .stdout(Stdio::null())
        .status()?;
    if status.success() { Ok(()) } else { Err(format!("taskset cannot move {process} to {list}").into()) }
}
