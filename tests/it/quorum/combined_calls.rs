//! Requests for many locks of one client travel as few script calls, to each node.

use std::time::Duration;

use redlatch::{Options, Renewal};
use tokio::task::JoinSet;

use super::{KINDS, Quorum};
use crate::support::eventually;

/// Eight requests are sent alone, and the others gather.
const LOCKS: u64 = 200;
const CALLS: u64 = 32 + LOCKS / 10;

/// Runs the requests while the nodes are stopped, so that they gather.
async fn gathered<T: 'static>(quorum: &Quorum, mut requests: JoinSet<T>) -> Vec<T> {
    // On a runtime with one thread, tasks run in the order in which they were woken.
    for _ in 0..10 {
        tokio::spawn(async {}).await.unwrap();
    }
    quorum.resume(quorum.all());
    let mut outcomes = Vec::new();
    while let Some(outcome) = requests.join_next().await {
        outcomes.push(outcome.unwrap());
    }
    outcomes
}

#[tokio::test]
async fn quorum_requests_share_script_calls() {
    let quorum = Quorum::start(3).await;
    for kind in KINDS {
        // A renewal would be counted as a call. A lock is renewed soon if one node was late.
        let options = Options::new()
            .node_timeout(Duration::from_secs(20))
            .ttl(Duration::from_secs(600))
            .renewal(Renewal::Never);
        let client = quorum.client(options).await;
        // All nodes are connected, and know the scripts for one lock.
        kind.lock(&client, "first").lock().await.unwrap().release().await.unwrap();
        client.settled().await;
        let before = quorum.scripts_run().await;
        quorum.hang(quorum.all());
        let mut acquires = JoinSet::new();
        for number in 0..LOCKS {
            let lock = kind.lock(&client, &format!("{}-{number}", kind.name()));
            acquires.spawn(async move { lock.lock().await });
        }
        let guards = gathered(&quorum, acquires).await;
        // Two nodes are a majority. The guard's release is sent alone while the third one has not
        // answered: it must have all locks, and its answer to a later request comes after those.
        for server in &quorum.servers {
            eventually("the node has all locks", || async {
                let mut held = 0;
                for guard in &guards {
                    let key = guard.as_ref().unwrap().lease().name().key();
                    held += server.run::<u64>(&["EXISTS", key]).await;
                }
                held == LOCKS
            })
            .await;
        }
        assert!(!kind.lock(&client, "later").is_locked().await);
        let acquired = quorum.scripts_run().await;
        quorum.hang(quorum.all());
        let mut releases = JoinSet::new();
        for guard in guards {
            releases.spawn(guard.unwrap().release());
        }
        for outcome in gathered(&quorum, releases).await {
            outcome.unwrap();
        }
        client.settled().await;
        let released = quorum.scripts_run().await;
        for (place, before) in before.into_iter().enumerate() {
            let calls = [acquired[place] - before, released[place] - acquired[place]];
            assert!(calls.iter().all(|calls| *calls <= CALLS), "{}: {calls:?} calls", kind.name());
        }
    }
    quorum.finish().await;
}
