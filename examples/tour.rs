//! A tour of redlatch with real processes, which contend, nest holds, and are killed. It checks
//! what it shows.
//!
//! ```text
//! scripts/demo                                         # finds a server, starts a private one
//! cargo run --example tour                             # starts $REDLATCH_SERVER, or redis-server
//! cargo run --example tour -- redis://127.0.0.1:6379/  # uses a server that runs already
//! ```
//!
//! On a server that runs already, it uses names of its own, below `lock:tour-`, and leaves only
//! keys that expire. The exit status is 0 if every check passed, 1 if one failed, 2 for wrong
//! arguments.

mod support;

use std::io::{self, BufRead as _};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use redlatch::{Lease, Locks, Mutex, MutexGuard, Options, Owner, ReentrantLock};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::sleep;

use support::{Demo, Outcome, Worker, check, ended_well, report, stdin_closed};

/// Act 1: how many processes acquire the mutex, how often each, and how long a hold lasts.
const PROCESSES: usize = 4;
const TURNS: usize = 3;
const HOLD: Duration = Duration::from_millis(100);

/// Act 3: how long a dead holder blocks the lock, and how late its successor may be after that.
const TTL: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_millis(1500);

#[tokio::main]
async fn main() -> ExitCode {
    support::open("tour", tour, work).await
}

async fn tour(demo: &Demo, locks: &Locks) -> Outcome {
    demo.contention().await?;
    demo.nesting(locks).await?;
    demo.crash(locks).await?;
    demo.say("All of this was checked: no overlap, growing tokens, the counts, a takeover in time.")
}

impl Demo {
    /// Act 1: several processes contend for one mutex.
    async fn contention(&self) -> Outcome {
        let title = format!("Act 1: {PROCESSES} processes acquire the mutex `backup`, {TURNS} times each.");
        self.title(&title)?;
        let (mut events, children) = self.contenders()?;
        let mut inside: Option<(String, Duration)> = None;
        let mut tokens: Vec<u64> = Vec::new();
        while let Some(event) = events.recv().await {
            let now = self.start.elapsed();
            let event = event?;
            match event.split(' ').collect::<Vec<_>>()[..] {
                ["entered", worker, token] => {
                    check(inside.is_none(), || format!("process {worker} entered beside {inside:?}"))?;
                    let token = token.parse()?;
                    let last = tokens.last().copied().unwrap_or_default();
                    check(token > last, || format!("token {token} came after {last}"))?;
                    inside = Some((worker.to_owned(), now));
                    tokens.push(token);
                }
                ["leaving", worker] => {
                    let alone = inside.take().filter(|(name, _)| name == worker);
                    let (_, from) = alone.ok_or_else(|| format!("process {worker} left without a hold"))?;
                    let (from, to) = (from.as_secs_f64(), now.as_secs_f64());
                    let token = tokens.last().copied().unwrap_or_default();
                    self.say(format!(
                        "  process {worker} held it from {from:.3}s to {to:.3}s, token {token}"
                    ))?;
                }
                _ => return Err(format!("unexpected line of a process: {event:?}").into()),
            }
        }
        for child in children {
            ended_well(child).await?;
        }
        check(tokens.len() == PROCESSES * TURNS, || format!("there were {} holds", tokens.len()))?;
        self.say(format!(
            "{} holds, no two at the same time, each with a larger fencing token.",
            tokens.len()
        ))
    }

    /// Starts the processes of act 1, with one pipe for the lines of all of them. Each process
    /// writes "entered" and "leaving" while it holds the mutex, so two holders at the same time
    /// would show as two "entered" in a row. The check needs no clocks that agree.
    fn contenders(&self) -> Outcome<(mpsc::UnboundedReceiver<io::Result<String>>, Vec<Child>)> {
        let (reader, writer) = io::pipe()?;
        let mut children = Vec::new();
        for number in 1..=PROCESSES {
            let mut command = self.command("contend", &number.to_string())?;
            children.push(command.stdin(Stdio::null()).stdout(writer.try_clone()?).spawn()?);
        }
        drop(writer); // the pipe now ends when the processes do
        let (sender, events) = mpsc::unbounded_channel();
        std::thread::spawn(move || io::BufReader::new(reader).lines().try_for_each(|line| sender.send(line)));
        Ok((events, children))
    }

    /// Act 2: a callee and another process acquire a re-entrant lock again.
    async fn nesting(&self, locks: &Locks) -> Outcome {
        self.title("Act 2: a call chain, and then another process, re-enter the lock `orders:42`.")?;
        let owner = Owner::new();
        let lock = orders(locks, &owner)?;
        self.ship(locks, &owner).await?;
        self.counts(&lock, 0, "shipped: free again").await?;

        let guard = lock.lock().await?;
        self.say(format!("  the same owner acquires it again, token {}", token(guard.lease())?))?;
        self.counts(&lock, 1, "held here").await?;
        let mut helper = Worker::start(self, "reenter", &owner.to_string())?;
        let same = helper.token().await? == token(guard.lease())?;
        check(same, || "the other process has another token".into())?;
        self.counts(&lock, 2, &format!("process {} received the owner as text", helper.pid)).await?;
        check(lock.with_owner(&Owner::new()).try_lock().await?.is_none(), || "another owner entered".into())?;
        self.say("    and try_lock of another owner returns None")?;
        helper.finish().await?;
        self.counts(&lock, 1, "that process released its hold").await?;
        guard.release().await?;
        self.counts(&lock, 0, "the last hold is released: free").await?;
        self.say("Every hold was counted, and all holds of one lease had the same token.")
    }

