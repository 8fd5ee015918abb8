//! The program as a process, and its output.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};

use crate::support::{Server, Stopwatch, eventually, soon};

/// How a program ended.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The program as words of a command. A busy machine may delay a server's reply for seconds.
pub const WORDS: [&str; 3] = [env!("CARGO_BIN_EXE_redlatch"), "--node-timeout", "20s"];

/// The same in a line of a shell.
pub const REDLATCH: &str = concat!(env!("CARGO_BIN_EXE_redlatch"), " --node-timeout 20s");

/// A command with the program, whose servers come from the arguments or the environment.
pub fn program(words: &[&str]) -> Command {
    // A shell without job control starts background jobs with INT ignored, and the program keeps
    // ignored signals ignored: the tests must not depend on how they were started.
    by(&["env"], words)
}

/// The same, executed by another program.
pub fn by(wrapper: &[&str], words: &[&str]) -> Command {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]);
    if wrapper != ["env"] {
        command.arg("env");
    }
    command.arg("--default-signal").args(WORDS).args(words).kill_on_drop(true);
    for name in ["REDLATCH_REDIS", "REDIS_URL", "REDLATCH_OWNER", "REDLATCH_NAME", "REDLATCH_TOKEN"] {
        command.env_remove(name);
    }
    command
}

/// The same on a server.
pub fn on(server: &Server, words: &[&str]) -> Command {
    let mut command = program(words);
    command.env("REDLATCH_REDIS", server.url());
    command
}

/// The same, executed by another program.
pub fn wrapped(wrapper: &[&str], server: &Server, words: &[&str]) -> Command {
    let mut command = by(wrapper, words);
    command.env("REDLATCH_REDIS", server.url());
    command
}

/// Runs the program to its end, with this text as its stdin.
pub async fn output(mut command: Command, stdin: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let text = stdin.to_owned();
    let written = tokio::spawn(async move {
        // The program may end without reading it.
        let _ = pipe.write_all(text.as_bytes()).await;
    });
    let output = soon("the program ends", child.wait_with_output()).await.unwrap();
    written.await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Output { code: code_of(output.status), stdout: text(output.stdout), stderr: text(output.stderr) }
}

pub async fn run_on(server: &Server, words: &[&str]) -> Output {
    output(on(server, words), "").await
}

/// A running program, with its lines.
pub struct RunningProgram {
    pub child: Child,
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
}

impl RunningProgram {
    pub fn start(command: Command) -> RunningProgram {
        RunningProgram::start_with_stderr(command, Stdio::piped())
    }

    pub fn start_with_stderr(mut command: Command, stderr: Stdio) -> RunningProgram {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        RunningProgram { child, lines }
    }

    /// The next line of its stdout.
    pub async fn line(&mut self) -> String {
        let line = soon("a line", self.lines.next_line()).await.unwrap();
        line.expect("stdout is open")
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// What it and its command still write to stdout, until none of them is left.
    pub async fn rest_of_stdout(&mut self) -> String {
        let mut stdout = String::new();
        while let Some(line) = soon("the end of stdout", self.lines.next_line()).await.unwrap() {
            stdout += &format!("{line}\n");
        }
        stdout
    }

    /// Waits for its end; returns the exit code and the rest of its output.
    pub async fn end(mut self) -> Output {
        let stdout = self.rest_of_stdout().await;
        let mut stderr = String::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            soon("the end of stderr", pipe.read_to_string(&mut stderr)).await.unwrap();
        }
        let status = soon("the program ends", self.child.wait()).await.unwrap();
        Output { code: code_of(status), stdout, stderr }
    }
}

/// As a shell shows it. Of all signals only SIGINT ends the program as it ends its command.
fn code_of(status: ExitStatus) -> i32 {
    let interrupted = || status.signal().filter(|signal| *signal == Signal::INT.as_raw());
    status.code().or_else(|| interrupted().map(|signal| 128 + signal)).expect("no other signal ended it")
}

/// A process id that a command has printed.
pub fn pid(line: &str) -> Pid {
    Pid::from_raw(line.trim().parse().unwrap()).unwrap()
}

pub fn is_alive(pid: Pid) -> bool {
    // A zombie has ended; a process outside of this one's children is reaped by init.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    test_kill_process(pid).is_ok() && !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}

/// The watchdog of a `run`.
pub fn watchdog_of(run: Pid) -> Option<Pid> {
    let tasks = format!("/proc/{0}/task/{0}/children", run.as_raw_nonzero());
    let children = std::fs::read_to_string(tasks).ok()?;
    let words = |id: &&str| std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
    children.split_whitespace().find(|id| words(id).starts_with("lock-watchdog")).map(pid)
}

pub async fn ends(pid: Pid) {
    eventually("a process ends", || async { !is_alive(pid) }).await;
}

/// Waits until the parent of a process has reaped it. Once a `run` has reaped its command, the
/// release has begun, or begins without any pause.
pub async fn is_reaped(pid: Pid) {
    let proc = format!("/proc/{}", pid.as_raw_nonzero());
    eventually("a process is reaped", || async { !std::path::Path::new(&proc).exists() }).await;
}

/// Waits until processes have ended, before the lock `job` is free. A machine that stands still
/// meanwhile may delay their end by as long.
pub async fn end_while_held(server: &Server, processes: &[Pid]) {
    let (watch, free_since) = (Stopwatch::start(), OnceLock::new());
    eventually("the processes have ended", || async {
        // First the lock: processes that end between both questions may leave it free.
        let is_held = server.run::<bool>(&["EXISTS", "lock:job"]).await;
        let are_over = !processes.iter().any(|process| is_alive(*process));
        if !is_held && !are_over {
            free_since.get_or_init(Instant::now);
        }
        are_over
    })
    .await;
    let late = free_since.get().map_or(Duration::ZERO, Instant::elapsed);
    let stalls = stalls(watch);
    assert!(late <= stalls, "the lock was free for {late:?} before, and {stalls:?} were stalls");
}

/// How long the machine has stood still.
fn stalls(watch: Stopwatch) -> Duration {
    let watch = watch.stop();
    watch.elapsed() - watch.undisturbed()
}

/// Checks that a command that has printed the time all the while, in nanoseconds, ended within 6 s,
/// its lease, of its server's end. A machine that stands still may delay its end by as long.
#[track_caller]
pub fn ended_before_its_lease(stdout: &str, (since, watch): (Duration, Stopwatch), what: &str) {
    let stalls = stalls(watch);
    let last = stdout.lines().last().and_then(|line| line.parse().ok()).map(Duration::from_nanos);
    let ran = last.expect("it ran on").saturating_sub(since);
    assert!(
        ran < Duration::from_secs(6) + stalls,
        "{what}: it ran for {ran:?} after the last renewal, and {stalls:?} were stalls"
    );
}

/// When the lease of the lock `job` ends, by the server's clock, in milliseconds. A script reads
/// both at once: a pause in between would look like a renewal.
pub async fn expiry(server: &Server) -> i64 {
    let script = "local now = redis.call('TIME')
        return now[1] * 1000 + math.floor(now[2] / 1000) + redis.call('PTTL', KEYS[1])";
    server.run(&["EVAL", script, "1", "lock:job"]).await
}

/// Waits until a mutex is held, or free.
pub async fn is_held(server: &Server, name: &str, held: bool) {
    let key = format!("lock:{name}");
    eventually("the lock changes", || async { server.run::<bool>(&["EXISTS", &key]).await == held }).await;
}
