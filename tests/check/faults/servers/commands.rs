//! Faults by commands of another client: `SCRIPT FLUSH`, `CLIENT KILL`, a busy script, and others.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::processes::{run as run_at, wait_for_reply};
use super::state::{ANSWERS, Outcome, add_reads, ask, gone, seen};
use crate::faults::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::support::{Deployment, Server};

/// A script that blocks a server. It writes nothing, so `SCRIPT KILL` can end it.
const BUSY: &str = "while true do end";

pub async fn run(scene: &mut Scene<'_>, deployment: &Deployment, fault: Fault) -> Outcome {
    let place = scene.place(deployment.masters().len());
    let server = &deployment.masters()[place];
    match fault {
        Fault::ScriptFlush => {
            let before = errors(server, "NOSCRIPT").await;
            for _ in 0..10 {
                run_at::<()>(server, &["SCRIPT", "FLUSH"]).await;
                sleep(scene.millis(5, 60)).await;
            }
            let missed = errors(server, "NOSCRIPT").await - before;
            (missed > 0).then(|| format!("{missed} scripts were missing")).into()
        }
        Fault::ClientKill => kill_clients(scene, server).await.into(),
        Fault::ClientPause => {
            let span = span(scene);
            let start = Instant::now();
            run_at::<()>(server, &["CLIENT", "PAUSE", &span.as_millis().to_string(), "WRITE"]).await;
            // A paused server delays PUBLISH as well, since that is replicated: its delay measures
            // the pause.
            run_at::<u64>(server, &["PUBLISH", "ballast", ""]).await;
            let waited = start.elapsed();
            sleep(span.saturating_sub(waited)).await;
            (waited >= span.mul_f64(0.9)).then(|| format!("writes paused for {waited:?}")).into()
        }
        Fault::DebugSleep => {
            let span = span(scene);
            let start = Instant::now();
            let slept = server.try_run::<()>(&["DEBUG", "SLEEP", &span.as_secs_f64().to_string()]).await;
            (slept.is_ok() && start.elapsed() >= span).then(|| format!("slept for {span:?}")).into()
        }
        Fault::BusyScript => busy(scene, server).await.into(),
        Fault::OutOfMemory => out_of_memory(scene, server).await.into(),
        Fault::Eviction => evict(scene, server).await,
        _ => flush(server).await,
    }
}

/// Kills all connections. The effect is the number of killed connections that had run a script or
/// subscribed.
async fn kill_clients(scene: &mut Scene<'_>, server: &Server) -> Option<String> {
    let mut killed = 0;
    for _ in 0..=scene.random.below(3) {
        let before = users(server).await;
        for kind in ["normal", "pubsub"] {
            run_at::<u64>(server, &["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]).await;
        }
        let after = users(server).await;
        killed += before.iter().filter(|id| !after.contains(id)).count();
        sleep(scene.millis(10, 200)).await;
    }
    (killed > 0).then(|| format!("{killed} connections killed"))
}

/// The connections of clients with locks: sentinels and the observer run no scripts and do not
/// subscribe for long.
async fn users(server: &Server) -> Vec<String> {
    let list: String = run_at(server, &["CLIENT", "LIST", "TYPE", "normal"]).await;
    let scripts = list.lines().filter(|line| line.contains(" cmd=eval"));
    let mut users: Vec<String> =
        scripts.filter_map(|line| line.strip_prefix("id=")?.split(' ').next().map(str::to_owned)).collect();
    users.extend(server.subscribers().await);
    users
}

/// Deletes all keys at once.
async fn flush(server: &Server) -> Outcome {
    let start = Time::now();
    let mut pipe = redis::Pipeline::new();
    add_reads(&mut pipe);
    let answers = ask(server, pipe.cmd("FLUSHALL")).await;
    Outcome::lost(start, &gone(&seen(&answers), &[]))
}

fn span(scene: &mut Scene<'_>) -> Duration {
    if scene.random.below(4) == 0 { TTL + scene.millis(50, 400) } else { scene.millis(50, 900) }
}

/// Runs a script that does not end: the server answers BUSY to all clients until it is killed.
async fn busy(scene: &mut Scene<'_>, server: &Server) -> Option<String> {
    let limit = ["busy-reply-threshold", "lua-time-limit"];
    for name in limit {
        // Each version of the server knows one of the two names.
        let _: Result<(), _> = server.try_run(&["CONFIG", "SET", name, "50"]).await;
    }
    let mut connection = server.connection().await;
    let script =
        tokio::spawn(
            async move { redis::cmd("EVAL").arg(BUSY).arg(0).query_async::<()>(&mut connection).await },
        );
    sleep(scene.millis(150, 900)).await;
    let mut is_busy = false;
    let start = Instant::now();
    while !script.is_finished() && start.elapsed() < Duration::from_secs(10) {
        let ping = server.try_run::<String>(&["PING"]).await;
        is_busy |= ping.is_err_and(|error| error.to_string().contains("BUSY"));
        // Fails as long as the script has not begun.
        let _: Result<(), _> = server.try_run(&["SCRIPT", "KILL"]).await;
        sleep(Duration::from_millis(10)).await;
    }
    wait_for_reply(server).await;
    is_busy.then(|| "answered BUSY".to_owned())
}

/// Sets `maxmemory` to one byte, without evictions.
async fn out_of_memory(scene: &mut Scene<'_>, server: &Server) -> Option<String> {
    let before = errors(server, "OOM").await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "1"]).await;
    sleep(scene.millis(100, 900)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    let refused = errors(server, "OOM").await - before;
    (refused > 0).then(|| format!("{refused} requests were refused"))
}

/// Sets `maxmemory` to one byte, with eviction of the keys that expire soonest.
async fn evict(scene: &mut Scene<'_>, server: &Server) -> Outcome {
    let start = Time::now();
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).await;
    let mut pipe = redis::Pipeline::new();
    add_reads(&mut pipe);
    pipe.cmd("CONFIG").arg(&["SET", "maxmemory", "1"]);
    // The server evicts only for a command that needs memory.
    pipe.cmd("SET").arg(&["ballast", "x", "PX", "60000"]);
    add_reads(&mut pipe);
    let answers = ask(server, &mut pipe).await;
    sleep(scene.millis(20, 200)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    // Meanwhile it refused all writes.
    Outcome::lost(start, &gone(&seen(&answers), &seen(&answers[ANSWERS + 2..]))).away(start)
}

/// How often the server has answered with this error.
async fn errors(server: &Server, code: &str) -> u64 {
    let stats: String = run_at(server, &["INFO", "errorstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("errorstat_")?.strip_prefix(code));
    line.and_then(|rest| rest.strip_prefix(":count=")?.trim().parse().ok()).unwrap_or(0)
}
