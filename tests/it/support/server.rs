//! A private server on a free port, killed when it is dropped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redlatch::{Locks, Options};
use rustix::process::{Pid, Signal, kill_process};

use super::binary::binary;
use super::lock_state::companion;
use super::port::{TRIES, free_port};
use super::process::stop;
use super::raw::WAITERS;
use super::{LONGEST_WAIT, eventually};

pub struct Server {
    child: Child,
    port: u16,
    arguments: Vec<String>,
    environment: Environment,
    directory: tempfile::TempDir,
    is_changed: AtomicBool,
}

/// Read-only subcommands of commands that can change more than data.
const QUESTIONS: [&str; 9] =
    ["CKQUORUM", "GET", "GETUSER", "INFO", "KEYSLOT", "MASTER", "MYID", "NODES", "SLOTS"];

/// Environment variables of a server's process.
pub type Environment = Vec<(String, String)>;

/// Arguments with which a server persists every write before it replies.
pub const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

impl Server {
    pub async fn start() -> Server {
        Server::start_with(&[]).await
    }

    pub async fn start_with(arguments: &[&str]) -> Server {
        Server::start_in(arguments, &Environment::new()).await
    }

    pub async fn start_in(arguments: &[&str], environment: &Environment) -> Server {
        let server = Server::try_start_in(arguments, environment).await;
        server.unwrap_or_else(|| panic!("{} does not start", binary().display()))
    }

    /// `None`: it ends at once, whatever the port.
    pub async fn try_start_in(arguments: &[&str], environment: &Environment) -> Option<Server> {
        for _ in 0..TRIES {
            let directory = tempfile::tempdir().unwrap();
            let port = free_port();
            // Empty at first: the server writes to it when sentinels reconfigure it.
            let file = directory.path().join("server.conf");
            std::fs::write(&file, "").unwrap();
            let (file, place) = (file.display().to_string(), directory.path().display().to_string());
            let port_word = port.to_string();
            let itself = [&file, "--port", &port_word, "--dir", &place, "--bind", "127.0.0.1"];
            let without_data = ["--save", "", "--appendonly", "no"];
            let words = itself.iter().chain(&without_data).chain(arguments).map(ToString::to_string);
            let words = words.collect();
            if let Some(server) = Server::launch(port, words, environment.clone(), directory).await {
                return Some(server);
            }
        }
        None
    }

