//! The libraries, with the settings that their documentation recommends.

use std::sync::Arc;
use std::time::Duration;

use distkit::DistkitRedisKey;
use distkit::lock as distkit_lock;
use redis::Value;
use redis::aio::{ConnectionManager, MultiplexedConnection};
use redlatch::{Fencing, Locks, Mutex, Options, Owner, ReentrantLock, RwLock};
use rlock::async_lock::{RLock, RLockGuard, RReadLockGuard, RWriteLockGuard};
use rlock::{AcquireOptions, RenewalMode};
use rslock::LockManager;
use serde_json::{Value as Json, json};

use crate::Outcome;

/// The default of redlatch and distkit. The others are set to it.
const TTL: Duration = Duration::from_secs(30);

/// For locks that are never busy.
pub(crate) const NO_POLL: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// The least that a lock costs: `SET NX PX`, and a script that compares and deletes.
    SetNx,
    Redlatch,
    Rslock,
    Rlock,
    Distkit,
}

impl Library {
    pub(crate) fn named(name: &str) -> Outcome<Library> {
        Ok(match name {
            "set-nx" => Library::SetNx,
            "redlatch" => Library::Redlatch,
            "rslock" => Library::Rslock,
            "rlock" => Library::Rlock,
            "distkit" => Library::Distkit,
            _ => return Err(format!("unknown library: {name}").into()),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Mutex,
    Unfenced,
    /// A mutex that tasks of one client do not pass on.
    Unpassed,
    Reentrant,
    Read,
    Write,
}

impl Kind {
    pub(crate) fn named(name: &str) -> Outcome<Kind> {
        Ok(match name {
            "mutex" => Kind::Mutex,
            "unfenced" => Kind::Unfenced,
            "unpassed" => Kind::Unpassed,
            "reentrant" => Kind::Reentrant,
            "read" => Kind::Read,
            "write" => Kind::Write,
            _ => return Err(format!("unknown kind: {name}").into()),
        })
    }
}

/// The answer to `libraries`.
pub(crate) fn description() -> Json {
    json!({ "language": "Rust", "libraries": [
        {
            "name": "set-nx", "version": "", "client": "redis 1", "kinds": ["mutex"], "turns": [],
            "most_clients": 0, "fencing": "no", "renewal": "no", "waiting": "",
            "settings": "the least that a lock costs: SET NX PX, then a script that compares and deletes",
        },
        {
            "name": "redlatch", "version": "0.1.0", "client": "redis 1",
            "kinds": ["mutex", "unfenced", "reentrant", "read", "write"], "turns": ["mutex", "reentrant"],
            "most_clients": 256, "fencing": "yes", "renewal": "yes", "waiting": "notified, in order",
            "settings": "defaults",
        },
        {
            "name": "rslock", "version": "0.10.0", "client": "redis 1", "kinds": ["mutex"],
            "turns": ["mutex"], "most_clients": 256, "fencing": "no", "renewal": "no", "waiting": "polls",
            "settings": "one server; set_retry",
        },
        {
            "name": "rlock", "version": "0.2.0", "client": "redis 1", "kinds": ["mutex", "read", "write"],
            "turns": ["mutex"], "most_clients": 256, "fencing": "no", "renewal": "yes", "waiting": "polls",
            "settings": "RenewalMode::Auto, retry_interval",
        },
        {
            "name": "distkit", "version": "0.7.1", "client": "redis 1", "kinds": ["mutex", "read", "write"],
            "turns": ["mutex"], "most_clients": 256, "fencing": "no", "renewal": "yes", "waiting": "polls",
            "settings": "retry_interval",
        },
    ]})
}

const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// One client, which all of its tasks share.
pub(crate) enum Client {
    SetNx { connection: MultiplexedConnection, script: String },
    Redlatch { fenced: Locks, unfenced: Locks, unpassed: Locks },
    Rslock(LockManager),
    Rlock { client: RLock, options: AcquireOptions },
    Distkit { connection: ConnectionManager, poll: Duration },
}

impl Client {
    /// Connects. Clients of libraries without notification retry a busy lock after `poll`.
    pub(crate) async fn connect(library: Library, url: &str, poll: Duration) -> Outcome<Client> {
        Ok(match library {
            Library::SetNx => {
                let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
                let script = redis::Script::new(COMPARE_AND_DELETE).load_async(&mut connection).await?;
                Client::SetNx { connection, script }
            }
            Library::Redlatch => {
                let fenced = redlatch(url).await?;
                let unfenced = fenced.with_options(Options::new().fencing(Fencing::Off))?;
                let unpassed = fenced.with_options(Options::new().local_turn(Duration::ZERO))?;
                Client::Redlatch { fenced, unfenced, unpassed }
            }
            Library::Rslock => {
                let mut manager = LockManager::new(url.split(',').collect::<Vec<_>>());
                manager.set_retry(u32::MAX, poll);
                Client::Rslock(manager)
            }
            Library::Rlock => {
                let options = AcquireOptions::builder()
                    .ttl(TTL)
                    .retry_interval(poll)
                    .renewal_mode(RenewalMode::Auto)
                    .build()?;
                // TCP_NODELAY does not make it faster: with many tasks it is up to a tenth slower.
                Client::Rlock { client: RLock::new(url).await?, options }
            }
            Library::Distkit => {
                let connection = redis::Client::open(url)?.get_connection_manager().await?;
                Client::Distkit { connection, poll }
            }
        })
    }

    /// Returns the lock of one task. Its name depends on the library and on the kind.
    pub(crate) fn lock(&self, kind: Kind, name: &str) -> Outcome<Lock> {
        let name = format!("{kind:?}-{name}").to_lowercase();
        Ok(match (self, kind) {
            (Client::SetNx { connection, script }, Kind::Mutex) => Lock::SetNx {
                connection: connection.clone(),
                script: script.clone(),
                key: format!("set-nx:{name}"),
            },
            (Client::Redlatch { fenced, .. }, Kind::Mutex) => Lock::Mutex(fenced.mutex(name)?),
            (Client::Redlatch { unfenced, .. }, Kind::Unfenced) => Lock::Mutex(unfenced.mutex(name)?),
            (Client::Redlatch { unpassed, .. }, Kind::Unpassed) => Lock::Mutex(unpassed.mutex(name)?),
            (Client::Redlatch { fenced, .. }, Kind::Reentrant) => {
                Lock::Reentrant(fenced.reentrant(name, &Owner::new())?)
            }
            (Client::Redlatch { fenced, .. }, Kind::Read) => Lock::Read(fenced.rwlock(name)?),
            (Client::Redlatch { fenced, .. }, Kind::Write) => Lock::Write(fenced.rwlock(name)?),
            (Client::Rslock(manager), Kind::Mutex) => {
                Lock::Rslock { manager: manager.clone(), key: format!("rslock:{name}") }
            }
            (Client::Rlock { client, options }, _) => Lock::Rlock {
                client: client.clone(),
                options: options.clone(),
                kind,
                key: format!("rlock:{name}"),
            },
            (Client::Distkit { connection, poll }, _) => {
                let key = DistkitRedisKey::try_from(name)?;
                let options = distkit_lock::LockOptions::builder(key, connection.clone())
                    .ttl(TTL)
                    .retry_interval(*poll)
                    .build();
                match kind {
                    Kind::Mutex => Lock::DistkitMutex(distkit_lock::Mutex::new(options)),
                    Kind::Read => Lock::DistkitRead(distkit_lock::RwLock::new(options)),
                    Kind::Write => Lock::DistkitWrite(distkit_lock::RwLock::new(options)),
                    other => return Err(format!("distkit has no {other:?}").into()),
                }
            }
            (_, other) => return Err(format!("this library has no {other:?}").into()),
        })
    }
}

/// Several URLs are a quorum; after `cluster:`, they are nodes of a cluster.
async fn redlatch(url: &str) -> Outcome<Locks> {
    let builder = Locks::builder();
    let builder = match url.strip_prefix("cluster:") {
        Some(nodes) => builder.cluster(nodes.split(',')),
        None if url.contains(',') => builder.quorum(url.split(',')),
        None => builder.server(url),
    };
    Ok(builder.connect().await?)
}

pub(crate) enum Lock {
    SetNx { connection: MultiplexedConnection, script: String, key: String },
    Mutex(Mutex),
    Reentrant(ReentrantLock),
    Read(RwLock),
    Write(RwLock),
    Rslock { manager: LockManager, key: String },
    Rlock { client: RLock, options: AcquireOptions, kind: Kind, key: String },
    DistkitMutex(Arc<distkit_lock::Mutex>),
    DistkitRead(Arc<distkit_lock::RwLock>),
    DistkitWrite(Arc<distkit_lock::RwLock>),
}

impl Lock {
    /// Waits until the lock is acquired.
    pub(crate) async fn acquire(&self) -> Outcome<Guard<'_>> {
        Ok(match self {
            Lock::SetNx { connection, script, key } => {
                let token = Owner::new().to_string();
                let mut set = redis::cmd("SET");
                set.arg(key).arg(&token).arg("NX").arg("PX").arg(TTL.as_millis() as u64);
                match set.query_async(&mut connection.clone()).await? {
                    Value::Okay => Guard::SetNx { connection, script, key, token },
                    other => return Err(format!("{key} is held: {other:?}").into()),
                }
            }
            Lock::Mutex(lock) => Guard::Mutex(lock.lock().await?),
            Lock::Reentrant(lock) => Guard::Reentrant(lock.lock().await?),
            Lock::Read(lock) => Guard::Read(lock.read().await?),
            Lock::Write(lock) => Guard::Write(lock.write().await?),
            Lock::Rslock { manager, key } => Guard::Rslock(manager.acquire(key.as_bytes(), TTL).await?),
            Lock::Rlock { client, options, kind, key } => match kind {
                Kind::Read => Guard::RlockRead(client.acquire_read_with_options(key, options.clone()).await?),
                Kind::Write => {
                    Guard::RlockWrite(client.acquire_write_with_options(key, options.clone()).await?)
                }
                _ => Guard::Rlock(client.acquire_mutex_with_options(key, options.clone()).await?),
            },
            Lock::DistkitMutex(lock) => Guard::Distkit(lock.lock().await?),
            Lock::DistkitRead(lock) => Guard::DistkitRead(lock.read().await?),
            Lock::DistkitWrite(lock) => Guard::DistkitWrite(lock.write().await?),
        })
    }
}

pub(crate) enum Guard<'a> {
    SetNx { connection: &'a MultiplexedConnection, script: &'a str, key: &'a str, token: String },
    Mutex(redlatch::MutexGuard),
    Reentrant(redlatch::ReentrantGuard),
    Read(redlatch::RwLockReadGuard),
    Write(redlatch::RwLockWriteGuard),
    Rslock(rslock::LockGuard),
    Rlock(RLockGuard),
    RlockRead(RReadLockGuard),
    RlockWrite(RWriteLockGuard),
    Distkit(distkit_lock::MutexGuard),
    DistkitRead(distkit_lock::RwLockReadGuard),
    DistkitWrite(distkit_lock::RwLockWriteGuard),
}

impl Guard<'_> {
    /// Waits until the lock is released.
    pub(crate) async fn release(self) -> Outcome<()> {
        match self {
            Guard::SetNx { connection, script, key, token } => {
                let mut delete = redis::cmd("EVALSHA");
                delete.arg(script).arg(1).arg(key).arg(token);
                let deleted: u64 = delete.query_async(&mut connection.clone()).await?;
                if deleted != 1 {
                    return Err(format!("{key} was not held").into());
                }
            }
            Guard::Mutex(guard) => guard.release().await?,
            Guard::Reentrant(guard) => guard.release().await?,
            Guard::Read(guard) => guard.release().await?,
            Guard::Write(guard) => guard.release().await?,
            Guard::Rslock(guard) => guard.release().await,
            // Dropping the guard is not faster: dropped guards are released one after another.
            Guard::Rlock(mut guard) => guard.release().await?,
            Guard::RlockRead(mut guard) => guard.release().await?,
            Guard::RlockWrite(mut guard) => guard.release().await?,
            Guard::Distkit(guard) => drop(guard.release().await?),
            Guard::DistkitRead(guard) => drop(guard.release().await?),
            Guard::DistkitWrite(guard) => drop(guard.release().await?),
        }
        Ok(())
    }
}
