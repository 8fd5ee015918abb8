//! Server processes that are paused, or killed and restarted with all, some or none of their data.

use std::time::Duration;

use redis::FromRedisValue;
use tokio::time::{Instant, sleep, timeout};

use super::state::{Outcome, gone, read_locks};
use crate::faults::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::support::{Deployment, Server, Topology};

/// Pauses one of the masters, or a minority or majority of a quorum.
pub async fn stop(scene: &mut Scene<'_>, deployment: &Deployment, fault: Fault) -> Outcome {
    let masters = deployment.masters();
    let number = match fault {
        Fault::Minority => masters.len() - deployment.topology().majority(),
        Fault::Majority => deployment.topology().majority(),
        _ => 1,
    };
    let first = scene.place(masters.len());
    let stopped: Vec<&Server> = masters.iter().cycle().skip(first).take(number).collect();
    stopped.iter().for_each(|server| server.pause());
    let since = Time::now();
    let span =
        if scene.random.below(3) == 0 { TTL + scene.millis(100, 700) } else { scene.millis(100, 1_000) };
    let (start, mut silent) = (Instant::now(), true);
    for server in &stopped {
        silent &= timeout(Duration::from_millis(30), server.try_run::<String>(&["PING"])).await.is_err();
    }
    sleep(span.saturating_sub(start.elapsed())).await;
    let until = Time::now();
    stopped.iter().for_each(|server| server.resume());
    for server in &stopped {
        wait_for_reply(server).await;
    }
    let effect = silent.then(|| format!("{number} servers paused for {span:?}"));
    Outcome { effect, lost: None, of: None, away: Some((since, until)) }
}

/// Kills a master and restarts it with all its data.
pub async fn restart(scene: &mut Scene<'_>, deployment: &mut Deployment) -> Option<String> {
    let place = scene.place(deployment.masters().len());
    let down = scene.millis(10, 400);
    let master = &mut deployment.masters_mut()[place];
    let (before, keys) = (run_id(master).await, count_keys(master).await);
    master.kill();
    sleep(down).await;
    master.restart().await;
    let (after, kept) = (run_id(master).await, count_keys(master).await);
    wait_until_whole(deployment).await;
    let is_another = before != after && keys > 0 && kept > 0;
    is_another.then(|| format!("down for {down:?}; {keys} keys before, {kept} keys after"))
}

/// Kills a master and restarts it with no data, or with an old copy.
pub async fn lose_data(scene: &mut Scene<'_>, deployment: &mut Deployment, has_old_copy: bool) -> Outcome {
    let place = scene.place(deployment.masters().len());
    let (age, down) = (scene.millis(300, 1_500), scene.millis(10, 300));
    let master = &mut deployment.masters_mut()[place];
    let kept = if has_old_copy { master.data() } else { Vec::new() };
    if has_old_copy {
        sleep(age).await;
    }
    let (start, before) = (Time::now(), read_locks(master).await);
    master.kill();
    master.put_back(&kept);
    sleep(down).await;
    master.restart().await;
    let after = read_locks(master).await;
    Outcome::lost(start, &gone(&before, &after)).away(start)
}

/// The run id of the server, which changes with every start.
async fn run_id(server: &Server) -> Option<String> {
    let info: String = run(server, &["INFO", "server"]).await;
    info.lines().find(|line| line.starts_with("run_id:")).map(str::to_owned)
}

async fn count_keys(server: &Server) -> u64 {
    run(server, &["DBSIZE"]).await
}

/// Runs a command, and repeats it if its connection is cut: a sentinel kills a server's connections
/// when it reconfigures it.
pub async fn run<T: FromRedisValue>(server: &Server, words: &[&str]) -> T {
    loop {
        match server.try_run(words).await {
            Ok(answer) => return answer,
            Err(error) if error.is_io_error() => sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("{words:?}: {error}"),
        }
    }
}

/// Waits until a server replies again.
pub async fn wait_for_reply(server: &Server) {
    while server.try_run::<String>(&["PING"]).await.is_err() {
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until replicas follow, and all slots are served.
pub async fn wait_until_whole(deployment: &Deployment) {
    if deployment.topology() == Topology::Cluster {
        deployment.is_whole().await;
    }
    for replica in deployment.replicas() {
        while !run::<String>(replica, &["INFO", "replication"]).await.contains("master_link_status:up") {
            sleep(Duration::from_millis(20)).await;
        }
    }
}
