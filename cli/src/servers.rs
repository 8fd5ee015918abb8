//! The servers: where they are, from arguments or the environment, and how to reach them.

use std::path::PathBuf;
use std::time::Duration;

use redlatch::redis::aio::MultiplexedConnection;
use redlatch::redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind,
    FromRedisValue, IntoConnectionInfo as _, RedisError, TlsCertificates, Value, cmd,
};
use redlatch::{Locks, LocksBuilder, Options, RestartGuard};

use crate::certificates;
use crate::exit::Failure;

#[derive(clap::Args)]
#[command(next_help_heading = "Servers")]
pub(crate) struct ServerArgs {
    /// The server; repeated, three or five servers of a quorum.
    ///
    /// Without it, the URLs in REDLATCH_REDIS, separated by spaces, or else the URL in REDIS_URL. A
    /// URL with a password belongs there: other users can read a program's arguments.
    #[arg(long, global = true, value_name = "URL")]
    redis: Vec<String>,
    /// The URLs are sentinels, which watch the master under this name, or
    /// `redis://NAME/database`.
    #[arg(long, global = true, value_name = "NAME", conflicts_with = "cluster")]
    sentinel: Option<String>,
    /// The URLs are some nodes of a Redis Cluster.
    #[arg(long, global = true)]
    cluster: bool,
    /// A node of the quorum that has restarted has no vote until `redlatch quorum
    /// rejoin` admits it. All clients of a quorum must agree on it.
    #[arg(long, global = true)]
    restart_guard: bool,
    /// The prefix of all keys.
    #[arg(long, global = true, value_name = "TEXT", default_value = "lock:")]
    pub(crate) key_prefix: String,
    /// How long a server may take to connect or to reply.
    #[arg(long, global = true, value_name = "DURATION", default_value = "2s", allow_hyphen_values = true, value_parser = crate::span::parse)]
    node_timeout: Duration,
    /// The CA that signed the servers' certificates, in PEM.
    #[arg(long, global = true, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// A certificate of this client, in PEM.
    #[arg(long, global = true, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Its key, in PEM.
    #[arg(long, global = true, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

impl ServerArgs {
    /// The options of the client that are the same for every command.
    pub(crate) fn options(&self) -> Options {
        let options = Options::new().prefix(&self.key_prefix).node_timeout(self.node_timeout);
        if self.restart_guard { options.restart_guard(RestartGuard::On) } else { options }
    }

    pub(crate) fn builder(&self) -> Result<LocksBuilder, Failure> {
        let urls = self.urls()?;
        let builder = match (&self.sentinel, self.cluster, urls.as_slice()) {
            (Some(master), ..) => Locks::builder().sentinel(&urls, master),
            (None, true, _) => Locks::builder().cluster(&urls),
            (None, false, [only]) => Locks::builder().server(only),
            (None, false, _) => Locks::builder().quorum(&urls),
        };
        let builder = match self.certificates()? {
            Some(certificates) => builder.tls(certificates),
            None => builder,
        };
        Ok(builder.client_name("redlatch"))
    }

    /// Connects, with the options of these arguments.
    pub(crate) async fn connect(&self) -> Result<Locks, Failure> {
        Ok(self.builder()?.options(self.options()).connect().await?)
    }

    fn urls(&self) -> Result<Vec<String>, Failure> {
        // Sentinel allows letters, digits, `.`, `-` and `_`. This would be in messages as a name.
        if self.sentinel.as_ref().is_some_and(|name| name.contains('@') && !name.contains("://")) {
            let text = "--sentinel: the name of a master has no `@`; with a user or a password it is a URL, redis://…";
            return Err(Failure::Usage(text.to_owned()));
        }
        if !self.redis.is_empty() {
            return Ok(self.redis.clone());
        }
        let urls = match variable("REDLATCH_REDIS")? {
            Some(urls) => Some(urls),
            None => variable("REDIS_URL")?,
        };
        let urls = urls.ok_or_else(|| {
            Failure::Usage("no server: set REDLATCH_REDIS or REDIS_URL, or give --redis URL".to_owned())
        })?;
        Ok(urls.split_whitespace().map(str::to_owned).collect())
    }

    fn certificates(&self) -> Result<Option<TlsCertificates>, Failure> {
        let root_cert = self.cacert.as_deref().map(certificates::read_certificates).transpose()?;
        let client = self.cert.as_deref().zip(self.key.as_deref());
        let client = client.map(|(cert, key)| certificates::read_client(cert, key)).transpose()?;
        let client_tls = client.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
        let is_given = client_tls.is_some() || root_cert.is_some();
        Ok(is_given.then_some(TlsCertificates { client_tls, root_cert }))
    }
}

/// A variable of the environment; `None` if it is missing or blank. One that is not UTF-8 is
/// refused: without it, this machine would lock on another server than the others.
pub(crate) fn variable(name: &str) -> Result<Option<String>, Failure> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let value = value.into_string().map_err(|_| Failure::Usage(format!("{name} is not UTF-8")))?;
    Ok(Some(value).filter(|value| !value.trim().is_empty()))
}

/// A server that grants locks, for requests that no lock has.
pub(crate) struct Master {
    connection: MultiplexedConnection,
    address: String,
}

