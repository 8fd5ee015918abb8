//! The foreground of the terminal: lent to the command, and taken back.
//!
//! Only the foreground group of a terminal may read it, and a command has a group of its own. So if
//! stdin is the terminal, the command's group becomes its foreground group.
//!
//! In a pipeline such as `redlatch run NAME -- COMMAND | less`, that would stop `less`, and with it
//! the whole job. And beside `redlatch run NAME -- COMMAND &`, a script may read the terminal.
//! There the command's group gets it only once the system has stopped the command for using it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::iter::successors;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgrp, getpid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::machine::program;
use crate::proc::{number, stats};

/// The first argument of the copy that returns the terminal; the group to return it to follows.
pub(crate) const ROLE: &str = "__foreground";

/// The longest time for which copies may take to return the terminal.
const LIMIT: Duration = Duration::from_secs(2);

/// The terminal of this process, which may have none.
pub(crate) struct Foreground {
    terminal: Option<File>,
    /// The command's.
    group: Pid,
    is_stdin: bool,
    /// The command was stopped since it used the terminal.
    is_needed: bool,
    is_lent: bool,
}

impl Foreground {
    pub(crate) fn new(group: Pid) -> Foreground {
        let is_stdin = tcgetpgrp(io::stdin()).is_ok();
        Foreground { terminal: open().ok(), group, is_stdin, is_needed: false, is_lent: false }
    }

    /// The command's group is the foreground group.
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Whether a command that stops is stopped by this terminal, so that this program stops too.
    pub(crate) fn is_used(&self) -> bool {
        self.is_stdin || self.is_needed
    }

    /// Lends the terminal to a command that starts or continues, if that stops no other process.
    pub(crate) fn lend(&mut self) {
        if !self.is_lent && (self.is_needed || self.is_stdin && is_alone()) {
            self.is_lent = self.set_group();
        }
    }

    /// Lends the terminal to a command that this signal has stopped, if it stopped since it used
    /// the terminal. Returns whether it may continue.
    pub(crate) fn lend_after(&mut self, stop: Option<Signal>) -> bool {
        if self.is_lent || !matches!(stop, Some(Signal::TTIN | Signal::TTOU)) {
            return false;
        }
        self.is_needed = self.terminal.is_some();
        self.is_lent = self.set_group();
        self.is_lent
    }

    /// Makes the command's group the foreground group, if that is this process's group now.
    fn set_group(&self) -> bool {
        self.terminal.as_ref().is_some_and(|terminal| {
            let current = tcgetpgrp(terminal);
            current.is_ok_and(|current| current == getpgrp()) && tcsetpgrp(terminal, self.group).is_ok()
        })
    }

    /// Makes this process's group the foreground group again.
    ///
    /// A process outside of the foreground group that does so is stopped by SIGTTOU, unless it
    /// blocks the signal, which needs `unsafe`. So a copy of this program joins the command's group
    /// and does it from there. The group's leader must not have been reaped.
    pub(crate) async fn take_back(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.is_lent) {
            return Ok(());
        }
        let mut copy = Command::new(program()?);
        copy.arg0("redlatch").arg(ROLE).arg(getpgrp().as_raw_nonzero().to_string());
        copy.process_group(self.group.as_raw_nonzero().get()).stdout(Stdio::null());
        let start = Instant::now();
        // A further Ctrl-C ends a copy before it has acted.
        while self.has_group() && start.elapsed() <= LIMIT {
            let mut copy = copy.spawn()?;
            // The shell may take the terminal at the same time, and the copy is stopped then.
            while copy.try_wait()?.is_none() {
                if start.elapsed() > LIMIT {
                    copy.kill()?;
                    copy.wait()?;
                    break;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        Ok(())
    }

    /// Whether the command's group is the foreground group now.
    fn has_group(&self) -> bool {
        self.terminal.as_ref().is_some_and(|terminal| tcgetpgrp(terminal).is_ok_and(|now| now == self.group))
    }
}

/// The controlling terminal, whatever stdin is.
fn open() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/tty")
}

/// Whether this process's group consists of this process, its ancestors and its descendants: a
/// script that waits for this program, but no other program of a pipeline. True if it is unknown.
fn is_alone() -> bool {
    let Ok(processes) = stats() else { return true };
    let parents: HashMap<Pid, Pid> =
        processes.iter().filter_map(|process| Some((process.pid, process.parent?))).collect();
    // Bounded: a process may have ended, and its number be used again, while they were listed.
    let line = |pid| successors(Some(pid), |pid| parents.get(pid).copied()).take(processes.len());
    let ancestors: Vec<Pid> = line(getpid()).collect();
    let mut members = processes.iter().filter(|process| process.group == Some(getpgrp()));
    members.all(|member| ancestors.contains(&member.pid) || line(member.pid).any(|pid| pid == getpid()))
}

/// The copy, in the foreground group.
pub(crate) fn main(words: &[OsString]) -> ExitCode {
    let group = words.first().and_then(|word| number(word.to_str()?));
    if let Some(group) = group
        && let Ok(terminal) = open()
        && tcgetpgrp(&terminal).is_ok_and(|current| current == getpgrp())
    {
        let _ = tcsetpgrp(&terminal, group);
    }
    ExitCode::SUCCESS
}
