//! A shared cache in several processes, under a read-write lock: many readers and one refresher.
//! One refresher is stopped in the middle of its work until its lease has expired; its late writes
//! are refused.
//!
//! ```text
//! scripts/demo                                          # finds a server, starts a private one
//! cargo run --example cache                             # starts $REDLATCH_SERVER, or redis-server
//! cargo run --example cache -- redis://127.0.0.1:6379/  # uses a server that runs already
//! ```
//!
//! On a server that runs already, it uses names of its own, with `cache-` and a number in them. It
//! removes its keys at the end, unless it is interrupted.
//!
//! The exit status is 0 if every check passed, 1 if one failed, 2 for wrong arguments. It needs a
//! Unix, to stop processes with signals.

mod support;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redlatch::redis::aio::MultiplexedConnection;
use redlatch::redis::{AsyncCommands as _, AsyncConnectionConfig, Client};
use redlatch::{Error, FencingToken, Locks, Options, RwLock, RwLockReadGuard, RwLockWriteGuard, fenced};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::task::JoinSet;
use tokio::time::sleep;

use support::{Demo, Outcome, Worker, check, report, stdin_closed};

/// The price list. The value of each part is the version that it belongs to, so that a mixture
/// shows.
const PARTS: [&str; 6] = ["tea", "coffee", "cocoa", "sugar", "milk", "honey"];

/// The processes that read, the tasks of each, and their pause between two parts and between two
/// reads.
const PROCESSES: usize = 3;
const TASKS: u64 = 4;
const PAUSE: Duration = Duration::from_millis(2);

/// How often a refresher refreshes in a row, and its pause: so short that two refreshes fit into
/// one read.
const REFRESHES: usize = 30;
const PACE: Duration = Duration::from_millis(2);

/// How long a refresher that has stopped blocks others.
const WRITE_TTL: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> ExitCode {
    support::open("cache", show, work).await
}

/// The cache: two copies of the price list, and the name of the one that is current.
///
/// The lock keeps refreshers apart, and readers out while a refresher works. A refresher that is
/// stopped for longer than its lease does not know that it has expired: the lock cannot keep it
/// from writing, its smaller token does. It also leaves half a list behind, so the current copy is
/// never the one that is written.
#[derive(Clone)]
struct Prices {
    lock: RwLock,
    redis: MultiplexedConnection,
    run: String,
}

impl Prices {
    async fn connect(demo: &Demo, locks: &Locks) -> Outcome<Prices> {
        let lock = locks.with_options(Options::new().write_ttl(WRITE_TTL))?.rwlock("prices")?;
        let patient = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
        let client = Client::open(demo.url.as_str())?;
        let redis = client.get_multiplexed_async_connection_with_config(&patient).await?;
        Ok(Prices { lock, redis, run: demo.run.clone() })
    }

    /// All keys are in one slot of a cluster, since a script compares one and writes another.
    fn key(&self, what: &str) -> String {
        format!("{{{}}}:{what}", self.run)
    }

    async fn get(&self, what: &str) -> Outcome<Option<String>> {
        Ok(self.redis.clone().get(self.key(what)).await?)
    }

    /// Compares and writes, in one step. False: refused, since a larger token has written to one of
    /// the keys.
    async fn set(&self, token: FencingToken, what: &str, value: &str) -> Outcome<bool> {
        let mut redis = self.redis.clone();
        Ok(fenced::set(&mut redis, &self.key(what), &self.key("token"), token, value).await?)
    }

    /// Returns the versions in the list: one, unless it is a mixture. Each part is read with its
    /// own request, and a pause before the next leaves time for a mixture.
    async fn read(&self, guard: RwLockReadGuard, pause: Duration) -> Outcome<BTreeSet<u64>> {
        let copy = self.get("current").await?.ok_or("nothing was published yet")?;
        let mut versions = BTreeSet::new();
        for part in PARTS {
            let found = self.get(&format!("{copy}:{part}")).await?;
            versions.insert(found.ok_or_else(|| format!("there is no {part}"))?.parse()?);
            sleep(pause).await;
        }
        guard.release().await?; // an error if the lease was lost: what was read may be a mixture
        Ok(versions)
    }

    async fn refresh(&self) -> Outcome<u64> {
        let refresh = Refresh::begin(self).await?;
        for part in PARTS {
            check(refresh.put(part).await?, || format!("{part} was refused while the lock was held"))?;
        }
        check(refresh.publish().await?, || "a version was refused while the lock was held".into())?;
        // Other readers enter from here on, but no refresher does before this task has read.
        let guard = refresh.guard.downgrade().await?;
        let found = self.read(guard, Duration::ZERO).await?;
        let token = refresh.token.get();
        check(found == BTreeSet::from([token]), || format!("{token} became {found:?}"))?;
        Ok(token)
    }

