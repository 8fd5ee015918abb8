//! A master that sentinels watch, and that they are asked for whenever a connection is made.

use std::time::Duration;

use redis::sentinel::{Sentinel, SentinelNodeConnectionInfo};
use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisError, TlsMode};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::settings::{info, tcp};

/// The name of a master, and whom to ask where it is.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    sentinels: Vec<ConnectionInfo>,
    name: String,
    node: SentinelNodeConnectionInfo,
    limit: Duration,
    /// Where requests go.
    place: watch::Sender<Option<ConnectionAddr>>,
}

impl Watched {
    /// `master` is a name, or a URL with the name in place of the host: it may carry what the master wants to
    /// be shown, which is not what the sentinels want.
    pub(crate) fn new(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        master: &str,
        limit: Duration,
    ) -> Result<Watched, RedisError> {
        let sentinels =
            urls.into_iter().map(|url| info(url.as_ref(), limit)).collect::<Result<Vec<_>, _>>()?;
        if sentinels.is_empty() {
            return Err(RedisError::from((ErrorKind::EmptySentinelList, "no sentinel was named")));
        }
        let mut node = SentinelNodeConnectionInfo::default();
        let mut name = master.to_owned();
        let mut settings = tcp(sentinels[0].tcp_settings(), limit);
        if master.contains("://") {
            let url = master.into_connection_info()?;
            let (host, tls) = match url.addr() {
                ConnectionAddr::Tcp(host, _) => (host.clone(), None),
                ConnectionAddr::TcpTls { host, insecure: false, .. } => (host.clone(), Some(TlsMode::Secure)),
                ConnectionAddr::TcpTls { host, .. } => (host.clone(), Some(TlsMode::Insecure)),
                _ => {
                    let text = "a master's URL is redis://name or rediss://name";
                    return Err(RedisError::from((ErrorKind::InvalidClientConfig, text)));
                }
            };
            node = node.set_redis_connection_info(url.redis_settings().clone());
            if let Some(tls) = tls {
                node = node.set_tls_mode(tls);
            }
            settings = tcp(url.tcp_settings(), limit);
            name = host;
        }
        let node = node.set_tcp_settings(settings);
        Ok(Watched { sentinels, name, node, limit, place: watch::Sender::new(None) })
    }

    /// What the master is called.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where the master is now: as the first sentinel says whose answer the server itself confirms. They are asked in
    /// turn, but whoever hangs keeps the next one from being asked for no more than his share of half the limit.
    pub(super) async fn master(&self) -> Result<Client, RedisError> {
        let share = self.limit / u32::try_from(2 * self.sentinels.len()).unwrap_or(u32::MAX);
        let mut left = self.sentinels.iter();
        let mut asked = JoinSet::new();
        let mut failure = RedisError::from((ErrorKind::EmptySentinelList, "no sentinel was named"));
        loop {
            let next = left.next();
            match next {
                Some(sentinel) => {
                    asked.spawn(self.clone().ask(sentinel.clone()));
                }
                None if asked.is_empty() => return Err(failure),
                None => {}
            }
            let patience = if next.is_some() { share } else { self.limit };
            match timeout(patience, asked.join_next()).await {
                Ok(Some(Ok(Ok(master)))) => return Ok(master),
                Ok(Some(Ok(Err(error)))) if rank(&error) >= rank(&failure) => failure = error,
                // The next one: there are fewer of those who are left each time, or of those who were asked.
                _ => {}
            }
        }
    }

    /// Takes note that requests go there from now on.
    pub(super) fn leads_to(&self, master: &Client) {
        let new = Some(master.get_connection_info().addr().clone());
        self.place.send_if_modified(|place| {
            let moves = *place != new;
            *place = new;
            moves
        });
    }

    /// Returns once requests go elsewhere than before, and not to this server. Only news count: of two sentinels that
    /// disagree, nobody is sent to and fro.
    pub(super) async fn moves_from(&self, client: &Client) {
        let mut place = self.place.subscribe();
        let here = client.get_connection_info().addr();
        while place.changed().await.is_ok() {
            if place.borrow().as_ref() != Some(here) {
                return;
            }
        }
    }

    async fn ask(self, sentinel: ConnectionInfo) -> Result<Client, RedisError> {
        // Nothing is kept of it: a connection to a sentinel that hangs must not be met again.
        Sentinel::build(vec![sentinel])?.async_master_for(&self.name, Some(&self.node)).await
    }
}

/// How much a failure tells: that somebody was refused is more than that there is no such name, and that is more than
/// that somebody is not there.
fn rank(error: &RedisError) -> u8 {
    match error.kind() {
        ErrorKind::EmptySentinelList => 0,
        ErrorKind::Io => 1,
        ErrorKind::MasterNameNotFoundBySentinel => 2,
        _ => 3,
    }
}
