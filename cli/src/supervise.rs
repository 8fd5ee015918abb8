//! Runs the command under a lease: passes signals on, and ends it before the lease does.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use redlatch::{Lease, LeaseEnd};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_current_process_group, waitid};

use crate::deadline::{Deadline, Grace, Limits};
use crate::exit::{Failure, SIGNALED, interrupted, say};
use crate::foreground::Foreground;
use crate::gate::Gate;
use crate::proc;
use crate::processes::{self, Processes};
use crate::signals::{Event, Signals};
use crate::watchdog::Watchdog;

/// How long the processes of an ended command may clean up before a message names them.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// How often to look for processes that outlive the command, at first and later.
const POLL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How a command ended.
pub(crate) struct CommandExit {
    pub(crate) code: u8,
    /// It was ended because the lease was lost, or could not be renewed.
    pub(crate) is_lost: bool,
}

/// Runs the command until it ends. A signal that arrived before it could start prevents it.
pub(crate) async fn run(
    command: &[OsString],
    variables: &[(&str, String)],
    lease: &Lease,
    limits: Limits,
    signals: &mut Signals,
) -> Result<CommandExit, Failure> {
    let Limits { grace, ttl, max_hold, .. } = limits;
    let name = lease.name().to_string();
    let longest_until = max_hold.map(|longest| Instant::now() + longest);
    // A shell that executes this program may have started them.
    let children = proc::children();
    let mut watchdog = tokio::select! {
        biased;
        signal = signals.forwarded() => return Ok(CommandExit { code: interrupted(signal), is_lost: false }),
        started = Watchdog::start(grace, &name) => started.map_err(Failure::os("start the watchdog"))?,
    };
    let id = processes::new_id();
    let variables: Vec<_> = variables.iter().cloned().chain([processes::variable(&id)]).collect();
    let gate = Gate::start(command, &variables).map_err(Failure::os("start a process"))?;
    let group = Pid::from_child(&gate.child);
    let mut processes = Processes::new(group, id);
    if !limits.allows_daemons {
        processes.hold_all(&children);
    }
    processes.watchdog = Some(watchdog.pid());
    let deadline = Deadline::new(lease.valid_until(), grace, processes.measure());
    watchdog.follow(deadline);
    watchdog.guard(&processes);
    let before = tokio::select! {
        biased;
        signal = signals.forwarded() => Some(CommandExit { code: interrupted(signal), is_lost: false }),
        () = std::future::ready(()) => {
            lease.is_lost().then_some(CommandExit { code: 0, is_lost: true })
        }
    };
    if let Some(ended) = before {
        watchdog.end();
        // Its socket closes, so it ends without the command.
        let Gate { mut child, .. } = gate;
        child.kill().and_then(|()| child.wait()).map_err(Failure::os("end a process"))?;
        processes.remove_cgroup();
        return Ok(ended);
    }
    if let Some(gap) = command.first().and_then(|program| processes.gap(program)) {
        say(&format!("lock {name:?}: {gap}"));
    }
    let mut foreground = Foreground::new(group);
    foreground.lend();
    let child = gate.open().map_err(Failure::os("start the command"))?;
    let command = Command {
        name,
        child,
        group,
        processes,
        foreground,
        watchdog,
        is_guarded: true,
        grace,
        longest_until,
        deadline,
        kill_at: None,
        is_killed: false,
        signal: None,
        ended: None,
        was_lent: false,
        is_reported: false,
        is_unreachable_reported: false,
        poll: POLL.0,
    };
    command.run(lease, ttl, signals).await.map_err(Failure::os("wait for the command"))
}

struct Command {
    /// The name of the lock, for messages: those of several jobs may arrive in one mailbox.
    name: String,
    child: Child,
    group: Pid,
    processes: Processes,
    foreground: Foreground,
    watchdog: Watchdog,
    /// The last attempt to start another watchdog, if any, has not failed.
    is_guarded: bool,
    grace: Grace,
    /// No renewal extends the lease past this time.
    longest_until: Option<Instant>,
    /// As last seen: a lease that has ended has none.
    deadline: Deadline,
    /// The command was ended by TERM, and is killed then.
    kill_at: Option<Instant>,
    is_killed: bool,
    /// The last signal that was passed on.
    signal: Option<Signal>,
    /// When this program noticed that the group's leader has ended.
    ended: Option<Instant>,
    /// The terminal was the command's when the leader ended.
    was_lent: bool,
    /// A message has said which processes are waited for.
    is_reported: bool,
    is_unreachable_reported: bool,
    /// When to look again for processes that outlive the leader.
    poll: Duration,
}

