//! The servers: where they are, from arguments or the environment, and how to reach them.

use std::path::PathBuf;

use redlatch::redis::{ClientTlsConfig, TlsCertificates};
use redlatch::{Locks, LocksBuilder, Options, RestartGuard};

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
    /// A node of the quorum that has restarted has no vote until it is admitted again. All clients
    /// of a quorum must agree on it.
    #[arg(long, global = true)]
    restart_guard: bool,
    /// The prefix of all keys.
    #[arg(long, global = true, value_name = "TEXT", default_value = "lock:")]
    key_prefix: String,
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
    /// The options of the client: the prefix, and the guard of a quorum.
    pub(crate) fn options(&self) -> Options {
        let options = Options::new().prefix(&self.key_prefix);
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

    fn urls(&self) -> Result<Vec<String>, Failure> {
        if !self.redis.is_empty() {
            return Ok(self.redis.clone());
        }
        let named = |name: &str| std::env::var(name).ok().filter(|urls| !urls.trim().is_empty());
        let urls = named("REDLATCH_REDIS").or_else(|| named("REDIS_URL"));
        let urls = urls.ok_or_else(|| {
            Failure::Usage("no server: set REDLATCH_REDIS or REDIS_URL, or give --redis URL".to_owned())
        })?;
        Ok(urls.split_whitespace().map(str::to_owned).collect())
    }

    fn certificates(&self) -> Result<Option<TlsCertificates>, Failure> {
        let read = |file: &PathBuf| {
            let unreadable = |error| Failure::Usage(format!("cannot read {}: {error}", file.display()));
            std::fs::read(file).map_err(unreadable)
        };
        let client_tls = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? })
            }
            _ => None,
        };
        let root_cert = self.cacert.as_ref().map(read).transpose()?;
        let is_given = client_tls.is_some() || root_cert.is_some();
        Ok(is_given.then_some(TlsCertificates { client_tls, root_cert }))
    }
}
