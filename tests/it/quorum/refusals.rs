//! Requests that some nodes refuse while others grant them, and replies that disagree.

use std::time::Duration;

use redlatch::{Error, Owner, Renewal};
use tokio::task::JoinSet;

use super::{ALONE, CLEANED, KINDS, Quorum, TIMEOUT, no_quorum, options};
use crate::support::{AnyLock, Kind, Stopwatch, eventually, patient, soon};

/// Makes these nodes accept a token that is an hour ahead of the clock, and returns it. They
/// refuse the first token that a client proposes, as too small.
async fn accept_token_far_ahead(quorum: &Quorum, among: u32, lock: &AnyLock) -> u64 {
    let fence = format!("{{{}}}:fence", lock.key());
    let clock: Vec<u64> = quorum.servers[1].run(&["TIME"]).await;
    let ahead = (clock[0] + 3_600) * 1_000_000;
    quorum.run::<String>(among, &["SET", &fence, &ahead.to_string(), "PX", "86400000"]).await;
    ahead
}

/// On two of three nodes the key is not a lock. The third grants it, and that grant is released.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_grant_of_a_minority_is_released_if_a_majority_refuses() {
    let quorum = Quorum::start(3).await;
    let (foreign, other) = (0b011, 0b100);
    for kind in KINDS {
        let client = quorum.client(options()).await;
        let lock = kind.lock(&client, kind.name());
        quorum.run::<u64>(foreign, &["SADD", lock.key(), "another program's"]).await;
        let refused = lock.try_lock().await.map(|guard| guard.is_some());
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: after try_lock");
        let refused = lock.lock().await.map(drop);
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: after lock");
        quorum.run::<u64>(foreign, &["DEL", lock.key()]).await;
    }
    quorum.finish().await;
}

/// A call with an owner tries once before it waits behind another task of its client. What a
/// minority has granted it then is released: else that node is without a vote until the TTL.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_try_before_the_local_queue_leaves_no_partial_grant() {
    let mut quorum = Quorum::durable(3).await;
    let lone = quorum.client_of(0b010, options()).await;
    let client = quorum.client(options().ttl(Duration::from_secs(600))).await;
    let lock = || client.reentrant("x", &Owner::new()).unwrap();
    // This loads the scripts into all nodes.
    lock().lock().await.unwrap().release().await.unwrap();
    let other = lone.reentrant("x", &Owner::new()).unwrap().lock().await.unwrap();
    quorum.kill(0b001);
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let (lock, asked) = (lock(), quorum.servers[2].scripts_run().await + 2);
        tasks.spawn(async move { lock.lock_timeout(4 * TIMEOUT).await.map(drop) });
        // One after the other: the third node is free again.
        eventually("it has tried", async || quorum.servers[2].scripts_run().await >= asked).await;
    }
    while let Some(outcome) = soon("the limit passes", tasks.join_next()).await {
        assert!(outcome.unwrap().is_err(), "a node is down, and another one has another holder");
    }
    eventually("the third node is free", async || quorum.having(0b100, "lock:x").await == 0).await;
    other.release().await.unwrap();
    quorum.restart(0b001).await;
    client.settled().await;
    drop((client, lone));
    quorum.finish().await;
}

/// One node grants the lock with a proposed token, and the other two refuse the token as too small.
/// Before the client proposes a larger one, the first node is out of memory and another client
/// holds the lock on the other two. The first grant must be released.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_grant_of_a_rejected_proposal_is_released() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let patient = options().node_timeout(Duration::from_secs(10));
    let other = quorum.client_of(0b110, options()).await;
    for kind in ALONE {
        let client = quorum.client_behind(&proxies, patient.clone()).await;
        let lock = kind.lock(&client, kind.name());
        // This loads the scripts into all nodes. The other two nodes get larger tokens below.
        quorum.take(&lock).await.release().await.unwrap();
        quorum.wait_for(0b111, 0, &lock).await;
        let before = quorum.servers[0].scripts_run().await;
        accept_token_far_ahead(&quorum, 0b110, &lock).await;
        for place in [1, 2] {
            proxies[place].hold_replies(true);
        }
        let scripts_before = [quorum.servers[1].scripts_run().await, quorum.servers[2].scripts_run().await];
        let trying = tokio::spawn({
            let lock = lock.clone();
            async move { lock.try_lock().await.map(|guard| guard.is_some()) }
        });
        quorum.wait_for(0b001, 0b001, &lock).await;
        for (place, scripts_before) in [1, 2].into_iter().zip(scripts_before) {
            eventually("the other nodes have run the request", || async {
                quorum.servers[place].scripts_run().await > scripts_before
            })
            .await;
        }
        quorum.run::<String>(0b001, &["CONFIG", "SET", "maxmemory", "1"]).await;
        let held = kind.lock(&other, kind.name()).lock().await.unwrap();
        // The slow replies of the other two let the first node's error arrive before them.
        for place in [1, 2] {
            proxies[place].slow_down(Some(Duration::from_millis(100)));
            proxies[place].hold_replies(false);
        }
        let granted = soon("try_lock returns", trying).await.unwrap().unwrap();
        assert!(!granted, "{kind:?}: another client holds the lock");
        assert!(
            quorum.servers[0].scripts_run().await >= before + 2,
            "{kind:?}: the first node got a second proposal"
        );
        for place in [1, 2] {
            proxies[place].slow_down(None);
        }
        let start = Stopwatch::start();
        quorum.run::<String>(0b001, &["CONFIG", "SET", "maxmemory", "0"]).await;
        quorum.wait_for(0b001, 0, &lock).await;
        assert!(start.undisturbed() < CLEANED, "{kind:?}: {start:?} of a TTL of 30 s");
        held.release().await.unwrap();
    }
    drop(other);
    quorum.finish_behind(proxies).await;
}

