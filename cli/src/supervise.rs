//! Runs the command under a lease: passes signals on, and ends it before the lease does.

use std::ffi::OsString;
use std::io;
use std::process::Child;
use std::time::{Duration, Instant};

use redlatch::{Lease, LeaseEnd};
use rustix::process::{Pid, Signal, kill_current_process_group};

use crate::cgroup::Cgroup;
use crate::child_state::{ChildState, state_of};
use crate::deadline::{Deadline, Grace, Limits};
use crate::exit::{Exit, Failure, say};
use crate::foreground::Foreground;
use crate::gate::{self, Gate};
use crate::proc;
use crate::processes::{self, Processes};
use crate::signals::{Event, Signals};
use crate::watchdog::Watchdog;

/// How long the processes of an ended command may clean up before a message names them.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// How often to look for processes that outlive the command, at first and later.
const POLL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// Runs the command until it ends, and returns its exit code; `None` if the lease was lost, or
/// could not be renewed. A signal that arrived before it could start prevents it. The cgroup that
/// is left of it is to be removed after the release.
pub(crate) async fn run(
    command: &[OsString],
    variables: &[(&str, String)],
    lease: &Lease,
    limits: Limits,
    signals: &mut Signals,
    cgroup: &mut Option<Cgroup>,
) -> Result<Option<Exit>, Failure> {
    let Limits { grace, max_hold, allows_daemons } = limits;
    let name = lease.name().to_string();
    let longest_until = max_hold.and_then(|longest| Instant::now().checked_add(longest));
    // A shell that executes this program may have started them.
    let children = proc::children();
    let mut watchdog = tokio::select! {
        biased;
        signal = signals.forwarded() => return Ok(Some(Exit::Interrupted(signal))),
        started = Watchdog::start(grace, &name) => started.map_err(Failure::os("start the watchdog"))?,
    };
    let id = processes::new_id();
    let variables: Vec<_> = variables.iter().cloned().chain([processes::variable(&id)]).collect();
    let (gate, child) = Gate::start(command, &variables).map_err(Failure::os("start a process"))?;
    let group = Pid::from_child(&child);
    let mut processes = Processes::new(group, id);
    if !allows_daemons {
        processes.hold_all(&children);
    }
    // At once: if this process is killed, the watchdog removes the cgroup. Without a deadline, it
    // also kills the gate at once.
    watchdog.guard(&processes);
    if !processes.enter_cgroup() {
        watchdog.guard(&processes);
    }
    processes.watchdog = Some(watchdog.pid());
    let deadline = Deadline::new(lease.valid_until(), grace, processes.measure());
    watchdog.follow(deadline);
    let gap = command.first().and_then(|program| processes.gap(program));
    let mut command = Command {
        name,
        program: command.first().cloned().unwrap_or_default(),
        gate,
        child,
        group,
        processes,
        foreground: Foreground::new(group),
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
        key: None,
        is_reported: false,
        is_unreachable_reported: false,
        poll: POLL.0,
    };
    let before = tokio::select! {
        biased;
        signal = signals.forwarded() => Some(Some(Exit::Interrupted(signal))),
        () = std::future::ready(()) => lease.end().map(|end| {
            say(&format!("lock {:?}: its lease {}: nothing is started", command.name, reason(end)));
            None
        }),
    };
    if let Some(ended) = before {
        command.give_up(cgroup).await;
        return Ok(ended);
    }
    if let Some(gap) = gap {
        say(&format!("lock {:?}: {gap}", command.name));
    }
    command.foreground.lend();
    if let Err(error) = command.gate.open() {
        command.give_up(cgroup).await;
        return Err(Failure::os("start the command")(error));
    }
    command.run(lease, signals, cgroup).await.map_err(Failure::os("wait for the command"))
}

