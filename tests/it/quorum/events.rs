//! What is said in the background of nodes that do not do what they should.

use std::time::Duration;

use super::{KINDS, Quorum, options};
use crate::support::events::{heard_of, listen};
use crate::support::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn quorum_events_count_the_nodes_of_a_renewal_that_fails() {
    listen();
    for (nodes, hanging, counts) in
        [(1, 0b001, "held=0 lost=0 unknown=1 nodes=1"), (3, 0b110, "held=1 lost=0 unknown=2 nodes=3")]
    {
        let quorum = Quorum::start(nodes).await;
        let client = quorum.client(options().ttl(Duration::from_secs(3))).await;
        for kind in KINDS {
            let name = format!("events-{nodes}-{}", kind.name());
            let guard = quorum.take(&kind.lock(&client, &name)).await;
            quorum.hang(hanging);
            eventually("said", || async { !heard_of(&name).is_empty() }).await;
            quorum.resume(hanging);
            let event = heard_of(&name).swap_remove(0);
            println!("{event}");
            assert!(event.starts_with("WARN cannot renew a lease on enough nodes: trying again"), "{event}");
            assert!(event.contains(counts), "{event}");
            assert!(event.contains("error=redis failed during") && !event.contains("Redis {"), "{event}");
            guard.release().await.unwrap();
        }
        drop(client);
        quorum.finish().await;
    }
}
