//! A tour of redlatch, with real processes: they contend, they nest, one is killed. It checks what it shows.
//!
//! ```text
//! scripts/demo                                         # finds a server's binary, starts a private one
//! cargo run --example tour -- --private                # starts $REDLATCH_SERVER, or redis-server
//! cargo run --example tour -- redis://127.0.0.1:6379/  # uses a server that runs already
//! ```
//!
//! On a server that runs already it uses names of its own, below `lock:tour-`, and leaves only keys that
//! expire. It exits with 0 if everything was as it should be, 1 if not, 2 if it was not told what to use.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, BufRead as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use redlatch::{Lease, Locks, Mutex, MutexGuard, Options, Owner, ReentrantLock};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

const USAGE: &str = "usage: tour --private     start a private server: $REDLATCH_SERVER, else redis-server
       tour redis://...   use a server that runs already";

/// Act 1: so many processes take the mutex so often, and keep it for so long.
const PROCESSES: usize = 4;
const TURNS: usize = 3;
const HOLD: Duration = Duration::from_millis(100);

/// Act 3: for how long a dead holder may be in the way, and how late its successor may be after that.
const TTL: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_millis(1500);

/// Longer than any of it takes, so that the tour ends even if a process hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// What the processes of one tour agree on. In the environment, since a URL may hold a password, and
/// everybody on the machine can read arguments.
const URL: &str = "REDLATCH_TOUR_URL";
const PREFIX: &str = "REDLATCH_TOUR_PREFIX";

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["--worker", role, who] => work(role, who).await,
        ["--private"] => limited(private_tour()).await,
        [url] if !url.starts_with('-') => limited(tour_of(url)).await,
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tour: {}", with_causes(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Ends early when interrupted: what is dropped stops its processes, which an exit would not.
async fn limited(tour: impl Future<Output = Outcome>) -> Outcome {
    tokio::select! {
        biased; // Ctrl-C ends the other processes too, and is the reason to give then
        signal = interrupted() => Err(signal.map_or_else(Into::into, |()| "interrupted".into())),
        outcome = timeout(LIMIT, tour) => outcome.map_err(|_| format!("not done after {LIMIT:?}"))?,
    }
}

async fn private_tour() -> Outcome {
    let (mut server, url) = Server::start()?;
    let tour = Tour::new(url);
    tour.say(format!("Starting a private server: {} on port {}.", server.binary, server.port))?;
    let locks = server.answers(&tour).await?;
    tour.run(&locks).await
}

async fn tour_of(url: &str) -> Outcome {
    let tour = Tour::new(url.to_owned());
    let locks = Locks::open_with(url, tour.options()).await?;
    tour.run(&locks).await
}

/// One run, with what all its acts need.
struct Tour {
    start: Instant,
    url: String,
    prefix: String,
}

impl Tour {
    fn new(url: String) -> Tour {
        // Two tours on one server must not wait for each other.
        let prefix = format!("lock:tour-{}:", unique());
        Tour { start: Instant::now(), url, prefix }
    }

    fn options(&self) -> Options {
        Options::new().prefix(&self.prefix)
    }

    async fn run(&self, locks: &Locks) -> Outcome {
        self.say(format!("Connected. This is process {}.", std::process::id()))?;
        self.contention().await?;
        self.nesting(locks).await?;
        self.crash(locks).await?;
        self.say("Everything shown was checked: no overlap, growing tokens, counts, a takeover in time.")
    }

