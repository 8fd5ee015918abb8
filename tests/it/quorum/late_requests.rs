//! Requests that arrive late: a release of a partial grant after a later grant, and a release whose
//! caller was dropped.

use std::time::{Duration, Instant};

use redlatch::{Options, Renewal};
use tokio::time::sleep;

use super::{ALONE, CLEANED, KINDS, Quorum, TIMEOUT, options};
use crate::support::{Random, Stopwatch, eventually, soon};

/// A waiter with a partial grant releases it, so that another client can acquire the lock, and that
/// release is delayed. When it arrives, it must not revoke what the waiter was granted meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_late_release_of_a_partial_grant_keeps_the_later_grant() {
    let quorum = Quorum::start(3).await;
    let mut random = Random::new();
    let proxies = quorum.proxies().await;
    let lone = quorum.client_of(0b010, options()).await;
    let client = quorum.client_behind(&proxies, options()).await;
    // The third node hangs, so each poll waits a node timeout for it; the request after a poll is
    // mostly the release of the partial grant.
    quorum.hang(0b100);
    for kind in KINDS {
        for round in 0..2 {
            let name = format!("late-{}-{round}", kind.name());
            let other = kind.rival().lock(&lone, &name).lock().await.unwrap();
            let lock = kind.lock(&client, &name);
            let waiting = lock.lock_in_task();
            quorum.wait_for(0b001, 0b001, &lock).await;
            // A random pause: any of the waiter's requests may be the delayed one.
            sleep(Duration::from_micros(random.below(900_000))).await;
            let before = proxies[0].connections();
            proxies[0].hold_requests(true);
            eventually("the client reconnects", || async { proxies[0].connections() > before }).await;
            other.release().await.unwrap();
            let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
            let ran = quorum.servers[0].scripts_run().await;
            proxies[0].hold_requests(false);
            eventually("the delayed requests arrive", || async {
                quorum.servers[0].scripts_run().await > ran
            })
            .await;
            assert_eq!(
                quorum.having(0b011, lock.key()).await,
                0b011,
                "{kind:?}: two nodes still hold the lock"
            );
            assert!(!guard.lease().is_lost());
            guard.release().await.unwrap();
        }
    }
    quorum.resume(0b100);
    client.settled().await;
    drop((client, lone));
    quorum.finish_behind(proxies).await;
}

/// A try releases its partial grant, to try again, and its future is dropped meanwhile. The keeper
/// still releases the grant.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_dropped_try_releases_its_partial_grant() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let pair = quorum.client_of(0b011, options()).await;
    // No request times out.
    let client = quorum.client_behind(&proxies, options().node_timeout(TIMEOUT * 10)).await;
    for kind in ALONE {
        let name = format!("dropped-{}", kind.name());
        let lock = kind.lock(&client, &name);
        // This loads the scripts into all nodes.
        quorum.take(&lock).await.release().await.unwrap();
        quorum.wait_for(0b111, 0, &lock).await;
        let other = kind.lock(&pair, &name).lock().await.unwrap();
        // All replies: once two nodes have refused, the try does not wait for the third one.
        proxies.iter().for_each(|proxy| proxy.hold_replies(true));
        let held = proxies[2].held();
        let trying = tokio::spawn({
            let lock = lock.clone();
            async move { lock.try_lock().await }
        });
        quorum.wait_for(0b100, 0b100, &lock).await;
        eventually("its reply is held back", || async { proxies[2].held() > held }).await;
        // The client receives the grant; its next requests to this node are lost.
        proxies[2].set_drops_requests(true);
        proxies[2].hold_requests(true);
        let held = proxies[2].held();
        proxies.iter().for_each(|proxy| proxy.hold_replies(false));
        // A script call is longer than what a connection sends by itself.
        eventually("the try releases its grant", || async { proxies[2].held() > held + 100 }).await;
        trying.abort();
        let _ended = trying.await;
        proxies[2].set_drops_requests(false);
        proxies[2].cut();
        proxies[2].hold_requests(false);
        let start = Stopwatch::start();
        quorum.wait_for(0b100, 0, &lock).await;
        assert!(start.undisturbed() < CLEANED, "{start:?} of a TTL of 30 s");
        other.release().await.unwrap();
    }
    client.settled().await;
    drop((client, pair));
    quorum.finish_behind(proxies).await;
}

/// A node never gets the release of a lock that the others have released: the connection to it is
/// silent. The next connection brings another release.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_that_a_node_never_got_is_repeated() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, options().ttl(Duration::from_secs(600))).await;
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        proxies[2].hold_requests(true);
        guard.release().await.unwrap();
        quorum.wait_for(0b111, 0, &lock).await;
        proxies[2].hold_requests(false);
    }
    client.settled().await;
    drop(client);
    quorum.finish_behind(proxies).await;
}

/// Two of three nodes grant the lock. One of them gets its request late, as the client first has to
/// connect to it. The lease counts from the request to the other one, where it expires earlier.
///
/// Not for readers: they may need another request, to agree on a token, and count from that.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_counts_from_the_first_request() {
    const TTL: Duration = Duration::from_secs(30);
    // Never renewed: the repair of a lease that one node has not granted extends it on the others.
    let options = Options::new().node_timeout(Duration::from_secs(15)).ttl(TTL).renewal(Renewal::Never);
    let mut quorum = Quorum::start(3).await;
    for kind in ALONE {
        quorum.kill(0b010);
        let client = quorum.client(options.clone()).await;
        quorum.restart(0b010).await;
        quorum.hang(0b010);
        quorum.kill(0b100);
        let lock = kind.lock(&client, kind.name());
        let acquiring = lock.lock_in_task();
        quorum.wait_for(0b001, 0b001, &lock).await;
        let granted = Instant::now();
        // Twice what is subtracted for the drift of clocks: with less, no test could tell.
        sleep(TTL / 50).await;
        quorum.resume(0b010);
        let guard = soon("a majority grants the lock", acquiring).await.unwrap().unwrap();
        let until = guard.lease().valid_until();
        assert!(until <= granted + TTL, "{}: one node may have it no longer by then", kind.name());
        quorum.restart(0b100).await;
        guard.release().await.unwrap();
        client.settled().await;
    }
    quorum.finish().await;
}
