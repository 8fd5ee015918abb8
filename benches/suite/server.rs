//! A private server, and its own figures.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use tempfile::TempDir;
use tokio::time::sleep;

use super::Outcome;

/// How long a server may take to start, or to notice that its clients have disconnected.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// A private server. It is stopped when this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    binary: PathBuf,
    port: u16,
    _directory: TempDir,
}

impl Server {
    pub(crate) async fn start() -> Outcome<Server> {
        Server::start_with(&[]).await
    }

    pub(crate) async fn start_with(settings: &[&str]) -> Outcome<Server> {
        let binary = binary()?;
        // Another process may take a free port before the server does. The server ends then, and
        // another port is tried.
        for _ in 0..20 {
            let directory = tempfile::tempdir()?;
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let child = spawn(&binary, port, directory.path(), settings)?;
            let mut server = Server { child, binary: binary.clone(), port, _directory: directory };
            if server.is_up().await? {
                return Ok(server);
            }
        }
        Err(format!("{} does not start", binary.display()).into())
    }

    async fn is_up(&mut self) -> Outcome<bool> {
        let start = Instant::now();
        while start.elapsed() < LONGEST_WAIT {
            if self.connect().await.is_ok() {
                return Ok(true);
            }
            if self.child.try_wait()?.is_some() {
                return Ok(false);
            }
            sleep(Duration::from_millis(5)).await;
        }
        Err(format!("{} does not answer", self.binary.display()).into())
    }

    pub(crate) fn binary(&self) -> &Path {
        &self.binary
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address())
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Opens a bare connection, with the socket settings of the crate's connections.
    pub(crate) async fn connect(&self) -> Outcome<MultiplexedConnection> {
        use redis::IntoConnectionInfo;
        let info = self.url().into_connection_info()?;
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let limit = Some(Duration::from_secs(1));
        let config =
            redis::AsyncConnectionConfig::new().set_connection_timeout(limit).set_response_timeout(limit);
        let client = redis::Client::open(info.set_tcp_settings(tcp))?;
        Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
    }

    pub(crate) async fn observer(&self) -> Outcome<Observer> {
        Ok(Observer { connection: self.connect().await?, observations: 0 })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the server's figures, on a connection of its own.
#[derive(Debug)]
pub(crate) struct Observer {
    connection: MultiplexedConnection,
    /// How often the number of commands was read.
    observations: u64,
}

impl Observer {
    /// The product and its version. Valkey also reports the version of Redis that it is compatible
    /// with.
    pub(crate) async fn version(&mut self) -> Outcome<String> {
        match self.info("server", "valkey_version").await {
            Ok(version) => Ok(format!("Valkey {version}")),
            Err(_) => Ok(format!("Redis {}", self.info("server", "redis_version").await?)),
        }
    }

    /// The CPU time that the server has used so far, its own and the kernel's for it.
    pub(crate) async fn cpu(&mut self) -> Outcome<Duration> {
        let user: f64 = self.info("cpu", "used_cpu_user").await?.parse()?;
        let system: f64 = self.info("cpu", "used_cpu_sys").await?.parse()?;
        Ok(Duration::from_secs_f64(user + system))
    }

    /// How many commands the server has run so far, without those that read this figure.
    pub(crate) async fn commands(&mut self) -> Outcome<u64> {
        self.observations += 1;
        let commands: u64 = self.info("stats", "total_commands_processed").await?.parse()?;
        Ok(commands - (self.observations - 1))
    }

    /// The bytes that the server has allocated.
    pub(crate) async fn memory(&mut self) -> Outcome<u64> {
        Ok(self.info("memory", "used_memory").await?.parse()?)
    }

    /// Deletes all keys: what an earlier section has left is not part of a later figure.
    pub(crate) async fn empty(&mut self) -> Outcome<()> {
        Ok(redis::cmd("FLUSHALL").arg("SYNC").query_async(&mut self.connection).await?)
    }

    /// How many messages were published so far: one for each lock that was granted to a waiter.
    pub(crate) async fn published(&mut self) -> Outcome<u64> {
        // The server does not list commands that have not been used.
        let Ok(calls) = self.info("commandstats", "cmdstat_publish").await else { return Ok(0) };
        let calls = calls.split(',').find_map(|field| field.strip_prefix("calls="));
        Ok(calls.ok_or("INFO commandstats does not count")?.parse()?)
    }

    /// The number of connections besides this one.
    pub(crate) async fn connections(&mut self) -> Outcome<u32> {
        Ok(self.info("clients", "connected_clients").await?.parse::<u32>()? - 1)
    }

    /// Waits until the clients of an earlier section have disconnected, which they do in the
    /// background.
    pub(crate) async fn alone(&mut self) -> Outcome<()> {
        let start = Instant::now();
        while self.connections().await? > 0 {
            if start.elapsed() > LONGEST_WAIT {
                return Err("connections of an earlier section stay open".into());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    async fn info(&mut self, section: &str, field: &str) -> Outcome<String> {
        let text: String = redis::cmd("INFO").arg(section).query_async(&mut self.connection).await?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        let value = pairs.find(|(name, _)| *name == field).map(|(_, value)| value.trim().to_owned());
        value.ok_or_else(|| format!("INFO {section} does not say {field}").into())
    }
}

/// The server's binary: `scripts/bench` sets the variable. Without it, `scripts/server` finds or
/// fetches one.
fn binary() -> Outcome<PathBuf> {
    if let Some(path) = std::env::var_os("REDLATCH_SERVER") {
        return Ok(path.into());
    }
    let output = Command::new(repository()?.join("scripts/server")).stderr(Stdio::inherit()).output()?;
    let path = String::from_utf8(output.stdout)?.lines().last().map(PathBuf::from);
    path.filter(|_| output.status.success()).ok_or_else(|| "scripts/server found no server".into())
}

/// The folder of the repository, also for the package in `benches/peers`.
pub(crate) fn repository() -> Outcome<&'static Path> {
    let mut directories = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    Ok(directories.find(|directory| directory.join("scripts/server").is_file()).ok_or("no scripts/server")?)
}

fn spawn(binary: &Path, port: u16, directory: &Path, settings: &[&str]) -> Outcome<Child> {
    Command::new(binary)
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
        .arg("--dir")
        .arg(directory)
        .args(settings)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|error| format!("{}: {error}", binary.display()).into())
}
