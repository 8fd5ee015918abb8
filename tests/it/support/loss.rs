//! How all nodes of a deployment lose a lock that a client renews.

use redlatch::Lease;

use super::{Deployment, eventually};

impl Deployment {
    /// Waits until every node has a key. A quorum grants a lock before its slowest node does, and
    /// that node may get the request after it was killed and has restarted empty.
    pub async fn has_everywhere(&self, key: &str) {
        eventually("every node has the lock", || async {
            self.run_at::<u64>(key, &["EXISTS", key]).await.iter().all(|found| *found == 1)
        })
        .await;
    }

    /// Deletes a lock's key on all nodes until these leases are lost. A quorum's renewal between
    /// two of the deletions acquires the lock again where it was deleted first.
    pub async fn delete_until_lost(&self, key: &str, leases: &[&Lease]) {
        eventually("the lease is lost", || async {
            self.run_at::<u64>(key, &["DEL", key]).await;
            leases.iter().all(|lease| lease.is_lost())
        })
        .await;
    }
}
