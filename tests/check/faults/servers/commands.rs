//! What somebody else's commands do to a server that locks are on.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::processes::{answers, run as run_at};
use super::state::{ANSWERS, Outcome, add_look, ask, gone, seen};
use crate::faults::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::support::{Deployment, Server};

/// What keeps a server from doing anything else, and has not written: so it can be ended.
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
            // Replicas would be told of it as well, so it has to wait.
            run_at::<u64>(server, &["PUBLISH", "ballast", ""]).await;
            let waited = start.elapsed();
            sleep(span.saturating_sub(waited)).await;
            (waited >= span.mul_f64(0.9)).then(|| format!("no writes for {waited:?}")).into()
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

/// Kills all connections, and tells how many of those that had run a script, or listened.
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
    (killed > 0).then(|| format!("{killed} connections"))
}

/// The connections of those who use locks: neither sentinels nor lookers-on run scripts, or listen for long.
async fn users(server: &Server) -> Vec<String> {
    let list: String = run_at(server, &["CLIENT", "LIST", "TYPE", "normal"]).await;
    let scripts = list.lines().filter(|line| line.contains(" cmd=eval"));
    let mut users: Vec<String> =
        scripts.filter_map(|line| line.strip_prefix("id=")?.split(' ').next().map(str::to_owned)).collect();
    users.extend(server.subscribers().await);
    users
}

/// All keys are gone at once.
async fn flush(server: &Server) -> Outcome {
    let start = Time::now();
    let mut pipe = redis::Pipeline::new();
    add_look(&mut pipe);
    let answers = ask(server, pipe.cmd("FLUSHALL")).await;
    Outcome::lost(start, &gone(&seen(&answers), &[]))
}

fn span(scene: &mut Scene<'_>) -> Duration {
    if scene.random.below(4) == 0 { TTL + scene.millis(50, 400) } else { scene.millis(50, 900) }
}

/// Somebody else's script does not end: the server says so to all others, until it is ended.
async fn busy(scene: &mut Scene<'_>, server: &Server) -> Option<String> {
    let limit = ["busy-reply-threshold", "lua-time-limit"];
    for name in limit {
        // Each server knows one of the names.
        let _: Result<(), _> = server.try_run(&["CONFIG", "SET", name, "50"]).await;
    }
    let mut connection = server.connection().await;
    let script =
        tokio::spawn(
            async move { redis::cmd("EVAL").arg(BUSY).arg(0).query_async::<()>(&mut connection).await },
        );
    sleep(scene.millis(150, 900)).await;
    let mut said_busy = false;
    let start = Instant::now();
    while !script.is_finished() && start.elapsed() < Duration::from_secs(10) {
        let ping = server.try_run::<String>(&["PING"]).await;
        said_busy |= ping.is_err_and(|error| error.to_string().contains("BUSY"));
        // It may not have begun yet.
        let _: Result<(), _> = server.try_run(&["SCRIPT", "KILL"]).await;
        sleep(Duration::from_millis(10)).await;
    }
    answers(server).await;
    said_busy.then(|| "said BUSY".to_owned())
}

/// There is no room, and nothing may be thrown away.
async fn out_of_memory(scene: &mut Scene<'_>, server: &Server) -> Option<String> {
    let before = errors(server, "OOM").await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "1"]).await;
    sleep(scene.millis(100, 900)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    let refused = errors(server, "OOM").await - before;
    (refused > 0).then(|| format!("{refused} requests were refused"))
}

/// There is no room, and what ends soonest is thrown away.
async fn evict(scene: &mut Scene<'_>, server: &Server) -> Outcome {
    let start = Time::now();
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).await;
    let mut pipe = redis::Pipeline::new();
    add_look(&mut pipe);
    pipe.cmd("CONFIG").arg(&["SET", "maxmemory", "1"]);
    // Only a command that needs room makes some.
    pipe.cmd("SET").arg(&["ballast", "x", "PX", "60000"]);
    add_look(&mut pipe);
    let answers = ask(server, &mut pipe).await;
    sleep(scene.millis(20, 200)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    // Meanwhile it refused whatever writes.
    Outcome::lost(start, &gone(&seen(&answers), &seen(&answers[ANSWERS + 2..]))).away(start)
}

/// How often it has answered with an error.
async fn errors(server: &Server, code: &str) -> u64 {
    let stats: String = run_at(server, &["INFO", "errorstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("errorstat_")?.strip_prefix(code));
    line.and_then(|rest| rest.strip_prefix(":count=")?.trim().parse().ok()).unwrap_or(0)
}
