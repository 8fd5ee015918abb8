//! The worker processes of one run: started, signalled, replaced and ended by the checker.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::plan::{WorkerSettings, topology_name};
use crate::support::Topology;

/// The number of processes at any time.
pub const WORKERS: usize = 4;

/// The settings that all workers of a run share.
pub struct CommonSettings {
    pub seed: u64,
    pub topology: Topology,
    pub ports: Vec<u16>,
    pub resource: String,
    pub directory: PathBuf,
    pub linger: u64,
    pub sets: u64,
}

/// The processes of a run.
pub struct Workers {
    settings: CommonSettings,
    /// One process for each place. After a kill, another process takes the same place.
    places: Vec<Process>,
    started: u32,
    /// Workers that ended before the checker ended them.
    died: Vec<String>,
}

/// The workers that did not end properly.
pub struct WorkerProblems {
    /// Workers that panicked, or ended before the command to end.
    pub died: Vec<String>,
    /// Workers that still ran when their time to finish was over.
    pub hang: Vec<String>,
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    history: PathBuf,
}

/// Whether this worker's waiters are notified. One worker of three polls instead.
pub fn is_notified(number: u64) -> bool {
    !number.is_multiple_of(3)
}

/// The address of the proxy that the worker at a place connects to.
pub fn host(place: usize) -> String {
    format!("127.0.0.{}", place + 2)
}

impl Workers {
    pub fn start(settings: CommonSettings) -> Workers {
        let mut workers = Workers { settings, places: Vec::new(), started: 0, died: Vec::new() };
        for place in 0..WORKERS {
            let process = workers.launch(place);
            workers.places.push(process);
        }
        workers
    }

    /// Starts a process. Processes are numbered in the order of their starts, from 1.
    fn launch(&mut self, place: usize) -> Process {
        self.started += 1;
        let history = history(&self.settings.directory, place, self.started);
        let settings = WorkerSettings {
            number: self.started,
            seed: self.settings.seed,
            topology: topology_name(self.settings.topology).to_owned(),
            host: host(place),
            ports: self.settings.ports.clone(),
            resource: self.settings.resource.clone(),
            history: history.clone(),
            linger: self.settings.linger,
            sets: self.settings.sets,
            is_notified: is_notified(self.started.into()),
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", &serde_json::to_string(&settings).unwrap()])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        Process { child, stdin, history }
    }

    pub fn signal(&self, place: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.places[place].child), signal).unwrap();
    }

    /// Kills the process with SIGKILL. Returns false if the process had ended before, or ended in
    /// another way meanwhile: the former is a violation of its own.
    pub fn kill(&mut self, place: usize) -> bool {
        let child = &mut self.places[place].child;
        if let Some(status) = child.try_wait().unwrap() {
            self.died.push(format!("the worker at place {place} died: {status}"));
            return false;
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        status.signal() == Some(Signal::KILL.as_raw())
    }

    /// Starts another process in the place of a killed one.
    pub fn replace(&mut self, place: usize) {
        self.places[place] = self.launch(place);
    }

    /// Blocks the only thread of a worker for a while.
    pub fn block(&mut self, place: usize, span: Duration) {
        // The write fails if the worker has died: `end` or `kill` reports that.
        let _ = writeln!(self.places[place].stdin, "block {}", span.as_millis());
    }

    /// The size of the history that the worker at a place has written so far.
    pub fn written(&self, place: usize) -> u64 {
        std::fs::metadata(&self.places[place].history).map_or(0, |file| file.len())
    }

    /// Lets all workers finish their current holds, and waits until they have ended.
    pub async fn end(mut self, within: Duration) -> WorkerProblems {
        for process in &mut self.places {
            // The write fails if the worker has died: its exit status below reports that.
            let _ = writeln!(process.stdin, "end");
        }
        let start = Instant::now();
        let mut ended = WorkerProblems { died: std::mem::take(&mut self.died), hang: Vec::new() };
        for (place, process) in self.places.iter_mut().enumerate() {
            let status = loop {
                if let Some(status) = process.child.try_wait().unwrap() {
                    break Some(status);
                }
                if start.elapsed() > within {
                    break None;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            match status {
                Some(status) if status.success() => {}
                Some(status) => ended.died.push(format!("the worker at place {place} failed: {status}")),
                None => ended.hang.push(format!("the worker at place {place} has not ended in {within:?}")),
            }
        }
        ended
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for process in &mut self.places {
            // Fails if the process has ended, as it should have.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// The file of a worker's history. Its name contains the place, which the judge reads from it.
fn history(directory: &Path, place: usize, number: u32) -> PathBuf {
    directory.join(format!("worker-{place}-{number}.jsonl"))
}

/// The place of the worker that wrote this history.
pub fn place(history: &Path) -> Option<usize> {
    history.file_stem()?.to_str()?.strip_prefix("worker-")?.split('-').next()?.parse().ok()
}
