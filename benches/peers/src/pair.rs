//! The pairs that are compared: an acquire and a release, in two round trips.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use redlatch::{Locks, Mutex, Owner, ReentrantLock, RwLock};
use rlock::async_lock::RLock;
use rslock::LockManager;
use serde::Serialize;

use crate::suite::Outcome;
use crate::suite::server::Server;

/// The pair that a task repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    Mutex,
    /// The peers have no re-entrant lock: it is compared with their mutexes.
    Reentrant,
    Read,
    Write,
    /// All tasks read the same lock.
    SharedRead,
}

impl Work {
    pub(crate) const ALL: [Work; 5] =
        [Work::Mutex, Work::Reentrant, Work::Read, Work::Write, Work::SharedRead];

    pub(crate) fn is_shared(self) -> bool {
        self == Work::SharedRead
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Work::Mutex => "mutex lock+release",
            Work::Reentrant => "reentrant lock+release",
            Work::Read => "read+release",
            Work::Write => "write+release",
            Work::SharedRead => "read+release, all one lock",
        }
    }

    fn name(self, task: usize) -> String {
        match self {
            Work::Mutex => format!("mutex:{task}"),
            Work::Reentrant => format!("reentrant:{task}"),
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
    /// The least that a lock costs: `SET NX PX`, and a script that compares and deletes.
    Floor,
    Redlatch,
    Rlock,
    Rslock,
}

impl Peer {
    /// The peers that have such a lock.
    pub(crate) fn of(work: Work) -> &'static [Peer] {
        match work {
            Work::Mutex | Work::Reentrant => &[Peer::Floor, Peer::Redlatch, Peer::Rlock, Peer::Rslock],
            Work::Read | Work::Write | Work::SharedRead => &[Peer::Floor, Peer::Redlatch, Peer::Rlock],
        }
    }

    pub(crate) fn is_other_library(self) -> bool {
        matches!(self, Peer::Rlock | Peer::Rslock)
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Peer::Floor => "SET NX, script",
            Peer::Redlatch => "redlatch",
            Peer::Rlock => "rlock 0.2.0",
            Peer::Rslock => "rslock 0.10.0",
        }
    }
}

/// One client of each peer, which all tasks share. All options are the defaults: redlatch and rlock
/// renew their leases, rslock does not, and only redlatch has fencing tokens.
pub(crate) struct Bench {
    bare: MultiplexedConnection,
    compare_and_delete: String,
    locks: Locks,
    rlock: RLock,
    rslock: LockManager,
}

const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// The default of redlatch.
const TTL: Duration = Duration::from_secs(30);

impl Bench {
    pub(crate) async fn new(server: &Server) -> Outcome<Bench> {
        let mut bare = server.connect().await?;
        let compare_and_delete = Script::new(COMPARE_AND_DELETE).load_async(&mut bare).await?;
        let locks = Locks::open(&server.url()).await?;
        // As in the documentation of rlock. TCP_NODELAY, which the others use, does not make it
        // faster: with many tasks it is up to a tenth slower.
        let rlock = RLock::new(server.url()).await?;
        let rslock = LockManager::new(vec![server.url()]);
        Ok(Bench { bare, compare_and_delete, locks, rlock, rslock })
    }

    /// Returns the pair of one task.
    pub(crate) fn pair(&self, peer: Peer, work: Work, task: usize) -> Outcome<Pair> {
        let name = work.name(task);
        Ok(match (peer, work) {
            (Peer::Floor, _) => Pair::Floor {
                connection: self.bare.clone(),
                sha1: self.compare_and_delete.clone(),
                // Also where all tasks read one lock: there is no cheaper way to hold any.
                key: format!("floor:{name}:{task}"),
                turns: 0,
            },
            (Peer::Redlatch, Work::Mutex) => Pair::Mutex(self.locks.mutex(name)?),
            (Peer::Redlatch, Work::Reentrant) => {
                Pair::Reentrant(self.locks.reentrant(name)?.with_owner(&Owner::new()))
            }
            (Peer::Redlatch, Work::Read | Work::SharedRead) => Pair::Read(self.locks.rwlock(name)?),
            (Peer::Redlatch, Work::Write) => Pair::Write(self.locks.rwlock(name)?),
            (Peer::Rlock, _) => {
                Pair::Rlock { client: self.rlock.clone(), key: format!("rlock:{name}"), work }
            }
            (Peer::Rslock, _) => Pair::Rslock { client: self.rslock.clone(), key: format!("rslock:{name}") },
        })
    }
}

pub(crate) enum Pair {
    Floor { connection: MultiplexedConnection, sha1: String, key: String, turns: u64 },
    Mutex(Mutex),
    Reentrant(ReentrantLock),
    Read(RwLock),
    Write(RwLock),
    Rlock { client: RLock, key: String, work: Work },
    Rslock { client: LockManager, key: String },
}

impl Pair {
    pub(crate) async fn run(&mut self) -> Outcome<()> {
        match self {
            Pair::Floor { connection, sha1, key, turns } => {
                *turns += 1;
                let mut set = redis::cmd("SET");
                set.arg(&*key).arg(*turns).arg("NX").arg("PX").arg(TTL.as_millis() as u64);
                set.query_async::<Value>(connection).await?;
                let mut delete = redis::cmd("EVALSHA");
                delete.arg(&*sha1).arg(1).arg(&*key).arg(*turns);
                let deleted: u64 = delete.query_async(connection).await?;
                if deleted != 1 {
                    return Err(format!("{key} was not held").into());
                }
            }
            Pair::Mutex(lock) => lock.lock().await?.release().await?,
            Pair::Reentrant(lock) => lock.lock().await?.release().await?,
            Pair::Read(lock) => lock.read().await?.release().await?,
            Pair::Write(lock) => lock.write().await?.release().await?,
            // Two scripts, one round trip each, on one connection for all: TIME, TYPE and four or
            // five commands on a sorted set, then TYPE and ZREM. The client makes a UUID and starts
            // three tasks, which acquire, renew and release. Dropping the guard instead is not
            // faster: dropped guards are released one after another.
            Pair::Rlock { client, key, work } => match work {
                Work::Mutex | Work::Reentrant => client.acquire_mutex(key).await?.release().await?,
                Work::Read | Work::SharedRead => client.acquire_read(key).await?.release().await?,
                Work::Write => client.acquire_write(key).await?.release().await?,
            },
            Pair::Rslock { client, key } => {
                let lock = client.lock(key.as_bytes(), TTL).await?;
                client.unlock(&lock).await;
            }
        }
        Ok(())
    }
}
