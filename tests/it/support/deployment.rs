//! The private servers of one test, in every topology, and operations on all of them at once.

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
    /// The number of nodes that decide about one lock.
    pub fn nodes(self) -> usize {
        match self {
            Topology::Standalone | Topology::Cluster | Topology::Sentinel => 1,
            Topology::Quorum3 => 3,
            Topology::Quorum5 => 5,
        }
    }

    /// The number of nodes that must agree.
    pub fn majority(self) -> usize {
        self.nodes() / 2 + 1
    }
}

/// The number of tests with several servers that run at a time. With more, the tests would measure
/// each other's load.
static TURNS: Semaphore = Semaphore::const_new(4);

/// Masters synchronize replicas at once, instead of waiting for more of them for seconds.
pub const PROMPT: [&str; 4] = ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"];

/// The servers of one test. No server fails over by itself unless a test
/// [allows](Deployment::allow_failover) it: a test that stops or restarts a master means that
/// master.
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

    /// Takes the idle servers of an earlier test, if there are any; starts new ones otherwise.
    pub async fn start_or_reuse(topology: Topology) -> Deployment {
        let turn = Deployment::turn(topology).await;
        match idle::take(topology).await {
            Some(deployment) => Deployment { _turn: turn, ..deployment },
            None => Deployment::form(topology, &[], turn).await,
        }
    }

    /// Leaves the servers to another test. The test has stopped its clients and has checked that
    /// nothing is left.
    pub fn leave(mut self) {
        let turn = self._turn.take();
        idle::keep(self);
        drop(turn); // only now may the next test take idle servers
    }

    async fn turn(topology: Topology) -> Option<SemaphorePermit<'static>> {
        match topology {
            Topology::Standalone => None,
            _ => Some(TURNS.acquire().await.unwrap()),
        }
    }

    /// Starts servers, with these arguments for each one that has data.
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

    /// A deployment of one server that is already running.
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

    /// A client that connects to the servers directly, not through proxies.
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

    /// The replicas; in a cluster, each at the index of its master.
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

    /// The servers that have data: masters and replicas.
    pub fn data(&self) -> impl Iterator<Item = &Server> {
        self.masters.iter().chain(&self.replicas)
    }

    pub fn all(&self) -> impl Iterator<Item = &Server> {
        self.data().chain(&self.sentinels)
    }

    /// The servers whose addresses a client is given.
    pub fn entrances(&self) -> &[Server] {
        if self.topology == Topology::Sentinel { &self.sentinels } else { &self.masters }
    }

    /// The index of the master that has a key; in a cluster, the owner of its slot. `None`: every
    /// master has it.
    pub async fn owner(&self, key: &str) -> Option<usize> {
        match self.topology {
            Topology::Standalone | Topology::Sentinel => Some(0),
            Topology::Cluster => Some(cluster::owner(&self.masters, key).await),
            Topology::Quorum3 | Topology::Quorum5 => None,
        }
    }

    pub async fn homes(&self, key: &str) -> &[Server] {
        match self.owner(key).await {
            Some(owner) => &self.masters[owner..=owner],
            None => &self.masters,
        }
    }

    /// Runs a command on the master of a key, or on every node of a quorum; one answer each.
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

    /// The time until which a majority of the nodes keeps a key.
    pub async fn kept_until(&self, key: &str) -> Instant {
        let mut ends = Vec::new();
        for server in self.homes(key).await {
            let pttl: i64 = server.run(&["PTTL", key]).await;
            ends.extend(u64::try_from(pttl).ok().map(|pttl| Instant::now() + Duration::from_millis(pttl)));
        }
        ends.sort();
        ends.reverse();
        *ends.get(self.topology.majority() - 1).expect("a majority has the key")
    }

    /// The number of scripts that the masters have run.
    pub async fn scripts_run(&self) -> u64 {
        let mut sum = 0;
        for master in &self.masters {
            sum += master.scripts_run().await;
        }
        sum
    }

    /// The number of messages published. A script publishes on the server that runs it.
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

    /// Pauses the masters.
    pub fn pause(&self) {
        self.masters.iter().for_each(Server::pause);
    }

    pub fn resume(&self) {
        self.masters.iter().for_each(Server::resume);
    }

    /// Closes the connections to the masters.
    pub async fn kill_connections(&self) {
        for master in &self.masters {
            master.kill_connections().await;
        }
    }

    /// Kills the masters with SIGKILL.
    pub fn kill(&mut self) {
        self.masters.iter_mut().for_each(Server::kill);
    }

    /// Restarts the masters on the same ports, and returns once they serve. A cluster remembers its
    /// slots.
    pub async fn restart(&mut self) {
        self.masters.iter_mut().for_each(Server::restart_unseen);
        for master in &mut self.masters {
            master.is_back().await;
        }
        self.is_whole().await;
    }

    /// Waits until all servers of a cluster report that every slot is served.
    pub async fn is_whole(&self) {
        if self.topology == Topology::Cluster {
            cluster::is_ok(self.data()).await;
        }
    }

    /// The number of the clients' subscriptions, on all servers.
    pub async fn subscriptions(&self) -> usize {
        let mut sum = 0;
        for server in self.data() {
            sum += server.subscribers().await.len();
        }
        sum
    }

    /// Kills the clients' subscriptions, and returns their number.
    pub async fn kill_subscribers(&self) -> usize {
        let mut killed = 0;
        for server in self.data() {
            for id in server.subscribers().await {
                // The client may have closed it meanwhile.
                let outcome: RedisResult<u64> = server.try_run(&["CLIENT", "KILL", "ID", &id]).await;
                killed += usize::from(outcome.is_ok_and(|killed| killed == 1));
            }
        }
        killed
    }

    /// Checks that the clients of a test have left nothing on the servers.
    pub async fn assert_nothing_left(&self) {
        eventually("no subscription left", || async { self.subscriptions().await == 0 }).await;
        for master in &self.masters {
            master.assert_nothing_left().await;
        }
    }

    /// Allows a replica to replace a master that does not respond for about a second.
    pub async fn allow_failover(&self) {
        match self.topology {
            Topology::Cluster => cluster::allow_failover(self.data()).await,
            Topology::Sentinel => sentinel::allow_failover(&self.sentinels).await,
            _ => panic!("{:?} has no replicas", self.topology),
        }
    }

    /// Forbids failovers until they are [allowed](Deployment::allow_failover) again.
    pub async fn forbid_failover(&self) {
        match self.topology {
            Topology::Cluster => cluster::forbid_failover(self.data()).await,
            _ => sentinel::forbid_failover(&self.sentinels).await,
        }
    }

    /// Replaces a live master by a replica, and waits until all servers know.
    pub async fn fail_over(&mut self, master: usize) {
        self.begin_failover(master).await;
        self.has_failed_over(master).await;
    }

    /// Starts replacing a master by a replica; does not wait until all servers know.
    pub async fn begin_failover(&self, master: usize) {
        match self.topology {
            Topology::Cluster => cluster::fail_over(&self.replicas[master]).await,
            Topology::Sentinel => sentinel::fail_over(&self.sentinels[0]).await,
            _ => panic!("{:?} has no replicas", self.topology),
        }
    }

    /// Waits until a replica has replaced a master and all live servers know. The two change places
    /// in [`masters`](Deployment::masters) and [`replicas`](Deployment::replicas).
    pub async fn has_failed_over(&mut self, master: usize) {
        let promoted = match self.topology {
            Topology::Cluster => {
                let (old, new) = (self.masters[master].port(), &self.replicas[master]);
                cluster::leads(new, self.data().filter(|one| one.port() != old && one.is_alive())).await;
                master
            }
            _ => {
                let promoted = sentinel::promoted(&self.replicas, &self.sentinels).await;
                // On a busy machine the new master may seem failed as well.
                sentinel::forbid_failover(&self.sentinels).await;
                promoted
            }
        };
        std::mem::swap(&mut self.masters[master], &mut self.replicas[promoted]);
    }

    /// Follows the sentinels: on a busy machine, two of them may each replace a killed master.
    pub async fn find_master(&mut self) {
        let port = sentinel::master_port(&self.sentinels).await;
        if let Some(place) = self.replicas.iter().position(|replica| replica.port() == port) {
            std::mem::swap(&mut self.masters[0], &mut self.replicas[place]);
        }
    }

    /// Moves the slot of a key to another master; clients may run meanwhile.
    pub async fn move_slot(&self, key: &str, to: usize) {
        self.begin_move(key, to).await;
        self.move_keys(key, to).await;
        self.end_move(key, to).await;
    }

    /// The first half of a move: the owner redirects requests for missing keys to the other master.
    pub async fn begin_move(&self, key: &str, to: usize) {
        let from = cluster::owner(&self.masters, key).await;
        cluster::begin_move(key, &self.masters[from], &self.masters[to]).await;
    }

    pub async fn move_keys(&self, key: &str, to: usize) {
        let from = cluster::owner(&self.masters, key).await;
        cluster::move_keys(key, &self.masters[from], &self.masters[to]).await.unwrap();
    }

    /// The second half of a move: the other master becomes the owner. Keys that were written
    /// meanwhile are moved as well.
    pub async fn end_move(&self, key: &str, to: usize) {
        cluster::end_move(key, &self.masters, to).await;
    }
}

/// Starts this number of servers at the same time.
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
