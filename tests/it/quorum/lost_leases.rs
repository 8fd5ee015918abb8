//! Nodes lose a lease one after the other, and no majority confirms it meanwhile.

use std::time::Duration;

use super::{KINDS, Quorum, options};
use crate::support::{eventually, soon};

/// Of three or five nodes, a minority has lost the lease and the others are down. It is repaired on
/// that minority, which may be all that a majority lacks. Then another node returns without it: a
/// majority has lost it, although the first ones have it again.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_does_not_pass_from_node_to_node() {
    for (nodes, emptied, returning) in [(3, 0b001, 0b010), (5, 0b00011, 0b00100)] {
        let mut quorum = Quorum::start(nodes).await;
        let client = quorum.client(options().ttl(Duration::from_secs(9))).await;
        let mut held = Vec::new();
        for kind in KINDS {
            let lock = kind.lock(&client, kind.name());
            held.push((quorum.take(&lock).await, lock));
        }
        quorum.kill(quorum.all() & !emptied);
        quorum.run::<String>(emptied, &["FLUSHALL"]).await;
        for (guard, lock) in &held {
            // On a very busy machine, its deadline may come first.
            eventually("the lease is repaired", || async {
                guard.lease().is_lost() || quorum.having(emptied, lock.key()).await == emptied
            })
            .await;
        }
        quorum.restart(returning).await;
        for (guard, lock) in &held {
            soon("the lease is lost", guard.lease().lost()).await;
            quorum.wait_for(emptied | returning, 0, lock).await;
        }
        quorum.restart(quorum.all() & !emptied & !returning).await;
        for (guard, lock) in held {
            let next = soon("the lock is free", lock.for_rival().lock()).await.unwrap();
            assert!(guard.release().await.is_err());
            next.release().await.unwrap();
        }
        client.settled().await;
        drop(client);
        quorum.finish().await;
    }
}