    /// The outer function: acquires the lock and calls another function that acquires it too.
    async fn ship(&self, locks: &Locks, owner: &Owner) -> Outcome {
        let lock = orders(locks, owner)?;
        let guard = lock.lock().await?;
        let outer = token(guard.lease())?;
        self.counts(&lock, 1, &format!("ship() acquired it, token {outer}")).await?;
        let inner = self.bill(locks, owner).await?;
        check(inner == outer, || format!("token {inner} inside, {outer} outside"))?;
        self.counts(&lock, 1, "bill() returned").await?;
        Ok(guard.release().await?)
    }

    /// The inner function: all that it gets from its caller is the owner.
    async fn bill(&self, locks: &Locks, owner: &Owner) -> Outcome<u64> {
        let lock = orders(locks, owner)?;
        let guard = lock.lock().await?;
        let token = token(guard.lease())?;
        self.counts(&lock, 2, &format!("bill(), called by ship(), acquired it, token {token}")).await?;
        guard.release().await?;
        Ok(token)
    }

    /// Prints and checks the number of holds that the server counts.
    async fn counts(&self, lock: &ReentrantLock, expected: u64, what: &str) -> Outcome {
        let count = lock.inspect().await?.holders.first().map_or(0, |holder| holder.count);
        check(count == expected, || format!("{what}: count {count}, not {expected}"))?;
        self.say(format!("    count {count}  {what}"))
    }

    /// Act 3: a holder is killed, and the next waiter is granted the lock.
    async fn crash(&self, locks: &Locks) -> Outcome {
        self.title(&format!("Act 3: a process is killed while it holds the mutex `nightly`, TTL {TTL:?}."))?;
        let mutex = nightly(locks)?;
        let mut holder = Worker::start(self, "hold", "-")?;
        let before = holder.token().await?;
        self.say(format!("  process {} holds it, token {before}", holder.pid))?;
        let successor = tokio::spawn(lock_at(mutex.clone()));
        while mutex.inspect().await?.waiters == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        self.say("  this process waits for it")?;
        sleep(TTL + Duration::from_millis(200)).await;
        check(!successor.is_finished(), || "a living holder lost its lease".into())?;
        self.say("  one TTL has passed: the holder lives and renews its lease, this process still waits")?;

        let requested_at = Instant::now();
        let left = mutex.inspect().await?.holders.first().and_then(|holder| holder.remaining);
        let left = left.ok_or("the mutex has no holder")?;
        let killed = Instant::now();
        let status = holder.kill().await?;
        self.say(format!("  killed the holder ({status}), with {left:.2?} of its lease left"))?;

        let (guard, granted) = successor.await??;
        let after = token(guard.lease())?;
        let took = granted - killed;
        self.say(format!("  this process was granted it {took:.2?} after the kill, token {after}"))?;
        // The server counts whole milliseconds.
        let earliest = requested_at + left - Duration::from_millis(2);
        check(granted >= earliest, || "too early: the lease was still valid".into())?;
        check(took <= TTL + LATE, || format!("too late: the TTL is {TTL:?}"))?;
        check(after > before, || format!("token {after} came after {before}"))?;
        guard.release().await?;
        self.say(format!("Not before the lease expired, within {:?}, and with a larger token.", TTL + LATE))
    }
}

/// Acquires the mutex, and returns when.
async fn lock_at(mutex: Mutex) -> Result<(MutexGuard, Instant), redlatch::Error> {
    let guard = mutex.lock().await?;
    Ok((guard, Instant::now()))
}

impl Worker {
    /// Returns the token: the one line that the worker writes, once it holds the lock.
    async fn token(&mut self) -> Outcome<u64> {
        Ok(self.next_line().await?.parse()?)
    }

    async fn kill(&mut self) -> Outcome<std::process::ExitStatus> {
        self.child.kill().await?;
        Ok(self.child.wait().await?)
    }
}

/// Runs a worker process. Workers only report; the tour checks.
async fn work(_: &Demo, locks: &Locks, role: &str, argument: &str) -> Outcome {
    match role {
        "contend" => contend(locks, argument).await,
        "reenter" => reenter(locks, &argument.parse()?).await,
        "hold" => hold(locks).await,
        _ => Err(format!("no such role: {role}").into()),
    }
}

async fn contend(locks: &Locks, worker: &str) -> Outcome {
    let mutex = locks.mutex("backup")?;
    for _ in 0..TURNS {
        let guard = mutex.lock().await?;
        report(format!("entered {worker} {}", token(guard.lease())?))?;
        sleep(HOLD).await;
        report(format!("leaving {worker}"))?; // before the release: the next may enter at once
        guard.release().await?;
    }
    Ok(())
}

async fn reenter(locks: &Locks, owner: &Owner) -> Outcome {
    let guard = orders(locks, owner)?.lock().await?;
    report(token(guard.lease())?)?;
    stdin_closed().await?;
    Ok(guard.release().await?)
}

async fn hold(locks: &Locks) -> Outcome {
    let guard = nightly(locks)?.lock().await?;
    report(token(guard.lease())?)?;
    stdin_closed().await?;
    Ok(guard.release().await?)
}

fn token(lease: &Lease) -> Outcome<u64> {
    Ok(lease.fencing_token().ok_or("a lease without a fencing token")?.get())
}

/// The lock of act 2.
fn orders(locks: &Locks, owner: &Owner) -> Outcome<ReentrantLock> {
    Ok(locks.reentrant("orders:42", owner)?)
}

/// The mutex of act 3.
fn nightly(locks: &Locks) -> Outcome<Mutex> {
    Ok(locks.with_options(Options::new().ttl(TTL))?.mutex("nightly")?)
}
