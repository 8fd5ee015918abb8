//! One private server per test, on a free port, stopped when it is dropped.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redlatch::{Locks, Options};
use rustix::process::{Pid, Signal, kill_process};

use super::{PATIENCE, eventually};

/// A server of one's own.
pub struct Server {
    child: Child,
    port: u16,
    arguments: Vec<String>,
    directory: tempfile::TempDir,
}

/// The server's binary: `scripts/test` sets it, and `scripts/server` finds or fetches one.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("REDLATCH_SERVER") {
        return path.into();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/server");
    let output = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "no Redis or Valkey server: run scripts/server, or set REDLATCH_SERVER");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().last().expect("scripts/server prints a path").into()
}

impl Server {
    pub async fn start() -> Server {
        Server::start_with(&[]).await
    }

    pub async fn start_with(arguments: &[&str]) -> Server {
        let binary = binary();
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        // A free port may be taken between finding and using it: then the server ends, and the next is tried.
        for _ in 0..20 {
            let directory = tempfile::tempdir().unwrap();
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let child = spawn(&binary, port, &arguments, &directory);
            let mut server = Server { child, port, arguments: arguments.clone(), directory };
            if server.is_up().await {
                return server;
            }
        }
        panic!("{} does not start", binary.display());
    }

    async fn is_up(&mut self) -> bool {
        let start = Instant::now();
        loop {
            if let Ok(mut connection) = self.try_connection().await
                && redis::cmd("PING").exec_async(&mut connection).await.is_ok()
            {
                return true;
            }
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(start.elapsed() < PATIENCE, "the server on port {} does not answer", self.port);
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
        Locks::open(&self.url()).await.unwrap()
    }

    pub async fn locks_with(&self, options: Options) -> Locks {
        Locks::open_with(&self.url(), options).await.unwrap()
    }

    /// A connection to look at the server with.
    pub async fn connection(&self) -> MultiplexedConnection {
        self.try_connection().await.unwrap()
    }

    async fn try_connection(&self) -> redis::RedisResult<MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        redis::Client::open(self.url())?.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Runs one command, given as words.
    pub async fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut cmd = redis::cmd(words[0]);
        for word in &words[1..] {
            cmd.arg(word);
        }
        cmd.query_async(&mut self.connection().await)
            .await
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Cuts all connections but the one that asks for it.
    pub async fn kill_connections(&self) {
        let _: i64 = self.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    }

    /// Kills it without a word.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again on its port, with its directory.
    pub async fn restart(&mut self) {
        self.child = spawn(&binary(), self.port, &self.arguments, &self.directory);
        assert!(self.is_up().await, "port {} was taken meanwhile", self.port);
    }

    /// What every test ends with, once its clients are gone: every key has a ttl, nobody is queued, and
    /// nobody is subscribed.
    pub async fn assert_nothing_left(&self) {
        eventually("no queue and no subscription left", || async {
            let channels: Vec<String> = self.run(&["PUBSUB", "CHANNELS"]).await;
            let queues: Vec<String> = self.run(&["KEYS", "*:waiters"]).await;
            channels.is_empty() && queues.is_empty()
        })
        .await;
        for key in self.run::<Vec<Vec<u8>>>(&["KEYS", "*"]).await {
            let mut connection = self.connection().await;
            let pttl: i64 = redis::cmd("PTTL").arg(&key).query_async(&mut connection).await.unwrap();
            assert_ne!(pttl, -1, "{:?} has no ttl", String::from_utf8_lossy(&key));
        }
    }
}

fn spawn(binary: &PathBuf, port: u16, arguments: &[String], directory: &tempfile::TempDir) -> Child {
    Command::new(binary)
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
        .arg("--dir")
        .arg(directory.path())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", binary.display()))
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be stopped, or dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
