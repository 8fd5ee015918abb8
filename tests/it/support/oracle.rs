//! Questions to the servers about a lock, answered with plain commands. Tests compare the crate's
//! reports with these, and not with the crate itself.

use redlatch::{Name, Owner};

use super::lock_state::{LockState, Oracle, companion};
use super::server::count_waiters;
use super::{AnyGuard, AnyLock, Deployment, Server};

impl Deployment {
    /// Whether the lock is held on a majority of the nodes, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        self.on_majority(lock.key(), LockState::is_held).await
    }

    /// Whether a majority of the nodes has this guard's hold.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        self.on_majority(lock.key(), |state| state.is_held_by(guard)).await
    }

    /// Whether the lock with this name is held on a majority of the nodes, on either side.
    pub async fn has_holders(&self, name: &Name) -> bool {
        self.on_majority(name.key(), LockState::is_held).await
    }

    /// Whether this owner holds the lock on a majority of the nodes, on either side.
    pub async fn has_holder(&self, name: &Name, owner: &Owner) -> bool {
        let owner = owner.to_string();
        self.on_majority(name.key(), |state| state.holds().any(|hold| hold.owner == owner)).await
    }

    async fn on_majority(&self, key: &str, is_so: impl Fn(&LockState) -> bool) -> bool {
        let mut count = 0;
        for server in self.homes(key).await {
            count += usize::from(is_so(&LockState::on(&mut server.connection().await, key).await));
        }
        count >= self.topology().majority()
    }

    /// The number of each holder's holds on a majority of the nodes, and the last token granted.
    pub async fn holds_and_token(&self, lock: &AnyLock) -> (Vec<u64>, Option<u64>) {
        let state = self.lock_state(lock.name()).await;
        (state.holds().map(|hold| hold.count).collect(), state.last_token)
    }

    /// The number of waiters in the lock's queue, on the node that has most.
    pub async fn waiters(&self, lock: &AnyLock) -> u64 {
        let queue = companion(lock.key(), "waiters");
        self.run_at::<u64>(&queue, &count_waiters(&queue)).await.into_iter().max().unwrap_or(0)
    }
}

impl Server {
    /// Whether the lock is held on this server, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        self.lock_state(lock.name()).await.is_held()
    }

    /// Whether this server has the guard's hold.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        self.lock_state(lock.name()).await.is_held_by(guard)
    }

    /// The number of waiters in the lock's queue.
    pub async fn queued_for(&self, lock: &AnyLock) -> u64 {
        self.run(&count_waiters(&companion(lock.key(), "waiters"))).await
    }
}
