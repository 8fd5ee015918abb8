//! A master that sentinels watch, and that they are asked for whenever a connection is made.

use std::collections::HashMap;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, Value};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::connection::too_slow;
use super::endpoint::config;

/// How long the other sentinels are waited for, once one has answered.
const GATHERING: Duration = Duration::from_millis(100);

/// The name of a master, and whom to ask where it is.
#[derive(Clone, Debug)]
pub(crate) struct SentinelMaster {
    sentinels: Vec<ConnectionInfo>,
    name: String,
    /// What the master wants to be shown. Its address is a placeholder.
    master: ConnectionInfo,
    limit: Duration,
    /// Where requests go.
    place: watch::Sender<Option<ConnectionAddr>>,
}

/// What a sentinel says of the master.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MasterReport {
    /// Counts failovers: whoever says more knows of a later one.
    epoch: u64,
    host: String,
    port: u16,
}

impl SentinelMaster {
    /// The name of the master is in place of its host. What it wants to be shown is not what the
    /// sentinels want.
    pub(crate) fn new(
        sentinels: Vec<ConnectionInfo>,
        master: ConnectionInfo,
        limit: Duration,
    ) -> Result<SentinelMaster, RedisError> {
        if sentinels.is_empty() {
            return Err(RedisError::from((ErrorKind::EmptySentinelList, "no sentinel was named")));
        }
        let (ConnectionAddr::Tcp(name, _) | ConnectionAddr::TcpTls { host: name, .. }) = master.addr() else {
            let text = "a master's URL is redis://name or rediss://name";
            return Err(RedisError::from((ErrorKind::InvalidClientConfig, text)));
        };
        Ok(SentinelMaster { sentinels, name: name.clone(), master, limit, place: watch::Sender::new(None) })
    }

    /// What the master is called.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where the master is now: as the sentinel says who knows of the latest failover, and as the server itself confirms.
    pub(super) async fn master(&self) -> Result<Client, RedisError> {
        let mut asked = JoinSet::new();
        for sentinel in &self.sentinels {
            asked.spawn(self.clone().ask(sentinel.clone()));
        }
        let mut reports = Vec::new();
        let mut failure = too_slow();
        // Half of the time is the master's.
        let mut patience = self.limit / 2;
        while let Ok(Some(answer)) = timeout(patience, asked.join_next()).await {
            match answer {
                Ok(Ok(one)) => {
                    reports.push(one);
                    patience = GATHERING;
                }
                Ok(Err(error)) if rank(&error) >= rank(&failure) => failure = error,
                _ => {}
            }
        }
        let voices = |one: &MasterReport| reports.iter().filter(|other| *other == one).count();
        let Some(latest) = reports.iter().max_by_key(|one| (one.epoch, voices(one))) else {
            return Err(failure);
        };
        let master = Client::open(self.at(latest))?;
        let mut connection = master.get_multiplexed_async_connection_with_config(&self.config()).await?;
        let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
        match role.first() {
            Some(Value::BulkString(role)) if role == b"master" => Ok(master),
            _ => {
                let text = "the sentinels name a server that is not a master";
                Err(RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, text, self.name.clone())))
            }
        }
    }

    /// Whether the master is elsewhere than requests go, as far as anybody knows.
    pub(super) async fn has_moved(&self) -> bool {
        let master = timeout(self.limit, self.master()).await;
        master.is_ok_and(|it| {
            it.is_ok_and(|it| self.place.borrow().as_ref() != Some(it.get_connection_info().addr()))
        })
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

    /// Asks as clients should: `SENTINEL MASTERS` lists a master that has been replaced until its replicas have been
    /// told, and it may be alive.
    async fn ask(self, sentinel: ConnectionInfo) -> Result<MasterReport, RedisError> {
        // Nothing is kept of it: a connection to a sentinel that hangs must not be met again.
        let client = Client::open(sentinel)?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&self.config()).await?;
        let mut questions = redis::pipe();
        questions.cmd("SENTINEL").arg("MASTER").arg(&self.name);
        questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let (known, address): (Value, Value) = questions.ignore_errors().query_async(&mut connection).await?;
        let Some((host, port)) = redis::from_redis_value::<Option<(String, u16)>>(address)? else {
            let text = "no sentinel knows a master of this name";
            return Err(RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, text, self.name)));
        };
        // Not everybody may ask that; then all know as much as the others.
        let known: HashMap<String, String> = redis::from_redis_value(known).unwrap_or_default();
        let epoch = known.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(MasterReport { epoch, host, port })
    }

    fn at(&self, reports: &MasterReport) -> ConnectionInfo {
        let (mut addr, to) = (self.master.addr().clone(), reports.clone());
        match &mut addr {
            ConnectionAddr::TcpTls { host, port, .. } => (*host, *port) = (to.host, to.port),
            other => *other = ConnectionAddr::Tcp(to.host, to.port),
        }
        self.master.clone().set_addr(addr)
    }

    fn config(&self) -> AsyncConnectionConfig {
        config(self.limit)
    }
}

/// How much a failure tells: that somebody was refused is more than that there is no such name, and that is more than
/// that somebody is not there.
fn rank(error: &RedisError) -> u8 {
    match error.kind() {
        ErrorKind::Io => 0,
        ErrorKind::MasterNameNotFoundBySentinel => 1,
        _ => 2,
    }
}
