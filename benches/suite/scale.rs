//! Many holders, many waiters and many readers on one server, a killed holder, a client that has
//! just started, and a stopped master of a cluster.

use std::time::{Duration, Instant};

use redlatch::{Locks, Options, Owner, Renewal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};

use super::Outcome;
use super::client_cpu::client_cpu;
use super::limits::Row;
use super::placement::{Cores, Placement};
use super::plan::Plan;
use super::samples::{Samples, median};
use super::server::{Observer, Server};
use super::shards;
use super::work::{Bench, Work};

/// How many tasks of one client wait for one lock.
const WAITERS: usize = 1_000;

/// How many readers hold a lock while another one comes and goes.
const READERS: usize = 10_000;

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut observer = server.observer().await?;
    let mut rows = vec![idle(&mut observer).await?];
    let counts: &[usize] = if plan.is_quick() { &[10_000] } else { &[100_000, 10_000] };
    for (place, locks) in counts.iter().enumerate() {
        rows.extend(held(server, &mut observer, *locks, place == 0, plan).await?);
    }
    for kind in [WaitMode::Mutex, WaitMode::Reentrant, WaitMode::Read, WaitMode::Write] {
        rows.extend(waiting(server, &mut observer, kind, plan.window * 3).await?);
    }
    rows.push(own_tasks(server, &mut observer, plan).await?);
    rows.push(readers(server, &mut observer).await?);
    rows.push(takeover(server, &mut observer, if plan.is_quick() { 10 } else { 40 }).await?);
    rows.push(cold(server, &mut observer).await?);
    rows.push(shards::measure(if plan.is_quick() { 2 } else { 3 }).await?);
    Ok(rows)
}

/// What a server takes that holds no lock: a part of what it takes while it holds some.
async fn idle(observer: &mut Observer) -> Outcome<Row> {
    observer.alone().await?;
    let (start, cpu) = (Instant::now(), observer.cpu().await?);
    sleep(Duration::from_secs(5)).await;
    let cpu = observer.cpu().await?.saturating_sub(cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    Ok(Row::shown("a server without requests: CPU of the server", cpu * 100.0, "% of a core"))
}

/// What the waiting tasks ask for.
#[derive(Clone, Copy, Debug)]
enum WaitMode {
    Mutex,
    /// Each task with an owner of its own.
    Reentrant,
    Read,
    Write,
}

impl WaitMode {
    fn title(self) -> &'static str {
        match self {
            WaitMode::Mutex => "mutex",
            WaitMode::Reentrant => "reentrant",
            WaitMode::Read => "read",
            WaitMode::Write => "write",
        }
    }

    /// Waits for the lock, and keeps it for no time.
    async fn acquire(self, locks: &Locks, name: &str) -> Outcome<()> {
        match self {
            WaitMode::Mutex => locks.mutex(name)?.lock().await?.release().await?,
            WaitMode::Reentrant => {
                locks.reentrant(name, &Owner::new())?.lock().await?.release().await?;
            }
            WaitMode::Read => locks.rwlock(name)?.read().await?.release().await?,
            WaitMode::Write => locks.rwlock(name)?.write().await?.release().await?,
        }
        Ok(())
    }
}

/// Tasks of one client wait for a lock that another client holds.
async fn waiting(
    server: &Server,
    observer: &mut Observer,
    kind: WaitMode,
    span: Duration,
) -> Outcome<Vec<Row>> {
    observer.alone().await?;
    let (holder, client) = (Locks::open(&server.url()).await?, Locks::open(&server.url()).await?);
    let name = format!("waited:{}", kind.title());
    let (mutex, reentrant, rwlock) =
        (holder.mutex(&name)?, holder.reentrant(&name, &Owner::new())?, holder.rwlock(&name)?);
    let held = match kind {
        WaitMode::Mutex => (Some(mutex.lock().await?), None, None),
        WaitMode::Reentrant => (None, Some(reentrant.lock().await?), None),
        WaitMode::Read | WaitMode::Write => (None, None, Some(rwlock.write().await?)),
    };
    let mut tasks = JoinSet::new();
    for _ in 0..WAITERS {
        let (client, name) = (client.clone(), name.clone());
        tasks.spawn(async move { kind.acquire(&client, &name).await });
    }
    // By then all of them wait. The pauses between their polls grow for 4 s.
    sleep(Duration::from_secs(4)).await;
    let (start, commands, cpu) = (Instant::now(), observer.commands().await?, client_cpu());
    sleep(span).await;
    let took = start.elapsed().as_secs_f64();
    let cpu = client_cpu().saturating_sub(cpu).as_secs_f64();
    let commands = observer.commands().await? - commands;
    drop(held);
    for outcome in timeout(Duration::from_secs(60), tasks.join_all()).await? {
        outcome?;
    }
    let what = |what| format!("{WAITERS} tasks of a client wait for one lock, {}: {what}", kind.title());
    Ok(vec![
        Row::at_most(what("commands"), commands as f64 / took, "a second", 5.0),
        Row::at_most(what("CPU of the clients"), cpu / took * 100.0, "% of a core", 0.2),
    ])
}