    /// Act 1: a mutex, wanted by several processes at once.
    async fn contention(&self) -> Outcome {
        let title = format!("Act 1: {PROCESSES} processes want the mutex `backup`, {TURNS} times each.");
        self.title(&title)?;
        let (mut events, children) = self.contenders()?;
        let mut inside: Option<(String, Duration)> = None;
        let mut tokens: Vec<u64> = Vec::new();
        while let Some(event) = events.recv().await {
            let now = self.start.elapsed();
            let event = event?;
            match event.split(' ').collect::<Vec<_>>()[..] {
                ["entered", who, token] => {
                    check(inside.is_none(), || format!("process {who} entered while {inside:?} was inside"))?;
                    let token = token.parse()?;
                    let last = tokens.last().copied().unwrap_or_default();
                    check(token > last, || format!("token {token} came after {last}"))?;
                    inside = Some((who.to_owned(), now));
                    tokens.push(token);
                }
                ["leaving", who] => {
                    let alone = inside.take().filter(|(name, _)| name == who);
                    let (_, from) = alone.ok_or_else(|| format!("process {who} left, but was not inside"))?;
                    let (from, to) = (from.as_secs_f64(), now.as_secs_f64());
                    let token = tokens.last().copied().unwrap_or_default();
                    self.say(format!(
                        "  process {who} was inside from {from:.3}s to {to:.3}s, token {token}"
                    ))?;
                }
                _ => return Err(format!("a process said {event:?}").into()),
            }
        }
        for child in children {
            ended_well(child).await?;
        }
        check(tokens.len() == PROCESSES * TURNS, || format!("there were {} holds", tokens.len()))?;
        self.say(format!("{} holds, no two at a time, each with a larger fencing token.", tokens.len()))
    }

    /// Starts the processes of act 1, with one pipe for what all of them say. Its order is the proof:
    /// each says "entered" and "leaving" while it holds the mutex, so two at a time would show as two
    /// entries in a row. That needs no clocks that agree.
    fn contenders(&self) -> Outcome<(mpsc::UnboundedReceiver<io::Result<String>>, Vec<Child>)> {
        let (reader, writer) = io::pipe()?;
        let mut children = Vec::new();
        for number in 1..=PROCESSES {
            let mut command = self.command("contend", &number.to_string())?;
            children.push(command.stdin(Stdio::null()).stdout(writer.try_clone()?).spawn()?);
        }
        drop(writer); // the last one: now the pipe ends when the processes do
        let (tell, told) = mpsc::unbounded_channel();
        std::thread::spawn(move || io::BufReader::new(reader).lines().try_for_each(|line| tell.send(line)));
        Ok((told, children))
    }

    /// Act 2: a re-entrant lock, taken again by a callee and by another process.
    async fn nesting(&self, locks: &Locks) -> Outcome {
        self.title("Act 2: a call chain, and then another process, re-enter the lock `orders:42`.")?;
        let lock = orders(locks)?;
        let owner = Owner::new();
        self.ship(locks, &owner).await?;
        self.counts(&lock, 0, "shipped: free again").await?;

        let guard = lock.lock(&owner).await?;
        self.say(format!("  the same owner takes it anew, token {}", token(guard.lease())?))?;
        self.counts(&lock, 1, "held here").await?;
        let mut helper = Worker::start(self, "reenter", &owner.to_string())?;
        let same = helper.token().await? == token(guard.lease())?;
        check(same, || "the other process has another token".into())?;
        self.counts(&lock, 2, &format!("process {} was sent the owner as text", helper.pid)).await?;
        check(lock.try_lock(&Owner::new()).await?.is_none(), || "a stranger came in".into())?;
        self.say("    and a stranger's try_lock is None")?;
        helper.finish().await?;
        self.counts(&lock, 1, "that process released its hold").await?;
        guard.release().await?;
        self.counts(&lock, 0, "the last hold is released: free").await?;
        self.say("Every hold was counted, and all holds of one lease had the same token.")
    }

    /// The outer function: takes the lock and calls another that needs it too.
    async fn ship(&self, locks: &Locks, owner: &Owner) -> Outcome {
        let lock = orders(locks)?;
        let guard = lock.lock(owner).await?;
        let outer = token(guard.lease())?;
        self.counts(&lock, 1, &format!("ship() took it, token {outer}")).await?;
        let inner = self.bill(locks, owner).await?;
        check(inner == outer, || format!("token {inner} inside, {outer} outside"))?;
        self.counts(&lock, 1, "bill() returned").await?;
        Ok(guard.release().await?)
    }

