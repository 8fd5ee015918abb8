//! Shared by the examples: processes of one program, and a private server for them.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use redlatch::{Locks, Options};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};

/// Longer than any example takes: it ends even if a process hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a process waits at its end for the release of its locks.
const CLOSE: Duration = Duration::from_secs(5);

/// The values that the processes of one run share. They are in the environment, since a URL may
/// contain a password, and every user of the machine can read arguments.
const URL: &str = "REDLATCH_EXAMPLE_URL";
const RUN: &str = "REDLATCH_EXAMPLE_RUN";

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The body of `main`: runs `show`, or `work` if this process was started as a worker.
pub(crate) async fn open(
    example: &str,
    show: impl AsyncFnOnce(&Demo, &Locks) -> Outcome,
    work: impl AsyncFnOnce(&Demo, &Locks, &str, &str) -> Outcome,
) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["--worker", role, argument] => run_worker(role, argument, work).await,
        [] | ["--private"] => limited(private(example, show)).await,
        [url] if !url.starts_with('-') => limited(public(example, url, show)).await,
        _ => {
            eprintln!(
                "usage: {example} [--private]   start a private server: $REDLATCH_SERVER, else redis-server"
            );
            eprintln!("       {example} redis://...   use a server that runs already");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{example}: {}", with_causes(&*error));
            ExitCode::FAILURE
        }
    }
}

async fn private(example: &str, show: impl AsyncFnOnce(&Demo, &Locks) -> Outcome) -> Outcome {
    let (mut server, url) = Server::start()?;
    let demo = Demo::new(example, url);
    demo.say(format!("Starting a private server: {} on port {}.", server.binary, server.port))?;
    let locks = server.answers(&demo).await?;
    demo.run(&locks, show).await
}

async fn public(example: &str, url: &str, show: impl AsyncFnOnce(&Demo, &Locks) -> Outcome) -> Outcome {
    let demo = Demo::new(example, url.to_owned());
    let locks = demo.locks().await?;
    demo.run(&locks, show).await
}

async fn run_worker(
    role: &str,
    argument: &str,
    work: impl AsyncFnOnce(&Demo, &Locks, &str, &str) -> Outcome,
) -> Outcome {
    let demo = Demo { start: Instant::now(), url: std::env::var(URL)?, run: std::env::var(RUN)? };
    let locks = demo.locks().await?;
    let outcome = work(&demo, &locks, role, argument).await;
    outcome.and(locks.close(CLOSE).await.map_err(Into::into))
}

/// Ends early when interrupted. Dropping `show` stops its processes; an exit would leave them
/// running.
async fn limited(show: impl Future<Output = Outcome>) -> Outcome {
    tokio::select! {
        biased; // Ctrl-C also ends the workers: report it, not their end
        signal = interrupted() => Err(signal.map_or_else(Into::into, |()| "interrupted".into())),
        outcome = timeout(LIMIT, show) => outcome.map_err(|_| format!("not done after {LIMIT:?}"))?,
    }
}

/// One run of an example, as all its processes see it.
pub(crate) struct Demo {
    pub(crate) start: Instant,
    pub(crate) url: String,
    /// A unique name: two runs on one server must not wait for each other.
    pub(crate) run: String,
}

impl Demo {
    fn new(example: &str, url: String) -> Demo {
        Demo { start: Instant::now(), url, run: format!("{example}-{}", unique()) }
    }

    async fn locks(&self) -> Result<Locks, redlatch::Error> {
        Locks::builder()
            .server(&self.url)
            .options(Options::new().prefix(format!("lock:{}:", self.run)))
            .connect()
            .await
    }

    async fn run(&self, locks: &Locks, show: impl AsyncFnOnce(&Demo, &Locks) -> Outcome) -> Outcome {
        self.say(format!("Connected. This is process {}.", std::process::id()))?;
        let outcome = show(self, locks).await;
        outcome.and(locks.close(CLOSE).await.map_err(Into::into))
    }