/// Tasks of one client hand one lock over among themselves: hand-overs in the time of a bare round
/// trip, which is measured anew beside each window, since it varies more than they do.
async fn own_tasks(server: &Server, observer: &mut Observer, plan: &Plan) -> Outcome<Row> {
    let mut ratios = Vec::new();
    let cores = Cores::of(server.process());
    if let Some(cores) = &cores {
        cores.place(Placement::Apart)?;
    }
    for _ in 0..plan.rounds {
        observer.alone().await?;
        let trip = round_trip(server).await?;
        let (acquired, span) = hand_over_inside(server, plan.window / 6).await?;
        ratios.push(acquired as f64 * trip / span.as_secs_f64());
    }
    if let Some(cores) = cores {
        cores.place(Placement::Anywhere)?;
    }
    let what =
        format!("{WAITERS} tasks of a client hand a mutex over, server on a core of its own: hand-overs");
    Ok(Row::at_least(what, median(ratios), "a round trip", 0.8))
}

/// The median of the round trips of a script that does nothing, in seconds.
async fn round_trip(server: &Server) -> Outcome<f64> {
    let bench = Bench::new(server).await?;
    let mut trips = Samples::default();
    let mut baseline = bench.pair(Work::Baseline, 0)?;
    for _ in 0..2_000 {
        let start = Instant::now();
        baseline.run().await?; // two round trips
        trips.push(start.elapsed() / 2);
    }
    Ok(trips.median() / 1e6)
}

/// How often the tasks acquired the lock, in which time.
async fn hand_over_inside(server: &Server, span: Duration) -> Outcome<(u64, Duration)> {
    let client = Locks::open(&server.url()).await?;
    let until = Instant::now() + span;
    let mut tasks = JoinSet::new();
    for _ in 0..WAITERS {
        let mutex = client.mutex("handed-over-inside")?;
        tasks.spawn(async move {
            let mut acquired = 0_u64;
            while Instant::now() < until {
                let guard = mutex.lock().await?;
                // The last tasks only leave the queue.
                acquired += u64::from(Instant::now() < until);
                guard.release().await?;
            }
            Outcome::Ok(acquired)
        });
    }
    let mut acquired = 0;
    while let Some(done) = tasks.join_next().await {
        acquired += done??;
    }
    Ok((acquired, span))
}

/// Locks that are held for longer than it takes to renew them once, with the default TTL. The
/// resident memory of this process says something only the first time: later leases reuse it.
async fn held(
    server: &Server,
    observer: &mut Observer,
    locks: usize,
    is_first: bool,
    plan: &Plan,
) -> Outcome<Vec<Row>> {
    observer.alone().await?;
    let client = Locks::open(&server.url()).await?;
    // The first lock brings the scripts and the task that renews.
    client.mutex("held")?.lock().await?.release().await?;
    observer.empty().await?;
    let (memory, resident) = (observer.memory().await?, resident());
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let client = client.clone();
        tasks.spawn(async move {
            let mut guards = Vec::with_capacity(locks / 64 + 1);
            for number in (task..locks).step_by(64) {
                guards.push(client.mutex(format!("held:{number}"))?.lock().await?);
            }
            Outcome::Ok(guards)
        });
    }
    let mut guards = Vec::new();
    while let Some(done) = tasks.join_next().await {
        guards.push(done??);
    }
    let count = locks as f64;
    let held = observer.memory().await?.saturating_sub(memory) as f64 / count;
    let resident = self::resident().saturating_sub(resident) as f64 / count;
    let (start, cpu, own) = (Instant::now(), observer.cpu().await?, client_cpu());
    let renewals = if plan.is_quick() { 1 } else { 2 };
    sleep(Duration::from_secs(10) * renewals).await; // each is renewed every 10 s
    let took = start.elapsed().as_secs_f64();
    let part = |cpu: Duration| cpu.as_secs_f64() / took * 100.0;
    let cpu = part(observer.cpu().await?.saturating_sub(cpu));
    let own = part(client_cpu().saturating_sub(own));
    let lost = guards.iter().flatten().filter(|guard| guard.lease().is_lost()).count();
    if lost > 0 {
        return Err(format!("{lost} of {locks} held locks were lost").into());
    }
    drop(guards);
    client.settled().await;
    let released = observer.memory().await?.saturating_sub(memory) as f64 / count;
    let what = |what| format!("{locks} locks held, TTL 30 s: {what}");
    let most = count / 1e4 * 0.3;
    let mut rows = vec![
        Row::at_most(what("CPU of the client"), own, "% of a core", most),
        Row::at_most(what("CPU of the server"), cpu, "% of a core", most),
        Row::at_most(what("memory of the server, a lock"), held, "bytes", 280.0),
        Row::shown(what("memory of the server, a lock after its release"), released, "bytes"),
    ];
    if is_first && resident > 0.0 {
        rows.push(Row::at_most(what("memory of the client, a lease"), resident, "bytes", 600.0));
    }
    Ok(rows)
}

