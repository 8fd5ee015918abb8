//! Log events about nodes of a quorum that fail or have no vote.

use std::time::Duration;

use redlatch::RestartGuard;

use super::{KINDS, Quorum, options};
use crate::support::events::{listen, logged_with};
use crate::support::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn quorum_logs_count_nodes_of_a_failed_renewal() {
    listen();
    for (nodes, hanging, counts) in
        [(1, 0b001, "held=0 lost=0 unknown=1 nodes=1"), (3, 0b110, "held=1 lost=0 unknown=2 nodes=3")]
    {
        let quorum = Quorum::start(nodes).await;
        // Renewed after two seconds, and lost four seconds after that.
        let client = quorum.client(options().ttl(Duration::from_secs(6))).await;
        let mut guards = Vec::new();
        for kind in KINDS {
            let name = format!("events-{nodes}-{}", kind.name());
            guards.push((quorum.take(&kind.lock(&client, &name)).await, name));
        }
        quorum.hang(hanging);
        for (_, name) in &guards {
            let is_logged = || logged_with(name).iter().any(|event| event.contains("no majority renewed"));
            eventually("the failed renewal is logged", || async { is_logged() }).await;
        }
        quorum.resume(hanging);
        for (guard, name) in guards {
            let event = logged_with(&name).swap_remove(0);
            println!("{event}");
            assert!(event.starts_with("DEBUG no majority renewed a lease: retrying"), "{event}");
            assert!(event.contains(counts), "{event}");
            let is_silent = event.contains("error=no ") || event.contains("could not be reached: timed out");
            assert!(is_silent && !event.contains(" {"), "{event}");
            guard.release().await.unwrap();
        }
        drop(client);
        quorum.finish().await;
    }
}

/// One event for each node and loss, not one for each refused request.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_logs_a_node_without_vote_once() {
    listen();
    let quorum = Quorum::start(3).await;
    let options = options().ttl(Duration::from_millis(900)).restart_guard(RestartGuard::On);
    let client = quorum.client(options).await;
    let logged = |place: u32| {
        let events = logged_with(&quorum.labels(1 << place)[0]);
        events.iter().filter(|event| event.starts_with("WARN a node has no vote")).count()
    };
    for round in 1..=2 {
        for kind in KINDS {
            for name in ["one", "other"] {
                assert!(kind.lock(&client, name).try_lock().await.is_err());
            }
        }
        for place in 0..3 {
            assert_eq!(logged(place), round, "{:?}", logged_with(&quorum.labels(1 << place)[0]));
        }
        client.rejoin().await.unwrap();
        for kind in KINDS {
            let guard = quorum.take(&kind.lock(&client, kind.name())).await;
            guard.release().await.unwrap();
        }
        assert_eq!([logged(0), logged(1), logged(2)], [round; 3]);
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
    }
}
