//! The kinds of lock behind one face, so that one suite can be run over all of them.

use std::time::Duration;

use redlatch::{Error, Inspection, Lease, Locks, Mutex, MutexGuard, Owner, ReentrantGuard, ReentrantLock};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mutex,
    Reentrant,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Mutex => "mutex",
            Kind::Reentrant => "reentrant",
        }
    }

    pub fn from_name(name: &str) -> Kind {
        [Kind::Mutex, Kind::Reentrant].into_iter().find(|kind| kind.name() == name).expect("a kind")
    }

    /// A lock of this kind; a re-entrant one is for an owner of its own.
    pub fn lock(self, locks: &Locks, name: &str) -> AnyLock {
        match self {
            Kind::Mutex => AnyLock::Mutex(locks.mutex(name).unwrap()),
            Kind::Reentrant => AnyLock::Reentrant(locks.reentrant(name).unwrap(), Owner::new()),
        }
    }
}

#[derive(Clone, Debug)]
pub enum AnyLock {
    Mutex(Mutex),
    Reentrant(ReentrantLock, Owner),
}

#[derive(Debug)]
pub enum AnyGuard {
    Mutex(MutexGuard),
    Reentrant(ReentrantGuard),
}

impl AnyLock {
    /// The same lock for somebody else.
    pub fn for_another(&self) -> AnyLock {
        match self {
            AnyLock::Mutex(lock) => AnyLock::Mutex(lock.clone()),
            AnyLock::Reentrant(lock, _) => AnyLock::Reentrant(lock.clone(), Owner::new()),
        }
    }

    pub fn key(&self) -> &str {
        match self {
            AnyLock::Mutex(lock) => lock.name().key(),
            AnyLock::Reentrant(lock, _) => lock.name().key(),
        }
    }

    pub async fn lock(&self) -> Result<AnyGuard, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => AnyGuard::Mutex(lock.lock().await?),
            AnyLock::Reentrant(lock, owner) => AnyGuard::Reentrant(lock.lock(owner).await?),
        })
    }

    pub async fn lock_timeout(&self, limit: Duration) -> Result<AnyGuard, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => AnyGuard::Mutex(lock.lock_timeout(limit).await?),
            AnyLock::Reentrant(lock, owner) => AnyGuard::Reentrant(lock.lock_timeout(owner, limit).await?),
        })
    }

    pub async fn try_lock(&self) -> Result<Option<AnyGuard>, Error> {
        Ok(match self {
            AnyLock::Mutex(lock) => lock.try_lock().await?.map(AnyGuard::Mutex),
            AnyLock::Reentrant(lock, owner) => lock.try_lock(owner).await?.map(AnyGuard::Reentrant),
        })
    }

    pub async fn inspect(&self) -> Result<Inspection, Error> {
        match self {
            AnyLock::Mutex(lock) => lock.inspect().await,
            AnyLock::Reentrant(lock, _) => lock.inspect().await,
        }
    }

    pub async fn is_locked(&self) -> bool {
        match self {
            AnyLock::Mutex(lock) => lock.is_locked().await.unwrap(),
            AnyLock::Reentrant(lock, _) => lock.is_locked().await.unwrap(),
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
            _ => panic!("a guard of another kind"),
        }
    }

    pub async fn force_release(&self) -> Result<bool, Error> {
        match self {
            AnyLock::Mutex(lock) => lock.force_release().await,
            AnyLock::Reentrant(lock, _) => lock.force_release().await,
        }
    }
}

impl AnyGuard {
    pub fn lease(&self) -> &Lease {
        match self {
            AnyGuard::Mutex(guard) => guard.lease(),
            AnyGuard::Reentrant(guard) => guard.lease(),
        }
    }

    /// The fencing token; fails if there is none.
    pub fn token(&self) -> u64 {
        self.lease().fencing_token().expect("fencing is on").get()
    }

    pub async fn release(self) -> Result<(), Error> {
        match self {
            AnyGuard::Mutex(guard) => guard.release().await,
            AnyGuard::Reentrant(guard) => guard.release().await,
        }
    }

    pub fn leak(self) {
        match self {
            AnyGuard::Mutex(guard) => guard.leak(),
            AnyGuard::Reentrant(guard) => guard.leak(),
        }
    }
}
