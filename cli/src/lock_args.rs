//! [`LockArgs`]: which lock `run` acquires, and its guard.

use std::time::{Duration, Instant};

use redlatch::{Error, Lease, Locks, MutexGuard, Owner, ReentrantGuard, RwLockReadGuard, RwLockWriteGuard};

use tokio::time::timeout;

use crate::exit::Failure;

/// How long to wait for the release of what a request without a reply may have acquired.
const LATE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(crate) struct LockArgs {
    /// Share the lock with other commands that use --shared: the reading side of a read-write lock.
    #[arg(short, long)]
    shared: bool,
    /// Exclude commands that use --shared: the writing side of a read-write lock.
    #[arg(short = 'x', long, visible_short_alias = 'e', conflicts_with = "shared")]
    exclusive: bool,
    /// Enter a lock that a calling `redlatch run --reentrant` holds. REDLATCH_OWNER says which.
    #[arg(short, long)]
    reentrant: bool,
    /// Do not wait for the lock.
    #[arg(short, long, visible_alias = "nb", aliases = ["no-wait", "nowait"], conflicts_with = "wait")]
    nonblock: bool,
    /// Wait at most this long for the lock, for example 10, 0.5 or 2m; 0 is the same as -n.
    #[arg(
        short,
        long,
        value_name = "SECONDS",
        visible_alias = "timeout",
        allow_hyphen_values = true, // so that the error for -1 names the rule
        value_parser = crate::span::parse
    )]
    wait: Option<Duration>,
}

impl LockArgs {
    /// How long to wait; `None` without a limit.
    pub(crate) fn limit(&self) -> Option<Duration> {
        if self.nonblock { Some(Duration::ZERO) } else { self.wait }
    }

    pub(crate) fn is_reentrant(&self) -> bool {
        self.reentrant
    }

    pub(crate) fn tries_once(&self) -> bool {
        self.limit() == Some(Duration::ZERO)
    }

    /// Acquires the lock within the limit, counted from `start`; `None` if another holder has it.
    pub(crate) async fn acquire(
        &self,
        locks: &Locks,
        name: &str,
        owner: &Owner,
        start: Instant,
    ) -> Result<Option<Guard>, Failure> {
        // The time for connecting counts, but a limit that connecting uses up allows one try.
        let limit = self.limit().map(|limit| limit.saturating_sub(start.elapsed()));
        let mut acquired = self.acquire_within(limit, locks, name, owner).await;
        if let Err(Error::TimedOut { was_busy: false, .. }) = acquired {
            // The limit was shorter than a request takes: one try, as with -n. What the first one
            // may have acquired is released before, or this one would find it held.
            let _late = timeout(LATE, locks.settled()).await;
            acquired = self.acquire_within(Some(Duration::ZERO), locks, name, owner).await;
        }
        match acquired {
            Ok(guard) => Ok(Some(guard)),
            Err(Error::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn acquire_within(
        &self,
        limit: Option<Duration>,
        locks: &Locks,
        name: &str,
        owner: &Owner,
    ) -> Result<Guard, Error> {
        // The longest limit is none: nothing else of a call depends on it.
        let limit = limit.unwrap_or(Duration::MAX);
        if self.shared || self.exclusive {
            let lock = locks.rwlock(name)?;
            let lock = if self.reentrant { lock.with_owner(owner) } else { lock };
            if self.shared {
                lock.read_timeout(limit).await.map(Guard::Read)
            } else {
                lock.write_timeout(limit).await.map(Guard::Write)
            }
        } else if self.reentrant {
            locks.reentrant(name, owner)?.lock_timeout(limit).await.map(Guard::Reentrant)
        } else {
            locks.mutex(name)?.lock_timeout(limit).await.map(Guard::Mutex)
        }
    }
}

pub(crate) enum Guard {
    Mutex(MutexGuard),
    Reentrant(ReentrantGuard),
    Read(RwLockReadGuard),
    Write(RwLockWriteGuard),
}

impl Guard {
    pub(crate) fn lease(&self) -> &Lease {
        match self {
            Guard::Mutex(guard) => guard.lease(),
            Guard::Reentrant(guard) => guard.lease(),
            Guard::Read(guard) => guard.lease(),
            Guard::Write(guard) => guard.lease(),
        }
    }

    pub(crate) async fn release(self) -> Result<(), Error> {
        match self {
            Guard::Mutex(guard) => guard.release().await,
            Guard::Reentrant(guard) => guard.release().await,
            Guard::Read(guard) => guard.release().await,
            Guard::Write(guard) => guard.release().await,
        }
    }
}
