//! Nodes lose a lease one after the other. It ends unless a majority confirms it meanwhile.

use std::time::Duration;

use redlatch::Renewal;

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

/// One of three nodes loses the lease while the others are silent, and all three confirm it later.
/// Then another node loses it: that one alone is no majority.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_lease_survives_a_loss_after_a_majority_confirmed_it() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, options().ttl(Duration::from_secs(15))).await;
    let mut held = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        held.push((quorum.take(&lock).await, lock));
    }
    proxies[1..].iter().for_each(|proxy| proxy.hold_requests(true));
    for (_, lock) in &held {
        quorum.run::<u64>(0b001, &["DEL", lock.key()]).await;
    }
    for (_, lock) in &held {
        quorum.wait_for(0b001, 0b001, lock).await; // a batch without a majority repairs it
    }
    let before: Vec<_> = held.iter().map(|(guard, _)| guard.lease().valid_until()).collect();
    proxies[1..].iter().for_each(|proxy| proxy.hold_requests(false));
    for ((guard, _), before) in held.iter().zip(before) {
        let is_confirmed = || guard.lease().valid_until() > before + Duration::from_secs(1);
        eventually("a majority confirms the lease", || async { is_confirmed() }).await;
    }
    for (_, lock) in &held {
        quorum.run::<u64>(0b010, &["DEL", lock.key()]).await;
    }
    for (guard, lock) in held {
        eventually("a batch finds that it is lost there", || async {
            guard.lease().is_lost() || quorum.having(0b111, lock.key()).await == 0b111
        })
        .await;
        assert!(!guard.lease().is_lost(), "one node of three has lost {}", lock.key());
        guard.release().await.unwrap();
    }
    client.settled().await;
    drop(client);
    quorum.finish_behind(proxies).await;
}

/// A downgrade succeeds while one node has lost the lease and another one is silent, since that may
/// still have it. But it has the old hold, so the new lease is not trusted for longer.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_downgraded_lease_ends_with_the_old_hold_of_a_silent_node() {
    let (short, long) = (Duration::from_secs(30), Duration::from_secs(120));
    let quorum = Quorum::start(3).await;
    // Without renewals: one may reach a majority soon.
    let options = options().renewal(Renewal::Never).ttl(long).write_ttl(short);
    let client = quorum.client(options).await;
    let lock = client.rwlock("downgraded").unwrap();
    let key = "lock:downgraded";
    let write = lock.write().await.unwrap();
    eventually("all nodes have it", || async { quorum.having(0b111, key).await == 0b111 }).await;
    let until = write.lease().valid_until();
    quorum.run::<u64>(0b010, &["DEL", key]).await;
    quorum.hang(0b100);
    let read = write.downgrade().await.unwrap();
    // Two readings of one end differ a little.
    assert!(read.lease().valid_until() < until + (long - short) / 2);
    quorum.resume(0b100);
    drop(read);
    client.settled().await;
    eventually("no node has it", || async { quorum.having(0b111, key).await == 0 }).await;
    drop((lock, client));
    quorum.finish().await;
}

/// A node that has lost the lease refuses its repair: that request has run nowhere, so the release
/// waits for nothing, and leaves no mark that would refuse a late one.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_repair_that_a_node_refuses_leaves_no_mark() {
    let quorum = Quorum::start(3).await;
    let client = quorum.client(options().ttl(Duration::from_secs(3))).await;
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        let refusals = async || {
            let errors: String = quorum.servers[0].run(&["INFO", "errorstats"]).await;
            let count = errors.split_once("errorstat_NOREPLICAS:count=").map_or("0", |(_, rest)| rest);
            count.lines().next().and_then(|count| count.parse::<u64>().ok()).unwrap_or(0)
        };
        quorum.servers[0].run::<()>(&["CONFIG", "RESETSTAT"]).await;
        let mut losing = redis::pipe();
        losing.atomic().cmd("DEL").arg(lock.key());
        losing.cmd("CONFIG").arg(&["SET", "min-replicas-to-write", "1"]);
        losing.exec_async(&mut quorum.servers[0].connection().await).await.unwrap();
        eventually("a repair is refused", async || refusals().await > 0).await;
        // The client knows it, too: replies come in order.
        client.mutex("other").unwrap().inspect().await.unwrap();
        guard.release().await.unwrap();
        let queue = format!("{{{}}}:waiters", lock.key());
        assert_eq!(quorum.having(0b110, &queue).await, 0, "{kind:?}: there is a mark");
        quorum.run::<String>(0b001, &["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    }
    client.settled().await;
    drop(client);
    quorum.finish().await;
}
