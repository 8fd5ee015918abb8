//! [`Master`]: one master of a cluster, and the connection to it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Client, ConnectionInfo, RedisError, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::error_replies::{at_announced, too_slow};
use super::batcher::Batcher;
use super::connecting::Connecting;
use super::refused_connection::{EXPLAINING, explain};
use super::transport::{connect, introduction, unlimited};
use crate::clock::Moment;
use crate::guarded::Guarded;

/// How a client connects to the masters of a cluster.
pub(super) struct Dialing {
    pub(super) limit: Duration,
    /// The connections' name in `CLIENT LIST`.
    pub(super) name: Option<String>,
    /// Where connections are made and driven.
    pub(super) runtime: Handle,
    /// How many connections were made, to any master, after the first ones.
    pub(super) made: AtomicU64,
    /// The masters of the first slot table that have had no connection. `None` before that table.
    pub(super) fresh: Guarded<Option<HashSet<String>>>,
}

/// A master, or a server that was named as one.
pub(super) struct Master {
    pub(super) info: ConnectionInfo,
    pub(super) address: String,
    /// Since when this client knows it.
    pub(super) known: Moment,
    current: Guarded<Option<Live>>,
    connecting: Connecting,
}

#[derive(Clone)]
pub(super) struct Live {
    pub(super) batcher: Arc<Batcher>,
    /// Zero for the first connection to a master of the first slot table: no lease is older. Else
    /// larger than that of each connection of this client that was made before.
    pub(super) number: u64,
}

impl Master {
    pub(super) fn new(info: ConnectionInfo) -> Master {
        let address = info.addr().to_string();
        let (current, connecting) = Default::default();
        Master { info, address, known: Moment::now(), current, connecting }
    }

    pub(super) fn current(&self) -> Option<Live> {
        self.current.lock().clone()
    }

    pub(super) fn drop_if(&self, number: u64) {
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|live| live.number == number) {
            *current = None;
        }
    }

    /// Returns the connection. If there is none, one is made on the client's runtime: it is of use
    /// to others even if this caller is not polled any more.
    pub(super) async fn live(
        self: &Arc<Master>,
        dialing: &Arc<Dialing>,
        deadline: Instant,
    ) -> Result<Live, RedisError> {
        if let Some(live) = self.current() {
            return Ok(live);
        }
        let (this, seen) = (Arc::clone(self), self.connecting.latest());
        let by = Arc::clone(dialing);
        let connecting = dialing
            .runtime
            .spawn(async move { this.connecting.connect(seen, || this.current(), this.connect(&by)).await });
        let silent = |_| at_announced(&self.address, too_slow());
        let connected = timeout_at(deadline, connecting).await.map_err(silent)?;
        connected.map_err(std::io::Error::other)?
    }

    async fn connect(&self, dialing: &Dialing) -> Result<Live, RedisError> {
        let limit = dialing.limit;
        let opening = async {
            let mut connection = connect(&Client::open(self.info.clone())?, &unlimited(limit)).await?;
            let mut pipeline = redis::pipe();
            for command in introduction() {
                pipeline.add_command(command);
            }
            if let Some(name) = &dialing.name {
                pipeline.cmd("CLIENT").arg("SETNAME").arg(name);
            }
            pipeline.cmd("PING");
            // Refusals do not matter: a server that replies can be used.
            pipeline.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(&mut connection).await?;
            Ok(connection)
        };
        let connection = match timeout(limit, opening).await.unwrap_or_else(|_| Err(too_slow())) {
            Ok(connection) => connection,
            Err(failure) => {
                let failure = explain(&self.info, failure, limit / EXPLAINING).await;
                return Err(at_announced(self.info.addr(), failure));
            }
        };
        let batcher = Arc::new(Batcher::new(connection, limit, &dialing.runtime));
        let mut fresh = dialing.fresh.lock();
        let is_first = fresh.as_mut().is_none_or(|fresh| fresh.remove(&self.address));
        let number = if is_first { 0 } else { dialing.made.fetch_add(1, Ordering::SeqCst) + 1 };
        let live = Live { batcher, number };
        *self.current.lock() = Some(live.clone());
        Ok(live)
    }
}
