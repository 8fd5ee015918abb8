//! What somebody else's commands do to a server that locks are on.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Effect;
use super::processes::{answers, run as run_at};
use crate::faults::Scene;
use crate::plan::{Fault, TTL};
use crate::support::{Deployment, Server};

/// What fills the memory.
const BALLAST: &str =
    "for i = 1, ARGV[1] do redis.call('SET', KEYS[1] .. i, string.rep('x', 1000), 'PX', 60000) end";

/// What keeps a server from doing anything else, and has not written: so it can be ended.
const BUSY: &str = "while true do end";

pub async fn run(scene: &mut Scene<'_>, deployment: &Deployment, fault: Fault) -> Effect {
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
            (missed > 0).then(|| format!("{missed} scripts were missing"))
        }
        Fault::ClientKill => {
            let mut killed: u64 = 0;
            for _ in 0..=scene.random.below(3) {
                for kind in ["normal", "pubsub"] {
                    killed += run_at::<u64>(server, &["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]).await;
                }
                sleep(scene.millis(10, 200)).await;
            }
            (killed > 0).then(|| format!("{killed} connections"))
        }
        Fault::ClientPause => {
            let span = span(scene);
            run_at::<()>(server, &["CLIENT", "PAUSE", &span.as_millis().to_string(), "WRITE"]).await;
            sleep(span).await;
            Some(format!("no writes for {span:?}"))
        }
        Fault::DebugSleep => {
            let span = span(scene);
            let start = Instant::now();
            let slept = server.try_run::<()>(&["DEBUG", "SLEEP", &span.as_secs_f64().to_string()]).await;
            (slept.is_ok() && start.elapsed() >= span).then(|| format!("slept for {span:?}"))
        }
        Fault::BusyScript => busy(scene, server).await,
        Fault::OutOfMemory => out_of_memory(scene, server).await,
        Fault::Eviction => evict(scene, server).await,
        _ => {
            let had: u64 = run_at(server, &["DBSIZE"]).await;
            run_at::<()>(server, &["FLUSHALL"]).await;
            (had > 0).then(|| format!("{had} keys"))
        }
    }
}

fn span(scene: &mut Scene<'_>) -> Duration {
    if scene.random.below(4) == 0 { TTL + scene.millis(50, 400) } else { scene.millis(50, 900) }
}

/// Somebody else's script does not end: the server says so to all others, until it is ended.
async fn busy(scene: &mut Scene<'_>, server: &Server) -> Effect {
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
async fn out_of_memory(scene: &mut Scene<'_>, server: &Server) -> Effect {
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "1"]).await;
    let mut refused = Ok(());
    for name in 0..50 {
        // In a cluster, until the slot is one of this server's.
        refused = server.try_run::<()>(&["SET", &format!("ballast-{name}"), "x", "PX", "60000"]).await;
        if !refused.as_ref().is_err_and(|error| error.to_string().contains("MOVED")) {
            break;
        }
    }
    sleep(scene.millis(100, 900)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    let refusal = refused.err()?.to_string();
    refusal.contains("OOM").then_some(refusal)
}

/// There is no room, and what ends soonest is thrown away.
async fn evict(scene: &mut Scene<'_>, server: &Server) -> Effect {
    let before = stat(server, "evicted_keys").await;
    run_at::<()>(server, &["EVAL", BALLAST, "1", "ballast:", "200"]).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "1"]).await;
    // Only a command that needs room makes some.
    let _: Result<(), _> = server.try_run(&["SET", "ballast", "x", "PX", "60000"]).await;
    sleep(scene.millis(20, 200)).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory", "0"]).await;
    run_at::<()>(server, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    let evicted = stat(server, "evicted_keys").await - before;
    (evicted > 0).then(|| format!("{evicted} keys were evicted"))
}

async fn stat(server: &Server, name: &str) -> u64 {
    let stats: String = run_at(server, &["INFO", "stats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// How often it has answered with an error.
async fn errors(server: &Server, code: &str) -> u64 {
    let stats: String = run_at(server, &["INFO", "errorstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("errorstat_")?.strip_prefix(code));
    line.and_then(|rest| rest.strip_prefix(":count=")?.trim().parse().ok()).unwrap_or(0)
}
