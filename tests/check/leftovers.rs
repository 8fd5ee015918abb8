//! What the servers have once nobody wants a lock any more.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::sleep;

use crate::history::Time;
use crate::plan::{Fault, Plan};
use crate::run::Window;
use crate::support::{Deployment, Server};

/// So much less is the score of those who wait to read.
const READERS: f64 = 4_503_599_627_370_496.0;

/// How long the copying of a server's data takes at the most.
const COPYING: Duration = Duration::from_millis(100);

/// After the last lease was given back, dropped or left: none lasts longer.
const GRACE: Duration = Duration::from_secs(1);

/// Takes out of the queues who was in them when a copy of the data was made, and is queued again since the copy was put
/// back: nobody may come who would let him in. Whoever queued later stays, and is found to be left.
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

/// Locks that are still held, and keys that last longer than `lua/README.md` says.
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
    // What a guarded quorum's node knows of itself stays.
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
    // What was granted while the clock was ahead ends when the clock is there again.
    if longest.is_zero() && plan.faults.iter().any(|fault| fault.sets_clock()) {
        return None;
    }
    let left: i64 = server.run(&["PTTL", key]).await;
    let left = Duration::from_millis(u64::try_from(left).ok()?);
    (left > longest).then(|| format!("{key} lasts for another {left:?}"))
}
