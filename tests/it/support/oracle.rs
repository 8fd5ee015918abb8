//! What the servers themselves say of a lock, read with plain commands: what the crate says is
//! compared with this, and not with itself.

use redlatch::{Name, Owner};

use super::lock_state::{LockState, Oracle, companion};
use super::server::count_waiters;
use super::{AnyGuard, AnyLock, Deployment, Server};

impl Deployment {
    /// Whether more than half of the nodes have the lock held, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        self.more_than_half(lock.key(), LockState::is_held).await
    }

    /// Whether more than half of the nodes have it held by the holder of this guard.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        self.more_than_half(lock.key(), |state| state.is_held_by(guard)).await
    }

    /// Whether more than half of the nodes have a lock held.
    pub async fn has_holders(&self, name: &Name) -> bool {
        self.more_than_half(name.key(), LockState::is_held).await
    }

    /// Whether more than half of the nodes have it held by this owner, on either side.
    pub async fn has_holder(&self, name: &Name, owner: &Owner) -> bool {
        let owner = owner.to_string();
        self.more_than_half(name.key(), |state| state.holds().any(|hold| hold.owner == owner)).await
    }

    async fn more_than_half(&self, key: &str, is_so: impl Fn(&LockState) -> bool) -> bool {
        let mut count = 0;
        for server in self.homes(key).await {
            count += usize::from(is_so(&LockState::on(&mut server.connection().await, key).await));
        }
        count >= self.topology().majority()
    }

    /// How many holds each holder has, on a majority of the nodes, and the last token granted.
    pub async fn holds_and_token(&self, lock: &AnyLock) -> (Vec<u64>, Option<u64>) {
        let state = self.lock_state(lock.name()).await;
        (state.holds().map(|hold| hold.count).collect(), state.last_token)
    }

    /// How many are queued for the lock, on the node that has most.
    pub async fn waiters(&self, lock: &AnyLock) -> u64 {
        let queue = companion(lock.key(), "waiters");
        self.run_at::<u64>(&queue, &count_waiters(&queue)).await.into_iter().max().unwrap_or(0)
    }
}

impl Server {
    /// Whether it has the lock held, on either side.
    pub async fn is_locked(&self, lock: &AnyLock) -> bool {
        self.lock_state(lock.name()).await.is_held()
    }

    /// Whether it has the lock held by the holder of this guard.
    pub async fn is_held_by(&self, lock: &AnyLock, guard: &AnyGuard) -> bool {
        self.lock_state(lock.name()).await.is_held_by(guard)
    }

    /// How many are queued for the lock.
    pub async fn queued_for(&self, lock: &AnyLock) -> u64 {
        self.run(&count_waiters(&companion(lock.key(), "waiters"))).await
    }
}
