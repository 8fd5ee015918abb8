//! The watchdog: a copy of this program that ends the command if `run` cannot.
//!
//! It reads lines from a pipe: the process group and the id of the `run`, and when the command gets
//! TERM and KILL unless a later time is named. If the pipe closes, `run` was killed: the command
//! gets TERM at once, and KILL before the lease ends. If a named time comes, `run` is stopped or
//! hangs: the command gets the signals at the same times as from `run`.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, setsid, waitid};

use crate::cgroup::Cgroup;
use crate::deadline::{Deadline, Grace};
use crate::exit::LOST;
use crate::machine::{machine_nanos, program};
use crate::processes::Processes;
use crate::signals::Signals;

/// The copy in `ps` and `pgrep`.
const NAME: &str = "lock-watchdog";

/// The first argument of the copy; the grace follows, in milliseconds, and for the reader of `ps`,
/// the process id of `run` and the name of the lock.
pub(crate) const ROLE: &str = "__watchdog";

/// How long a copy may take to start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// How long the copy may take to end. It may still kill processes that start one another.
const LIMIT: Duration = Duration::from_secs(30);

/// The watchdog, as `run` sees it.
pub(crate) struct Watchdog {
    copy: CopyProcess,
    grace: Grace,
    /// Of the lock.
    name: String,
    /// What another copy has to know if this one is killed.
    command: Option<String>,
    deadline: Option<Deadline>,
    /// The processes have got TERM, from `run` or from a copy.
    is_stopping: bool,
    /// A copy has ended the command.
    has_acted: bool,
}

/// A copy that has not been reaped.
struct CopyProcess {
    child: Child,
    pipe: Option<ChildStdin>,
    /// Where it says first that no signal for the group of `run` reaches it any more, and then that
    /// it sends TERM.
    said: Option<ChildStdout>,
    is_ready: bool,
    start: Instant,
}

impl Watchdog {
    /// Starts the copy, and waits until it is ready.
    ///
    /// # Cancel safety
    /// Cancel safe: a copy that is not ready is killed.
    pub(crate) async fn start(grace: Grace, name: &str) -> io::Result<Watchdog> {
        let mut watchdog = Watchdog {
            copy: CopyProcess::launch(grace, name)?,
            grace,
            name: name.to_owned(),
            command: None,
            deadline: None,
            is_stopping: false,
            has_acted: false,
        };
        watchdog.copy.becomes_ready().await?;
        Ok(watchdog)
    }

    /// Names the processes to end. Not as an argument of the copy: other users could read the id of
    /// the `run`, and give it to processes of their own.
    pub(crate) fn guard(&mut self, processes: &Processes) {
        let line = format!("command {}\n", processes.to_words());
        self.copy.send(&line);
        self.command = Some(line);
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.copy.child)
    }

    /// Names the times of TERM and KILL.
    pub(crate) fn follow(&mut self, deadline: Deadline) {
        if self.deadline.replace(deadline) == Some(deadline) {
            return;
        }
        let (here, now) = (Instant::now(), machine_nanos());
        let nanos = |at: Instant| now.saturating_add(nanos(at.saturating_duration_since(here)));
        let (term, kill) = (nanos(deadline.term_at()), nanos(deadline.kill_at()));
        self.copy.send(&format!("until {term} {kill}\n"));
    }

    /// Says that `run` has sent TERM, so that the group does not get another one.
    pub(crate) fn note_stop(&mut self) {
        self.is_stopping = true;
        self.copy.send("stopping\n");
    }

    /// Whether a copy has sent TERM, since this process was stopped for too long: another one would
    /// end the clean-up of many programs.
    pub(crate) fn has_sent_term(&mut self) -> bool {
        self.is_stopping |= self.copy.has_sent_term();
        self.is_stopping
    }

    /// Starts another copy if this one was killed or stopped, or is not ready for too long. It does
    /// not wait for the other one: the lease may end meanwhile.
    pub(crate) fn check(&mut self) -> io::Result<()> {
        let is_late = !self.copy.is_ready().unwrap_or(false) && self.copy.start.elapsed() > START_LIMIT;
        if is_late || self.copy.is_stopped() {
            // One that resumes later has missed what it was to know.
            self.copy.child.kill()?;
        }
        let Some(status) = self.copy.child.try_wait()? else { return Ok(()) };
        self.has_acted |= has_acted(status);
        if self.has_acted {
            return Ok(());
        }
        let is_stopping = self.has_sent_term();
        self.copy = CopyProcess::launch(self.grace, &self.name)?;
        if is_stopping {
            self.note_stop();
        }
        if let Some(line) = &self.command {
            self.copy.send(line);
        }
        if let Some(deadline) = self.deadline.take() {
            self.follow(deadline);
        }
        Ok(())
    }

    /// Ends the watchdog, since the command has ended. Returns whether the watchdog has ended it.
    /// Call it before the command is reaped: its number may then belong to another process.
    pub(crate) fn end(mut self) -> bool {
        self.copy.send("done\n");
        self.copy.pipe = None;
        self.has_acted || self.copy.wait().is_ok_and(has_acted)
    }
}

