//! `is_held_by`, with a lease and with an owner.

use redlatch::{Options, Owner};

use crate::support::{Deployment, Topology};

/// How many fields and values of the key have this word, on each server.
async fn words(deployment: &Deployment, key: &str, word: &str) -> Vec<usize> {
    let fields: Vec<Vec<String>> = deployment.run_at(key, &["HGETALL", key]).await;
    fields.into_iter().map(|fields| fields.iter().filter(|field| field.contains(word)).count()).collect()
}

async fn assert_server_has(deployment: &Deployment, key: &str, owner: &Owner, has: bool) {
    let found = words(deployment, key, &owner.to_string()).await;
    assert!(found.iter().all(|found| (*found > 0) == has), "{key}: {found:?} of {owner:?}");
}

/// Compares `is_held_by` of every kind with the server's keys.
#[tokio::test(flavor = "multi_thread")]
async fn is_held_by_accepts_a_lease_or_an_owner_on_every_kind() {
    for topology in [Topology::Standalone, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        let locks = deployment.client(Options::new()).await;
        let (mine, other) = (Owner::new(), Owner::new());

        let mutex = locks.mutex("x").unwrap();
        let guard = mutex.lock().await.unwrap();
        let lease = guard.lease().clone();
        assert!(mutex.is_held_by(&lease).await.unwrap());
        let replaced =
            deployment.run_at::<String>("lock:x", &["SET", "lock:x", "other", "XX", "KEEPTTL"]).await;
        assert_eq!(replaced.len(), topology.nodes());
        assert!(!mutex.is_held_by(&lease).await.unwrap(), "another client holds the lock");
        deployment.run_at::<i64>("lock:x", &["DEL", "lock:x"]).await;
        drop(guard);

        let reentrant = locks.reentrant("y", &Owner::new()).unwrap();
        let guard = reentrant.with_owner(&mine).lock().await.unwrap();
        assert_server_has(&deployment, "lock:y", &mine, true).await;
        assert_eq!(guard.owner(), &mine);
        assert!(
            reentrant.is_held_by(&mine).await.unwrap() && reentrant.is_held_by(guard.lease()).await.unwrap()
        );
        assert!(!reentrant.is_held_by(&other).await.unwrap());
        let z = locks.reentrant("z", &Owner::new()).unwrap();
        let elsewhere = z.with_owner(&mine).lock().await.unwrap();
        assert!(!reentrant.is_held_by(elsewhere.lease()).await.unwrap(), "the lease is of another lock");
        deployment.run_at::<i64>("lock:y", &["DEL", "lock:y"]).await;
        assert!(
            !reentrant.is_held_by(&mine).await.unwrap()
                && !reentrant.is_held_by(guard.lease()).await.unwrap()
        );
        drop((guard, elsewhere));

        let prices = locks.rwlock("prices").unwrap();
        assert!(!prices.is_locked().await.unwrap());
        let reading = prices.with_owner(&mine).read().await.unwrap();
        assert_eq!(reading.owner(), Some(&mine));
        let beside = prices.read().await.unwrap();
        assert_eq!(beside.owner(), None);
        assert_server_has(&deployment, "lock:prices", &mine, true).await;
        assert_server_has(&deployment, "lock:prices", &other, false).await;
        for lease in [reading.lease(), beside.lease()] {
            assert!(prices.is_held_by(lease).await.unwrap());
        }
        assert!(prices.is_held_by(&mine).await.unwrap() && !prices.is_held_by(&other).await.unwrap());
        assert!(prices.is_locked().await.unwrap());
        let gone = beside.lease().clone();
        beside.release().await.unwrap();
        assert!(!prices.is_held_by(&gone).await.unwrap(), "only other readers are left");
        let writing = prices.with_owner(&mine).write().await.unwrap();
        assert!(prices.is_held_by(writing.lease()).await.unwrap());
        let gone = writing.lease().clone();
        writing.release().await.unwrap();
        assert_server_has(&deployment, "lock:prices", &mine, true).await;
        assert!(prices.is_held_by(&mine).await.unwrap() && prices.is_held_by(reading.lease()).await.unwrap());
        assert!(
            !prices.is_held_by(&gone).await.unwrap(),
            "the owner still reads, but the write lease has ended"
        );
        reading.release().await.unwrap();
        assert!(!prices.is_locked().await.unwrap() && !prices.is_held_by(&mine).await.unwrap());
        assert_eq!(
            deployment.run_at::<i64>("lock:prices", &["EXISTS", "lock:prices"]).await.iter().sum::<i64>(),
            0
        );
    }
}
