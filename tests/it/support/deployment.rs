//! The private servers of one test, in every topology, and what a test does to all of them at once.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisResult};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Server, cluster, eventually, idle, sentinel};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    Standalone,
    /// Three masters with a replica each.
    Cluster,
    /// A master, two replicas and three sentinels.
    Sentinel,
    Quorum3,
    Quorum5,
}

impl Topology {
    /// How many nodes decide about one lock.
    pub fn nodes(self) -> usize {
        match self {
            Topology::Standalone | Topology::Cluster | Topology::Sentinel => 1,
            Topology::Quorum3 => 3,
            Topology::Quorum5 => 5,
        }
    }

    /// How many of them are enough.
    pub fn majority(self) -> usize {
        self.nodes() / 2 + 1
    }
}

/// So many tests with several servers at a time: more, and what is measured is how they are in each other's way.
static TURNS: Semaphore = Semaphore::const_new(4);

/// Replicas follow at once, instead of gathering for seconds.
pub const PROMPT: [&str; 4] = ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"];

/// The servers of one test. Nothing fails over by itself unless it [may](Deployment::allow_failover): a test
/// that stops or restarts a master means that master.
pub struct Deployment {
    topology: Topology,
    masters: Vec<Server>,
    replicas: Vec<Server>,
    sentinels: Vec<Server>,
    _turn: Option<SemaphorePermit<'static>>,
}

impl Deployment {
    pub async fn start(topology: Topology) -> Deployment {
        Deployment::start_with(topology, &[]).await
    }

    /// Servers that may have served a test before, which left nothing there.
    pub async fn start_or_reuse(topology: Topology) -> Deployment {
        let turn = Deployment::turn(topology).await;
        match idle::take(topology).await {
            Some(deployment) => Deployment { _turn: turn, ..deployment },
            None => Deployment::form(topology, &[], turn).await,
        }
    }

    /// The end of a test that may leave its servers to another one: it has stopped its clients, and
    /// found nothing left.
    pub fn leave(mut self) {
        let turn = self._turn.take();
        idle::keep(self);
        drop(turn); // only now may the next test look for servers
    }

