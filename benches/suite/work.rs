//! The pairs that are compared: something is taken and given back, in two round trips or none.

use redis::aio::MultiplexedConnection;
use redis::{Script, Value};
use redlatch::{Fencing, Locks, Mutex, Nesting, Owner, ReentrantGuard, ReentrantLock};
use serde::Serialize;

use super::Outcome;
use super::server::Server;

/// What a task does over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// Two bare round trips of a script that does nothing: less than any lock can do.
    Floor,
    Mutex,
    MutexWithoutFencing,
    MutexTryLock,
    Reentrant,
    NestedCounted,
    NestedLocal,
}

impl Work {
    pub(crate) const ALL: [Work; 7] = [
        Work::Floor,
        Work::Mutex,
        Work::MutexWithoutFencing,
        Work::MutexTryLock,
        Work::Reentrant,
        Work::NestedCounted,
        Work::NestedLocal,
    ];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Work::Floor => "floor: two bare EVALSHA",
            Work::Mutex => "mutex lock+release",
            Work::MutexWithoutFencing => "mutex, Fencing::Off",
            Work::MutexTryLock => "mutex try_lock+release",
            Work::Reentrant => "reentrant lock+release",
            Work::NestedCounted => "nested, Nesting::Counted",
            Work::NestedLocal => "nested, Nesting::Local",
        }
    }
}

/// What pairs are made of: one bare connection, and one client for all locks.
#[derive(Debug)]
pub(crate) struct Bench {
    bare: MultiplexedConnection,
    trivial: String,
    locks: Locks,
    unfenced: Locks,
    local: Locks,
}

impl Bench {
    pub(crate) async fn new(server: &Server) -> Outcome<Bench> {
        let mut bare = server.connect().await?;
        let trivial = Script::new("return 1").load_async(&mut bare).await?;
        let locks = Locks::open(&server.url()).await?;
        let unfenced = locks.with_options(locks.options().clone().fencing(Fencing::Off))?;
        let local = locks.with_options(locks.options().clone().nesting(Nesting::Local))?;
        Ok(Bench { bare, trivial, locks, unfenced, local })
    }

    /// One task's own pair: no two tasks ever want the same key.
    pub(crate) fn pair(&self, work: Work, task: usize) -> Outcome<Pair> {
        let mutex = || format!("mutex:{task}");
        let reentrant = |locks: &Locks| locks.reentrant(format!("reentrant:{task}"));
        Ok(match work {
            Work::Floor => Pair::Bare {
                connection: self.bare.clone(),
                sha1: self.trivial.clone(),
                key: format!("floor:{task}"),
            },
            Work::Mutex => Pair::Lock(self.locks.mutex(mutex())?),
            Work::MutexWithoutFencing => Pair::Lock(self.unfenced.mutex(mutex())?),
            Work::MutexTryLock => Pair::TryLock(self.locks.mutex(mutex())?),
            Work::Reentrant => Pair::Enter(reentrant(&self.locks)?, Owner::new()),
            Work::NestedCounted => Pair::Nest(reentrant(&self.locks)?, Owner::new()),
            Work::NestedLocal => Pair::Nest(reentrant(&self.local)?, Owner::new()),
        })
    }
}

pub(crate) enum Pair {
    Bare {
        connection: MultiplexedConnection,
        sha1: String,
        key: String,
    },
    Lock(Mutex),
    TryLock(Mutex),
    Enter(ReentrantLock, Owner),
    /// As `Enter`, inside a hold that the owner has already.
    Nest(ReentrantLock, Owner),
}

impl Pair {
    /// The hold that nested ones are inside of. Not part of what is measured.
    pub(crate) async fn outer(&self) -> Outcome<Option<ReentrantGuard>> {
        match self {
            Pair::Nest(lock, owner) => Ok(Some(lock.lock(owner).await?)),
            _ => Ok(None),
        }
    }

    pub(crate) async fn run(&mut self) -> Outcome<()> {
        match self {
            Pair::Bare { connection, sha1, key } => {
                bare_trip(connection, sha1, key).await?;
                bare_trip(connection, sha1, key).await?;
            }
            Pair::Lock(mutex) => mutex.lock().await?.release().await?,
            Pair::TryLock(mutex) => {
                let guard = mutex.try_lock().await?.ok_or("somebody else has a lock of one's own")?;
                guard.release().await?;
            }
            Pair::Enter(lock, owner) | Pair::Nest(lock, owner) => lock.lock(owner).await?.release().await?,
        }
        Ok(())
    }
}

async fn bare_trip(connection: &mut MultiplexedConnection, sha1: &str, key: &str) -> Outcome<()> {
    redis::cmd("EVALSHA").arg(sha1).arg(1).arg(key).query_async::<Value>(connection).await?;
    Ok(())
}
