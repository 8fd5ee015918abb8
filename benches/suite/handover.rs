//! One mutex that all clients request all the time: how fast it is handed over, and how fairly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redlatch::{Locks, Mutex, Options};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Outcome;
use super::client_cpu::client_cpu;
use super::plan::Plan;
use super::samples::median;
use super::server::{Observer, Server};

/// The numbers of clients. Each client has its own connections, as a process would have.
const CLIENTS: [usize; 4] = [2, 16, 64, 256];

/// How long it may take until every client has had a turn.
const TURN_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) clients: usize,
    pub(crate) turns_per_second: f64,
    /// The part of the turns that were handed over. The others found the mutex free: with few
    /// clients, the next one has often finished before the last one has queued again.
    pub(crate) handed_over: f64,
    /// The median over all rounds of this rate divided by that of two clients.
    pub(crate) to_two_clients: f64,
    /// Fewest and most turns of one client, in the window with the largest difference.
    pub(crate) fewest_turns: usize,
    pub(crate) most_turns: usize,
    pub(crate) fairness: f64,
    pub(crate) longest_wait_ms: f64,
    pub(crate) server_cpu_us_per_turn: f64,
}

pub(crate) async fn measure(server: &Server, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut observer = server.observer().await?;
    let mut columns = CLIENTS.map(|_| Vec::new());
    for _ in 0..plan.windows {
        for (clients, column) in CLIENTS.into_iter().zip(&mut columns) {
            observer.alone().await?;
            let contenders = Contenders::of_one_name(clients, 1, Options::new());
            column.push(window(server, &mut observer, &contenders, plan.window).await?);
        }
    }
    let two_clients: Vec<f64> = columns[0].iter().map(|window| window.rate).collect();
    Ok(CLIENTS
        .into_iter()
        .zip(columns)
        .map(|(clients, column)| row(clients, &column, &two_clients))
        .collect())
}

fn row(clients: usize, windows: &[Window], two_clients: &[f64]) -> Row {
    let worst = windows.iter().min_by(|one, other| one.fairness().total_cmp(&other.fairness()));
    let longest = windows.iter().map(|window| window.longest_wait).max().unwrap_or_default();
    let ratios = windows.iter().zip(two_clients).map(|(window, two)| window.rate / two);
    Row {
        clients,
        turns_per_second: median(windows.iter().map(|window| window.rate).collect()),
        handed_over: median(windows.iter().map(|window| window.handed_over).collect()),
        to_two_clients: median(ratios.collect()),
        fewest_turns: worst.map_or(0, |window| window.fewest),
        most_turns: worst.map_or(0, |window| window.most),
        fairness: worst.map_or(f64::NAN, Window::fairness),
        longest_wait_ms: longest.as_secs_f64() * 1e3,
        server_cpu_us_per_turn: median(windows.iter().map(|window| window.server_cpu_us).collect()),
    }
}

pub(crate) struct Window {
    pub(crate) rate: f64,
    handed_over: f64,
    fewest: usize,
    most: usize,
    pub(crate) longest_wait: Duration,
    pub(crate) server_cpu_us: f64,
    pub(crate) client_cpu_us: f64,
    /// Commands that the server ran, those inside of scripts included, for each turn.
    pub(crate) commands: f64,
}

impl Window {
    pub(crate) fn fairness(&self) -> f64 {
        self.fewest as f64 / self.most as f64
    }
}

/// The clients that contend for the mutex, and their tasks.
pub(crate) struct Contenders {
    pub(crate) clients: usize,
    /// The tasks of each client.
    pub(crate) tasks: usize,
    pub(crate) options: Options,
    /// For how long each task holds the lock.
    pub(crate) hold: Duration,
    /// Each task has a name of its own.
    pub(crate) are_apart: bool,
}

impl Contenders {
    pub(crate) fn of_one_name(clients: usize, tasks: usize, options: Options) -> Contenders {
        Contenders { clients, tasks, options, hold: Duration::ZERO, are_apart: false }
    }
}