impl Command {
    async fn run(mut self, lease: &Lease, ttl: Duration, signals: &mut Signals) -> io::Result<CommandExit> {
        if let Err(error) = self.supervise(lease, ttl, signals).await {
            // The lock is released next, so the command must not run on.
            self.processes.kill();
            self.child.wait()?;
            self.processes.remove_cgroup();
            return Err(error);
        }
        self.conclude().await
    }

    /// Returns once the command has ended, before it is reaped. If the lease was lost or a signal
    /// was passed on, all of its processes have ended, as far as the system shows them, or were
    /// killed.
    async fn supervise(&mut self, lease: &Lease, ttl: Duration, signals: &mut Signals) -> io::Result<()> {
        // How late a renewal, a passed deadline or a resumed machine may be noticed.
        let tick = (ttl / 20).clamp(Duration::from_millis(10), Duration::from_secs(1));
        loop {
            if lease.end().is_none() {
                self.deadline.follow(lease.valid_until(), self.grace, || self.processes.measure());
                self.watchdog.follow(self.deadline);
                self.report_unreachable();
            }
            let now = Instant::now();
            let next = match self.kill_at {
                None if now >= self.deadline.term_at() => {
                    // Close to its longest hold, no renewal would have come in time either.
                    let is_longest =
                        self.longest_until.is_some_and(|longest| lease.valid_until() + ttl / 3 > longest);
                    self.end_before_loss(if is_longest {
                        "has reached --max-hold"
                    } else {
                        "could not be renewed in time"
                    });
                    continue;
                }
                None => self.deadline.term_at(),
                Some(at) if now >= at && !self.is_killed => {
                    self.processes.kill();
                    self.is_killed = true;
                    continue;
                }
                Some(_) if self.is_killed => now + tick,
                Some(at) => at,
            };
            let limit = if self.ended.is_some() { tick.min(self.poll) } else { tick };
            let wait = next.saturating_duration_since(now).min(limit);
            let event = tokio::select! {
                event = signals.next() => event,
                end = lease.lost(), if self.kill_at.is_none() => {
                    self.end_before_loss(match end {
                        LeaseEnd::Revoked => "was revoked, or the server has lost its data",
                        _ => "has expired",
                    });
                    continue;
                }
                () = tokio::time::sleep(wait) => Event::Child,
            };
            match event {
                Event::Forward(signal) => self.forward(signal),
                Event::Pass(signal) => self.processes.send_group(signal),
                Event::Continued => self.continue_command(),
                Event::Child => {
                    let state = state_of(self.group)?;
                    if let ChildState::Ended(signal) = state
                        && self.is_over(signal).await?
                    {
                        return Ok(());
                    }
                    let checked = self.watchdog.check();
                    if let Err(error) = &checked
                        && self.is_guarded
                    {
                        say(&format!("the watchdog was killed, and another one cannot be started: {error}"));
                    }
                    self.is_guarded = checked.is_ok();
                    self.processes.watchdog = Some(self.watchdog.pid());
                    self.processes.reap_orphans();
                    if let ChildState::Stopped(by) = state {
                        self.stop_with_command(by).await?;
                    }
                }
            }
        }
    }

    /// Passes a signal on. The leader decides for the processes outside of the group, as a shell or
    /// `timeout` does, until it has ended.
    fn forward(&mut self, signal: Signal) {
        self.signal = Some(signal);
        if self.ended.is_some() { self.processes.signal(signal) } else { self.processes.signal_group(signal) }
    }

