//! What was given up arrives late, when something else has come of it.

use std::time::Duration;

use redlatch::Locks;
use tokio::time::sleep;

use super::{KINDS, Quorum, options};
use crate::support::{Random, eventually, soon};

/// One who has a part of a lock lets it go, so that others may have it, and is not heard in time. What he is granted after
/// that must not be taken away by it.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_keeps_what_was_let_go_before() {
    let quorum = Quorum::start(3).await;
    let mut random = Random::new();
    let proxies = quorum.proxies().await;
    let lone = Locks::quorum_with([quorum.servers[1].url()], options()).await.unwrap();
    let client = quorum.client_behind(&proxies, options()).await;
    // Each look takes as long as this one is waited for: most of the time, what comes next is to let go.
    quorum.hang(0b100);
    for kind in KINDS {
        for round in 0..2 {
            let name = format!("late-{}-{round}", kind.name());
            let other = kind.rival().lock(&lone, &name).lock().await.unwrap();
            let lock = kind.lock(&client, &name);
            let waiting = tokio::spawn({
                let lock = lock.clone();
                async move { lock.lock().await }
            });
            eventually("it has one", || async { quorum.having(0b001, lock.key()).await == 1 }).await;
            // Any of its requests may be the one that is held up.
            sleep(Duration::from_micros(random.below(900_000))).await;
            let before = proxies[0].connections();
            proxies[0].hold_requests(true);
            eventually("it connects again", || async { proxies[0].connections() > before }).await;
            other.release().await.unwrap();
            let guard = soon("granted", waiting).await.unwrap().unwrap();
            let ran = quorum.servers[0].scripts_run().await;
            proxies[0].hold_requests(false);
            eventually("it arrives", || async { quorum.servers[0].scripts_run().await > ran }).await;
            assert_eq!(quorum.having(0b011, lock.key()).await, 0b011, "{kind:?}: it is still held");
            assert!(!guard.lease().is_lost());
            guard.release().await.unwrap();
        }
    }
    quorum.resume(0b100);
    client.settled().await;
    drop((client, lone));
    for proxy in proxies {
        proxy.outlive_clients().await;
    }
    quorum.finish().await;
}
