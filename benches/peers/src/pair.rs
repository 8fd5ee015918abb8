//! The pairs that are compared: an acquire and a release, in two round trips.

use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use redlatch::{Locks, RwLock};
use rlock::async_lock::RLock;
use serde::Serialize;

use crate::suite::Outcome;
use crate::suite::server::Server;

/// The pair that a task repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    Read,
    Write,
    /// All tasks read the same lock.
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

/// The library that is measured.
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

/// One client of each peer, which all tasks share. All options are the defaults: both peers renew
/// their leases, and only redlatch has fencing tokens.
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
        // As in the documentation of rlock. TCP_NODELAY, which the others use, does not make it
        // faster: with many tasks it is up to a tenth slower.
        let rlock = RLock::new(server.url()).await?;
        Ok(Bench { bare, trivial, locks, rlock })
    }

    /// Returns the pair of one task.
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
            // Two scripts, one round trip each, on one connection for all: TIME, TYPE and four or
            // five commands on a sorted set, then TYPE and ZREM. The client makes a UUID and starts
            // three tasks, which acquire, renew and release. Dropping the guard instead is not
            // faster: dropped guards are released one after another.
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
