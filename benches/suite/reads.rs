//! Tasks of one client that read together, with and without `Options::local_turn`.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redlatch::{Locks, Options, RwLock};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Outcome;
use super::plan::Plan;
use super::plot::thousands;
use super::record::Target;
use super::samples::median;
use super::server::Server;

/// The numbers of clients and of the tasks of each, the pause between two writes of another client
/// if there are any, and how many times more reads there must be than without sharing.
const READERS: [(usize, usize, Option<Duration>, f64); 4] = [
    (1, 64, None, 40.0),
    (1, 64, Some(Duration::from_millis(50)), 40.0),
    (4, 64, None, 20.0),
    (4, 64, Some(Duration::from_millis(50)), 20.0),
];

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    clients: usize,
    tasks: usize,
    has_writer: bool,
    reads_per_second: f64,
    without: f64,
    /// The median over all rounds of the one rate divided by the other.
    gain: f64,
    least_gain: f64,
    longest_write_ms: f64,
    longest_write_without_ms: f64,
}

struct Window {
    rate: f64,
    longest_write: Duration,
}

/// What the tasks of one window share.
#[derive(Default)]
struct Signals {
    stop: AtomicBool,
    reads: AtomicU64,
    /// How many tasks read now, and whether one writes.
    readers: AtomicU64,
    writes: AtomicBool,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut observer = server.observer().await?;
    let mut rows = Vec::new();
    for (clients, tasks, pause, least_gain) in READERS {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..plan.peer_rounds {
            let off = Options::new().local_turn(Duration::ZERO);
            for (options, windows) in [(Options::new(), &mut with), (off, &mut without)] {
                observer.alone().await?;
                windows.push(window(server, (clients, tasks, pause), options, plan.peer_window).await?);
            }
        }
        let rate = |windows: &[Window]| median(windows.iter().map(|window| window.rate).collect());
        let longest = |windows: &[Window]| {
            windows.iter().map(|window| window.longest_write.as_secs_f64() * 1e3).fold(0.0, f64::max)
        };
        rows.push(Row {
            clients,
            tasks,
            has_writer: pause.is_some(),
            reads_per_second: rate(&with),
            without: rate(&without),
            gain: median(with.iter().zip(&without).map(|(on, off)| on.rate / off.rate).collect()),
            least_gain,
            longest_write_ms: longest(&with),
            longest_write_without_ms: longest(&without),
        });
    }
    Ok(rows)
}

async fn window(
    server: &Server,
    (clients, tasks, pause): (usize, usize, Option<Duration>),
    options: Options,
    span: Duration,
) -> Outcome<Window> {
    let signals = Arc::new(Signals::default());
    let connect = async |options: Options| {
        Locks::builder().server(server.url().as_str()).options(options).connect().await
    };
    let mut running = JoinSet::new();
    for _ in 0..clients {
        let locks = connect(options.clone()).await?;
        for _ in 0..tasks {
            running.spawn(read(locks.rwlock("reads")?, Arc::clone(&signals)));
        }
    }
    let writer = connect(options).await?.rwlock("reads")?;
    sleep(span / 5).await;
    let (start, before) = (Instant::now(), signals.reads.load(Ordering::Relaxed));
    let longest_write = match pause {
        Some(pause) => write(&writer, &signals, (start, span), pause).await?,
        None => {
            sleep(span).await;
            Duration::ZERO
        }
    };
    let reads = signals.reads.load(Ordering::Relaxed) - before;
    let rate = reads as f64 / start.elapsed().as_secs_f64();
    signals.stop.store(true, Ordering::Relaxed);
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(Window { rate, longest_write })
}

async fn read(lock: RwLock, signals: Arc<Signals>) -> Outcome<()> {
    while !signals.stop.load(Ordering::Relaxed) {
        let guard = lock.read().await?;
        signals.readers.fetch_add(1, Ordering::SeqCst);
        let overlaps = signals.writes.load(Ordering::SeqCst);
        signals.readers.fetch_sub(1, Ordering::SeqCst);
        if overlaps && !guard.lease().is_lost() {
            return Err("a task read while another one wrote".into());
        }
        guard.release().await?;
        signals.reads.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Returns the longest wait of a write.
async fn write(
    lock: &RwLock,
    signals: &Signals,
    (start, span): (Instant, Duration),
    pause: Duration,
) -> Outcome<Duration> {
    let mut longest = Duration::ZERO;
    while start.elapsed() < span {
        sleep(pause).await;
        let asked = Instant::now();
        let guard = lock.write().await?;
        longest = longest.max(asked.elapsed());
        signals.writes.store(true, Ordering::SeqCst);
        let overlaps = signals.readers.load(Ordering::SeqCst) > 0;
        signals.writes.store(false, Ordering::SeqCst);
        if overlaps && !guard.lease().is_lost() {
            return Err("a task wrote while others read".into());
        }
        guard.release().await?;
    }
    Ok(longest)
}

impl Row {
    pub(crate) fn targets(&self) -> Vec<Target> {
        let writer = if self.has_writer { " and a writer" } else { "" };
        let contenders = format!("{} clients with {} reading tasks each{writer}", self.clients, self.tasks);
        let limit = format!("{contenders}: reads at least {} times those without sharing", self.least_gain);
        let mut targets = vec![Target::at_least(limit, self.gain, self.least_gain)];
        if self.has_writer {
            let limit = format!("{contenders}: longest write at most that without sharing, and 1 ms");
            let most = self.longest_write_without_ms + 1.0;
            targets.push(Target::at_most(limit, self.longest_write_ms / most, 1.0));
        }
        targets
    }
}

pub(crate) fn print(rows: &[Row]) {
    println!("\ntasks of one client read under one hold, for 1 ms; beside it without that");
    println!(
        "{:>7} {:>5} {:>9} {:>11} {:>9} {:>6} {:>16} {:>10}",
        "clients", "tasks", "a writer", "reads/s", "without", "x", "longest write ms", "without"
    );
    for row in rows {
        let writer = if row.has_writer { "each 50 ms" } else { "no" };
        println!(
            "{:>7} {:>5} {:>9} {:>11.0} {:>9.0} {:>6.1} {:>16.1} {:>10.1}",
            row.clients,
            row.tasks,
            writer,
            row.reads_per_second,
            row.without,
            row.gain,
            row.longest_write_ms,
            row.longest_write_without_ms,
        );
    }
}

pub(crate) fn table(rows: &[Row], page: &mut String) -> Outcome<()> {
    writeln!(page, "| readers of one lock | reads/s | without | x | longest write | without |")?;
    writeln!(page, "|---|---:|---:|---:|---:|---:|")?;
    for row in rows {
        let (clients, tasks, gain) = (row.clients, row.tasks, row.gain);
        let (with, without) = (thousands(row.reads_per_second), thousands(row.without));
        let writer = if row.has_writer { ", and a writer each 50 ms" } else { "" };
        let longest = |ms: f64| if row.has_writer { format!("{ms:.1} ms") } else { "-".to_owned() };
        let (write, write_without) = (longest(row.longest_write_ms), longest(row.longest_write_without_ms));
        writeln!(
            page,
            "| {clients} clients with {tasks} tasks each{writer} | {with} | {without} | {gain:.1} | \
             {write} | {write_without} |"
        )?;
    }
    Ok(writeln!(page)?)
}
