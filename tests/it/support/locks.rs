//! One interface to all kinds of lock, so that one suite tests all of them.

use std::time::Duration;

use redlatch::{
    Error, FencingToken, Holder, Lease, Locks, Mutex, MutexGuard, Name, Owner, ReentrantGuard, ReentrantLock,
    RwLock, RwLockReadGuard, RwLockWriteGuard, Ticket,
};
use serde::Serialize;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mutex,
    Reentrant,
    /// The read side, with an owner. Its rivals write.
    Read,
    /// The write side, without an owner.
    Write,
}

/// All kinds.
pub const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Mutex => "mutex",
            Kind::Reentrant => "reentrant",
            Kind::Read => "read",
            Kind::Write => "write",
        }
    }

    pub fn from_name(name: &str) -> Kind {
        KINDS.into_iter().find(|kind| kind.name() == name).expect("a kind")
    }

    /// The kind that this one excludes.
    pub fn rival(self) -> Kind {
        if self == Kind::Read { Kind::Write } else { self }
    }

    /// A lock of this kind, with a new owner if the kind has owners.
    pub fn lock(self, locks: &Locks, name: &str) -> AnyLock {
        match self {
            Kind::Mutex => AnyLock::Mutex(locks.mutex(name).unwrap()),
            Kind::Reentrant => {
                AnyLock::Reentrant(locks.reentrant(name, &Owner::new()).unwrap(), Owner::new())
            }
            Kind::Read => AnyLock::Read(locks.rwlock(name).unwrap(), Owner::new()),
            Kind::Write => AnyLock::Write(locks.rwlock(name).unwrap()),
        }
    }
}

#[derive(Clone, Debug)]
pub enum AnyLock {
    Mutex(Mutex),
    Reentrant(ReentrantLock, Owner),
    Read(RwLock, Owner),
    /// To read without an owner: tasks of the client share a hold.
    SharedRead(RwLock),
    Write(RwLock),
}

#[derive(Debug)]
pub enum AnyGuard {
    Mutex(MutexGuard),
    Reentrant(ReentrantGuard),
    Read(RwLockReadGuard),
    Write(RwLockWriteGuard),
}

/// The fields that the inspections of all kinds have.
#[derive(Debug, Serialize)]
pub struct InspectedLock {
    pub holders: Vec<Holder>,
    pub waiters: u64,
    pub fencing_token: Option<FencingToken>,
}

impl AnyLock {
    /// The same lock with another owner.
    pub fn for_another(&self) -> AnyLock {
        match self {
            AnyLock::Reentrant(lock, _) => AnyLock::Reentrant(lock.clone(), Owner::new()),
            AnyLock::Read(lock, _) => AnyLock::Read(lock.clone(), Owner::new()),
            AnyLock::Mutex(_) | AnyLock::SharedRead(_) | AnyLock::Write(_) => self.clone(),
        }
    }