    async fn remove(mut self) -> Outcome {
        let lists = ["a", "b"].map(|copy| PARTS.map(|part| format!("{copy}:{part}")));
        let others = ["begun", "current", "token"].map(str::to_owned);
        let keys: Vec<String> = lists.iter().flatten().chain(&others).map(|what| self.key(what)).collect();
        Ok(self.redis.del(keys).await?)
    }
}

/// A refresh under way.
struct Refresh<'a> {
    prices: &'a Prices,
    guard: RwLockWriteGuard,
    token: FencingToken,
    copy: &'static str,
}

impl Refresh<'_> {
    async fn begin(prices: &Prices) -> Outcome<Refresh<'_>> {
        let guard = prices.lock.write().await?;
        let token = guard.lease().fencing_token().ok_or("fencing is off")?;
        // From here on smaller tokens are refused: no paused refresher can change what is read
        // next.
        let begun = prices.set(token, "begun", &token.to_string()).await?;
        check(begun, || format!("{token} is not the largest token"))?;
        let copy = if prices.get("current").await?.as_deref() == Some("a") { "b" } else { "a" };
        Ok(Refresh { prices, guard, token, copy })
    }

    /// Writes a part into the copy that is not current, so that no reader sees it yet.
    async fn put(&self, part: &str) -> Outcome<bool> {
        self.prices.set(self.token, &format!("{}:{part}", self.copy), &self.token.to_string()).await
    }

    /// Makes the written copy the current one, in one step.
    async fn publish(&self) -> Outcome<bool> {
        self.prices.set(self.token, "current", self.copy).await
    }
}

async fn show(demo: &Demo, locks: &Locks) -> Outcome {
    let prices = Prices::connect(demo, locks).await?;
    let outcome = run(demo, &prices).await;
    outcome.and(prices.remove().await)
}

async fn run(demo: &Demo, prices: &Prices) -> Outcome {
    demo.title("1. One process refreshes a price list, others read it.")?;
    let mut first = Worker::start(demo, "refresh", "-")?;
    let mut second = Worker::start(demo, "refresh", "-")?;
    let version = first.ask("refresh").await?;
    demo.say(format!("  process {} has published version {version}", first.pid))?;
    let mut readers = Vec::new();
    for _ in 0..PROCESSES {
        readers.push(Worker::start(demo, "read", "-")?);
    }
    for reader in &mut readers {
        reader.next_line().await?; // each of its tasks has read once
    }
    let parts = PARTS.len();
    demo.say(format!("  {PROCESSES} processes, {TASKS} tasks in each, read its {parts} parts one by one"))?;
    let version = first.refreshes().await?;
    demo.say(format!("  {REFRESHES} more versions came meanwhile, the last is {version}"))?;

    demo.title("2. It is stopped in the middle of a refresh, and another process takes over.")?;
    let stale: u64 = first.ask("refresh, with a break").await?.parse()?;
    first.stop(true)?;
    let stopped = Instant::now();
    demo.say(format!("  process {} has written half of version {stale}, and is stopped", first.pid))?;
    let version: u64 = second.ask("refresh").await?.parse()?;
    let after = stopped.elapsed();
    let pid = second.pid;
    demo.say(format!(
        "  process {pid} has published version {version}, {after:.2?} later: the TTL is {WRITE_TTL:?}"
    ))?;
    check(version > stale, || format!("version {version} came after {stale}"))?;
    first.stop(false)?;
    let late = first.ask("continue").await?;
    let (refused, lost) = late.split_once(' ').ok_or("an incomplete reply")?;
    let (refused, lost, rest) = (refused.parse::<usize>()?, lost.parse::<bool>()?, parts - parts / 2 + 1);
    demo.say(format!("  process {} continues: {refused} of its {rest} late writes were refused", first.pid))?;
    check(refused == rest, || "a stale refresher wrote".into())?;
    check(lost, || "a stale refresher's lease did not report its loss".into())?;
    demo.say("    and its lease reported the loss")?;
    let version = second.refreshes().await?;
    demo.say(format!("  {REFRESHES} more versions came meanwhile, the last is {version}"))?;

    demo.title("3. The versions that the readers saw meanwhile.")?;
    for reader in readers {
        let pid = reader.pid;
        let line = reader.finish().await?.ok_or("a reader did not report its reads")?;
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [reads, least, versions, mixed, newest] = numbers[..] else { return Err(line.into()) };
        demo.say(format!(
            "  process {pid}: {reads} reads of {versions} versions, at least {least} in each task"
        ))?;
        check(mixed == 0, || format!("{mixed} reads found a mixture of versions"))?;
        check(least > 2, || "a task read only at the beginning and at the end".into())?;
        check(newest == version, || format!("its last read found version {newest}, not {version}"))?;
    }
    first.finish().await?;
    second.finish().await?;
    let found = prices.read(prices.lock.read().await?, PAUSE).await?;
    check(found == BTreeSet::from([version]), || format!("the cache holds {found:?}, not {version}"))?;
    let refreshes = 2 * REFRESHES + 2;
    demo.say(format!("{refreshes} refreshes, no mixture read, {refused} late writes refused."))?;
    demo.say(format!("The last version, {version}, is that of the process that took over."))
}

