//! [`Processes`]: those of a command, also where they have left its process group.
//!
//! `timeout` and `setsid` move a process into another group, where no signal for the command's
//! group reaches it: it would run on beside the next holder's command. On Linux, a process is found
//! in each of these ways, of which one suffices:
//!
//! - it is in the cgroup of the command, if this user may make one;
//! - it descends from `run`, which is the parent of all orphans of the command while it lives;
//! - the id of the `run` is in its environment, which all descendants inherit;
//! - it was found before, or its parent is found.
//!
//! With `--allow-daemons`, only the environment counts.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, geteuid, getpgid, getpid, getppid, kill_process_group, test_kill_process,
    test_kill_process_group,
};
use uuid::Uuid;

use crate::cgroup::Cgroup;
use crate::proc::{self, Stat, number, stats};

/// The variable with the ids of all `run`s that a process descends from, the outermost one first.
const RUNS: &str = "REDLATCH_RUNS";

/// How long to wait for the end of processes that got KILL. One that waits for a broken disk may
/// never end.
const LIMIT: Duration = Duration::from_secs(1);

/// How long to look for processes that start one another in turn.
const LONGEST: Duration = Duration::from_secs(10);

/// How often to measure how long a scan takes.
const MEASURE: Duration = Duration::from_secs(1);

/// How many scans must find no process. One that starts another one and ends at once is in few.
const EMPTY: usize = 3;

/// How often to look for such processes by their numbers, after a scan of all processes.
const CHASE: usize = 100;

/// The id of a new `run`: its process id first, by which an outer `run` recognizes it. No other
/// user can guess it, since a process that had it would hold the lock.
pub(crate) fn new_id() -> String {
    format!("{}-{}", getpid().as_raw_nonzero(), Uuid::new_v4().simple())
}

/// The variable for a command of the `run` with this id.
pub(crate) fn variable(id: &str) -> (&'static str, String) {
    let outer = std::env::var(RUNS).unwrap_or_default();
    (RUNS, format!("{outer} {id}").trim_start().to_owned())
}

/// The processes of a command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Processes {
    /// `None`: no member is left, so the number may belong to other processes.
    group: Option<Pid>,
    id: String,
    cgroup: Option<Cgroup>,
    /// The `run`, if all of its descendants but its watchdog are the command's.
    run: Option<Pid>,
    /// Never one of the command's.
    pub(crate) watchdog: Option<Pid>,
    /// Whether the parents of a process count, and not only its environment.
    is_strict: bool,
    /// How long the last scan took, and when it began.
    scan: Option<(Instant, Duration)>,
    /// As [`Processes::unreachable`] after that scan.
    pub(crate) seen_unreachable: String,
    /// How many scans in turn have found none.
    empty: usize,
    /// Those that were found, with their starts.
    known: HashMap<Pid, Option<u64>>,
}

/// A process of a command that has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) pid: Pid,
    /// `None`: only the cgroup shows it.
    start: Option<u64>,
    is_in_group: bool,
    /// The nested `run` that it descends from, which may have ended.
    nested: Option<Pid>,
}

impl Processes {
    /// The group, and what has the id in its environment.
    pub(crate) fn new(group: Pid, id: String) -> Processes {
        Processes { group: Some(group), id, ..Processes::default() }
    }

    /// Finds also those that have cleared their environment. Call it before the command starts.
    pub(crate) fn hold_all(&mut self, children_before: &[Pid]) {
        self.is_strict = true;
        // Their orphans are not the command's.
        if children_before.is_empty() && adopts_orphans() {
            self.run = Some(getpid());
        }
        self.cgroup = Cgroup::planned();
    }

    /// Makes the planned cgroup. The watchdog knows of it: it removes it if this process is killed.
    /// False if this is not possible: then the watchdog is to forget it.
    pub(crate) fn enter_cgroup(&mut self) -> bool {
        let planned = self.cgroup.take().zip(self.group);
        self.cgroup = planned.clone().filter(|(cgroup, group)| cgroup.create(*group)).unzip().0;
        planned.is_some() == self.cgroup.is_some()
    }