    /// The same lock for a caller that this one excludes.
    pub fn for_rival(&self) -> AnyLock {
        match self {
            AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) => AnyLock::Write(lock.clone()),
            _ => self.for_another(),
        }
    }

    pub fn name(&self) -> &Name {
        match self {
            AnyLock::Mutex(lock) => lock.name(),
            AnyLock::Reentrant(lock, _) => lock.name(),
            AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) | AnyLock::Write(lock) => lock.name(),
        }
    }

    pub fn key(&self) -> &str {
        self.name().key()
    }

    pub async fn lock(&self) -> Result<AnyGuard, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => AnyGuard::Mutex(lock.lock().await?),
            AnyLock::Reentrant(lock, owner) => AnyGuard::Reentrant(lock.with_owner(owner).lock().await?),
            AnyLock::Read(lock, owner) => AnyGuard::Read(lock.with_owner(owner).read().await?),
            AnyLock::SharedRead(lock) => AnyGuard::Read(lock.read().await?),
            AnyLock::Write(lock) => AnyGuard::Write(lock.write().await?),
        })
    }

    /// Starts a task that acquires the lock.
    pub fn lock_in_task(&self) -> JoinHandle<Result<AnyGuard, Error>> {
        let lock = self.clone();
        tokio::spawn(async move { lock.lock().await })
    }

    pub async fn lock_timeout(&self, limit: Duration) -> Result<AnyGuard, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => AnyGuard::Mutex(lock.lock_timeout(limit).await?),
            AnyLock::Reentrant(lock, owner) => {
                AnyGuard::Reentrant(lock.with_owner(owner).lock_timeout(limit).await?)
            }
            AnyLock::Read(lock, owner) => AnyGuard::Read(lock.with_owner(owner).read_timeout(limit).await?),
            AnyLock::SharedRead(lock) => AnyGuard::Read(lock.read_timeout(limit).await?),
            AnyLock::Write(lock) => AnyGuard::Write(lock.write_timeout(limit).await?),
        })
    }

    pub async fn try_lock(&self) -> Result<Option<AnyGuard>, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => lock.try_lock().await?.map(AnyGuard::Mutex),
            AnyLock::Reentrant(lock, owner) => {
                lock.with_owner(owner).try_lock().await?.map(AnyGuard::Reentrant)
            }
            AnyLock::Read(lock, owner) => lock.with_owner(owner).try_read().await?.map(AnyGuard::Read),
            AnyLock::SharedRead(lock) => lock.try_read().await?.map(AnyGuard::Read),
            AnyLock::Write(lock) => lock.try_write().await?.map(AnyGuard::Write),
        })
    }

    /// Continues the hold of a ticket, whatever its owner.
    pub async fn adopt(&self, ticket: &Ticket) -> Result<AnyGuard, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => AnyGuard::Mutex(lock.adopt(ticket).await?),
            AnyLock::Reentrant(lock, _) => AnyGuard::Reentrant(lock.adopt(ticket).await?),
            AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) => {
                AnyGuard::Read(lock.adopt_read(ticket).await?)
            }
            AnyLock::Write(lock) => AnyGuard::Write(lock.adopt_write(ticket).await?),
        })
    }

    pub async fn run<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            AnyLock::Mutex(lock) => lock.run(work).await,
            AnyLock::Reentrant(lock, owner) => lock.with_owner(owner).run(work).await,
            AnyLock::Read(lock, owner) => lock.with_owner(owner).run_read(work).await,
            AnyLock::SharedRead(lock) => lock.run_read(work).await,
            AnyLock::Write(lock) => lock.run_write(work).await,
        }
    }

    pub async fn run_timeout<T, E: From<Error>>(
        &self,
        limit: Duration,
        work: impl AsyncFnOnce(Lease) -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            AnyLock::Mutex(lock) => lock.run_timeout(limit, work).await,
            AnyLock::Reentrant(lock, owner) => lock.with_owner(owner).run_timeout(limit, work).await,
            AnyLock::Read(lock, owner) => lock.with_owner(owner).run_read_timeout(limit, work).await,
            AnyLock::SharedRead(lock) => lock.run_read_timeout(limit, work).await,
            AnyLock::Write(lock) => lock.run_write_timeout(limit, work).await,
        }
    }

    pub async fn inspect(&self) -> Result<InspectedLock, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => {
                let seen = lock.inspect().await?;
                InspectedLock {
                    holders: seen.holders,
                    waiters: seen.waiters,
                    fencing_token: seen.fencing_token,
                }
            }
            AnyLock::Reentrant(lock, _) => {
                let seen = lock.inspect().await?;
                InspectedLock {
                    holders: seen.holders,
                    waiters: seen.waiters,
                    fencing_token: seen.fencing_token,
                }
            }
            AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) | AnyLock::Write(lock) => {
                let seen = lock.inspect().await?;
                let waiters = seen.waiting_readers + seen.waiting_writers;
                let holders = seen.writer.into_iter().chain(seen.readers).collect();
                InspectedLock { holders, waiters, fencing_token: seen.fencing_token }
            }
        })
    }

    pub async fn is_locked(&self) -> bool {
        match self {
            AnyLock::Mutex(lock) => lock.is_locked().await.unwrap(),
            AnyLock::Reentrant(lock, _) => lock.is_locked().await.unwrap(),
            _ => !self.inspect().await.unwrap().holders.is_empty(),
        }
    }

    pub async fn waiters(&self) -> u64 {
        self.inspect().await.unwrap().waiters
    }

    pub async fn is_held_by(&self, guard: &AnyGuard) -> bool {
        match (self, guard) {
            (AnyLock::Mutex(lock), AnyGuard::Mutex(guard)) => lock.is_held_by(guard.lease()).await.unwrap(),
            (AnyLock::Reentrant(lock, _), AnyGuard::Reentrant(guard)) => {
                lock.is_held_by(guard.owner()).await.unwrap()
            }
            (
                AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) | AnyLock::Write(lock),
                AnyGuard::Read(guard),
            ) => lock.is_held_by(guard.lease()).await.unwrap(),
            (AnyLock::Read(lock, _) | AnyLock::Write(lock), AnyGuard::Write(guard)) => {
                lock.is_held_by(guard.lease()).await.unwrap()
            }
            _ => panic!("a guard of another kind"),
        }
    }

    pub async fn force_release(&self) -> Result<bool, Error> {
        match self {
            AnyLock::Mutex(lock) => lock.force_release().await,
            AnyLock::Reentrant(lock, _) => lock.force_release().await,
            AnyLock::Read(lock, _) | AnyLock::SharedRead(lock) => lock.force_release_read().await,
            AnyLock::Write(lock) => lock.force_release_write().await,
        }
    }
}

impl AnyGuard {
    pub fn lease(&self) -> &Lease {
        match self {
            AnyGuard::Mutex(guard) => guard.lease(),
            AnyGuard::Reentrant(guard) => guard.lease(),
            AnyGuard::Read(guard) => guard.lease(),
            AnyGuard::Write(guard) => guard.lease(),
        }
    }

    /// The fencing token; panics if there is none.
    pub fn token(&self) -> u64 {
        self.lease().fencing_token().expect("fencing is on").get()
    }

    pub async fn release(self) -> Result<(), Error> {
        match self {
            AnyGuard::Mutex(guard) => guard.release().await,
            AnyGuard::Reentrant(guard) => guard.release().await,
            AnyGuard::Read(guard) => guard.release().await,
            AnyGuard::Write(guard) => guard.release().await,
        }
    }

    /// The error drops the guard.
    pub fn into_ticket(self) -> Result<Ticket, Error> {
        Ok(match self {
            AnyGuard::Mutex(guard) => guard.into_ticket()?,
            AnyGuard::Reentrant(guard) => guard.into_ticket()?,
            AnyGuard::Read(guard) => guard.into_ticket()?,
            AnyGuard::Write(guard) => guard.into_ticket()?,
        })
    }

    pub fn leak(self) {
        match self {
            AnyGuard::Mutex(guard) => guard.leak(),
            AnyGuard::Reentrant(guard) => guard.leak(),
            AnyGuard::Read(guard) => guard.leak(),
            AnyGuard::Write(guard) => guard.leak(),
        }
    }
}