    async fn turn(topology: Topology) -> Option<SemaphorePermit<'static>> {
        match topology {
            Topology::Standalone => None,
            _ => Some(TURNS.acquire().await.unwrap()),
        }
    }

    /// With these arguments for each server that has data.
    pub async fn start_with(topology: Topology, arguments: &[&str]) -> Deployment {
        Deployment::form(topology, arguments, Deployment::turn(topology).await).await
    }

    async fn form(
        topology: Topology,
        arguments: &[&str],
        turn: Option<SemaphorePermit<'static>>,
    ) -> Deployment {
        let (masters, replicas, sentinels) = match topology {
            Topology::Standalone => (vec![Server::start_with(arguments).await], Vec::new(), Vec::new()),
            Topology::Quorum3 | Topology::Quorum5 => {
                (servers(topology.nodes(), arguments).await, Vec::new(), Vec::new())
            }
            Topology::Cluster => {
                let (masters, replicas) = cluster::form(arguments).await;
                (masters, replicas, Vec::new())
            }
            Topology::Sentinel => sentinel::form(arguments).await,
        };
        let deployment = Deployment { topology, masters, replicas, sentinels, _turn: turn };
        deployment.all().for_each(Server::is_formed);
        deployment
    }

    /// One server, started by somebody else.
    pub fn of(server: Server) -> Deployment {
        Deployment {
            topology: Topology::Standalone,
            masters: vec![server],
            replicas: Vec::new(),
            sentinels: Vec::new(),
            _turn: None,
        }
    }

    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// A client that comes in past all proxies.
    pub async fn client(&self, options: redlatch::Options) -> redlatch::Locks {
        super::open::open(self, super::proxy::DIRECT, super::Protocol::Resp3, super::Wake::Push, options)
            .await
            .unwrap()
    }

    /// The masters, or all nodes of a quorum.
    pub fn masters(&self) -> &[Server] {
        &self.masters
    }

    pub fn masters_mut(&mut self) -> &mut [Server] {
        &mut self.masters
    }

    /// In a cluster, each at the place of its master.
    pub fn replicas(&self) -> &[Server] {
        &self.replicas
    }

    pub fn replicas_mut(&mut self) -> &mut [Server] {
        &mut self.replicas
    }

    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    pub fn sentinels_mut(&mut self) -> &mut [Server] {
        &mut self.sentinels
    }

    /// Where data is.
    pub fn data(&self) -> impl Iterator<Item = &Server> {
        self.masters.iter().chain(&self.replicas)
    }

    pub fn all(&self) -> impl Iterator<Item = &Server> {
        self.data().chain(&self.sentinels)
    }

    /// Where clients come in.
    pub fn entrances(&self) -> &[Server] {
        if self.topology == Topology::Sentinel { &self.sentinels } else { &self.masters }
    }

    /// Where a key lives, as a place among the masters: in a cluster, the owner of its slot. `None`: on each.
    pub async fn owner(&self, key: &str) -> Option<usize> {
        match self.topology {
            Topology::Standalone | Topology::Sentinel => Some(0),
            Topology::Cluster => Some(cluster::owner(&self.masters, key).await),
            Topology::Quorum3 | Topology::Quorum5 => None,
        }
    }

    pub(super) async fn homes(&self, key: &str) -> &[Server] {
        match self.owner(key).await {
            Some(owner) => &self.masters[owner..=owner],
            None => &self.masters,
        }
    }

    /// Runs a command where a key lives: one answer, or one from each node of a quorum.
    pub async fn run_at<T: FromRedisValue>(&self, key: &str, words: &[&str]) -> Vec<T> {
        run_on(self.homes(key).await, words).await
    }

    /// Runs a command on every master.
    pub async fn run<T: FromRedisValue>(&self, words: &[&str]) -> Vec<T> {
        run_on(&self.masters, words).await
    }

    /// The keys that match, once for each node that has them.
    pub async fn keys(&self, pattern: &str) -> Vec<String> {
        self.run::<Vec<String>>(&["KEYS", pattern]).await.concat()
    }

    /// Until when a key is kept by as many nodes as decide about a lock.
    pub async fn kept_until(&self, key: &str) -> Instant {
        let mut ends = Vec::new();
        for server in self.homes(key).await {
            let pttl: i64 = server.run(&["PTTL", key]).await;
            ends.extend(u64::try_from(pttl).ok().map(|pttl| Instant::now() + Duration::from_millis(pttl)));
        }
        ends.sort();
        ends.reverse();
        *ends.get(self.topology.majority() - 1).expect("it is held")
    }

    /// How many scripts were run.
    pub async fn scripts_run(&self) -> u64 {
        let mut sum = 0;
        for master in &self.masters {
            sum += master.scripts_run().await;
        }
        sum
    }

    /// How many messages were published. A script publishes on the server that runs it.
    pub async fn published(&self) -> u64 {
        let mut sum = 0;
        for master in &self.masters {
            sum += master.published().await;
        }
        sum
    }

    /// A connection to each server that has data.
    pub async fn connections(&self) -> Vec<MultiplexedConnection> {
        let mut connections = Vec::new();
        for server in self.data() {
            connections.push(server.connection().await);
        }
        connections
    }

    /// Stops everything that serves.
    pub fn pause(&self) {
        self.masters.iter().for_each(Server::pause);
    }

    pub fn resume(&self) {
        self.masters.iter().for_each(Server::resume);
    }

    /// Cuts the connections to everything that serves.
    pub async fn kill_connections(&self) {
        for master in &self.masters {
            master.kill_connections().await;
        }
    }

    /// Kills everything that serves, without a word.
    pub fn kill(&mut self) {
        self.masters.iter_mut().for_each(Server::kill);
    }

    /// Starts it again on the same ports; returns once it serves. A cluster remembers its slots.
    pub async fn restart(&mut self) {
        self.masters.iter_mut().for_each(Server::restart_unseen);
        for master in &mut self.masters {
            master.is_back().await;
        }
        self.is_whole().await;
    }

    /// Waits until all servers of a cluster agree that it serves.
    pub async fn is_whole(&self) {
        if self.topology == Topology::Cluster {
            cluster::is_ok(self.data()).await;
        }
    }

    /// How many subscriptions clients have, on all servers.
    pub async fn subscriptions(&self) -> usize {
        let mut sum = 0;
        for server in self.data() {
            sum += server.subscribers().await.len();
        }
        sum
    }

    /// Cuts the clients' subscriptions, and says how many.
    pub async fn kill_subscribers(&self) -> usize {
        let mut killed = 0;
        for server in self.data() {
            for id in server.subscribers().await {
                // It may be gone by itself meanwhile.
                let outcome: RedisResult<u64> = server.try_run(&["CLIENT", "KILL", "ID", &id]).await;
                killed += usize::from(outcome.is_ok_and(|killed| killed == 1));
            }
        }
        killed
    }

    /// What every test ends with, once its clients are gone.
    pub async fn assert_nothing_left(&self) {
        eventually("no subscription left", || async { self.subscriptions().await == 0 }).await;
        for master in &self.masters {
            master.assert_nothing_left().await;
        }
    }

    /// From now on, a master that does not answer for a second or so is replaced.
    pub async fn allow_failover(&self) {
        match self.topology {
            Topology::Cluster => cluster::allow_failover(self.data()).await,
            Topology::Sentinel => sentinel::allow_failover(&self.sentinels).await,
            _ => panic!("{:?} has no replicas", self.topology),
        }
    }

    /// From now on, nobody is replaced unless it [may](Deployment::allow_failover) again.
    pub async fn forbid_failover(&self) {
        match self.topology {
            Topology::Cluster => cluster::forbid_failover(self.data()).await,
            _ => sentinel::forbid_failover(&self.sentinels).await,
        }
    }

    /// Has a master that lives replaced by a replica, and waits until everybody knows.
    pub async fn fail_over(&mut self, master: usize) {
        self.begin_failover(master).await;
        self.has_failed_over(master).await;
    }

    /// Has a replica replace a master: not everybody knows yet.
    pub async fn begin_failover(&self, master: usize) {
        match self.topology {
            Topology::Cluster => cluster::fail_over(&self.replicas[master]).await,
            Topology::Sentinel => sentinel::fail_over(&self.sentinels[0]).await,
            _ => panic!("{:?} has no replicas", self.topology),
        }
    }

    /// Waits until a replica has replaced a master, and everybody who lives knows. The two change places in
    /// [`masters`](Deployment::masters) and [`replicas`](Deployment::replicas).
    pub async fn has_failed_over(&mut self, master: usize) {
        let heir = match self.topology {
            Topology::Cluster => {
                let rest = self.masters.iter().enumerate().filter(|(place, _)| *place != master);
                cluster::leads(&self.replicas[master], rest.map(|(_, server)| server)).await;
                master
            }
            _ => sentinel::heir(&self.replicas, &self.sentinels).await,
        };
        std::mem::swap(&mut self.masters[master], &mut self.replicas[heir]);
    }

    /// Moves the slot of a key to another master, while clients go on.
    pub async fn move_slot(&self, key: &str, to: usize) {
        self.begin_move(key, to).await;
        self.move_keys(key, to).await;
        self.end_move(key, to).await;
    }

    /// The first half: keys that are missing at the owner are asked for at the other master.
    pub async fn begin_move(&self, key: &str, to: usize) {
        let from = cluster::owner(&self.masters, key).await;
        cluster::begin_move(key, &self.masters[from], &self.masters[to]).await;
    }

    pub async fn move_keys(&self, key: &str, to: usize) {
        let from = cluster::owner(&self.masters, key).await;
        cluster::move_keys(key, &self.masters[from], &self.masters[to]).await;
    }

    /// The second half: the other master is the owner. Keys that came meanwhile are moved as well.
    pub async fn end_move(&self, key: &str, to: usize) {
        cluster::end_move(key, &self.masters, to).await;
    }
}

/// So many servers, started at the same time.
pub async fn servers(number: usize, arguments: &[&str]) -> Vec<Server> {
    let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    let start = |_| {
        let arguments = arguments.clone();
        tokio::spawn(async move {
            let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
            Server::start_with(&words).await
        })
    };
    let starting: Vec<_> = (0..number).map(start).collect();
    let mut servers = Vec::new();
    for server in starting {
        servers.push(server.await.unwrap());
    }
    servers
}

async fn run_on<T: FromRedisValue>(servers: &[Server], words: &[&str]) -> Vec<T> {
    let mut answers = Vec::new();
    for server in servers {
        answers.push(server.run(words).await);
    }
    answers
}
