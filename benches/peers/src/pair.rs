//! The pairs that are compared: a lock is taken and given back, in two round trips.

use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use redlatch::{Locks, RwLock};
use rlock::async_lock::RLock;
use serde::Serialize;

use crate::suite::Outcome;
use crate::suite::server::Server;

/// What a task does over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    Read,
    Write,
    /// All tasks read one and the same lock.
    SharedRead,
}

impl Work {
    pub(crate) const ALL: [Work; 3] = [Work::Read, Work::Write, Work::SharedRead];

    pub(crate) fn is_shared(self) -> bool {
        self == Work::SharedRead
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Work::Read => "read+release",
            Work::Write => "write+release",
            Work::SharedRead => "read+release, all one lock",
        }
    }

    fn name(self, task: usize) -> String {
        match self {
            Work::Read => format!("read:{task}"),
            Work::Write => format!("write:{task}"),
            Work::SharedRead => "shared".to_owned(),
        }
    }
}

/// Whose pair it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Peer {
    /// Two bare round trips of a script that does nothing: less than any lock can do.
    Floor,
    Redlatch,
    Rlock,
}

impl Peer {
    pub(crate) const ALL: [Peer; 3] = [Peer::Floor, Peer::Redlatch, Peer::Rlock];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Peer::Floor => "two bare EVALSHA",
            Peer::Redlatch => "redlatch",
            Peer::Rlock => "rlock 0.2.0",
        }
    }
}

/// What pairs are made of: of each peer one client, which all tasks share. All options are the defaults:
/// both renew what they hold, and only redlatch gives fencing tokens.
#[derive(Debug)]
pub(crate) struct Bench {
    bare: MultiplexedConnection,
    trivial: String,
    locks: Locks,
    rlock: RLock,
}

impl Bench {
    pub(crate) async fn new(server: &Server) -> Outcome<Bench> {
        let mut bare = server.connect().await?;
        let trivial = Script::new("return 1").load_async(&mut bare).await?;
        let locks = Locks::open(&server.url()).await?;
        // As its documentation opens one. TCP_NODELAY, which the others have, makes it no faster: in crowds
        // it is up to a tenth slower with it.
        let rlock = RLock::new(server.url()).await?;
        Ok(Bench { bare, trivial, locks, rlock })
    }

    /// One task's own pair.
    pub(crate) fn pair(&self, peer: Peer, work: Work, task: usize) -> Outcome<Pair> {
        let name = work.name(task);
        Ok(match peer {
            Peer::Floor => Pair::Floor {
                connection: self.bare.clone(),
                sha1: self.trivial.clone(),
                key: format!("floor:{name}"),
            },
            Peer::Redlatch => Pair::Redlatch { lock: self.locks.rwlock(name)?, work },
            Peer::Rlock => Pair::Rlock { client: self.rlock.clone(), key: format!("rlock:{name}"), work },
        })
    }
}

#[derive(Debug)]
pub(crate) enum Pair {
    Floor { connection: MultiplexedConnection, sha1: String, key: String },
    Redlatch { lock: RwLock, work: Work },
    Rlock { client: RLock, key: String, work: Work },
}

impl Pair {
    pub(crate) async fn run(&mut self) -> Outcome<()> {
        match self {
            Pair::Floor { connection, sha1, key } => {
                bare_trip(connection, sha1, key).await?;
                bare_trip(connection, sha1, key).await?;
            }
            Pair::Redlatch { lock, work } => match work {
                Work::Read | Work::SharedRead => lock.read().await?.release().await?,
                Work::Write => lock.write().await?.release().await?,
            },
            // Two scripts, one round trip each, on one connection for all: TIME, TYPE and four or five
            // commands on a sorted set, then TYPE and ZREM. Here it makes a UUID and starts three tasks:
            // one that takes, one that renews, one that gives back. To drop the guard instead would be no
            // faster: dropped ones are given back one after another.
            Pair::Rlock { client, key, work } => match work {
                Work::Read | Work::SharedRead => client.acquire_read(key).await?.release().await?,
                Work::Write => client.acquire_write(key).await?.release().await?,
            },
        }
        Ok(())
    }
}

async fn bare_trip(connection: &mut MultiplexedConnection, sha1: &str, key: &str) -> Outcome<()> {
    redis::cmd("EVALSHA").arg(sha1).arg(1).arg(key).query_async::<Value>(connection).await?;
    Ok(())
}
