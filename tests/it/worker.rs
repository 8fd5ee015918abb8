//! The roles of worker processes. A worker reports in lines that begin with `@`.

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Duration;

use redlatch::{Error, Locks, Options};

use crate::support::{Kind, Protocol, Stopwatch, Topology, Wake, open_at, role};

/// Not a test: the entry point of worker processes. See `support::Worker`.
#[test]
fn play() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    if let ["blocking", url] = words.as_slice() {
        return end_with_locks(url);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match words.as_slice() {
            ["count", url, kind, file, turns] => count(url, kind, file, turns.parse().unwrap()).await,
            ["hold", url, kind, ttl_ms] => hold(url, kind, ttl_ms.parse().unwrap()).await,
            ["measure"] => measure(),
            ["reenter", url, owner] => reenter(url, owner).await,
            ["wait", topology, user, ports, wake, kind, name, ttl_ms, count] => {
                let (topology, wake) = (topology_of(topology), wake_of(wake));
                let ports: Vec<u16> = ports.split(',').map(|port| port.parse().unwrap()).collect();
                let ttl = Duration::from_millis(ttl_ms.parse().unwrap());
                let options = long_limits().ttl(ttl);
                let (host, ports) = (format!("{user}127.0.0.1"), ports.as_slice());
                let open = || open_at(topology, &host, ports, Protocol::Resp3, wake, options.clone());
                wait(open, Kind::from_name(kind), name, count.parse().unwrap()).await;
            }
            unknown => panic!("no such role: {unknown:?}"),
        }
    });
}

/// Options of processes that start together, so that each gets little of the machine at first.
fn long_limits() -> Options {
    Options::new().node_timeout(Duration::from_secs(20))
}

async fn open(url: &str, options: Options) -> Locks {
    Locks::builder().server(url).options(options).connect().await.unwrap()
}

fn say(word: &str, rest: impl std::fmt::Display) {
    println!("@{word} {rest}");
    std::io::stdout().flush().unwrap();
}

fn read_line() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// Increments a number in a file, without any file lock.
async fn count(url: &str, kind: &str, file: &str, turns: u32) {
    let lock = Kind::from_name(kind).lock(&open(url, long_limits()).await, "counter");
    say("ready", "");
    read_line();
    for _ in 0..turns {
        let guard = lock.lock().await.unwrap();
        let number: u64 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
        tokio::task::yield_now().await;
        std::fs::write(Path::new(file), (number + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
}

/// Acquires the lock, reports it, and follows commands.
async fn hold(url: &str, kind: &str, ttl_ms: u64) {
    let locks = open(url, long_limits().ttl(Duration::from_millis(ttl_ms))).await;
    let lock = Kind::from_name(kind).lock(&locks, "held");
    let guard = lock.lock().await.unwrap();
    say("holding", guard.token());
    loop {
        match tokio::task::spawn_blocking(read_line).await.unwrap().as_str() {
            "look" => say("lost", guard.lease().is_lost()),
            "release" => return guard.release().await.unwrap(),
            command => panic!("no such command: {command:?}"),
        }
    }
}

/// Acquires 200 locks without a runtime, drops them and ends at once, as if `main` returned.
fn end_with_locks(url: &str) {
    let locks =
        redlatch::blocking::Locks::connect(Locks::builder().server(url).options(long_limits())).unwrap();
    let lock = |n| locks.mutex(format!("x{n}")).unwrap().lock().unwrap();
    let guards: Vec<_> = (0..200).map(lock).collect();
    say("holding", guards.len());
    read_line();
    drop(locks);
    drop(guards);
    std::process::exit(0);
}

/// Measures the time until a command.
fn measure() {
    let stopwatch = Stopwatch::start();
    say("started", "");
    read_line();
    let stopwatch = stopwatch.stop();
    say("stalled", (stopwatch.elapsed() - stopwatch.undisturbed()).as_micros());
}

/// Enters a lock that another process holds for the same owner.
async fn reenter(url: &str, owner: &str) {
    let locks = open(url, long_limits()).await;
    let guard = locks.reentrant("shared", &owner.parse().unwrap()).unwrap().lock().await.unwrap();
    say("inside", guard.lease().fencing_token().unwrap());
    tokio::task::spawn_blocking(read_line).await.unwrap();
    guard.release().await.unwrap();
    say("outside", "");
}

fn topology_of(name: &str) -> Topology {
    match name {
        "standalone" => Topology::Standalone,
        "cluster" => Topology::Cluster,
        "sentinel" => Topology::Sentinel,
        "quorum3" => Topology::Quorum3,
        "quorum5" => Topology::Quorum5,
        _ => panic!("no such topology: {name}"),
    }
}

fn wake_of(name: &str) -> Wake {
    if name == "push" { Wake::Push } else { Wake::Poll }
}

/// Waits for a lock in several clients, each of which releases it once it is granted.
async fn wait(open: impl AsyncFn() -> Result<Locks, Error>, kind: Kind, name: &str, count: usize) {
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..count {
        let lock = kind.lock(&open().await.unwrap(), name);
        waiting.spawn(async move { lock.lock().await.unwrap().release().await });
    }
    while let Some(outcome) = waiting.join_next().await {
        let _ = outcome.unwrap(); // a client that was stopped may have lost the lock
    }
}
