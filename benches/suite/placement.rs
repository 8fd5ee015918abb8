//! On which cores the server and its clients run.
//!
//! With one task, a round trip is mostly the time that it takes to wake a thread up. That time
//! differs by several times between a busy core and a sleeping one. The scheduler moves processes
//! between the two at will, so without fixed cores the figures are random.

use std::process::{Command, Stdio};

use serde::Serialize;

use super::Outcome;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Placement {
    /// On the cores that the scheduler chooses.
    Anywhere,
    /// The server has a core of its own, as if it had a machine of its own.
    Apart,
    /// All on one core, where no core has to be woken up: only work is left.
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

/// The cores that this process may use, and how to use fewer of them.
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

    /// Places the server, and this process as its client.
    pub(crate) fn place(&self, placement: Placement) -> Outcome<()> {
        self.place_processes(placement, &[std::process::id()])
    }

    /// Places the server and its clients.
    pub(crate) fn place_processes(&self, placement: Placement, processes: &[u32]) -> Outcome<()> {
        let (first, others) = self.list.split_at(1);
        let (server, clients) = match placement {
            Placement::Anywhere => (&self.list[..], &self.list[..]),
            Placement::Apart => (first, others),
            Placement::Together => (first, first),
        };
        pin(self.server, server)?;
        processes.iter().try_for_each(|process| pin(*process, clients))
    }
}

/// Parses lists such as `0-3,8`.
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
