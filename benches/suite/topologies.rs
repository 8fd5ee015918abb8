//! A quorum of three, beside rslock on the same three; a cluster of three masters, beside one
//! server; and clients in several processes.

use std::time::Duration;

use redis::Value;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::Outcome;
use super::beside_rslock;
use super::plan::Plan;
use super::processes::Processes;
use super::program::Program;
use super::record::Target;
use super::samples::median;
use super::server::{Observer, Server};

const NODES: usize = 3;
const SLOTS: usize = 16_384;

/// The program that measures redlatch and rslock.
const PROGRAM: &str = "rust";

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) topology: &'static str,
    pub(crate) library: &'static str,
    pub(crate) tasks: usize,
    pub(crate) pairs_per_second: f64,
    /// CPU time of all servers together, for one pair.
    pub(crate) server_us: f64,
    pub(crate) client_us: f64,
}

impl Row {
    pub(crate) fn is_ours(&self) -> bool {
        self.library == "redlatch"
    }
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Topologies {
    pub(crate) rows: Vec<Row>,
    pub(crate) processes: Processes,
    pub(crate) beside_rslock: Vec<beside_rslock::Row>,
}

#[derive(Debug, Deserialize)]
struct Pairs {
    seconds: f64,
    pairs: u64,
    overlaps: u64,
}

impl Topologies {
    fn row(&self, topology: &str, library: &str, tasks: usize) -> Option<&Row> {
        self.rows.iter().find(|row| row.topology == topology && row.library == library && row.tasks == tasks)
    }

    pub(crate) fn targets(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for tasks in [1, 64, 256] {
            if let (Some(ours), Some(theirs)) =
                (self.row("quorum", "redlatch", tasks), self.row("quorum", "rslock", tasks))
            {
                let limit = format!("quorum of three, mutex, tasks: {tasks}: pairs/s at least 1 x rslock");
                targets.push(Target::at_least(limit, ours.pairs_per_second / theirs.pairs_per_second, 1.0));
            }
        }
        if let (Some(cluster), Some(one)) =
            (self.row("cluster", "redlatch", 256), self.row("one server", "redlatch", 256))
        {
            let limit = "cluster of three, 256 tasks: client time at most 1.3 x that with one server";
            targets.push(Target::at_most(limit, cluster.client_us / one.client_us, 1.3));
            let limit = "cluster of three, 256 tasks: server time at most 1.2 x that of one server";
            targets.push(Target::at_most(limit, cluster.server_us / one.server_us, 1.2));
        }
        targets.extend(self.processes.targets());
        targets.extend(self.beside_rslock.iter().map(beside_rslock::Row::target));
        targets
    }
}

/// Servers, and the program that is connected to them.
struct Setting {
    observers: Vec<Observer>,
    program: Program,
    servers: Vec<Server>,
}

impl Setting {
    async fn new(servers: Vec<Server>, prefix: &str) -> Outcome<Option<Setting>> {
        let urls: Vec<String> = servers.iter().map(Server::url).collect();
        let url = format!("{prefix}{}", urls.join(","));
        let Some(program) = Program::start(PROGRAM, &url).await? else { return Ok(None) };
        let mut observers = Vec::new();
        for server in &servers {
            observers.push(server.observer().await?);
        }
        Ok(Some(Setting { observers, program, servers }))
    }

    async fn pairs(&mut self, library: &str, tasks: usize, span: Duration) -> Outcome<(f64, f64, f64)> {
        let command = format!("pairs {library} mutex {tasks} {}", span.as_secs_f64());
        let measured = self.program.measure::<Pairs>(&mut self.observers, &command).await?;
        if measured.result.overlaps > 0 {
            return Err(format!("{library}: two holders at once").into());
        }
        let pairs = measured.result.pairs as f64;
        let us = |time: Duration| time.as_secs_f64() * 1e6 / pairs;
        Ok((pairs / measured.result.seconds, us(measured.server_cpu), us(measured.client_cpu)))
    }
}

pub(crate) async fn measure(plan: &Plan) -> Outcome<Topologies> {
    let mut topologies = Topologies::default();
    let Some(mut quorum) = Setting::new(servers(&[]).await?, "").await? else { return Ok(topologies) };
    for tasks in [1, 64, 256] {
        let mut columns = [Vec::new(), Vec::new()];
        for round in 0..plan.peer_rounds {
            for turn in [round, round + 1] {
                let library = ["redlatch", "rslock"][turn % 2];
                columns[turn % 2].push(quorum.pairs(library, tasks, plan.peer_slice).await?);
            }
        }
        for (library, column) in ["redlatch", "rslock"].into_iter().zip(columns) {
            topologies.rows.push(row("quorum", library, tasks, &column));
        }
    }
    drop(quorum);
    let masters = cluster(&["--cluster-enabled", "yes"]).await?;
    let Some(mut cluster) = Setting::new(masters, "cluster:").await? else { return Ok(topologies) };
    let Some(mut one) = Setting::new(vec![Server::start().await?], "").await? else { return Ok(topologies) };
    let mut columns = [Vec::new(), Vec::new()];
    for _ in 0..plan.peer_rounds {
        columns[0].push(cluster.pairs("redlatch", 256, plan.peer_slice).await?);
        columns[1].push(one.pairs("redlatch", 256, plan.peer_slice).await?);
    }
    topologies.rows.push(row("cluster", "redlatch", 256, &columns[0]));
    topologies.rows.push(row("one server", "redlatch", 256, &columns[1]));
    drop(cluster);
    topologies.processes = Processes::measure(&one.servers[0], plan).await?;
    topologies.beside_rslock = beside_rslock::measure(&one.servers[0], plan).await?;
    Ok(topologies)
}

fn row(topology: &'static str, library: &'static str, tasks: usize, column: &[(f64, f64, f64)]) -> Row {
    Row {
        topology,
        library,
        tasks,
        pairs_per_second: median(column.iter().map(|run| run.0).collect()),
        server_us: median(column.iter().map(|run| run.1).collect()),
        client_us: median(column.iter().map(|run| run.2).collect()),
    }
}

async fn servers(settings: &[&str]) -> Outcome<Vec<Server>> {
    let mut servers = Vec::new();
    for _ in 0..NODES {
        servers.push(Server::start_with(settings).await?);
    }
    Ok(servers)
}

/// Starts a cluster of masters, each with a part of the slots.
pub(crate) async fn cluster(settings: &[&str]) -> Outcome<Vec<Server>> {
    let masters = servers(settings).await?;
    for (place, master) in masters.iter().enumerate() {
        let mut connection = master.connect().await?;
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("ADDSLOTS");
        for slot in place * SLOTS / masters.len()..(place + 1) * SLOTS / masters.len() {
            slots.arg(slot);
        }
        slots.query_async::<Value>(&mut connection).await?;
        let address = masters[0].address();
        let (host, port) = address.rsplit_once(':').ok_or("no port")?;
        redis::cmd("CLUSTER").arg("MEET").arg(host).arg(port).query_async::<Value>(&mut connection).await?;
    }
    for master in &masters {
        let mut connection = master.connect().await?;
        let begun = std::time::Instant::now();
        loop {
            let info: String = redis::cmd("CLUSTER").arg("INFO").query_async(&mut connection).await?;
            let known = format!("cluster_known_nodes:{}", masters.len());
            if info.contains("cluster_state:ok") && info.contains(&known) {
                break;
            }
            if begun.elapsed() > Duration::from_secs(30) {
                return Err("the cluster does not form".into());
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(masters)
}
