//! The worker processes of one run, as the one who started them sees them.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::plan::{Duty, topology_name};
use crate::support::Topology;

/// How many processes there are at a time.
pub const WORKERS: usize = 4;

/// What all workers of a run are told alike.
pub struct Terms {
    pub seed: u64,
    pub topology: Topology,
    pub ports: Vec<u16>,
    pub resource: String,
    pub directory: PathBuf,
    pub linger: u64,
}

pub struct Crew {
    terms: Terms,
    /// One place for each; whoever is killed is followed by another at the same place.
    places: Vec<Process>,
    started: u32,
    /// Who ended before anybody wanted it to.
    died: Vec<String>,
}

/// What became of workers that did not end as they were told to.
pub struct Ended {
    /// They panicked, or ended in another way before they were told to.
    pub died: Vec<String>,
    pub hang: Vec<String>,
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    history: PathBuf,
}

/// One of three looks now and then; the others are told.
pub fn is_told(number: u64) -> bool {
    !number.is_multiple_of(3)
}

/// Where the worker at a place comes in.
pub fn host(place: usize) -> String {
    format!("127.0.0.{}", place + 2)
}

impl Crew {
    pub fn start(terms: Terms) -> Crew {
        let mut crew = Crew { terms, places: Vec::new(), started: 0, died: Vec::new() };
        for place in 0..WORKERS {
            let process = crew.launch(place);
            crew.places.push(process);
        }
        crew
    }

    /// The workers are numbered as they are started: this one was, or will be, at place `number % WORKERS`.
    fn launch(&mut self, place: usize) -> Process {
        self.started += 1;
        let history = history(&self.terms.directory, place, self.started);
        let duty = Duty {
            number: self.started,
            seed: self.terms.seed,
            topology: topology_name(self.terms.topology).to_owned(),
            host: host(place),
            ports: self.terms.ports.clone(),
            resource: self.terms.resource.clone(),
            history: history.clone(),
            linger: self.terms.linger,
            pushed: is_told(self.started.into()),
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", &serde_json::to_string(&duty).unwrap()])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        Process { child, stdin, history }
    }

    pub fn signal(&self, place: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.places[place].child), signal).unwrap();
    }

    /// Kills one without a word. Whether that is how it died: else, that is found at the end.
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

    /// Starts another one in the place of one that was killed.
    pub fn replace(&mut self, place: usize) {
        self.places[place] = self.launch(place);
    }

    /// Has the only thread of a worker do nothing else for a while.
    pub fn block(&mut self, place: usize, span: Duration) {
        // One that has died does not read it, and is found out later.
        let _ = writeln!(self.places[place].stdin, "block {}", span.as_millis());
    }

    /// How much the one at a place has written down so far.
    pub fn written(&self, place: usize) -> u64 {
        std::fs::metadata(&self.places[place].history).map_or(0, |file| file.len())
    }

    /// Has all finish what they are about.
    pub async fn end(mut self, within: Duration) -> Ended {
        for process in &mut self.places {
            // One that has failed has closed it, and is found out below.
            let _ = writeln!(process.stdin, "end");
        }
        let start = Instant::now();
        let mut ended = Ended { died: std::mem::take(&mut self.died), hang: Vec::new() };
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
                None => ended.hang.push(format!("the worker at place {place} does not come to an end")),
            }
        }
        ended
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for process in &mut self.places {
            // It has ended, if all is well.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// Named for the place and the number, which are known again when it is read.
fn history(directory: &Path, place: usize, number: u32) -> PathBuf {
    directory.join(format!("worker-{place}-{number}.jsonl"))
}

/// The place of the worker with this history.
pub fn place(history: &Path) -> Option<usize> {
    history.file_stem()?.to_str()?.strip_prefix("worker-")?.split('-').next()?.parse().ok()
}
