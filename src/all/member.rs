//! [`Member`]: one of several locks, and its side.

use crate::lease::LockRequest;
use crate::mutex::Mutex;
use crate::name::Name;
use crate::reentrant::ReentrantLock;
use crate::rwlock::RwLock;

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
    pub(super) fn lock(&self) -> &LockRequest {
        match self {
            Member::Mutex(lock) => &lock.lock,
            Member::Reentrant(lock) => &lock.lock,
            Member::Read(lock) => &lock.read,
            Member::Write(lock) => &lock.write,
        }
    }

    pub(super) fn name(&self) -> &Name {
        &self.lock().name
    }
}