/// The resident memory of this process, in bytes. Zero where there is no `/proc`.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// A reader comes and goes while few or many others stay.
async fn readers(server: &Server, observer: &mut Observer) -> Outcome<Row> {
    observer.alone().await?;
    let options = Options::new().max_readers(READERS as u32 + 10);
    let client = Locks::builder().server(server.url()).options(options).connect().await?;
    let lock = client.rwlock("read-by-many")?;
    let mut medians = Vec::new();
    let mut guards = Vec::new();
    for present in [1, READERS] {
        while guards.len() < present {
            let mut tasks = JoinSet::new();
            for _ in 0..256.min(present - guards.len()) {
                let lock = lock.clone();
                tasks.spawn(async move { lock.read().await });
            }
            while let Some(done) = tasks.join_next().await {
                guards.push(done??);
            }
        }
        let mut samples = Samples::default();
        for _ in 0..1_000 {
            let start = Instant::now();
            lock.read().await?.release().await?;
            samples.push(start.elapsed());
        }
        medians.push(samples.median());
    }
    drop(guards);
    client.settled().await;
    let what = format!("a read pair beside {READERS} readers, divided by one beside one reader");
    Ok(Row::at_most(what, medians[1] / medians[0], "x", 1.2))
}

/// How long after the TTL of a holder that was killed a waiter has the lock. The holder's lease is
/// leaked: the server cannot distinguish the two.
async fn takeover(server: &Server, observer: &mut Observer, rounds: usize) -> Outcome<Row> {
    observer.alone().await?;
    let ttl = Duration::from_millis(300);
    let options = Options::new().ttl(ttl).renewal(Renewal::Never);
    let holder = Locks::builder().server(server.url()).options(options).connect().await?;
    let client = Locks::open(&server.url()).await?;
    let mut samples = Samples::default();
    for round in 0..rounds {
        let name = format!("killed:{round}");
        let guard = holder.mutex(&name)?.lock().await?;
        let acquired = Instant::now();
        guard.leak();
        client.mutex(&name)?.lock().await?.release().await?;
        samples.push(acquired.elapsed().saturating_sub(ttl));
    }
    let what = "takeover from a killed holder: median time after its TTL";
    Ok(Row::at_most(what, samples.median() / 1e3, "ms", 20.0))
}

/// How long a message takes in each direction through the slow proxy.
const ONE_WAY: Duration = Duration::from_millis(20);

/// The round trips of a client that opens, locks, releases and closes: through a proxy that delays
/// each message, the time is that of the round trips. Connecting takes one more.
async fn cold(server: &Server, observer: &mut Observer) -> Outcome<Row> {
    observer.alone().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("redis://{}/", listener.local_addr()?);
    let target = server.address();
    let proxy = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(&target).await else { return };
            let _nodelay = (client.set_nodelay(true), server.set_nodelay(true));
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            connections.spawn(delay(from_client, to_server));
            connections.spawn(delay(from_server, to_client));
        }
    });
    let start = Instant::now();
    let locks = Locks::open(&url).await?;
    locks.mutex("cold")?.lock().await?.release().await?;
    locks.close(Duration::from_secs(5)).await?;
    let took = start.elapsed();
    proxy.abort();
    let trips = 1.0 + (took.as_secs_f64() / (2.0 * ONE_WAY.as_secs_f64())).floor();
    Ok(Row::at_most("a new client opens, locks, releases and closes", trips, "round trips", 4.0))
}

/// Passes bytes on, each message a fixed time after it came.
async fn delay(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf) {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let reading = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            if sender.send((tokio::time::Instant::now() + ONE_WAY, buffer[..count].to_vec())).is_err() {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, bytes)) = receiver.recv().await {
            sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(reading, writing);
}
