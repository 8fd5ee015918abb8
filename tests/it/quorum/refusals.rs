//! What a majority refuses while some node grants it, and what the nodes do not agree on.

use std::time::Duration;

use redlatch::{Error, Locks, Owner, Renewal};

use super::{ALONE, KINDS, Quorum, no_quorum, options};
use crate::support::{eventually, soon};

/// More than half say that it is no lock; the one that says nothing of the kind keeps nothing.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_keeps_nothing_of_what_a_majority_refuses() {
    let quorum = Quorum::start(3).await;
    let (squatted, other) = (0b011, 0b100);
    for kind in KINDS {
        let client = quorum.client(options()).await;
        let lock = kind.lock(&client, kind.name());
        quorum.run::<u64>(squatted, &["SADD", lock.key(), "somebody else's"]).await;
        let refused = lock.try_lock().await.map(|guard| guard.is_some());
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: tried");
        let refused = lock.lock().await.map(drop);
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: waited for");
        quorum.run::<u64>(squatted, &["DEL", lock.key()]).await;
    }
    quorum.finish().await;
}

/// One grants a token for which the others have seen larger ones, and has no memory left when it is asked again; meanwhile
/// somebody else has the lock on those.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_keeps_nothing_of_an_earlier_proposal() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let patient = options().node_timeout(Duration::from_secs(10));
    let pair = [1, 2].map(|place: usize| quorum.servers[place].url());
    let other = Locks::builder().quorum(pair).options(options()).connect().await.unwrap();
    for kind in ALONE {
        let client = quorum.client_behind(&proxies, patient.clone()).await;
        let lock = kind.lock(&client, kind.name());
        // From here on, all nodes know the scripts, and those two larger tokens.
        quorum.take(&lock).await.release().await.unwrap();
        eventually("quiet", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
        let before = quorum.servers[0].scripts_run().await;
        let fence = format!("{{{}}}:fence", lock.key());
        let clock: Vec<u64> = quorum.servers[1].run(&["TIME"]).await;
        let ahead = ((clock[0] + 3_600) * 1_000_000).to_string();
        quorum.run::<String>(0b110, &["SET", &fence, &ahead, "PX", "86400000"]).await;
        for place in [1, 2] {
            proxies[place].hold_replies(true);
        }
        let asked = [quorum.servers[1].scripts_run().await, quorum.servers[2].scripts_run().await];
        let trying = tokio::spawn({
            let lock = lock.clone();
            async move { lock.try_lock().await.map(|guard| guard.is_some()) }
        });
        eventually("one grants it", || async { quorum.having(0b001, lock.key()).await == 0b001 }).await;
        for (place, asked) in [1, 2].into_iter().zip(asked) {
            eventually("the others do not", || async { quorum.servers[place].scripts_run().await > asked })
                .await;
        }
        quorum.run::<String>(0b001, &["CONFIG", "SET", "maxmemory", "1"]).await;
        let held = kind.lock(&other, kind.name()).lock().await.unwrap();
        // So that the one without memory is heard as well.
        for place in [1, 2] {
            proxies[place].slow_down(Some(Duration::from_millis(100)));
            proxies[place].hold_replies(false);
        }
        let granted = soon("told", trying).await.unwrap().unwrap();
        assert!(!granted, "{kind:?}: somebody else has it");
        assert!(quorum.servers[0].scripts_run().await >= before + 2, "{kind:?}: it was asked again");
        for place in [1, 2] {
            proxies[place].slow_down(None);
        }
        quorum.run::<String>(0b001, &["CONFIG", "SET", "maxmemory", "0"]).await;
        eventually("given back", || async { quorum.having(0b001, lock.key()).await == 0 }).await;
        held.release().await.unwrap();
    }
    drop(other);
    quorum.finish_behind(proxies).await;
}

/// All that is left of a quorum answers, one node in one way and another one in the other.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_says_that_those_who_answer_do_not_agree() {
    let mut quorum = Quorum::start(3).await;
    // Nobody takes once more what a node has lost.
    let client = quorum.client(options().renewal(Renewal::Never)).await;
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

/// Two who read want to write, and each is the first to be heard by one of the two nodes that are left. Neither waits for
/// the other.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_one_of_two_upgrades_while_one_is_dead() {
    let mut quorum = Quorum::start(3).await;
    // Nobody is given up for being slow.
    let options = || options().node_timeout(Duration::from_secs(10));
    let proxies = quorum.proxies().await;
    let one = quorum.client_behind(&proxies, options()).await;
    let other = quorum.client(options()).await;
    // Who has waited once listens already: his first request queues.
    let held = other.mutex("listens").unwrap().lock().await.unwrap();
    let limit = Duration::from_millis(100);
    assert!(one.mutex("listens").unwrap().lock_timeout(limit).await.is_err());
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
        eventually("both read on both", both).await;
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
        eventually("the first node hears one", || marked(0)).await;
        let outcome = soon("the other is told", rival.with_owner(&its_owner).write()).await;
        assert!(matches!(outcome, Err(Error::WouldDeadlock { .. })), "{outcome:?}");
        second.release().await.unwrap();
        proxies[1].hold_requests(false);
        let writing = soon("upgraded", upgrading).await.unwrap().unwrap();
        writing.release().await.unwrap();
        first.release().await.unwrap();
        quorum.restart(0b100).await;
        other.settled().await;
        one.settled().await;
    }
    drop((one, other));
    quorum.finish_behind(proxies).await;
}
