//! [`Greeting`]: what is asked on a new connection.

use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::connection::Connection;
use super::floor::Floor;
use super::roster::Roster;

/// What is asked on a new connection.
pub(super) struct Greeting {
    pub(super) limit: Duration,
    pub(super) floor: Arc<Floor>,
    pub(super) place: Option<(usize, Arc<Roster>)>,
}

impl Greeting {
    /// Finds out what time it is there, and in a quorum which run of which server it is.
    pub(super) async fn greet(&self, connection: &Connection) -> Result<Option<Arc<str>>, RedisError> {
        let run = match &self.place {
            Some((place, roster)) => roster.admit(*place, connection, self.limit).await?,
            None => None,
        };
        match connection.send(&redis::cmd("TIME"), self.limit).await {
            Ok(answer) => {
                let (seconds, micros): (u64, u64) = redis::from_redis_value(answer)?;
                self.floor.raise(seconds * 1_000_000 + micros);
                Ok(run)
            }
            // Without this right the floor rises with the first answer that carries a time.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(run),
            Err(error) => Err(error),
        }
    }
}