    /// The inner function: knows nothing of its caller but the owner.
    async fn bill(&self, locks: &Locks, owner: &Owner) -> Outcome<u64> {
        let lock = orders(locks)?;
        let guard = lock.lock(owner).await?;
        let token = token(guard.lease())?;
        self.counts(&lock, 2, &format!("bill(), called by ship(), took it, token {token}")).await?;
        guard.release().await?;
        Ok(token)
    }

    /// Shows and checks how many holds the server counts.
    async fn counts(&self, lock: &ReentrantLock, expected: u64, what: &str) -> Outcome {
        let count = lock.inspect().await?.holders.first().map_or(0, |holder| holder.count);
        check(count == expected, || format!("{what}: count {count}, not {expected}"))?;
        self.say(format!("    count {count}  {what}"))
    }

    /// Act 3: a holder is killed, and the next in the queue takes over.
    async fn crash(&self, locks: &Locks) -> Outcome {
        self.title(&format!("Act 3: a process is killed while it holds the mutex `nightly`, ttl {TTL:?}."))?;
        let mutex = nightly(locks)?;
        let mut holder = Worker::start(self, "hold", "-")?;
        let before = holder.token().await?;
        self.say(format!("  process {} has it, token {before}", holder.pid))?;
        let successor = tokio::spawn(take(mutex.clone()));
        while mutex.inspect().await?.waiters == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        self.say("  this process waits for it")?;
        sleep(TTL + Duration::from_millis(200)).await;
        check(!successor.is_finished(), || "a living holder lost its lease".into())?;
        self.say("  the ttl is over, the holder lives: its lease was renewed, we still wait")?;

        let asked = Instant::now();
        let left = mutex.inspect().await?.holders.first().and_then(|holder| holder.remaining);
        let left = left.ok_or("nobody holds the mutex")?;
        let killed = Instant::now();
        let status = holder.kill().await?;
        self.say(format!("  killed it ({status}); {left:.2?} of its lease were left"))?;

        let (guard, taken) = successor.await??;
        let after = token(guard.lease())?;
        let took = taken - killed;
        self.say(format!("  took over {took:.2?} after the kill, token {after}"))?;
        let earliest = asked + left - Duration::from_millis(2); // the server counts whole milliseconds
        check(taken >= earliest, || "too early: the lease still stood".into())?;
        check(took <= TTL + LATE, || format!("too late: the ttl is {TTL:?}"))?;
        check(after > before, || format!("token {after} came after {before}"))?;
        guard.release().await?;
        self.say(format!("Not before the lease ended, within {:?}, and with a larger token.", TTL + LATE))
    }

    /// A command that runs this program again, as another process.
    fn command(&self, role: &str, who: &str) -> Outcome<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["--worker", role, who])
            .env(URL, &self.url)
            .env(PREFIX, &self.prefix)
            .kill_on_drop(true);
        Ok(command)
    }

    fn title(&self, text: &str) -> Outcome {
        writeln!(io::stdout())?;
        self.say(text)
    }

    fn say(&self, text: impl Display) -> Outcome {
        Ok(writeln!(io::stdout(), "[{:6.3}s] {text}", self.start.elapsed().as_secs_f64())?)
    }
}

/// Waits for the mutex, and notes when it came.
async fn take(mutex: Mutex) -> Result<(MutexGuard, Instant), redlatch::Error> {
    let guard = mutex.lock().await?;
    Ok((guard, Instant::now()))
}

/// Another process that holds something, until it is told to finish or killed.
struct Worker {
    child: Child,
    pid: u32,
}

impl Worker {
    fn start(tour: &Tour, role: &str, who: &str) -> Outcome<Worker> {
        let child = tour.command(role, who)?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let pid = child.id().ok_or("a process ended at once")?;
        Ok(Worker { child, pid })
    }

    /// The one line that it says, once it holds the lock: the token.
    async fn token(&mut self) -> Outcome<u64> {
        let stdout = self.child.stdout.take().ok_or("its line was read already")?;
        let line = tokio::io::BufReader::new(stdout).lines().next_line().await?;
        Ok(line.ok_or("a process ended before it held the lock")?.parse()?)
    }

