//! Holders: which one has a lock, by its lease and by its owner, and how much of an owner is shown.

use redlatch::{Options, Owner, RwInspection};

use crate::support::{Deployment, Server, Topology};

/// How often a word is in the fields and values of the key, on each server.
async fn words(deployment: &Deployment, key: &str, word: &str) -> Vec<usize> {
    let fields: Vec<Vec<String>> = deployment.run_at(key, &["HGETALL", key]).await;
    fields.into_iter().map(|fields| fields.iter().filter(|field| field.contains(word)).count()).collect()
}

async fn assert_server_has(deployment: &Deployment, key: &str, owner: &Owner, has: bool) {
    let found = words(deployment, key, &owner.to_string()).await;
    assert!(found.iter().all(|found| (*found > 0) == has), "{key}: {found:?} of {owner:?}");
}

/// By a lease and by an owner, on each kind, and as the server's own commands show it.
#[tokio::test(flavor = "multi_thread")]
async fn is_held_by_takes_a_lease_or_an_owner_on_every_kind() {
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
        assert!(!mutex.is_held_by(&lease).await.unwrap(), "another holder has it");
        deployment.run_at::<i64>("lock:x", &["DEL", "lock:x"]).await;
        drop(guard);

        let reentrant = locks.reentrant("y").unwrap();
        let guard = reentrant.with_owner(&mine).lock().await.unwrap();
        assert_server_has(&deployment, "lock:y", &mine, true).await;
        assert_eq!(guard.owner(), &mine);
        assert!(
            reentrant.is_held_by(&mine).await.unwrap() && reentrant.is_held_by(guard.lease()).await.unwrap()
        );
        assert!(!reentrant.is_held_by(&other).await.unwrap());
        let z = locks.reentrant("z").unwrap();
        let elsewhere = z.with_owner(&mine).lock().await.unwrap();
        assert!(!reentrant.is_held_by(elsewhere.lease()).await.unwrap(), "it is a lease of another lock");
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
        assert!(!prices.is_held_by(&gone).await.unwrap(), "others still read");
        let writing = prices.with_owner(&mine).write().await.unwrap();
        assert!(prices.is_held_by(writing.lease()).await.unwrap());
        let gone = writing.lease().clone();
        writing.release().await.unwrap();
        assert_server_has(&deployment, "lock:prices", &mine, true).await;
        assert!(prices.is_held_by(&mine).await.unwrap() && prices.is_held_by(reading.lease()).await.unwrap());
        assert!(!prices.is_held_by(&gone).await.unwrap(), "its owner reads, and the lease was to write");
        reading.release().await.unwrap();
        assert!(!prices.is_locked().await.unwrap() && !prices.is_held_by(&mine).await.unwrap());
        assert_eq!(
            deployment.run_at::<i64>("lock:prices", &["EXISTS", "lock:prices"]).await.iter().sum::<i64>(),
            0
        );
    }
}

/// Without an owner, holds of a re-entrant lock exclude each other; the owner of one can be passed
/// on.
#[tokio::test]
async fn reentrant_holds_without_an_owner_exclude_each_other() {
    let server = Server::start().await;
    let lock = server.locks().await.reentrant("alone").unwrap();
    assert!(lock.owner().is_none());
    let outer = lock.lock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let bound = lock.with_owner(outer.owner());
    assert_eq!(bound.owner(), Some(outer.owner()));
    let inner = bound.try_lock().await.unwrap().expect("it is of the same owner");
    let count: String = server.run(&["HGET", "lock:alone", &outer.owner().to_string()]).await;
    assert_eq!(count, "2");
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:alone"]).await, 0);
}

fn assert_hidden(shown: &impl std::fmt::Debug, secret: &str) {
    for text in [format!("{shown:?}"), format!("{shown:#?}")] {
        let starts = secret.char_indices().map(|(end, _)| &secret[..end]);
        let shown = starts.filter(|start| text.contains(start)).map(|start| start.chars().count());
        let longest = shown.max().unwrap_or(0);
        assert!(!text.contains(secret) && longest <= 8, "{longest} characters of {secret} are in {text}");
    }
}

/// An owner lets its bearer into the lock, and an attempt can be released by its id.
#[tokio::test]
async fn debug_output_shows_no_complete_owner() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for word in
        ["8743c9c0-0795-4907-87fd-6c719a6b4586:61", "8743c9c0-0795-4907-87fd-6c719a6b4586", "tiny", "é"]
    {
        let owner = Owner::from_word(word).unwrap();
        assert_eq!(owner.to_string(), word);
        assert_hidden(&owner, word);
        if word.len() > 8 {
            assert_hidden(&Owner::from_word(&format!("{word} ")).unwrap_err(), word);
        }

        let (reentrant, rwlock) = (locks.reentrant("re").unwrap(), locks.rwlock("rw").unwrap());
        let (reentrant, rwlock) = (reentrant.with_owner(&owner), rwlock.with_owner(&owner));
        let inner = reentrant.lock().await.unwrap();
        let seen = reentrant.inspect().await.unwrap();
        assert_eq!(seen.holders[0].owner, word);
        assert_hidden(&(&reentrant, &rwlock, &inner, inner.lease(), &seen, &seen.holders[0]), word);
        assert!(serde_json::to_string(&seen).unwrap().contains(word), "for programs it is complete");
        let writing = rwlock.write().await.unwrap();
        let reading = rwlock.read().await.unwrap();
        let seen: RwInspection = rwlock.inspect().await.unwrap();
        assert_eq!(
            (seen.writer.as_ref().unwrap().owner.as_str(), seen.readers[0].owner.as_str()),
            (word, word)
        );
        assert_hidden(&(&writing, writing.lease(), &reading, reading.lease(), &seen), word);
        let deep = locks.with_options(Options::new().max_depth(1)).unwrap();
        let deep = deep.rwlock("rw").unwrap().with_owner(&owner).write().await.unwrap_err();
        assert_hidden(&(&deep, &locks), word);
        for released in [inner.release().await, writing.release().await, reading.release().await] {
            released.unwrap();
        }
    }
    let mutex = locks.mutex("m").unwrap();
    let guard = mutex.lock().await.unwrap();
    let attempt: String = server.run(&["GET", "lock:m"]).await;
    assert_hidden(&(&mutex, &guard, guard.lease(), mutex.inspect().await.unwrap(), &locks), &attempt);
    guard.release().await.unwrap();
}