impl CopyProcess {
    fn launch(grace: Grace, name: &str) -> io::Result<CopyProcess> {
        let mut command = Command::new(program()?);
        // Neither name is that of this program: `pkill redlatch` is to leave the watchdog alive.
        command.arg0(NAME).arg(ROLE).arg(grace.span.as_millis().to_string());
        command.arg(std::process::id().to_string()).arg(name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (pipe, said) = (child.stdin.take(), child.stdout.take());
        let copy = CopyProcess { child, pipe, said, is_ready: false, start: Instant::now() };
        let (Some(pipe), Some(said)) = (&copy.pipe, &copy.said) else {
            return Err(io::Error::other("a pipe is missing"));
        };
        rustix::io::ioctl_fionbio(pipe, true)?;
        rustix::io::ioctl_fionbio(said, true)?;
        Ok(copy)
    }

    fn is_ready(&mut self) -> io::Result<bool> {
        self.is_ready = self.is_ready || self.has_said()?;
        Ok(self.is_ready)
    }

    async fn becomes_ready(&mut self) -> io::Result<()> {
        while !self.is_ready()? {
            if self.child.try_wait()?.is_some() || self.start.elapsed() > START_LIMIT {
                return Err(io::ErrorKind::TimedOut.into());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    fn has_sent_term(&mut self) -> bool {
        // One that was killed before has said nothing more.
        self.is_ready().unwrap_or(false) && self.has_said().unwrap_or(false)
    }

    /// Whether there is another byte from it.
    fn has_said(&mut self) -> io::Result<bool> {
        let Some(said) = &mut self.said else { return Ok(false) };
        match said.read(&mut [0]) {
            Ok(1..) => Ok(true),
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether it was stopped since the last time.
    fn is_stopped(&self) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        waitid(WaitId::Pid(Pid::from_child(&self.child)), options).is_ok_and(|status| status.is_some())
    }

    /// Waits for its end, which comes at once unless it ends the command. One that is stopped does
    /// not end, and the lease would be renewed for ever, so it is killed.
    fn wait(&mut self) -> io::Result<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < LIMIT && !self.is_stopped() {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.child.kill()?;
        self.child.wait()
    }

    fn send(&mut self, line: &str) {
        let Some(pipe) = &mut self.pipe else { return };
        // A line is shorter than what the system writes at once or not at all. If the copy was
        // killed, `check` starts another one. If its pipe is full, it has not read for long.
        if let Err(error) = pipe.write_all(line.as_bytes())
            && error.kind() == io::ErrorKind::WouldBlock
        {
            let _ = self.child.kill();
        }
    }
}

/// A copy that has not said that it has ended is killed: nothing is left to be guarded.
impl Drop for CopyProcess {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn has_acted(status: ExitStatus) -> bool {
    status.code() == Some(LOST.into())
}

/// The copy.
pub(crate) fn main(words: &[OsString]) -> ExitCode {
    let grace = words.first().and_then(|word| word.to_str()?.parse().ok());
    let Some(grace) = grace.map(Duration::from_millis) else { return ExitCode::FAILURE };
    match watch(nanos(grace)) {
        Ok(has_acted) => ExitCode::from(if has_acted { LOST } else { 0 }),
        // Without a message, for which it may have to wait: `run` starts another copy.
        Err(_) => ExitCode::FAILURE,
    }
}

/// What the lines have said.
#[derive(Default)]
struct Orders {
    command: Option<Processes>,
    term_at: Option<u64>,
    kill_at: Option<u64>,
    is_stopping: bool,
    is_done: bool,
    is_closed: bool,
}

/// Returns whether it has ended the command.
fn watch(grace: u64) -> io::Result<bool> {
    // For `pgrep`, which does not look at arguments by default. Without it, `ps -f` has the name.
    #[cfg(any(target_os = "android", target_os = "linux"))]
    let _ = rustix::thread::set_name(c"lock-watchdog");
    // A session of its own has no terminal, so neither Ctrl-C nor a hangup ends the watchdog.
    setsid()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    // Handlers in place of the default action: a signal for all copies of this program is for
    // `run`.
    let _signals = runtime.block_on(async { Signals::new() })?;
    let _ = std::env::set_current_dir("/"); // do not keep a file system mounted
    // An error means that `run` was killed, and has left its orders in the pipe.
    let _ = rustix::io::write(io::stdout(), b"!");
    let (mut orders, mut text) = (Orders::default(), String::new());
    let (mut kill_at, mut has_acted): (Option<u64>, bool) = (None, false);
    loop {
        // First the time, then the orders: a copy that is stopped here and resumes later does not
        // act at a time that newer orders have moved.
        let now = machine_nanos();
        while !orders.is_closed && orders.read(&mut text, Duration::ZERO)? {}
        let Orders { term_at, kill_at: deadline, is_stopping, is_done, is_closed, .. } = orders;
        let Some(command) = orders.command.as_mut().filter(|_| !is_done) else {
            if is_closed {
                return Ok(has_acted);
            }
            orders.read(&mut text, Duration::from_secs(1))?;
            continue;
        };
        // A little later than `run`, which says why.
        let term_at =
            term_at.zip(deadline).map(|(term, kill)| term.saturating_add(kill.saturating_sub(term) / 10));
        if kill_at.is_none() && (is_closed || is_stopping || term_at.is_some_and(|at| now >= at)) {
            kill_at = Some(now.saturating_add(grace).min(deadline.unwrap_or(now)));
            if !is_stopping {
                has_acted = true;
                // For a `run` that resumes during the grace. An error means that it was killed.
                let _ = rustix::io::write(io::stdout(), b"!");
                command.signal(Signal::TERM);
            }
        }
        if kill_at.is_some_and(|at| now >= at) {
            command.kill();
            command.take_cgroup().inspect(Cgroup::remove);
            return Ok(true);
        }
        let (scan, mut most) = (Instant::now(), Duration::from_secs(1));
        if is_closed {
            if command.have_ended() {
                command.take_cgroup().inspect(Cgroup::remove);
                return Ok(has_acted);
            }
            // A scan of thousands of processes takes a while, and may take no core for itself.
            most = (scan.elapsed() * 20).clamp(Duration::from_millis(20), Duration::from_millis(500));
        }
        // Not from before the scan, which takes a while on a busy machine: KILL came so much late.
        let next = kill_at.or(term_at).map_or(u64::MAX, |at| at.saturating_sub(machine_nanos()));
        // A timer stands still while the machine sleeps, so no wait is long.
        let wait = Duration::from_nanos(next).clamp(Duration::from_millis(1), most);
        if is_closed {
            std::thread::sleep(wait);
        } else {
            orders.read(&mut text, wait)?;
        }
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl Orders {
    /// Reads what arrives within the limit. Returns whether something did.
    fn read(&mut self, text: &mut String, limit: Duration) -> io::Result<bool> {
        let stdin = io::stdin();
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            other => other?,
        };
        let mut bytes = [0; 512];
        // Not through the buffer of `stdin`, which `poll` does not know.
        let count = rustix::io::read(&stdin, &mut bytes)?;
        self.is_closed |= count == 0;
        *text += &String::from_utf8_lossy(&bytes[..count]);
        while let Some((line, rest)) = text.split_once('\n') {
            match line.split_once(' ') {
                Some(("command", words)) => self.command = Processes::from_words(words),
                Some(("until", times)) => {
                    let mut times = times.split(' ').map(|nanos| nanos.parse().ok());
                    (self.term_at, self.kill_at) = (times.next().flatten(), times.next().flatten());
                }
                _ if line == "stopping" => self.is_stopping = true,
                _ => self.is_done = true,
            }
            *text = rest.to_owned();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;
    use rustix::process::kill_process;

    /// A shell in place of the copy.
    fn copy(script: &str) -> CopyProcess {
        let mut child = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
        let pipe = child.stdin.take();
        CopyProcess { child, pipe, said: None, is_ready: true, start: Instant::now() }
    }

    /// On a busy machine, it takes seconds to find and kill all processes.
    #[test]
    fn a_copy_that_takes_long_to_end_the_command_has_ended_it() {
        let mut slow = copy("sleep 2; exit 75");
        assert!(has_acted(slow.wait().unwrap()));
    }

    #[test]
    fn a_copy_that_is_stopped_is_not_waited_for() {
        let mut stopped = copy("exec sleep 1000");
        kill_process(Pid::from_child(&stopped.child), Signal::STOP).unwrap();
        assert!(!has_acted(stopped.wait().unwrap()));
        assert!(stopped.start.elapsed() < LIMIT);
    }

    #[tokio::test]
    async fn a_copy_that_takes_too_long_to_start_is_given_up() {
        let late = || {
            let mut copy = copy("exec sleep 1000");
            (copy.is_ready, copy.start) = (false, Instant::now().checked_sub(START_LIMIT).unwrap());
            copy
        };
        let mut first = late();
        let given_up = tokio::time::timeout(LIMIT, first.becomes_ready()).await;
        assert!(given_up.is_ok_and(|ready| ready.is_err()));
        let grace = Grace::new(LIMIT, None).unwrap();
        let (name, command, deadline) = ("none".to_owned(), None, None);
        let (is_stopping, has_acted) = (false, false);
        let mut watchdog = Watchdog { copy: late(), grace, name, command, deadline, is_stopping, has_acted };
        let (before, start) = (watchdog.pid(), Instant::now());
        while watchdog.pid() == before {
            assert!(start.elapsed() < LIMIT, "it is not replaced");
            watchdog.check().unwrap();
        }
    }
}