struct Command {
    /// The name of the lock, for messages: those of several jobs may arrive in one mailbox.
    name: String,
    /// The first word of the command.
    program: OsString,
    gate: Gate,
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
    /// The last signal that was passed on, or that a key has sent to the command alone.
    signal: Option<Signal>,
    /// The latter, if it has ended the command.
    key: Option<Signal>,
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
    async fn run(
        mut self,
        lease: &Lease,
        signals: &mut Signals,
        cgroup: &mut Option<Cgroup>,
    ) -> io::Result<Option<Exit>> {
        if let Err(error) = self.supervise(lease, signals).await {
            self.give_up(cgroup).await;
            return Err(error);
        }
        self.conclude(cgroup).await
    }

    /// Kills the command, or what was to become it: each step, also after one that has failed.
    async fn give_up(mut self, cgroup: &mut Option<Cgroup>) {
        self.processes.kill();
        self.watchdog.end();
        let _ = self.foreground.take_back().await;
        let _ = self.child.wait();
        *cgroup = self.processes.take_cgroup();
    }

    /// Returns once the command has ended, before it is reaped. If the lease was lost or a signal
    /// was passed on, all of its processes have ended, as far as the system shows them, or were
    /// killed.
    async fn supervise(&mut self, lease: &Lease, signals: &mut Signals) -> io::Result<()> {
        let ttl = self.grace.ttl;
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
                    self.end_before_loss(reason(end));
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
            // It fails where no process is left in the ulimit: no reason to end with 71.
            let _ = self.foreground.take_back().await;
        }
        if self.signal.is_none() && self.was_lent {
            // Ctrl-C reached the command alone.
            self.key = by.filter(|by| [Signal::INT, Signal::QUIT].contains(by));
            self.signal = self.key;
        }
        // The watchdog has ended the leader while this program was stopped: the others have their
        // grace, and then KILL, before the lock is released.
        if self.kill_at.is_none() && self.watchdog.has_sent_term() {
            self.end_before_loss("ran out while this program was stopped or hung");
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
        // This process may have been stopped until now.
        if !self.watchdog.has_sent_term() {
            self.watchdog.note_stop();
            self.processes.signal(Signal::TERM);
        }
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
            self.processes.send_group(Signal::CONT);
            return Ok(());
        }
        if !self.foreground.is_used() {
            return Ok(());
        }
        // An error, as where no process is left in the ulimit, is no reason to kill the command.
        let _ = self.foreground.take_back().await;
        kill_current_process_group(Signal::TSTP)?;
        // This process was stopped before that returned, and continues. Or the system has ignored
        // the signal, since no shell could continue this process, as with `ssh -t HOST redlatch
        // run`: then the command would stand still with the lock held.
        self.continue_command();
        Ok(())
    }

    fn continue_command(&mut self) {
        if self.ended.is_none() {
            self.foreground.lend();
        }
        self.processes.send_group(Signal::CONT);
    }

    /// Reaps the command, and kills what is left of it if the lock was lost.
    async fn conclude(mut self, cgroup: &mut Option<Cgroup>) -> io::Result<Option<Exit>> {
        let mut is_lost = self.kill_at.is_some();
        if is_lost {
            self.processes.kill();
        }
        if self.watchdog.end() && !is_lost {
            self.processes.kill();
            let name = &self.name;
            say(&format!(
                "lock {name:?}: this program was stopped or hung while the lease ran out: its watchdog ended the \
                 command"
            ));
            is_lost = true;
        }
        *cgroup = self.processes.take_cgroup();
        let status = self.child.wait()?;
        if let Some(error) = self.gate.failure() {
            gate::refuse(&self.program, &error, None);
        }
        let exit = self.key.map_or_else(|| Exit::of(status), Exit::KilledByKey);
        Ok((!is_lost).then_some(exit))
    }
}

/// Why the lease was lost.
fn reason(end: LeaseEnd) -> &'static str {
    match end {
        LeaseEnd::Revoked => "was revoked, or the server has lost its data",
        _ => "has expired",
    }
}
