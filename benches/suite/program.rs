//! A program of `benches/peers` that measures other libraries: `benches/peers/README.md` describes
//! its commands and answers.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::Outcome;
use super::server::{Observer, repository};

pub(crate) const LANGUAGES: [&str; 5] = ["rust", "go", "java", "python", "node"];

/// How long an answer may take, besides the measured time.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A library, as its program describes it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Library {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) client: String,
    pub(crate) kinds: Vec<String>,
    /// The kinds that clients contend for.
    pub(crate) turns: Vec<String>,
    pub(crate) most_clients: usize,
    pub(crate) fencing: String,
    pub(crate) renewal: String,
    pub(crate) waiting: String,
    pub(crate) settings: String,
}

#[derive(Debug, Deserialize)]
struct Description {
    language: String,
    libraries: Vec<Library>,
}

#[derive(Debug, Deserialize)]
struct Ready {
    ready: bool,
}

/// An answer, and the CPU time from `go` to it.
#[derive(Debug)]
pub(crate) struct Measured<T> {
    pub(crate) result: T,
    pub(crate) server_cpu: Duration,
    pub(crate) client_cpu: Duration,
}

#[derive(Debug)]
pub(crate) struct Program {
    /// The folder in `benches/peers`.
    pub(crate) folder: &'static str,
    /// The language with its version.
    pub(crate) language: String,
    pub(crate) libraries: Vec<Library>,
    url: String,
    running: Running,
}

#[derive(Debug)]
struct Running {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Starts the program of a language. `None` if `scripts/peers` has not built it.
    pub(crate) async fn start(folder: &'static str, url: &str) -> Outcome<Option<Program>> {
        if !directory(folder)?.join("peer").is_file() {
            return Ok(None);
        }
        let mut running = Running::start(folder, url)?;
        let Description { language, libraries } = running.ask("libraries").await?;
        Ok(Some(Program { folder, language, libraries, url: url.to_owned(), running }))
    }

    pub(crate) fn process(&self) -> u32 {
        self.running.child.id().unwrap_or(0)
    }

    /// Prepares a measurement that [`begin`](Program::begin) begins and [`end`](Program::end)
    /// waits for, so that several programs measure at once.
    pub(crate) async fn prepare(&mut self, command: &str) -> Outcome<()> {
        self.running.prepare(command).await
    }

    pub(crate) async fn begin(&mut self) -> Outcome<()> {
        self.running.send("go").await
    }

    pub(crate) async fn end<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        self.running.answer(ANSWER_LIMIT).await
    }

    /// Measures once. After an error, a new process takes the place of the program.
    pub(crate) async fn measure<T: DeserializeOwned>(
        &mut self,
        observers: &mut [Observer],
        command: &str,
    ) -> Outcome<Measured<T>> {
        let outcome = self.running.measure(observers, command).await;
        if outcome.is_err() {
            self.running.child.kill().await?;
            self.running = Running::start(self.folder, &self.url)?;
        }
        let log = directory(self.folder)?.join("errors.log");
        outcome.map_err(|error| format!("{command}: {error}; see {}", log.display()).into())
    }
}

impl Running {
    fn start(folder: &str, url: &str) -> Outcome<Running> {
        let directory = directory(folder)?;
        let mut child = Command::new(directory.join("peer"))
            .arg(url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::options().create(true).append(true).open(directory.join("errors.log"))?)
            .kill_on_drop(true)
            .spawn()?;
        let input = child.stdin.take().ok_or("no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no standard output")?).lines();
        Ok(Running { child, input, output })
    }

    async fn measure<T: DeserializeOwned>(
        &mut self,
        observers: &mut [Observer],
        command: &str,
    ) -> Outcome<Measured<T>> {
        self.prepare(command).await?;
        let (server_cpu, client_cpu) = (cpu_of(observers).await?, self.cpu()?);
        let result = self.ask("go").await?;
        Ok(Measured {
            result,
            server_cpu: cpu_of(observers).await?.saturating_sub(server_cpu),
            client_cpu: self.cpu()?.saturating_sub(client_cpu),
        })
    }

    async fn prepare(&mut self, command: &str) -> Outcome<()> {
        let Ready { ready } = self.ask(command).await?;
        if ready { Ok(()) } else { Err("not ready".into()) }
    }

    async fn ask<T: DeserializeOwned>(&mut self, command: &str) -> Outcome<T> {
        self.send(command).await?;
        self.answer(ANSWER_LIMIT).await
    }

    async fn send(&mut self, command: &str) -> Outcome<()> {
        self.input.write_all(format!("{command}\n").as_bytes()).await?;
        Ok(self.input.flush().await?)
    }

    async fn answer<T: DeserializeOwned>(&mut self, limit: Duration) -> Outcome<T> {
        match timeout(limit, self.output.next_line()).await {
            Ok(Ok(Some(line))) => {
                serde_json::from_str(&line).map_err(|error| format!("{line}: {error}").into())
            }
            Ok(Ok(None)) => Err("the program ended".into()),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(format!("no answer in {limit:?}").into()),
        }
    }

    /// The CPU time of the process so far. Zero where there is no `/proc`.
    fn cpu(&self) -> Outcome<Duration> {
        let id = self.child.id().ok_or("the program ended")?;
        let Ok(line) = fs::read_to_string(format!("/proc/{id}/stat")) else { return Ok(Duration::ZERO) };
        // After the name, in brackets: the fields from 3 on. 14 and 15 are ticks of 10 ms.
        let fields: Vec<&str> =
            line.rsplit_once(')').map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
        let ticks = |field: usize| fields.get(field - 3).and_then(|ticks| ticks.parse::<u64>().ok());
        Ok(Duration::from_millis(10 * (ticks(14).unwrap_or(0) + ticks(15).unwrap_or(0))))
    }
}

/// The CPU time of all servers together.
async fn cpu_of(observers: &mut [Observer]) -> Outcome<Duration> {
    let mut cpu = Duration::ZERO;
    for observer in observers {
        cpu += observer.cpu().await?;
    }
    Ok(cpu)
}

fn directory(folder: &str) -> Outcome<PathBuf> {
    Ok(repository()?.join("target/bench-peers").join(folder))
}
