//! A tour of redlatch, with real processes: they contend, they nest, one is killed. It checks what it shows.
//!
//! ```text
//! scripts/demo                                         # finds a server's binary, starts a private one
//! cargo run --example tour                             # starts $REDLATCH_SERVER, or redis-server
//! cargo run --example tour -- redis://127.0.0.1:6379/  # uses a server that runs already
//! ```
//!
//! On a server that runs already it uses names of its own, below `lock:tour-`, and leaves only keys that
//! expire. It exits with 0 if everything was as it should be, 1 if not, 2 if it was told anything else.

mod support;

use std::io::{self, BufRead as _};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use redlatch::{Locks, Mutex, MutexGuard, Options, Owner, ReentrantLock};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::sleep;

use support::{Outcome, Stage, Worker, check, ended_well, report, token, told_to_finish};

/// Act 1: so many processes take the mutex so often, and keep it for so long.
const PROCESSES: usize = 4;
const TURNS: usize = 3;
const HOLD: Duration = Duration::from_millis(100);

/// Act 3: for how long a dead holder may be in the way, and how late its successor may be after that.
const TTL: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_millis(1500);

#[tokio::main]
async fn main() -> ExitCode {
    support::open("tour", tour, work).await
}

async fn tour(stage: &Stage, locks: &Locks) -> Outcome {
    stage.contention().await?;
    stage.nesting(locks).await?;
    stage.crash(locks).await?;
    stage.say("Everything shown was checked: no overlap, growing tokens, counts, a takeover in time.")
}

impl Stage {
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

        let guard = lock.with_owner(&owner).lock().await?;
        self.say(format!("  the same owner takes it anew, token {}", token(guard.lease())?))?;
        self.counts(&lock, 1, "held here").await?;
        let mut helper = Worker::start(self, "reenter", &owner.to_string())?;
        let same = helper.token().await? == token(guard.lease())?;
        check(same, || "the other process has another token".into())?;
        self.counts(&lock, 2, &format!("process {} was sent the owner as text", helper.pid)).await?;
        check(lock.with_owner(&Owner::new()).try_lock().await?.is_none(), || "a stranger came in".into())?;
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
        let guard = lock.with_owner(owner).lock().await?;
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
        let guard = lock.with_owner(owner).lock().await?;
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
}

/// Waits for the mutex, and notes when it came.
async fn take(mutex: Mutex) -> Result<(MutexGuard, Instant), redlatch::Error> {
    let guard = mutex.lock().await?;
    Ok((guard, Instant::now()))
}

impl Worker {
    /// The one line that it says, once it holds the lock.
    async fn token(&mut self) -> Outcome<u64> {
        Ok(self.hear().await?.parse()?)
    }

    async fn kill(&mut self) -> Outcome<std::process::ExitStatus> {
        self.child.kill().await?;
        Ok(self.child.wait().await?)
    }
}

/// What the other processes do. They only report; the tour judges.
async fn work(_: &Stage, locks: &Locks, role: &str, who: &str) -> Outcome {
    match role {
        "contend" => contend(locks, who).await,
        "reenter" => reenter(locks, &who.parse()?).await,
        "hold" => hold(locks).await,
        _ => Err(format!("no such role: {role}").into()),
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
    let guard = orders(locks)?.with_owner(owner).lock().await?;
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

/// The lock of act 2.
fn orders(locks: &Locks) -> Outcome<ReentrantLock> {
    Ok(locks.reentrant("orders:42")?)
}

/// The mutex of act 3.
fn nightly(locks: &Locks) -> Outcome<Mutex> {
    Ok(locks.with_options(Options::new().ttl(TTL))?.mutex("nightly")?)
}