    /// What is not reached if the lock is lost, if anything. Call it before the command starts.
    pub(crate) fn gap(&self, command: &OsStr) -> Option<&'static str> {
        if self.cgroup.is_none() && changes_user(command) {
            return Some(
                "the command changes its user: this user may not end it, so it will run on if the lock is lost",
            );
        }
        let is_shown = self.cgroup.is_some() || proc::is_own() || !cfg!(target_os = "linux");
        (!is_shown).then_some(
            "/proc does not show this namespace's processes: those that leave the command's group run on if the \
             lock is lost",
        )
    }

    /// What the watchdog of this `run` has to know, on one line.
    pub(crate) fn to_words(&self) -> String {
        let number = |pid: Option<Pid>| pid.map_or(0, |pid| pid.as_raw_nonzero().get());
        let path = self.cgroup.as_ref().map(Cgroup::path).unwrap_or_default();
        let strict = u8::from(self.is_strict);
        format!("{} {} {strict} {} {path}", number(self.group), self.id, number(self.run))
    }

    /// The same in the watchdog.
    pub(crate) fn from_words(words: &str) -> Option<Processes> {
        let mut words = words.splitn(5, ' ');
        let mut processes = Processes::new(words.next().and_then(number)?, words.next()?.to_owned());
        processes.is_strict = words.next()? == "1";
        processes.run = words.next().and_then(number);
        processes.cgroup = words.next().and_then(Cgroup::at);
        Some(processes)
    }

    /// The cgroup, to be removed once the lock is released.
    pub(crate) fn take_cgroup(&mut self) -> Option<Cgroup> {
        self.cgroup.take()
    }

    /// Reaps processes that were left to this one: the command's, and all orphans if this is the
    /// first process of a container.
    pub(crate) fn reap_orphans(&self) {
        // The watchdog itself knows of none, and has no children.
        if self.watchdog.is_some() {
            proc::reap(&[self.group, self.watchdog]);
        }
    }

    /// How long it takes to find them, measured at most once in a while.
    pub(crate) fn measure(&mut self) -> Duration {
        match self.scan {
            Some((start, took)) if start.elapsed() < MEASURE + took * 20 => took,
            _ => {
                let start = Instant::now();
                let _ = self.scan();
                self.seen_unreachable = self.unreachable();
                self.scan.insert((start, start.elapsed())).1
            }
        }
    }

    /// Those of the last scan that this user may not signal, with commas; empty if there are none.
    pub(crate) fn unreachable(&self) -> String {
        let is_refused = |pid: &&Pid| test_kill_process(**pid) == Err(Errno::PERM);
        let pids: Vec<_> = self.known.keys().filter(is_refused).map(Pid::to_string).collect();
        pids.join(", ")
    }

    /// Those that have not ended. `None`: the system does not show them.
    pub(crate) fn alive(&mut self) -> Option<Vec<Member>> {
        let members = self.scan()?;
        // One that was not found before may have started since.
        Some(if members.is_empty() { self.chase(&[]) } else { members })
    }

    /// Whether none is left. Then the number of the group is not used any more.
    pub(crate) fn have_ended(&mut self) -> bool {
        let Some(members) = self.alive() else {
            return self.group.is_none_or(|group| test_kill_process_group(group).is_err());
        };
        // Only /proc shows a process of the group that was moved out of the cgroup.
        let is_alive = |group| !proc::is_own() && test_kill_process_group(group).is_ok();
        if self.group.is_some_and(is_alive) {
            return false;
        }
        if !members.iter().any(|member| member.is_in_group) {
            self.group = None;
        }
        self.empty = if members.is_empty() { self.empty + 1 } else { 0 };
        self.empty >= EMPTY
    }

    /// Signals all of them, and continues those that are stopped: they end only then.
    pub(crate) fn signal(&mut self, signal: Signal) {
        self.signal_group(signal);
        self.signal_others(signal);
    }

    /// Signals the group, and continues it.
    pub(crate) fn signal_group(&self, signal: Signal) {
        self.send_group(signal);
        self.send_group(Signal::CONT);
    }

    /// Signals and continues the processes outside of the group. Those of a nested `run` get the
    /// signal from that one, and not twice: many programs stop their clean-up at a second signal.
    pub(crate) fn signal_others(&mut self, signal: Signal) {
        let members = self.scan().unwrap_or_default();
        let is_alive = |run: Pid| members.iter().any(|member| member.pid == run);
        for member in members.iter().filter(|member| !member.nested.is_some_and(is_alive)) {
            self.send(*member, &[signal, Signal::CONT]);
        }
    }

    /// Kills all of them, also those that start meanwhile.
    pub(crate) fn kill(&mut self) {
        let start = Instant::now();
        let (mut killed, mut last) = (HashSet::new(), start);
        self.empty = 0;
        loop {
            self.send_group(Signal::KILL);
            if let Some(cgroup) = &self.cgroup {
                cgroup.kill();
            }
            let Some(members) = self.scan() else { return };
            self.empty = if members.is_empty() { self.empty + 1 } else { 0 };
            for member in members {
                self.send(member, &[Signal::KILL]);
                if killed.insert((member.pid, member.start)) {
                    last = Instant::now();
                }
            }
            if !self.chase(&[Signal::KILL]).is_empty() {
                (last, self.empty) = (Instant::now(), 0);
            }
            if self.empty >= EMPTY || last.elapsed() > LIMIT || start.elapsed() > LONGEST {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Signals those that have started since a scan, and returns them.
    ///
    /// A process that starts another one and ends at once is in no scan: when its entry of /proc is
    /// read, it has ended, and the next one was not there when the entries were listed. But numbers
    /// are given in turn, so that of the next one is known.
    fn chase(&mut self, signals: &[Signal]) -> Vec<Member> {
        let mut found = Vec::new();
        if !proc::is_own() {
            return found; // its numbers are those of unrelated processes here
        }
        let mut last = proc::newest().unwrap_or(i32::MAX);
        for _ in 0..CHASE {
            let Some(newest) = proc::newest() else { break };
            self.reap_orphans();
            // Only the last ones can live. After the largest number, the smallest ones follow.
            let latest = (last.min(newest)..=newest).rev().take(32).filter_map(Pid::from_raw);
            let orphans = if self.run == Some(getpid()) { proc::children() } else { Vec::new() };
            for pid in latest.chain(orphans) {
                let Some(stat) = proc::stat(pid).filter(|stat| self.is_candidate(*stat)) else { continue };
                let is_child = |parent| self.run == Some(parent) || self.known.contains_key(&parent);
                let is_child = self.is_strict && stat.parent.is_some_and(is_child);
                if is_child || self.nested_run(pid).is_some() {
                    let member = Member { pid, start: Some(stat.start), is_in_group: false, nested: None };
                    self.send(member, signals);
                    self.known.insert(pid, member.start);
                    found.push(member);
                }
            }
            if newest == last {
                // A chain takes a while for each process.
                std::thread::sleep(Duration::from_micros(100));
            }
            last = newest;
        }
        found
    }

    pub(crate) fn send_group(&self, signal: Signal) {
        if let Some(group) = self.group {
            // An error means that no process of the group is left.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Neither this process, nor `run`, nor its watchdog.
    fn is_candidate(&self, stat: Stat) -> bool {
        stat.pid != getpid() && Some(stat.pid) != self.run && Some(stat.pid) != self.watchdog
    }

    fn scan(&mut self) -> Option<Vec<Member>> {
        if ![Some(getpid()), getppid()].contains(&self.run) {
            // It was killed. What it was the parent of has another parent now.
            self.run = None;
        }
        let cgroup: HashSet<Pid> = self.cgroup.iter().flat_map(Cgroup::members).collect();
        let Ok(all) = stats() else {
            self.cgroup.as_ref()?;
            let in_group = |pid| self.group.is_some() && getpgid(Some(pid)).ok() == self.group;
            let member = |pid| Member { pid, start: None, is_in_group: in_group(pid), nested: None };
            let found: Vec<Member> = cgroup.into_iter().map(member).collect();
            self.known = found.iter().map(|member| (member.pid, None)).collect();
            return Some(found);
        };
        let all: Vec<Stat> = all.into_iter().filter(|stat| self.is_candidate(*stat)).collect();
        let mut found: HashMap<Pid, Member> = HashMap::new();
        let mut children: HashMap<Pid, Vec<Stat>> = HashMap::new();
        for stat in all {
            let nested = self.nested_run(stat.pid);
            let is_in_group = stat.group.is_some() && stat.group == self.group;
            let start = Some(stat.start);
            let is_known = self.known.get(&stat.pid) == Some(&start);
            let is_child = self.run.is_some() && stat.parent == self.run;
            if nested.is_some() || is_in_group || is_known || is_child || cgroup.contains(&stat.pid) {
                let nested = nested.flatten();
                found.insert(stat.pid, Member { pid: stat.pid, start, is_in_group, nested });
            }
            if let Some(parent) = stat.parent {
                children.entry(parent).or_default().push(stat);
            }
        }
        let nested_runs: HashSet<Pid> = found.values().filter_map(|member| member.nested).collect();
        let mut parents: Vec<Member> = found.values().copied().collect();
        while let Some(parent) = parents.pop().filter(|_| self.is_strict) {
            for Stat { pid, start, .. } in children.get(&parent.pid).into_iter().flatten() {
                let nested = nested_runs.get(&parent.pid).copied().or(parent.nested);
                let member = Member { pid: *pid, start: Some(*start), is_in_group: false, nested };
                if let Entry::Vacant(entry) = found.entry(*pid) {
                    parents.push(*entry.insert(member));
                }
            }
        }
        self.known = found.values().map(|member| (member.pid, member.start)).collect();
        Some(found.into_values().collect())
    }

    /// Signals a process outside of the group.
    #[cfg(target_os = "linux")]
    fn send(&self, member: Member, signals: &[Signal]) {
        use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
        if member.is_in_group {
            return;
        }
        // The process may have ended since it was found, and its number be that of another one. The
        // descriptor stays that of one process, so it is looked for once more.
        let Ok(process) = pidfd_open(member.pid, PidfdFlags::empty()) else { return };
        let is_same = match member.start {
            Some(start) => proc::stat(member.pid).is_some_and(|stat| stat.start == start),
            None => self.cgroup.iter().any(|cgroup| cgroup.members().contains(&member.pid)),
        };
        for signal in signals.iter().filter(|_| is_same) {
            // An error means that it has ended, or has changed its user.
            let _ = pidfd_send_signal(&process, *signal);
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn send(&self, _member: Member, _signals: &[Signal]) {}

    /// `None`: the process does not have the id, has ended, or belongs to another user. Otherwise
    /// the next `run` that it descends from.
    fn nested_run(&self, pid: Pid) -> Option<Option<Pid>> {
        let ids = proc::variable(pid, RUNS)?;
        let mut ids = ids.split(' ').skip_while(|id| *id != self.id);
        ids.next()?;
        Some(ids.next().and_then(|id| number(id.split('-').next()?)))
    }
}

/// Makes this process the parent of all orphans among its descendants.
#[cfg(target_os = "linux")]
fn adopts_orphans() -> bool {
    rustix::process::set_child_subreaper(Some(getpid())).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn adopts_orphans() -> bool {
    false
}

/// Whether a program runs as another user than the one that starts it, as sudo does.
fn changes_user(program: &OsStr) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // With a slash, the name replaces the folder or is a path below the current one.
    let is_path = program.as_bytes().contains(&b'/');
    let folders = if is_path { vec![PathBuf::new()] } else { std::env::split_paths(&path).collect() };
    let file = folders.iter().find_map(|folder| std::fs::metadata(folder.join(program)).ok());
    let user = geteuid();
    file.is_some_and(|file| file.mode() & 0o4000 != 0 && file.uid() != user.as_raw() && !user.is_root())
}