/// Two of three nodes grant the lock, and the third refuses the token as too small. The lease must
/// not stay on a bare majority for a third of its TTL, until its first regular renewal: it is
/// repaired on the third node long before.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_is_soon_repaired_on_a_node_that_refused_its_token() {
    let quorum = Quorum::start(3).await;
    let options = options().node_timeout(Duration::from_secs(10)).ttl(Duration::from_secs(60));
    let client = quorum.client(options).await;
    for kind in ALONE {
        let lock = kind.lock(&client, kind.name());
        let ahead = accept_token_far_ahead(&quorum, 0b100, &lock).await;
        let guard = lock.lock().await.unwrap();
        let start = Stopwatch::start();
        assert!(guard.token() < ahead, "{kind:?}: the third node has refused it");
        quorum.wait_for(0b111, 0b111, &lock).await;
        assert!(start.undisturbed() < CLEANED, "{kind:?}: {start:?} of a TTL of 60 s");
        assert!(!guard.lease().is_lost());
        guard.release().await.unwrap();
    }
    client.settled().await;
    drop(client);
    quorum.finish().await;
}

/// Of three nodes, one is dead, one confirms and one refuses.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_error_counts_replies_that_disagree() {
    let mut quorum = Quorum::start(3).await;
    // Without renewals, the lease is not repaired on the node that lost it.
    let client = quorum.client(patient().renewal(Renewal::Never)).await;
    let lock = KINDS[0].lock(&client, "divided");
    let guard = quorum.take(&lock).await;
    quorum.run::<u64>(0b001, &["DEL", lock.key()]).await;
    quorum.kill(0b010);
    let error = lock.force_release().await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("1 granted, 1 refused, 1 silent of 3 nodes; 2 must agree"), "{text}");
    assert_eq!(no_quorum::<()>(Err(error)).0, 2);
    drop(guard);
    quorum.restart(0b010).await;
    client.settled().await;
    drop(client);
    quorum.finish().await;
}

/// Two readers upgrade at the same time, and each is the first to reach one of the two live nodes.
/// One of them gets `WouldDeadlock`, since they would wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_one_of_two_upgrades_while_a_node_is_dead() {
    let mut quorum = Quorum::start(3).await;
    // No request times out.
    let options = || options().node_timeout(Duration::from_secs(10));
    let proxies = quorum.proxies().await;
    let one = quorum.client_behind(&proxies, options()).await;
    let other = quorum.client(options()).await;
    // A client that has waited once is subscribed, so its first request queues.
    let held = other.mutex("subscribe").unwrap().lock().await.unwrap();
    let limit = Duration::from_millis(100);
    assert!(one.mutex("subscribe").unwrap().lock_timeout(limit).await.is_err());
    held.release().await.unwrap();
    for round in 0..3 {
        let name = format!("upgrades-{round}");
        let (lock, rival) = (one.rwlock(&name).unwrap(), other.rwlock(&name).unwrap());
        let (owner, its_owner) = (Owner::new(), Owner::new());
        let first = lock.with_owner(&owner).read().await.unwrap();
        let second = rival.with_owner(&its_owner).read().await.unwrap();
        let key = lock.name().key().to_owned();
        let both = || async {
            quorum.run::<Option<u32>>(0b011, &["HGET", &key, "readers"]).await == [Some(2), Some(2)]
        };
        eventually("both live nodes have both readers", both).await;
        quorum.kill(0b100);
        proxies[1].hold_requests(true);
        let upgrading = tokio::spawn({
            let lock = lock.clone();
            async move { lock.with_owner(&owner).write().await }
        });
        let marked = |place: u32| {
            let (quorum, key) = (&quorum, &key);
            async move { quorum.run::<u32>(1 << place, &["HEXISTS", key, "upgrade"]).await == [1] }
        };
        eventually("the first node has the upgrade", || marked(0)).await;
        let outcome = soon("the other upgrade is refused", rival.with_owner(&its_owner).write()).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        second.release().await.unwrap();
        proxies[1].hold_requests(false);
        let writing = soon("the first upgrade succeeds", upgrading).await.unwrap().unwrap();
        writing.release().await.unwrap();
        first.release().await.unwrap();
        quorum.restart(0b100).await;
        other.settled().await;
        one.settled().await;
    }
    drop((one, other));
    quorum.finish_behind(proxies).await;
}

/// One node refuses the release for good, and one does not answer. Both may still hold the lock, so
/// a close must not return as if it were released.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_close_reports_a_lock_that_a_majority_may_hold() {
    let quorum = Quorum::start(3).await;
    let client = quorum.client(options()).await;
    let lock = Kind::Mutex.lock(&client, "left");
    let guard = quorum.take(&lock).await;
    quorum.run::<()>(0b001, &["ACL", "SETUSER", "default", "-evalsha", "-eval"]).await;
    quorum.hang(0b010);
    let outcome = client.close(3 * TIMEOUT).await;
    assert!(matches!(&outcome, Err(Error::Unreleased { count: 1, .. })), "{outcome:?}");
    quorum.resume(0b010);
    quorum.wait_for(0b110, 0, &lock).await;
    soon("nothing is tried any more", client.settled()).await;
    quorum.run::<()>(0b001, &["ACL", "SETUSER", "default", "+@all"]).await;
    quorum.run::<u64>(0b001, &["DEL", lock.key()]).await;
    drop((guard, lock, client));
    quorum.finish().await;
}
