//! Releases of many locks of one client travel as few script calls, to each node.

use std::time::Duration;

use redlatch::Options;
use tokio::task::JoinSet;

use super::{KINDS, Quorum};

/// 32 requests are sent alone, and the others gather.
const LOCKS: u64 = 200;
const CALLS: u64 = 32 + LOCKS / 10;

#[tokio::test]
async fn quorum_releases_share_script_calls() {
    let quorum = Quorum::start(3).await;
    for kind in KINDS {
        // A renewal would be counted as a call: on a busy machine a round takes longer than 10 s.
        let options = Options::new().node_timeout(Duration::from_secs(20)).ttl(Duration::from_secs(600));
        let client = quorum.client(options).await;
        let mut guards = Vec::new();
        for number in 0..LOCKS {
            let lock = kind.lock(&client, &format!("{}-{number}", kind.name()));
            guards.push(lock.lock().await.unwrap());
        }
        // All nodes have answered all requests.
        client.settled().await;
        let mut before = Vec::new();
        for server in &quorum.servers {
            before.push(server.scripts_run().await);
        }
        quorum.hang(quorum.all());
        let mut releases = JoinSet::new();
        for guard in guards {
            releases.spawn(guard.release());
        }
        // On a runtime with one thread, tasks run in the order in which they were woken.
        for _ in 0..10 {
            tokio::spawn(async {}).await.unwrap();
        }
        quorum.resume(quorum.all());
        for outcome in releases.join_all().await {
            outcome.unwrap();
        }
        client.settled().await;
        for (server, before) in quorum.servers.iter().zip(before) {
            let calls = server.scripts_run().await - before;
            assert!(calls <= CALLS, "{}: {calls} calls for {LOCKS} releases", kind.name());
        }
    }
    quorum.finish().await;
}
