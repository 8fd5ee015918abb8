//! What was given up arrives late, when something else has come of it.

use std::time::{Duration, Instant};

use redlatch::Locks;
use tokio::time::sleep;

use super::{ALONE, CLEANED, KINDS, Quorum, TIMEOUT, options};
use crate::support::{Random, eventually, soon};

/// One who has a part of a lock lets it go, so that others may have it, and is not heard in time. What he is granted after
/// that must not be taken away by it.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_keeps_what_was_let_go_before() {
    let quorum = Quorum::start(3).await;
    let mut random = Random::new();
    let proxies = quorum.proxies().await;
    let lone = Locks::builder().quorum([quorum.servers[1].url()]).options(options()).connect().await.unwrap();
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
    quorum.finish_behind(proxies).await;
}

/// Who tries lets go of a part, to try again, and is dropped meanwhile: what he did not get rid of is given back all the same.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_gives_back_what_a_dropped_try_was_letting_go() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let pair = Locks::builder()
        .quorum([quorum.servers[0].url(), quorum.servers[1].url()])
        .options(options())
        .connect()
        .await
        .unwrap();
    let client = quorum.client_behind(&proxies, options()).await;
    for kind in ALONE {
        let name = format!("dropped-{}", kind.name());
        // From here on, all nodes know the scripts.
        quorum.take(&kind.lock(&client, &name)).await.release().await.unwrap();
        let other = kind.lock(&pair, &name).lock().await.unwrap();
        let lock = kind.lock(&client, &name);
        proxies[2].hold_replies(true);
        let trying = tokio::spawn({
            let lock = lock.clone();
            async move { lock.try_lock().await }
        });
        eventually("it has one", || async { quorum.having(0b100, lock.key()).await == 0b100 }).await;
        // It is told so, and what it asks next gets lost.
        proxies[2].be_deaf(true);
        proxies[2].hold_requests(true);
        proxies[2].hold_replies(false);
        sleep(TIMEOUT / 3).await;
        trying.abort();
        sleep(TIMEOUT * 2).await;
        proxies[2].cut();
        proxies[2].be_deaf(false);
        proxies[2].hold_requests(false);
        let start = Instant::now();
        eventually("free", || async { quorum.having(0b100, lock.key()).await == 0 }).await;
        assert!(start.elapsed() < CLEANED, "{:?}, and its ttl is 30 s", start.elapsed());
        other.release().await.unwrap();
    }
    client.settled().await;
    drop((client, pair));
    quorum.finish_behind(proxies).await;
}
