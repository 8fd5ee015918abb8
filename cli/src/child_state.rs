//! [`state_of`]: whether a child runs, has stopped or has ended.

use std::io;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChildState {
    Runs,
    /// Since the last poll, by this signal.
    Stopped(Option<Signal>),
    /// By this signal, if any.
    Ended(Option<Signal>),
}

/// The state of a child. One that has ended is not reaped, so its number stays its own.
///
/// One system call, not one for each state: a child that ended between them is not known to one
/// that looks only for stopped children, which fails.
pub(crate) fn state_of(child: Pid) -> io::Result<ChildState> {
    let any = WaitIdOptions::EXITED | WaitIdOptions::STOPPED;
    let status = waitid(WaitId::Pid(child), any | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT)?;
    Ok(match status {
        None => ChildState::Runs,
        Some(status) if status.stopped() => {
            // Clears the reported stop. If the child has ended meanwhile, that is seen next time.
            let _ = waitid(WaitId::Pid(child), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
            ChildState::Stopped(status.stopping_signal().and_then(Signal::from_named_raw))
        }
        Some(status) => ChildState::Ended(status.terminating_signal().and_then(Signal::from_named_raw)),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;
    use rustix::process::kill_process;

    /// The state of a child, which changes some time after its cause.
    fn next_state(child: Pid, before: ChildState) -> ChildState {
        loop {
            match state_of(child).unwrap() {
                state if state == before => std::thread::yield_now(),
                state => return state,
            }
        }
    }

    #[test]
    fn a_child_stops_once_continues_and_ends() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert_eq!(state_of(pid).unwrap(), ChildState::Runs);
        kill_process(pid, Signal::STOP).unwrap();
        assert_eq!(next_state(pid, ChildState::Runs), ChildState::Stopped(Some(Signal::STOP)));
        assert_eq!(state_of(pid).unwrap(), ChildState::Runs, "a stop is reported once");
        kill_process(pid, Signal::KILL).unwrap();
        assert_eq!(next_state(pid, ChildState::Runs), ChildState::Ended(Some(Signal::KILL)));
        assert_eq!(state_of(pid).unwrap(), ChildState::Ended(Some(Signal::KILL)), "it is not reaped");
        child.wait().unwrap();
    }
}