impl ServerArgs {
    /// Connects to the server, to all nodes of a quorum, to all masters of a cluster, or to the
    /// master that the sentinels name. One of several may fail.
    pub(crate) async fn masters(&self) -> Result<Vec<Result<Master, Failure>>, Failure> {
        let (certificates, limit) = (self.certificates()?, self.node_timeout);
        let info = |url: &str| {
            let unusable = |cause| Failure::Lock(redlatch::ConfigError::Url { cause }.into());
            url.into_connection_info().map_err(unusable)
        };
        let infos: Vec<_> = self.urls()?.iter().map(|url| info(url)).collect::<Result<_, _>>()?;
        let infos = match &self.sentinel {
            Some(name) => {
                let (settings, name) = match name.split_once("://") {
                    Some(_) => (Some(info(name)?), host(info(name)?.addr())),
                    None => (None, name.clone()),
                };
                vec![master_of(&infos, settings, &name, certificates.as_ref(), limit).await?]
            }
            None if self.cluster => nodes_of(&infos, certificates.as_ref(), limit).await?,
            None => infos,
        };
        let mut masters = Vec::new();
        for info in infos {
            masters.push(Master::connect(info, certificates.as_ref(), limit).await);
        }
        Ok(masters)
    }
}

impl Master {
    async fn connect(
        info: ConnectionInfo,
        certificates: Option<&TlsCertificates>,
        limit: Duration,
    ) -> Result<Master, Failure> {
        let address = info.addr().to_string();
        let connected = async {
            let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
            let client = match certificates.filter(|_| is_tls) {
                Some(certificates) => Client::build_with_tls(info, certificates.clone())?,
                None => Client::open(info)?,
            };
            let config = AsyncConnectionConfig::new();
            let config = config.set_connection_timeout(Some(limit)).set_response_timeout(Some(limit));
            client.get_multiplexed_async_connection_with_config(&config).await
        };
        match connected.await {
            Ok(connection) => Ok(Master { connection, address }),
            Err(cause) => Err(failure("connect to", address, cause)),
        }
    }

    /// Returns some of the keys that match, and the cursor for more; 0 after the last ones.
    pub(crate) async fn scan(&mut self, pattern: &str, cursor: u64) -> Result<(u64, Vec<Vec<u8>>), Failure> {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000);
        self.ask("list the keys of", &scan).await
    }

    async fn ask<T: FromRedisValue>(&mut self, what: &'static str, request: &Cmd) -> Result<T, Failure> {
        let reply = request.query_async(&mut self.connection).await;
        reply.map_err(|cause| failure(what, self.address.clone(), cause))
    }
}

fn failure(what: &'static str, server: String, cause: RedisError) -> Failure {
    Failure::Server { what, server, is_refusal: refuses(&cause), cause: cause.into() }
}

/// Whether a server has refused for a reason that does not pass by itself.
fn refuses(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig)
        || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED"))
}

fn host(addr: &ConnectionAddr) -> String {
    match addr {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.clone(),
        other => other.to_string(),
    }
}

/// The same server settings, at another address.
fn at(info: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    info.clone().set_addr(addr)
}

/// The first answer of several servers; otherwise the last failure.
async fn first<T>(
    infos: &[ConnectionInfo],
    certificates: Option<&TlsCertificates>,
    limit: Duration,
    ask: impl AsyncFn(Master, &ConnectionInfo) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut failure = Failure::Usage("no server is named".to_owned());
    for info in infos {
        let answer = match Master::connect(info.clone(), certificates, limit).await {
            Ok(server) => ask(server, info).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(answer) => return Ok(answer),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

async fn master_of(
    sentinels: &[ConnectionInfo],
    settings: Option<ConnectionInfo>,
    name: &str,
    certificates: Option<&TlsCertificates>,
    limit: Duration,
) -> Result<ConnectionInfo, Failure> {
    let (host, port) = first(sentinels, certificates, limit, async |mut sentinel, _| {
        let mut question = cmd("SENTINEL");
        question.arg("get-master-addr-by-name").arg(name);
        sentinel.ask::<(String, u16)>("find the master at", &question).await
    })
    .await?;
    // One has answered, so there are some. The credentials in their URLs are for the sentinels.
    let plain = || sentinels[0].clone().set_redis_settings(Default::default());
    Ok(at(&settings.unwrap_or_else(plain), host, port))
}

async fn nodes_of(
    seeds: &[ConnectionInfo],
    certificates: Option<&TlsCertificates>,
    limit: Duration,
) -> Result<Vec<ConnectionInfo>, Failure> {
    first(seeds, certificates, limit, async |mut seed, info| {
        let mut question = cmd("CLUSTER");
        question.arg("SLOTS");
        let slots: Vec<Vec<Value>> = seed.ask("find the masters at", &question).await?;
        let mut masters = Vec::new();
        for range in slots {
            // First slot, last slot, then the master: its address, its port, its id.
            let Some(Value::Array(node)) = range.get(2) else { continue };
            let [address, Value::Int(port), ..] = node.as_slice() else { continue };
            let address = match address {
                Value::BulkString(address) if !address.is_empty() => {
                    String::from_utf8_lossy(address).into_owned()
                }
                _ => host(info.addr()), // the same as that of the server that was asked
            };
            let node = (address, u16::try_from(*port).unwrap_or(0));
            if !masters.contains(&node) {
                masters.push(node);
            }
        }
        Ok(masters.into_iter().map(|(host, port)| at(info, host, port)).collect())
    })
    .await
}
