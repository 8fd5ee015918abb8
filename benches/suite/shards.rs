//! Locks that are held on a cluster while one of its masters is stopped: whether the locks of the
//! other masters are renewed in time.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redlatch::{Locks, Options};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Outcome;
use super::limits::Row;
use super::server::Server;
use super::topologies::cluster;

/// As many renewals a second as 100,000 locks have with the default TTL of 30 s.
const LOCKS: usize = 10_000;
const TTL: Duration = Duration::from_secs(3);

/// A lease is renewed when a third of its TTL is over. With less than a half left, it is late.
const LATE: Duration = Duration::from_millis(TTL.as_millis() as u64 / 2);

/// Nodes keep serving their slots without the others.
const SETTINGS: [&str; 4] = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"];

/// One of the masters is stopped for this many TTLs.
pub(crate) async fn measure(ttls: u32) -> Outcome<Row> {
    let masters = cluster(&SETTINGS).await?;
    let urls = masters.iter().map(Server::url);
    let client = Locks::builder().cluster(urls).options(Options::new().ttl(TTL)).connect().await?;
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let client = client.clone();
        tasks.spawn(async move {
            let mut guards = Vec::new();
            for number in (task..LOCKS).step_by(64) {
                guards.push(client.mutex(format!("held:{number}"))?.lock().await?);
            }
            Outcome::Ok(guards)
        });
    }
    let guards = tasks.join_all().await.into_iter().collect::<Outcome<Vec<_>>>()?;
    let mut others = Vec::new();
    for master in &masters[1..] {
        let mut connection = master.connect().await?;
        let keys: Vec<String> = redis::cmd("KEYS").arg("lock:held:*").query_async(&mut connection).await?;
        others.push((connection, keys));
    }
    let stopped = Stopped::new(&masters[0])?;
    let (start, mut late) = (Instant::now(), 0);
    while start.elapsed() < TTL * ttls {
        for (connection, keys) in &mut others {
            late = late.max(count_late(connection, keys).await?);
        }
        sleep(Duration::from_millis(100)).await;
    }
    drop(stopped);
    drop(guards);
    client.settled().await;
    let what = format!(
        "{LOCKS} locks held on a cluster, TTL {} s, one of three masters stopped: locks of the others \
         whose renewal is late",
        TTL.as_secs()
    );
    Ok(Row::at_most(what, late as f64, "locks", 0.0))
}

/// The locks that have ended, or will before long.
async fn count_late(connection: &mut MultiplexedConnection, keys: &[String]) -> Outcome<usize> {
    let mut pipeline = redis::pipe();
    for key in keys {
        pipeline.cmd("PTTL").arg(key);
    }
    let left: Vec<i64> = pipeline.query_async(connection).await?;
    let limit = i64::try_from(LATE.as_millis())?;
    Ok(left.into_iter().filter(|left| *left < limit).count())
}

/// A process that does not run until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(server: &Server) -> Outcome<Stopped> {
        let process = i32::try_from(server.process())?;
        let process = Pid::from_raw(process).ok_or("no process")?;
        kill_process(process, Signal::STOP)?;
        Ok(Stopped(process))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // A server that is gone needs no signal.
        let _ = kill_process(self.0, Signal::CONT);
    }
}
