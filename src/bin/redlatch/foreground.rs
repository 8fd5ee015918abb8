//! The foreground of the terminal: lent to the command, and taken back.
//!
//! Only the foreground group of a terminal may read it, and a command has a group of its own. So if
//! stdin is the terminal, the command's group becomes its foreground group.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::watchdog::program;

/// The first argument of the copy that returns the terminal; the group to return it to follows.
pub(crate) const ROLE: &str = "__foreground";

/// The longest time for which a copy may take to return the terminal.
const LIMIT: Duration = Duration::from_secs(2);

/// Whether stdin is the terminal of this process.
pub(crate) fn has_terminal() -> bool {
    tcgetpgrp(io::stdin()).is_ok()
}

/// Makes `group` the foreground group, if that is this process's group now. Returns whether it did.
pub(crate) fn lend(group: Pid) -> bool {
    tcgetpgrp(io::stdin()).is_ok_and(|current| current == getpgrp()) && tcsetpgrp(io::stdin(), group).is_ok()
}

/// Makes this process's group the foreground group again, instead of `group`.
///
/// A process outside of the foreground group that does so is stopped by SIGTTOU, unless it blocks
/// the signal, which needs `unsafe`. So a copy of this program joins `group` and does it from
/// there. The group's leader must not have been reaped.
pub(crate) async fn take_back(group: Pid) -> io::Result<()> {
    let mut copy = Command::new(program()?);
    copy.arg0("redlatch").arg(ROLE).arg(getpgrp().as_raw_nonzero().to_string());
    let mut copy = copy.process_group(group.as_raw_nonzero().get()).stdout(Stdio::null()).spawn()?;
    // The shell may take the terminal at the same time, and the copy is stopped then.
    let start = Instant::now();
    while copy.try_wait()?.is_none() {
        if start.elapsed() > LIMIT {
            copy.kill()?;
            copy.wait()?;
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// The copy, in the foreground group.
pub(crate) fn main(words: &[OsString]) -> ExitCode {
    let group = words.first().and_then(|word| word.to_str()?.parse().ok()).and_then(Pid::from_raw);
    let is_foreground = tcgetpgrp(io::stdin()).is_ok_and(|current| current == getpgrp());
    if let Some(group) = group
        && is_foreground
    {
        let _ = tcsetpgrp(io::stdin(), group);
    }
    ExitCode::SUCCESS
}
