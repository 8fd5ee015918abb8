//! Worker processes: this test binary, started again with a role.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

const ROLE: &str = "REDLATCH_TEST_ROLE";

/// The role of this process and the role's arguments, if it is a worker.
pub fn role() -> Option<Vec<String>> {
    std::env::var(ROLE).ok().map(|role| role.split('\u{1f}').map(str::to_owned).collect())
}

/// Stops a process, and waits until all of its threads have stopped: on a busy machine they may run
/// for a while after the signal.
pub(super) fn stop(child: &Child) {
    kill_process(Pid::from_child(child), Signal::STOP).unwrap();
    let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = task.and_then(|task| std::fs::read_to_string(task.path().join("stat")));
        // The name in parentheses may contain any character; the state comes after it.
        stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    };
    let tasks = format!("/proc/{}/task", child.id());
    while !std::fs::read_dir(&tasks).unwrap().all(is_stopped) {
        std::thread::yield_now();
    }
}

/// A worker process, which prints lines and is killed when this is dropped.
pub struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts a worker; `worker::play` runs the role.
    pub fn start(role: &[&str]) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker::play", "--exact", "--nocapture", "--test-threads", "1"])
            .env(ROLE, role.join("\u{1f}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Worker { child, stdin, lines }
    }

    /// The rest of the next line that begins with `word`. The test harness prints lines of its own.
    pub fn expect_line(&mut self, word: &str) -> String {
        loop {
            let line =
                self.lines.next().unwrap_or_else(|| panic!("the worker ended without {word:?}")).unwrap();
            // The harness prints "test ... " without a line end before the worker's first word.
            if let Some((_, rest)) = line.split_once(&format!("@{word}")) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Sends a line, for which the worker waits.
    pub fn send(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn stop(&self) {
        stop(&self.child);
    }

    /// Kills the worker with SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the worker ends, and panics if it failed.
    pub fn finish(mut self) {
        assert!(self.child.wait().unwrap().success(), "a worker failed");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