    /// The leader has ended, by this signal if any. Whether no other process of the command is to
    /// be waited for.
    ///
    /// After a signal, the others may still clean up, as the programs that a script has started:
    /// the next holder must not start beside them.
    async fn is_over(&mut self, by: Option<Signal>) -> io::Result<bool> {
        let is_first = self.ended.is_none();
        if is_first {
            self.was_lent = self.foreground.is_lent();
            // Ctrl-C is to reach this program from now on: it has to pass it on to all of them.
            self.foreground.take_back().await?;
        }
        if self.signal.is_none() && self.was_lent {
            // Ctrl-C reached the command alone.
            self.signal = by.filter(|by| [Signal::INT, Signal::QUIT].contains(by));
        }
        if self.is_killed || self.kill_at.is_none() && self.signal.is_none() {
            return Ok(true);
        }
        let now = Instant::now();
        let ended = *self.ended.get_or_insert(now);
        let Some(left) = self.processes.alive() else { return Ok(true) };
        // A scan of thousands of processes takes a while, and may take no core for itself.
        self.poll = (now.elapsed() * 20).max(ended.elapsed() / 10).clamp(POLL.0, POLL.1);
        if self.kill_at.is_some() || left.is_empty() {
            return Ok(left.is_empty());
        }
        if let Some(signal) = self.signal.filter(|_| is_first) {
            self.processes.signal_others(signal);
        }
        if !self.is_reported && ended.elapsed() >= REPORT_AFTER {
            self.is_reported = true;
            let pids: Vec<_> = left.iter().map(|member| member.pid.to_string()).collect();
            let pids = pids.join(", ");
            say(&format!(
                "lock {:?}: the command has ended, but not its processes {pids}: the lock stays held until they have",
                self.name
            ));
        }
        Ok(false)
    }

    /// Names processes of another user, once.
    fn report_unreachable(&mut self) {
        let pids = &self.processes.seen_unreachable;
        if !pids.is_empty() && !self.is_unreachable_reported {
            self.is_unreachable_reported = true;
            say(&format!(
                "lock {:?}: this user may not signal the processes {pids}: they will run on if the lock is lost",
                self.name
            ));
        }
    }

    /// Sends TERM, and sets when KILL follows.
    fn end_before_loss(&mut self, why: &str) {
        let now = Instant::now();
        let kill_at = self.deadline.kill_at().min(now + self.grace.span).max(now);
        let kill = match kill_at - now {
            Duration::ZERO => "KILL at once".to_owned(),
            left => format!("KILL in {left:.1?}"),
        };
        self.kill_at = Some(kill_at);
        self.watchdog.note_stop();
        self.processes.signal(Signal::TERM);
        let pids = self.processes.unreachable();
        let except = if pids.is_empty() { pids } else { format!("; this user may not signal {pids}") };
        say(&format!("lock {:?}: its lease {why}: the command gets TERM, and {kill}{except}", self.name));
    }

    /// The command was stopped. If it needs the terminal, it continues with it. After Ctrl-Z this
    /// program stops as well, so that the shell returns; the watchdog ends the command when the
    /// lease ends.
    async fn stop_with_command(&mut self, by: Option<Signal>) -> io::Result<()> {
        if self.kill_at.is_some() {
            return Ok(());
        }
        if self.foreground.lend_after(by) {
            self.processes.continue_group();
            return Ok(());
        }
        if !self.foreground.is_used() {
            return Ok(());
        }
        self.foreground.take_back().await?;
        // Ignored by the system if no shell could continue this process.
        Ok(kill_current_process_group(Signal::TSTP)?)
    }

    fn continue_command(&mut self) {
        if self.ended.is_none() {
            self.foreground.lend();
        }
        self.processes.continue_group();
    }

    /// Reaps the command, and kills what is left of it if the lock was lost.
    async fn conclude(mut self) -> io::Result<CommandExit> {
        let mut is_lost = self.kill_at.is_some();
        if is_lost {
            self.processes.kill();
        }
        if self.watchdog.end() && !is_lost {
            let name = &self.name;
            say(&format!(
                "lock {name:?}: this program was stopped or hung while the lease ran out: its watchdog ended the \
                 command"
            ));
            is_lost = true;
        }
        let status = self.child.wait()?;
        self.processes.remove_cgroup();
        if self.was_lent
            && let Some(signal @ (Signal::INT | Signal::QUIT)) = signal_of(status)
        {
            // Ctrl-C reached the command alone. A script that called this program is to end too.
            let _ = kill_current_process_group(signal);
        }
        Ok(CommandExit { code: code(status), is_lost })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum ChildState {
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
fn state_of(child: Pid) -> io::Result<ChildState> {
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

fn signal_of(status: ExitStatus) -> Option<Signal> {
    status.signal().and_then(Signal::from_named_raw)
}

fn code(status: ExitStatus) -> u8 {
    let signaled = || SIGNALED.saturating_add(u8::try_from(status.signal().unwrap_or(0)).unwrap_or(0));
    status.code().map_or_else(signaled, |code| u8::try_from(code).unwrap_or(u8::MAX))
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
