//! The pairs that are compared: an acquire and a release, in two round trips or none.

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Script, Value};
use redlatch::{Fencing, Locks, Mutex, Nesting, Options, Owner, ReentrantGuard, ReentrantLock, RwLock};
use serde::Serialize;

use super::Outcome;
use super::server::Server;

/// The pair that a task repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// Two bare round trips of a script that does nothing: less than any lock can do.
    Baseline,
    Mutex,
    MutexWithoutFencing,
    MutexTryLock,
    Reentrant,
    NestedCounted,
    NestedLocal,
    /// The least that a lock costs: `SET NX PX`, and a script that compares and deletes.
    SetNx,
    /// The same in pipelines, as the crate sends when many requests are in flight.
    SetNxPipelined,
    Read,
    Write,
}

/// The number of pairs that one task runs at once, in pipelines as long as the crate's.
const PIPELINE: usize = 64;

const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// The crate's default.
const TTL_MS: usize = 30_000;

impl Work {
    /// The kinds that the section `pairs` compares.
    pub(crate) const ALL: [Work; 7] = [
        Work::Baseline,
        Work::Mutex,
        Work::MutexWithoutFencing,
        Work::MutexTryLock,
        Work::Reentrant,
        Work::NestedCounted,
        Work::NestedLocal,
    ];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Work::Baseline => "baseline: two bare EVALSHA",
            Work::Mutex => "mutex lock+release",
            Work::MutexWithoutFencing => "mutex, Fencing::Off",
            Work::MutexTryLock => "mutex try_lock+release",
            Work::Reentrant => "reentrant lock+release",
            Work::NestedCounted => "nested, Nesting::Counted",
            Work::NestedLocal => "nested, Nesting::Local",
            Work::SetNx => "baseline: SET NX, EVALSHA",
            Work::SetNxPipelined => "baseline, in pipelines",
            Work::Read => "read+release",
            Work::Write => "write+release",
        }
    }

    /// Whether it measures redlatch, and not a baseline.
    pub(crate) fn is_ours(self) -> bool {
        !matches!(self, Work::Baseline | Work::SetNx | Work::SetNxPipelined)
    }

    pub(crate) fn pairs_at_once(self) -> usize {
        if self == Work::SetNxPipelined { PIPELINE } else { 1 }
    }
}

/// One bare connection, and one client for all locks: every pair uses them.
#[derive(Debug)]
pub(crate) struct Bench {
    bare: MultiplexedConnection,
    trivial: String,
    compare_and_delete: String,
    locks: Locks,
    unfenced: Locks,
    local: Locks,
}

impl Bench {
    pub(crate) async fn new(server: &Server) -> Outcome<Bench> {
        let mut bare = server.connect().await?;
        let trivial = Script::new("return 1").load_async(&mut bare).await?;
        let compare_and_delete = Script::new(COMPARE_AND_DELETE).load_async(&mut bare).await?;
        let locks = Locks::open(&server.url()).await?;
        let unfenced = locks.with_options(Options::new().fencing(Fencing::Off))?;
        let local = locks.with_options(Options::new().nesting(Nesting::Local))?;
        Ok(Bench { bare, trivial, compare_and_delete, locks, unfenced, local })
    }

    /// Returns the pair of one task. No two tasks use the same key. Locks with nested holds have
    /// names of their own: a client sends requests for them alone, since most find the lock held.
    pub(crate) fn pair(&self, work: Work, task: usize) -> Outcome<Pair> {
        let mutex = || format!("mutex:{task}");
        let nested = |locks: &Locks| locks.reentrant(format!("nested:{task}"), &Owner::new());
        Ok(match work {
            Work::Baseline => Pair::Bare {
                connection: self.bare.clone(),
                sha1: self.trivial.clone(),
                key: format!("baseline:{task}"),
            },
            Work::Mutex => Pair::Lock(self.locks.mutex(mutex())?),
            Work::MutexWithoutFencing => Pair::Lock(self.unfenced.mutex(mutex())?),
            Work::MutexTryLock => Pair::TryLock(self.locks.mutex(mutex())?),
            Work::Reentrant => Pair::Enter(self.locks.reentrant(format!("reentrant:{task}"), &Owner::new())?),
            Work::NestedCounted => Pair::Nest(nested(&self.locks)?),
            Work::NestedLocal => Pair::Nest(nested(&self.local)?),
            Work::SetNx | Work::SetNxPipelined => Pair::SetNx(SetNx {
                connection: self.bare.clone(),
                compare_and_delete: self.compare_and_delete.clone(),
                keys: (0..work.pairs_at_once()).map(|pair| format!("lock:set:{task}:{pair}")).collect(),
                token: Owner::new().to_string(),
            }),
            Work::Read => Pair::Read(self.locks.rwlock(format!("read:{task}"))?),
            Work::Write => Pair::Write(self.locks.rwlock(format!("write:{task}"))?),
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
    Enter(ReentrantLock),
    /// Like `Enter`, inside a hold that the owner has already.
    Nest(ReentrantLock),
    SetNx(SetNx),
    Read(RwLock),
    Write(RwLock),
}

impl Pair {
    /// Acquires the outer hold of nested pairs. It is not measured.
    pub(crate) async fn outer(&self) -> Outcome<Option<ReentrantGuard>> {
        match self {
            Pair::Nest(lock) => Ok(Some(lock.lock().await?)),
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
                let guard = mutex.try_lock().await?.ok_or("the lock of this task is held by another one")?;
                guard.release().await?;
            }
            Pair::Enter(lock) | Pair::Nest(lock) => lock.lock().await?.release().await?,
            Pair::SetNx(locks) => locks.run().await?,
            Pair::Read(lock) => lock.read().await?.release().await?,
            Pair::Write(lock) => lock.write().await?.release().await?,
        }
        Ok(())
    }
}

async fn bare_trip(connection: &mut MultiplexedConnection, sha1: &str, key: &str) -> Outcome<()> {
    redis::cmd("EVALSHA").arg(sha1).arg(1).arg(key).query_async::<Value>(connection).await?;
    Ok(())
}

/// Bare locks without a client library for locks, one or a pipeline of them.
pub(crate) struct SetNx {
    connection: MultiplexedConnection,
    compare_and_delete: String,
    keys: Vec<String>,
    token: String,
}

impl SetNx {
    async fn run(&mut self) -> Outcome<()> {
        let set = |key| {
            let mut set = redis::cmd("SET");
            set.arg(key).arg(&self.token).arg("NX").arg("PX").arg(TTL_MS);
            set
        };
        let delete = |key| {
            let mut delete = redis::cmd("EVALSHA");
            delete.arg(&self.compare_and_delete).arg(1).arg(key).arg(&self.token);
            delete
        };
        self.send(set, &Value::Okay).await?;
        self.send(delete, &Value::Int(1)).await
    }

    async fn send<'a>(&'a self, request: impl Fn(&'a String) -> Cmd, expected: &Value) -> Outcome<()> {
        let mut connection = self.connection.clone();
        let replies: Vec<Value> = match self.keys.as_slice() {
            [key] => vec![request(key).query_async(&mut connection).await?],
            keys => {
                let mut pipeline = Pipeline::with_capacity(keys.len());
                for key in keys {
                    pipeline.add_command(request(key));
                }
                pipeline.query_async(&mut connection).await?
            }
        };
        match replies.iter().find(|reply| *reply != expected) {
            Some(reply) => Err(format!("a bare lock: {reply:?} instead of {expected:?}").into()),
            None => Ok(()),
        }
    }
}