/// Opens the clients, runs them until each task has had a turn, and then counts the turns of each
/// client.
pub(crate) async fn window(
    server: &Server,
    observer: &mut Observer,
    contenders: &Contenders,
    span: Duration,
) -> Outcome<Window> {
    let signals = Arc::new(Signals::default());
    let mut running = JoinSet::new();
    let Contenders { clients, tasks, options, hold, are_apart } = contenders;
    for client in 0..*clients {
        let options = options.clone();
        let locks = Locks::builder().server(server.url().as_str()).options(options).connect().await?;
        for task in 0..*tasks {
            let name = if *are_apart { format!("handover:{client}:{task}") } else { "handover".to_owned() };
            let turns = take_turns(locks.mutex(name)?, *hold, Arc::clone(&signals));
            running.spawn(async move { turns.await.map(|turns| (client, turns)) });
        }
    }
    signals.all_had_a_turn(clients * tasks).await?;
    let (cpu, published) = (observer.cpu().await?, observer.published().await?);
    let commands = observer.commands().await?;
    let (start, own_cpu) = (Instant::now(), client_cpu());
    sleep(span).await;
    let (end, own_cpu) = (Instant::now(), client_cpu().saturating_sub(own_cpu));
    let (cpu, published) =
        (observer.cpu().await?.saturating_sub(cpu), observer.published().await? - published);
    let commands = observer.commands().await? - commands;
    signals.stop.store(true, Ordering::Relaxed);
    let (mut counts, mut longest_wait) = (vec![0; *clients], Duration::ZERO);
    while let Some(turns) = running.join_next().await {
        let (client, turns) = turns??;
        counts[client] += turns.iter().filter(|turn| turn.at >= start && turn.at < end).count();
        // Includes clients that began to wait within the window and are served after it.
        let waits = turns.iter().filter(|turn| turn.at >= start && turn.at - turn.waited < end);
        longest_wait = waits.map(|turn| turn.waited).fold(longest_wait, Duration::max);
    }
    let turns: usize = counts.iter().sum();
    Ok(Window {
        rate: turns as f64 / (end - start).as_secs_f64(),
        handed_over: published as f64 / turns as f64,
        fewest: counts.iter().min().copied().unwrap_or(0),
        most: counts.iter().max().copied().unwrap_or(0),
        longest_wait,
        server_cpu_us: cpu.as_secs_f64() * 1e6 / turns as f64,
        commands: commands as f64 / turns as f64,
        client_cpu_us: own_cpu.as_secs_f64() * 1e6 / turns as f64,
    })
}

/// When a client was granted the mutex, and how long it had waited for it.
struct Turn {
    at: Instant,
    waited: Duration,
}

async fn take_turns(mutex: Mutex, hold: Duration, signals: Arc<Signals>) -> Outcome<Vec<Turn>> {
    let mut turns = Vec::new();
    while !signals.stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let guard = mutex.lock().await?;
        let at = Instant::now();
        if !hold.is_zero() {
            sleep(hold).await;
        }
        guard.release().await?;
        if turns.is_empty() {
            signals.served.fetch_add(1, Ordering::Relaxed);
        }
        turns.push(Turn { at, waited: at - start });
    }
    Ok(turns)
}

/// What the bench and its clients share.
#[derive(Default)]
struct Signals {
    served: AtomicUsize,
    stop: AtomicBool,
}

impl Signals {
    async fn all_had_a_turn(&self, clients: usize) -> Outcome<()> {
        let start = Instant::now();
        while self.served.load(Ordering::Relaxed) < clients {
            if start.elapsed() > TURN_LIMIT {
                let served = self.served.load(Ordering::Relaxed);
                return Err(format!("only {served} of {clients} clients had a turn in {TURN_LIMIT:?}").into());
            }
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}
