//! [`Handshake`]: what is asked on a new connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::Facts;
use super::connection::Connection;
use super::membership::Membership;
use super::token_floor::TokenFloor;
use crate::diagnosis::{Check, Finding};
use crate::event::event;

/// What is asked on a new connection.
pub(super) struct Handshake {
    pub(super) limit: Duration,
    pub(super) floor: Arc<TokenFloor>,
    pub(super) place: Option<(usize, Arc<Membership>)>,
    pub(super) label: Arc<str>,
    /// Whether this client has looked for what endangers locks on the servers behind the node.
    pub(super) examined: Arc<AtomicBool>,
}

impl Handshake {
    /// Finds out what time it is there, and in a quorum which run of which server it is.
    pub(super) async fn run(&self, connection: &Connection) -> Result<Option<Arc<str>>, RedisError> {
        let run = match &self.place {
            Some((place, membership)) => membership.admit(*place, connection, self.limit).await?,
            None => None,
        };
        match connection.send(&redis::cmd("TIME"), self.limit).await {
            Ok(answer) => {
                let (seconds, micros): (u64, u64) = redis::from_redis_value(answer)?;
                self.floor.raise(seconds * 1_000_000 + micros);
                self.examine(connection);
                Ok(run)
            }
            // Without this right the floor rises with the first answer that carries a time.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(run),
            Err(error) => Err(error),
        }
    }

    /// Warns of servers that evict keys, and of those of a quorum that forget locks when they start
    /// again: once, in a task of its own, and only if the user may ask for it. No lock waits for
    /// that.
    fn examine(&self, connection: &Connection) {
        if cfg!(not(feature = "tracing")) || self.examined.swap(true, Ordering::Relaxed) {
            return;
        }
        let (connection, label, limit) = (connection.clone(), Arc::clone(&self.label), self.limit);
        let (in_quorum, guarded) = match &self.place {
            Some((_, membership)) => (true, membership.is_strict()),
            None => (false, false),
        };
        tokio::spawn(async move {
            for facts in Facts::ask(&connection, &label, limit).await.into_iter().flatten() {
                let matters = |finding: &Finding| {
                    finding.verdict.is_danger()
                        && (finding.check == Check::Eviction
                            || finding.check == Check::Persistence && in_quorum)
                };
                for _finding in facts.findings(false, guarded).into_iter().filter(matters) {
                    event!(warn, finding = %_finding, "a server endangers its locks");
                }
            }
        });
    }
}