impl Worker {
    /// Sends an order, and waits for its reply.
    async fn ask(&mut self, order: &str) -> Outcome<String> {
        self.stdin.write_all(format!("{order}\n").as_bytes()).await?;
        self.next_line().await
    }

    /// Makes it refresh several times, and returns the last version.
    async fn refreshes(&mut self) -> Outcome<u64> {
        for _ in 1..REFRESHES {
            self.ask("refresh").await?;
            sleep(PACE).await;
        }
        Ok(self.ask("refresh").await?.parse()?)
    }

    /// Stops the process, or lets it continue.
    fn stop(&self, stop: bool) -> Outcome {
        #[cfg(unix)]
        {
            use rustix::process::{Pid, Signal, kill_process};
            let pid = Pid::from_raw(i32::try_from(self.pid)?).ok_or("a process without a number")?;
            Ok(kill_process(pid, if stop { Signal::STOP } else { Signal::CONT })?)
        }
        #[cfg(not(unix))]
        Err(format!("process {} cannot be stopped ({stop}): this system has no signals", self.pid).into())
    }
}

/// Runs a worker process. Workers only report; the first process checks.
async fn work(demo: &Demo, locks: &Locks, role: &str, _: &str) -> Outcome {
    let prices = Prices::connect(demo, locks).await?;
    match role {
        "read" => read(&prices).await,
        "refresh" => refresh(&prices).await,
        _ => Err(format!("no such role: {role}").into()),
    }
}

async fn refresh(prices: &Prices) -> Outcome {
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Some(order) = orders.next_line().await? {
        if order == "refresh" {
            report(prices.refresh().await?)?;
            continue;
        }
        let refresh = Refresh::begin(prices).await?;
        let (early, late) = PARTS.split_at(PARTS.len() / 2);
        for part in early {
            check(refresh.put(part).await?, || format!("{part} was refused while the lock was held"))?;
        }
        report(refresh.token)?;
        orders.next_line().await?; // the process is stopped here
        // `while_held` would drop this work. But checking the lease and writing are two steps: a
        // process may be stopped between them.
        let mut refused = 0;
        for part in late {
            refused += u32::from(!refresh.put(part).await?);
        }
        refused += u32::from(!refresh.publish().await?);
        let lost = matches!(refresh.guard.downgrade().await, Err(Error::Lost { .. }));
        report(format!("{refused} {lost}"))?;
    }
    Ok(())
}

async fn read(prices: &Prices) -> Outcome {
    let finish = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let mut seen = PriceReading::default();
        seen.read(prices).await?;
        tasks.spawn(read_on(prices.clone(), seen, Arc::clone(&finish)));
    }
    report("reading")?;
    stdin_closed().await?;
    finish.store(true, Ordering::Relaxed);
    let (mut all, mut least) = (PriceReading::default(), u64::MAX);
    while let Some(seen) = tasks.join_next().await {
        let seen = seen??;
        least = least.min(seen.reads);
        all.reads += seen.reads;
        all.mixed += seen.mixed;
        all.versions.extend(seen.versions);
    }
    let newest = all.versions.last().ok_or("nothing was read")?;
    report(format!("{} {least} {} {} {newest}", all.reads, all.versions.len(), all.mixed))
}

async fn read_on(prices: Prices, mut seen: PriceReading, finish: Arc<AtomicBool>) -> Outcome<PriceReading> {
    loop {
        // Before the read, so that the last read finds the last version.
        let last = finish.load(Ordering::Relaxed);
        seen.read(&prices).await?;
        if last {
            return Ok(seen);
        }
        sleep(PAUSE).await;
    }
}

/// What a task has read.
#[derive(Default)]
struct PriceReading {
    reads: u64,
    mixed: u64,
    versions: BTreeSet<u64>,
}

impl PriceReading {
    async fn read(&mut self, prices: &Prices) -> Outcome {
        let versions = prices.read(prices.lock.read().await?, PAUSE).await?;
        self.reads += 1;
        self.mixed += u64::from(versions.len() > 1);
        self.versions.extend(versions);
        Ok(())
    }
}
