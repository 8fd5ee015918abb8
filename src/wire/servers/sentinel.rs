//! [`SentinelMaster`]: finds the master that sentinels watch, whenever a connection is made.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, Value};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::error_replies::{at_announced, too_slow};
use super::refused_connection::{EXPLAINING, explain};
use super::transport::{config, moved_to};

/// How long to wait for the other sentinels once one has replied.
const REPORT_GATHERING: Duration = Duration::from_millis(100);

/// The name of a master, and the sentinels that know its address.
#[derive(Clone, Debug)]
pub(crate) struct SentinelMaster {
    sentinels: Vec<ConnectionInfo>,
    pub(super) name: String,
    /// The master's connection settings. The address is a placeholder.
    master: ConnectionInfo,
    limit: Duration,
    /// The address that requests are sent to.
    place: watch::Sender<Option<ConnectionAddr>>,
    /// The epoch of the report that named the master in use, or of a later one.
    epoch: Arc<AtomicU64>,
}

/// A sentinel's report about the master.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MasterReport {
    /// Counts failovers: the report with the larger epoch knows of a later one.
    epoch: u64,
    host: String,
    port: u16,
}

impl SentinelMaster {
    /// The URL has the master's name in place of a host. Its credentials are the master's, not the
    /// sentinels'.
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
        let (name, place) = (name.clone(), watch::Sender::new(None));
        Ok(SentinelMaster { sentinels, name, master, limit, place, epoch: Arc::default() })
    }

    /// Finds the master's present address, as reported by the sentinel with the latest failover and
    /// confirmed by the server itself.
    pub(super) async fn master(&self) -> Result<Client, RedisError> {
        Ok(self.find().await?.0)
    }

    /// The master, and the epoch of the report that named it.
    pub(super) async fn find(&self) -> Result<(Client, u64), RedisError> {
        let known = self.epoch.load(Ordering::SeqCst);
        let mut queries = JoinSet::new();
        for sentinel in &self.sentinels {
            queries.spawn(self.clone().ask(sentinel.clone()));
        }
        let (mut reports, mut refusals) = (Vec::new(), 0);
        let mut failure = too_slow();
        // Half of the time is reserved for the master.
        let mut limit = self.limit / 2;
        while let Ok(Some(answer)) = timeout(limit, queries.join_next()).await {
            match answer {
                Ok(Ok(one)) => {
                    // A sentinel that is cut off with a replaced master names that one.
                    limit = if one.epoch < known { limit } else { REPORT_GATHERING };
                    reports.push(one);
                }
                Ok(Err(error)) => {
                    refusals += usize::from(rank(&error) > 0);
                    failure = if rank(&error) >= rank(&failure) { error } else { failure };
                }
                Err(_) => {}
            }
        }
        let supporters = |one: &MasterReport| reports.iter().filter(|other| *other == one).count();
        let Some(latest) = reports.iter().max_by_key(|one| (one.epoch, supporters(one))) else {
            // One refusal beside sentinels that are silent is no lasting mistake: they may know the
            // master.
            let is_lasting = refusals == 0 || refusals == self.sentinels.len();
            let text = "no sentinel names the master yet; one of them answers";
            let not_yet = |why: RedisError| (ErrorKind::UnexpectedReturnType, text, why.to_string()).into();
            return Err(if is_lasting { failure } else { not_yet(failure) });
        };
        if reports.len() == self.sentinels.len() {
            // An operator may have made all of them forget the failovers. What another search has
            // found since this one began is newer.
            let (this, order) = (latest.epoch, Ordering::SeqCst);
            let _newer_stays = self.epoch.compare_exchange(known, this, order, order);
        }
        // Those that are cut off with a replaced master are few.
        if latest.epoch < known && reports.len() <= self.sentinels.len() / 2 {
            let text = "the sentinels that answer name the master of before the last failover";
            return Err(RedisError::from((ErrorKind::UnexpectedReturnType, text, self.name.clone())));
        }
        let master = Client::open(moved_to(&self.master, latest.host.clone(), latest.port))?;
        match self.role_of(&master).await {
            Ok(Some(Value::BulkString(role))) if role == b"master" => Ok((master, latest.epoch)),
            Ok(_) => {
                // It may become one: a failover is under way.
                let text = "the sentinels name a server that is not a master";
                Err(RedisError::from((ErrorKind::UnexpectedReturnType, text, self.name.clone())))
            }
            Err(failure) => {
                let info = master.get_connection_info();
                let failure = explain(info, failure, self.limit / EXPLAINING).await;
                Err(at_announced(info.addr(), failure))
            }
        }
    }

    async fn role_of(&self, server: &Client) -> Result<Option<Value>, RedisError> {
        let mut connection = server.get_multiplexed_async_connection_with_config(&config(self.limit)).await?;
        let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
        Ok(role.into_iter().next())
    }

    /// Whether the sentinels place the master elsewhere than requests are sent.
    pub(in crate::wire) async fn has_moved(&self) -> bool {
        let Ok(Ok((master, epoch))) = timeout(self.limit, self.find()).await else { return false };
        // A connection that works is left for fewer failovers only if all sentinels report them.
        let is_later = self.epoch.fetch_max(epoch, Ordering::SeqCst) <= epoch;
        is_later && self.place.borrow().as_ref() != Some(master.get_connection_info().addr())
    }

    /// Records where requests are sent from now on. The epoch is not lowered before: a
    /// subscription, or a connection that fails, must not make an outdated sentinel seem to know
    /// enough.
    pub(super) fn record_master(&self, master: &Client, epoch: u64) {
        self.epoch.store(epoch, Ordering::SeqCst);
        let new = Some(master.get_connection_info().addr().clone());
        self.place.send_if_modified(|place| {
            let moves = *place != new;
            *place = new;
            moves
        });
    }

    /// Where requests are sent.
    pub(super) fn place(&self) -> watch::Receiver<Option<ConnectionAddr>> {
        self.place.subscribe()
    }

    /// What one sentinel reports, or why it does not.
    async fn ask(self, sentinel: ConnectionInfo) -> Result<MasterReport, RedisError> {
        // Half of the limit is for this. A server without TLS that is sent TLS says nothing: part
        // of the time is for learning that.
        let (half, is_tls) = (self.limit / 2, matches!(sentinel.addr(), ConnectionAddr::TcpTls { .. }));
        let explaining = half / EXPLAINING;
        let limit = if is_tls { half - explaining } else { half };
        match timeout(limit, self.query(&sentinel)).await.unwrap_or_else(|_| Err(too_slow())) {
            Err(failure) => Err(explain(&sentinel, failure, explaining).await),
            report => report,
        }
    }

    /// Queries one sentinel in the documented way. Not `SENTINEL MASTERS`: that lists a replaced
    /// master, which may still be alive, until its replicas were reconfigured.
    async fn query(&self, sentinel: &ConnectionInfo) -> Result<MasterReport, RedisError> {
        // The connection is not kept: a connection to a sentinel that hangs must not be used again.
        let client = Client::open(sentinel.clone())?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config(self.limit)).await?;
        let mut questions = redis::pipe();
        questions.cmd("SENTINEL").arg("MASTER").arg(&self.name);
        questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let (known, address): (Value, Value) = questions.ignore_errors().query_async(&mut connection).await?;
        let address = address.extract_error()?; // of a server that is no sentinel
        let Some((host, port)) = redis::from_redis_value::<Option<(String, u16)>>(address)? else {
            let text = "no sentinel knows a master of this name";
            return Err(RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, text, self.name.clone())));
        };
        // Not every user may query this; without it, all sentinels rank alike.
        let known: HashMap<String, String> = redis::from_redis_value(known).unwrap_or_default();
        let epoch = known.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        Ok(MasterReport { epoch, host, port })
    }
}

/// How informative a failure is: a refusal says more than an unknown name, and that more than a
/// failed connection.
fn rank(error: &RedisError) -> u8 {
    match error.kind() {
        ErrorKind::Io => 0,
        ErrorKind::MasterNameNotFoundBySentinel => 1,
        _ => 2,
    }
}