    /// Returns a command that runs this program again, as a worker process.
    pub(crate) fn command(&self, role: &str, argument: &str) -> Outcome<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--worker", role, argument]).env(URL, &self.url).env(RUN, &self.run).kill_on_drop(true);
        Ok(command)
    }

    pub(crate) fn title(&self, text: &str) -> Outcome {
        writeln!(io::stdout())?;
        self.say(text)
    }

    pub(crate) fn say(&self, text: impl Display) -> Outcome {
        Ok(writeln!(io::stdout(), "[{:6.3}s] {text}", self.start.elapsed().as_secs_f64())?)
    }
}

/// Another process, which writes lines until its input is closed or it is killed.
pub(crate) struct Worker {
    pub(crate) child: Child,
    pub(crate) pid: u32,
    pub(crate) stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    pub(crate) fn start(demo: &Demo, role: &str, argument: &str) -> Outcome<Worker> {
        let mut child = demo.command(role, argument)?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let pid = child.id().ok_or("a process ended at once")?;
        let stdin = child.stdin.take().ok_or("a process without an input")?;
        let stdout = child.stdout.take().ok_or("a process without an output")?;
        Ok(Worker { child, pid, stdin, lines: BufReader::new(stdout).lines() })
    }

    /// Waits for the next line that it writes.
    pub(crate) async fn next_line(&mut self) -> Outcome<String> {
        Ok(self.lines.next_line().await?.ok_or("a process ended too early")?)
    }

    /// Closes its input, waits until it ends, and returns its last line, if there is one.
    pub(crate) async fn finish(mut self) -> Outcome<Option<String>> {
        drop(self.stdin);
        let last = self.lines.next_line().await?;
        ended_well(self.child).await?;
        Ok(last)
    }
}

pub(crate) async fn ended_well(mut child: Child) -> Outcome {
    let status = child.wait().await?;
    if status.success() { Ok(()) } else { Err(format!("a process of the example failed: {status}").into()) }
}

/// Waits for the end of standard input, which also comes if the first process dies.
pub(crate) async fn stdin_closed() -> Outcome {
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    Ok(())
}

/// Writes a line with one write, so that the lines of processes with one pipe do not mix.
pub(crate) fn report(line: impl Display) -> Outcome {
    Ok(io::stdout().write_all(format!("{line}\n").as_bytes())?)
}

pub(crate) fn check(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(format!("this must not happen: {}", otherwise()).into()) }
}

/// A private server, with nothing on disk. It is stopped when this is dropped.
struct Server {
    child: std::process::Child,
    binary: String,
    port: u16,
    directory: PathBuf,
}

impl Server {
    /// Starts the server and returns its URL. It does not answer yet.
    fn start() -> Outcome<(Server, String)> {
        let binary = std::env::var("REDLATCH_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let directory = std::env::temp_dir().join(format!("redlatch-example-{}", unique()));
        std::fs::create_dir(&directory)?;
        let started = std::process::Command::new(&binary)
            .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let child = started.map_err(|error| {
            let _ = std::fs::remove_dir(&directory);
            format!("cannot start {binary}: {error}; set REDLATCH_SERVER to a Redis or Valkey server")
        })?;
        Ok((Server { child, binary, port, directory }, format!("redis://127.0.0.1:{port}/")))
    }

    /// Waits until the server answers. Fails if it has ended: another server may have its port
    /// then.
    async fn answers(&mut self, demo: &Demo) -> Outcome<Locks> {
        loop {
            let answer = demo.locks().await;
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("{} ended at once: {status}", self.binary).into());
            }
            match answer {
                Ok(locks) => return Ok(locks),
                Err(error) if demo.start.elapsed() > Duration::from_secs(10) => return Err(error.into()),
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A failure here cannot be reported or repaired.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Waits for Ctrl-C, or for the signal of `kill` and `timeout`.
async fn interrupted() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminated = signal(SignalKind::terminate())?;
        tokio::select! {
            pressed = tokio::signal::ctrl_c() => pressed,
            _ = terminated.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}

/// Returns a name that no other process of this machine uses, and hardly one of another machine.
fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", now.as_millis(), std::process::id())
}

/// Returns the error and its causes, in one line. An error that repeats its cause shows it once.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |&error| error.source()) {
        let cause = cause.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
