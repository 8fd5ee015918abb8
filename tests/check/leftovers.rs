//! What the servers still store after all workers have ended.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::sleep;

use crate::history::Time;
use crate::plan::{Fault, Plan};
use crate::run::Window;
use crate::support::{Deployment, Server};

/// The score of a waiting reader is its time less this number.
const READERS: f64 = 4_503_599_627_370_496.0;

/// The longest time that copying a server's data takes.
const COPYING: Duration = Duration::from_millis(100);

/// The time after which no lease is left. `run` waits for one TTL before it.
const GRACE: Duration = Duration::from_secs(1);

/// Removes the waiters of an old copy of the data from the queues: those that were queued when the
/// copy was made, and are queued again since it was put back. Only a later request would admit and
/// so remove them, and after a run there may be none. Waiters that queued later stay, and are
/// reported.
pub async fn forget_old_queues(deployment: &Deployment, windows: &[Window]) {
    let set_back =
        windows.iter().filter(|window| matches!(window.fault, Fault::ServerSetBack | Fault::NodeSetBack));
    let Some(copied) = set_back.map(|window| window.start + COPYING).max() else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let copied = (now - Time::now().since(copied)).as_secs_f64() * 1e6;
    for server in deployment.data() {
        for queue in server.queues().await {
            let members: Vec<(String, f64)> = server.run(&["ZRANGE", &queue, "0", "-1", "WITHSCORES"]).await;
            for (waiter, score) in members {
                let queued = if score < 0.0 { score + READERS } else { score };
                // Marks have larger scores than all waiters, and stay.
                if queued < copied {
                    server.run::<()>(&["ZREM", &queue, &waiter]).await;
                }
            }
        }
    }
}

/// Locks that are still held, and keys with a longer TTL than `lua/README.md` documents.
pub async fn overdue(deployment: &Deployment, plan: &Plan) -> Vec<String> {
    sleep(GRACE).await;
    let mut left = Vec::new();
    for master in deployment.masters() {
        for key in master.run::<Vec<String>>(&["KEYS", "*"]).await {
            left.extend(is_overdue(master, plan, &key).await);
        }
    }
    left
}

async fn is_overdue(server: &Server, plan: &Plan, key: &str) -> Option<String> {
    // The key of the restart guard, on a node of a quorum, has no TTL.
    if key.ends_with("{}node") {
        return None;
    }
    let longest = if key.starts_with("lock:") {
        Duration::ZERO
    } else if key.ends_with(":fence") {
        Duration::from_secs(3_600)
    } else {
        Duration::from_secs(60)
    };
    // A lock that was granted while the clock was ahead expires once the clock reaches that time.
    if longest.is_zero() && plan.faults.iter().any(|fault| fault.sets_clock()) {
        return None;
    }
    let left: i64 = server.run(&["PTTL", key]).await;
    let left = Duration::from_millis(u64::try_from(left).ok()?);
    (left > longest).then(|| format!("{key} expires only in {left:?}; at most {longest:?} may be left"))
}
