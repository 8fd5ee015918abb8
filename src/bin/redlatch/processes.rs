//! [`Processes`]: those of a command, also where they have left its process group.
//!
//! `timeout` and `setsid` move a process into another group, where no signal for the command's
//! group reaches it: it would run on beside the next holder's command. So `run` adds an id to the
//! environment of the command. All descendants inherit it, and Linux shows it in /proc.

use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process_group, test_kill_process_group};

use crate::watchdog::machine_nanos;

/// The variable with the ids of all `run`s that a process descends from, the outermost one first.
const RUNS: &str = "REDLATCH_RUNS";

/// How long KILL is repeated for processes that have not ended. One that waits for a broken disk
/// may never end.
const LIMIT: Duration = Duration::from_secs(1);

/// The id of a new `run`: its process id first, by which an outer `run` recognizes it.
pub(crate) fn new_id() -> String {
    format!("{}-{}", getpid().as_raw_nonzero(), machine_nanos())
}

/// The variable for a command of the `run` with this id.
pub(crate) fn variable(id: &str) -> (&'static str, String) {
    let outer = std::env::var(RUNS).unwrap_or_default();
    (RUNS, format!("{outer} {id}").trim_start().to_owned())
}

/// The processes of a command: its group, and those with the id of its `run`.
#[derive(Clone, Debug)]
pub(crate) struct Processes {
    /// `None`: no member is left, so the number may belong to other processes.
    group: Option<Pid>,
    id: String,
}

/// A process of a command that has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) pid: Pid,
    is_in_group: bool,
    /// The nested `run` that it descends from, which may have ended.
    nested: Option<Pid>,
}

impl Processes {
    pub(crate) fn new(group: Pid, id: String) -> Processes {
        Processes { group: Some(group), id }
    }

    /// Those that have not ended. `None`: the system does not show them.
    pub(crate) fn alive(&self) -> Option<Vec<Member>> {
        let members = self.scan()?;
        // While a process executes another program, /proc shows no environment of it. Two scans
        // will hardly both meet that moment.
        if members.is_empty() { self.scan() } else { Some(members) }
    }

    /// Whether none is left. Then the number of the group is not used any more.
    pub(crate) fn have_ended(&mut self) -> bool {
        let Some(members) = self.alive() else {
            return self.group.is_none_or(|group| test_kill_process_group(group).is_err());
        };
        if !members.iter().any(|member| member.is_in_group) {
            self.group = None;
        }
        members.is_empty()
    }

    /// Signals all of them, and continues those that are stopped: they end only then.
    pub(crate) fn signal(&self, signal: Signal) {
        self.signal_group(signal);
        self.signal_others(signal);
    }

    /// Signals the group, and continues it.
    pub(crate) fn signal_group(&self, signal: Signal) {
        self.send_group(signal);
        self.send_group(Signal::CONT);
    }

    pub(crate) fn continue_group(&self) {
        self.send_group(Signal::CONT);
    }

    /// Signals and continues the processes outside of the group. Those of a nested `run` get the
    /// signal from that one, and not twice: many programs stop their clean-up at a second signal.
    pub(crate) fn signal_others(&self, signal: Signal) {
        let members = self.scan().unwrap_or_default();
        let is_alive = |run: Pid| members.iter().any(|member| member.pid == run);
        for member in members.iter().filter(|member| !member.nested.is_some_and(is_alive)) {
            self.send_other(*member, &[signal, Signal::CONT]);
        }
    }

    /// Kills all of them, also those that start meanwhile.
    pub(crate) fn kill(&self) {
        let start = Instant::now();
        loop {
            self.send_group(Signal::KILL);
            let members = self.alive().unwrap_or_default();
            if members.is_empty() || start.elapsed() > LIMIT {
                return;
            }
            for member in members {
                self.send_other(member, &[Signal::KILL]);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn send_group(&self, signal: Signal) {
        if let Some(group) = self.group {
            // An error means that no process of the group is left.
            let _ = kill_process_group(group, signal);
        }
    }

    #[cfg(target_os = "linux")]
    fn send_other(&self, member: Member, signals: &[Signal]) {
        use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
        if member.is_in_group {
            return;
        }
        // The process may have ended since the scan, and its number may be that of another one. The
        // descriptor stays that of one process, so its environment is read once more.
        let Ok(process) = pidfd_open(member.pid, PidfdFlags::empty()) else { return };
        if self.nested_run(member.pid).is_none() {
            return;
        }
        for signal in signals {
            // An error means that it has ended, or has changed its user.
            let _ = pidfd_send_signal(&process, *signal);
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn send_other(&self, _member: Member, _signals: &[Signal]) {}

    fn scan(&self) -> Option<Vec<Member>> {
        let own = getpid();
        let others = stats().ok()?.into_iter().filter(|process| process.pid != own);
        let members = others.filter_map(|Stat { pid, group, .. }| {
            let is_in_group = group.is_some() && group == self.group;
            let nested = self.nested_run(pid);
            (is_in_group || nested.is_some()).then(|| Member { pid, is_in_group, nested: nested.flatten() })
        });
        Some(members.collect())
    }

    /// `None`: the process does not have the id, has ended, or belongs to another user. Otherwise
    /// the next `run` that it descends from.
    fn nested_run(&self, pid: Pid) -> Option<Option<Pid>> {
        let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
        let variables = environment.split(|byte| *byte == 0);
        let mut values =
            variables.filter_map(|entry| entry.strip_prefix(RUNS.as_bytes())?.strip_prefix(b"="));
        let ids = String::from_utf8_lossy(values.next()?);
        let mut ids = ids.split(' ').skip_while(|id| *id != self.id);
        ids.next()?;
        Some(ids.next().and_then(|id| number(id.split('-').next()?)))
    }
}

/// A process that has not ended, as /proc shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub(crate) pid: Pid,
    pub(crate) parent: Option<Pid>,
    /// `None`: its leader is outside of this container.
    pub(crate) group: Option<Pid>,
}

/// All processes that have not ended. Fails where /proc is not that of Linux.
pub(crate) fn stats() -> io::Result<Vec<Stat>> {
    if !cfg!(target_os = "linux") {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let names = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| stat(number(&name)?)).collect())
}

fn stat(pid: Pid) -> Option<Stat> {
    // Without the file, it has ended since.
    let text = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    parse(pid, &String::from_utf8_lossy(&text))
}

fn parse(pid: Pid, text: &str) -> Option<Stat> {
    // After the name of the program, which may contain any character.
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    let is_alive = !matches!(words.next()?, "Z" | "X");
    let mut number = || Some(number(words.next()?));
    let (parent, group) = (number()?, number()?);
    is_alive.then_some(Stat { pid, parent, group })
}

/// A process id. The group of a process that was just reaped is -1, for which `Pid` panics.
fn number(word: &str) -> Option<Pid> {
    word.parse().ok().filter(|number| *number > 0).and_then(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;

    #[test]
    fn processes_are_read_from_proc() {
        let pid = getpid();
        let group = |text| parse(pid, text).map(|stat| stat.group.map(|group| group.as_raw_nonzero().get()));
        assert_eq!(group("7 (a) b) S 1 5 5 0 -1"), Some(Some(5)));
        assert_eq!(group("7 (kthreadd) S 0 0 0 0 -1"), Some(None));
        assert_eq!(group("7 (reaped) R 0 -1 -1 0 -1"), Some(None));
        assert_eq!(group("7 (sh) Z 1 5 5 0 -1"), None);
        assert_eq!(stat(pid).unwrap().group, Some(rustix::process::getpgrp()));
    }
}
