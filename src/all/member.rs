//! [`Member`]: one of several locks, and its side. [`MemberGuard`]: its guard.

use std::time::Duration;

use crate::error::{Context, Error, Operation};
use crate::lease::{Hold, Lease, LockRequest, NamedLock, OwnedLease, acquire};
use crate::mutex::{Mutex, MutexGuard};
use crate::name::Name;
use crate::reentrant::{ReentrantGuard, ReentrantLock};
use crate::rwlock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::wire::Together;

/// A lock that is acquired together with others, and for a read-write lock its side.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Member {
    /// A mutex.
    Mutex(Mutex),
    /// A re-entrant lock: its owner may hold it already.
    Reentrant(ReentrantLock),
    /// A read-write lock, to read.
    Read(RwLock),
    /// A read-write lock, to write.
    Write(RwLock),
}

impl From<Mutex> for Member {
    fn from(lock: Mutex) -> Member {
        Member::Mutex(lock)
    }
}

impl From<ReentrantLock> for Member {
    fn from(lock: ReentrantLock) -> Member {
        Member::Reentrant(lock)
    }
}

impl Member {
    pub(super) fn lock(&self) -> &NamedLock {
        match self {
            Member::Mutex(lock) => &lock.lock,
            Member::Reentrant(lock) => &lock.lock,
            Member::Read(lock) | Member::Write(lock) => &lock.read,
        }
    }

    pub(super) fn name(&self) -> &Name {
        &self.lock().name
    }

    /// For errors of a call that acquires it.
    pub(super) fn context(&self) -> Context {
        self.lock().client.context(Operation::Acquire, self.name())
    }

    pub(super) fn request(&self) -> LockRequest {
        match self {
            Member::Mutex(lock) => lock.request(),
            Member::Reentrant(lock) => lock.request(),
            Member::Read(lock) => lock.to_read(),
            Member::Write(lock) => lock.to_write(),
        }
    }

    pub(super) fn guard(&self, request: &LockRequest, hold: OwnedLease) -> MemberGuard {
        match self {
            Member::Mutex(_) => MemberGuard::Mutex(MutexGuard::new(hold)),
            Member::Reentrant(lock) => MemberGuard::Reentrant(lock.granted(request, hold)),
            Member::Read(lock) => MemberGuard::Read(lock.read_guard(Hold::new(hold))),
            Member::Write(lock) => MemberGuard::Write(lock.write_guard(hold)),
        }
    }

    pub(super) async fn acquire(&self, limit: Option<Duration>) -> Result<MemberGuard, Error> {
        Ok(match self {
            Member::Mutex(lock) => {
                MemberGuard::Mutex(MutexGuard::new(acquire(&lock.request(), limit).await?))
            }
            Member::Reentrant(lock) => MemberGuard::Reentrant(lock.acquire(limit).await?),
            Member::Read(lock) => MemberGuard::Read(lock.read_guard(acquire(&lock.to_read(), limit).await?)),
            Member::Write(lock) => {
                MemberGuard::Write(lock.write_guard(acquire(&lock.to_write(), limit).await?))
            }
        })
    }
}

pub(super) enum MemberGuard {
    Mutex(MutexGuard),
    Reentrant(ReentrantGuard),
    Read(RwLockReadGuard),
    Write(RwLockWriteGuard),
}

impl MemberGuard {
    pub(super) fn lease(&self) -> &Lease {
        match self {
            MemberGuard::Mutex(guard) => guard.lease(),
            MemberGuard::Reentrant(guard) => guard.lease(),
            MemberGuard::Read(guard) => guard.lease(),
            MemberGuard::Write(guard) => guard.lease(),
        }
    }

    pub(super) async fn release(self, together: &Together) -> Result<(), Error> {
        match self {
            MemberGuard::Mutex(guard) => guard.hold.release(Some(together)).await,
            MemberGuard::Reentrant(guard) => guard.shared.release(Some(together)).await,
            MemberGuard::Read(guard) => guard.hold.release(Some(together)).await,
            MemberGuard::Write(guard) => guard.hold.release(Some(together)).await,
        }
    }
}