    /// Starts a sentinel, which writes to its configuration file. `None`: the port was taken.
    pub async fn start_sentinel(port: u16, configuration: &str) -> Option<Server> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("sentinel.conf");
        let place = format!("port {port}\nbind 127.0.0.1\ndir {}\n", directory.path().display());
        std::fs::write(&file, place + configuration).unwrap();
        let words = vec![file.display().to_string(), "--sentinel".to_owned()];
        Server::launch(port, words, Environment::new(), directory).await
    }

    async fn launch(
        port: u16,
        arguments: Vec<String>,
        environment: Environment,
        directory: tempfile::TempDir,
    ) -> Option<Server> {
        let child = spawn(&binary(), &arguments, &environment);
        let mut server =
            Server { child, port, arguments, environment, directory, is_changed: AtomicBool::new(false) };
        server.is_up().await.then_some(server)
    }

    async fn is_up(&mut self) -> bool {
        let start = Instant::now();
        // Another process may have taken the port and answer there.
        let itself = format!("process_id:{}\r\n", self.child.id());
        loop {
            // While the server loads its data, it answers PING with an error.
            if self.try_run::<String>(&["PING"]).await.is_ok() {
                return self
                    .try_run::<String>(&["INFO", "server"])
                    .await
                    .is_ok_and(|info| info.contains(&itself));
            }
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(start.elapsed() < LONGEST_WAIT, "the server on port {} does not answer", self.port);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub async fn locks(&self) -> Locks {
        self.locks_with(super::patient()).await
    }

    pub async fn locks_with(&self, options: Options) -> Locks {
        Locks::builder().server(self.url()).options(options).connect().await.unwrap()
    }

    /// A connection for the test itself.
    pub async fn connection(&self) -> MultiplexedConnection {
        self.try_connection().await.unwrap()
    }

    async fn try_connection(&self) -> redis::RedisResult<MultiplexedConnection> {
        connect(&self.url()).await
    }

    /// Runs one command, given as words.
    pub async fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub async fn try_run<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        match words {
            ["ACL" | "CLUSTER" | "CONFIG" | "SENTINEL", question, ..] if QUESTIONS.contains(question) => {}
            ["CLIENT", "KILL" | "LIST", ..] => {}
            ["ACL" | "CLIENT" | "CLUSTER" | "CONFIG" | "DEBUG", ..] => self.change(),
            ["FAILOVER" | "REPLICAOF" | "SENTINEL" | "SHUTDOWN", ..] => self.change(),
            _ => {}
        }
        let mut cmd = redis::cmd(words[0]);
        for word in &words[1..] {
            cmd.arg(word);
        }
        cmd.query_async(&mut self.try_connection().await?).await
    }

    fn change(&self) {
        self.is_changed.store(true, Ordering::Relaxed);
    }

    /// Whether a test may have changed more than the server's data.
    pub fn is_changed(&self) -> bool {
        self.is_changed.load(Ordering::Relaxed)
    }

    /// Marks the end of the topology's setup: later changes are the test's.
    pub(super) fn is_formed(&self) {
        self.is_changed.store(false, Ordering::Relaxed);
    }

    /// Resets everything but the data to the state at the start.
    pub(super) async fn reset(&self) {
        self.run::<()>(&["SCRIPT", "FLUSH"]).await;
        self.run::<()>(&["CONFIG", "RESETSTAT"]).await;
        self.is_formed();
    }

    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn signal(&self, signal: Signal) {
        self.change();
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn pause(&self) {
        self.change();
        stop(&self.child);
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Closes all connections but the one that requests it.
    pub async fn kill_connections(&self) {
        let _: i64 = self.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    }

    /// Whether the server's process exists.
    pub fn is_alive(&self) -> bool {
        let pid = Pid::from_child(&self.child);
        rustix::process::test_kill_process(pid).is_ok()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.change();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts the server on its port, with its directory.
    pub async fn restart(&mut self) {
        self.restart_unseen();
        self.is_back().await;
    }

    /// Restarts the server without waiting for it; [`is_back`](Server::is_back) waits.
    pub fn restart_unseen(&mut self) {
        self.child = spawn(&binary(), &self.arguments, &self.environment);
    }

    /// The current files with the server's data.
    pub fn data(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files = Vec::new();
        let mut directories = vec![self.directory.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let is_data = path.extension().is_none_or(|extension| extension != "conf");
                if path.is_dir() {
                    directories.push(path);
                } else if let (true, Ok(bytes)) = (is_data, std::fs::read(&path)) {
                    files.push((path, bytes)); // a deleted file was replaced by another one
                }
            }
        }
        files
    }

    /// Replaces the data files of a server that is down.
    pub fn put_back(&self, data: &[(PathBuf, Vec<u8>)]) {
        for (path, _) in self.data() {
            std::fs::remove_file(path).unwrap();
        }
        for (path, bytes) in data {
            std::fs::write(path, bytes).unwrap();
        }
    }

    pub async fn is_back(&mut self) {
        assert!(self.is_up().await, "port {} was taken meanwhile", self.port);
    }

    /// The server's clock, in microseconds.
    pub async fn time(&self) -> i64 {
        let (seconds, micros): (i64, i64) = self.run(&["TIME"]).await;
        seconds * 1_000_000 + micros
    }

    /// The number of scripts that the server has run.
    pub async fn scripts_run(&self) -> u64 {
        self.calls("cmdstat_eval").await
    }

    /// The number of messages that the server's scripts and clients have published.
    pub async fn published(&self) -> u64 {
        self.calls("cmdstat_publish:").await
    }

    /// The number of executed commands with this prefix in the statistics.
    pub async fn calls(&self, prefix: &str) -> u64 {
        let stats: String = self.run(&["INFO", "commandstats"]).await;
        let count = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with(prefix)).filter_map(count).sum()
    }

    /// The number of replicas that are connected and synchronized.
    pub async fn replicas_online(&self) -> usize {
        self.run::<String>(&["INFO", "replication"]).await.matches("state=online").count()
    }

    /// Gives slots to this node of a cluster.
    pub async fn add_slots(&self, slots: impl Iterator<Item = usize>) {
        // One by one: Redis 6.2 does not accept ranges.
        let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
        let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
        self.run::<()>(&words.collect::<Vec<_>>()).await;
    }

    /// Whether the server is a replica that is connected to its master and synchronized.
    pub async fn follows(&self) -> bool {
        self.run::<String>(&["INFO", "replication"]).await.contains("master_link_status:up")
    }

    /// The ids of the connections with a subscription, without those of sentinels.
    pub async fn subscribers(&self) -> Vec<String> {
        let list: String = self.run(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
        let word = |line: &str, key: &str| {
            line.split(' ').find_map(|word| word.strip_prefix(key)).unwrap_or_default().to_owned()
        };
        let clients = list.lines().filter(|line| !word(line, "name=").starts_with("sentinel-"));
        clients.map(|line| word(line, "id=")).collect()
    }

    /// The number of waiters in this queue. Marks are in the same sorted set, with larger scores.
    pub async fn waiters(&self, queue: &str) -> u64 {
        self.run(&count_waiters(queue)).await
    }

    /// Waits until the lock with this key has waiters, and all of them are notified: a client's
    /// first one may queue before the client is subscribed, and polls until then.
    pub async fn all_notified(&self, key: &str) {
        let queue = companion(key, "waiters");
        let places = ["ZRANGEBYSCORE", &queue, "-inf", WAITERS];
        let has_channel = |place: &String| place.split(' ').nth(3).is_some_and(|channel| !channel.is_empty());
        eventually("the waiters are notified", || async {
            let places: Vec<String> = self.run(&places).await;
            !places.is_empty() && places.iter().all(has_channel)
        })
        .await;
    }

    /// The queues with a waiter. Queues with marks alone may remain until their TTL expires.
    pub async fn queues(&self) -> Vec<String> {
        let mut connection = self.connection().await;
        let keys = redis::cmd("KEYS").arg("*:waiters").to_owned();
        let queues: Vec<String> = keys.query_async(&mut connection).await.unwrap();
        let mut counts = redis::pipe();
        counts.cmd("PING").ignore(); // there may be no queue
        for queue in &queues {
            let [command, words @ ..] = count_waiters(queue);
            counts.cmd(command).arg(&words);
        }
        let counts: Vec<u64> = counts.query_async(&mut connection).await.unwrap();
        queues.into_iter().zip(counts).filter(|(_, count)| *count > 0).map(|(queue, _)| queue).collect()
    }

    /// Checks that the clients of a test have left no waiter, no subscription, and no key without a
    /// TTL.
    pub async fn assert_nothing_left(&self) {
        eventually("no queue and no subscription left", || async {
            self.subscribers().await.is_empty() && self.queues().await.is_empty()
        })
        .await;
        // The record that a guarded quorum's node has of itself stays.
        let keys = self.run::<Vec<Vec<u8>>>(&["KEYS", "*"]).await;
        for key in keys.into_iter().filter(|key| !key.ends_with(b"{}node")) {
            let mut connection = self.try_connection().await.unwrap();
            let pttl: i64 = redis::cmd("PTTL").arg(&key).query_async(&mut connection).await.unwrap();
            assert_ne!(pttl, -1, "{:?} has no TTL", String::from_utf8_lossy(&key));
        }
    }
}

/// The command that counts the waiters of a queue, which are below all marks.
pub fn count_waiters(queue: &str) -> [&str; 4] {
    ["ZCOUNT", queue, "-inf", WAITERS]
}

fn spawn(binary: &Path, arguments: &[String], environment: &Environment) -> Child {
    Command::new(binary)
        .args(arguments)
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", binary.display()))
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects for the test itself. The client's own limits, half a second for a reply, would be over
/// on a busy machine.
pub async fn connect(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(LONGEST_WAIT))
        .set_response_timeout(Some(LONGEST_WAIT));
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}