    async fn finish(mut self) -> Outcome {
        drop(self.child.stdin.take());
        ended_well(self.child).await
    }

    async fn kill(&mut self) -> Outcome<std::process::ExitStatus> {
        self.child.kill().await?;
        Ok(self.child.wait().await?)
    }
}

async fn ended_well(mut child: Child) -> Outcome {
    let status = child.wait().await?;
    if status.success() { Ok(()) } else { Err(format!("a process of the tour failed: {status}").into()) }
}

/// What the other processes do. They only report; the tour judges.
async fn work(role: &str, who: &str) -> Outcome {
    let options = Options::new().prefix(std::env::var(PREFIX)?);
    let locks = Locks::open_with(&std::env::var(URL)?, options).await?;
    match role {
        "contend" => contend(&locks, who).await,
        "reenter" => reenter(&locks, &who.parse()?).await,
        "hold" => hold(&locks).await,
        _ => Err(USAGE.into()),
    }
}

async fn contend(locks: &Locks, who: &str) -> Outcome {
    let mutex = locks.mutex("backup")?;
    for _ in 0..TURNS {
        let guard = mutex.lock().await?;
        report(format!("entered {who} {}", token(guard.lease())?))?;
        sleep(HOLD).await;
        report(format!("leaving {who}"))?; // not after the release: the next may be inside by then
        guard.release().await?;
    }
    Ok(())
}

async fn reenter(locks: &Locks, owner: &Owner) -> Outcome {
    let guard = orders(locks)?.lock(owner).await?;
    report(token(guard.lease())?)?;
    told_to_finish().await?;
    Ok(guard.release().await?)
}

async fn hold(locks: &Locks) -> Outcome {
    let guard = nightly(locks)?.lock().await?;
    report(token(guard.lease())?)?;
    told_to_finish().await?;
    Ok(guard.release().await?)
}

/// The end of standard input, which also comes if the tour ends in whatever way.
async fn told_to_finish() -> Outcome {
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    Ok(())
}

/// One write for one line, so that the lines of processes with one pipe do not mix.
fn report(line: impl Display) -> Outcome {
    Ok(io::stdout().write_all(format!("{line}\n").as_bytes())?)
}

/// The lock of act 2.
fn orders(locks: &Locks) -> Outcome<ReentrantLock> {
    Ok(locks.reentrant("orders:42")?)
}

/// The mutex of act 3.
fn nightly(locks: &Locks) -> Outcome<Mutex> {
    Ok(locks.with_options(locks.options().clone().ttl(TTL))?.mutex("nightly")?)
}

fn token(lease: &Lease) -> Outcome<u64> {
    Ok(lease.fencing_token().ok_or("a lease without a fencing token")?.get())
}

fn check(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(format!("this must not happen: {}", otherwise()).into()) }
}

/// A server of our own, with nothing on disk. Stopped when it is dropped.
struct Server {
    child: std::process::Child,
    binary: String,
    port: u16,
    directory: PathBuf,
}

impl Server {
    /// Starts it and says where it will be. It does not answer yet.
    fn start() -> Outcome<(Server, String)> {
        let binary = std::env::var("REDLATCH_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let directory = std::env::temp_dir().join(format!("redlatch-tour-{}", unique()));
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

    /// Waits until it answers, unless it ended: then somebody else might.
    async fn answers(&mut self, tour: &Tour) -> Outcome<Locks> {
        loop {
            let answer = Locks::open_with(&tour.url, tour.options()).await;
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("{} ended at once: {status}", self.binary).into());
            }
            match answer {
                Ok(locks) => return Ok(locks),
                Err(error) if tour.start.elapsed() > Duration::from_secs(10) => return Err(error.into()),
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Whatever fails here, there is nobody left to do it better.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Ctrl-C, or what `kill` and `timeout` send.
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

/// For names that nobody else uses: no other process of this machine now, and hardly one of another.
fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", now.as_millis(), std::process::id())
}

/// The error and what caused it, in one line. Some errors repeat their causes; this does not.
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
