//! What an inspection shows while the nodes differ: what a majority of them keeps.

use std::time::Duration;

use redlatch::{Holder, Locks, Mode, Owner, Renewal};

use super::{Quorum, options};
use crate::support::{AnyGuard, AnyLock, Kind, eventually};

const TTL: Duration = Duration::from_secs(60);

/// For how long a minority may keep a hold that was given up.
const LONG: Duration = Duration::from_secs(3_600);

/// A client of all nodes, and one that holds locks on the first node alone, for longer.
async fn clients(quorum: &Quorum) -> (Locks, Locks) {
    let options = options().renewal(Renewal::Never);
    let lone = Locks::builder()
        .quorum([quorum.servers[0].url()])
        .options(options.clone().ttl(LONG))
        .connect()
        .await
        .unwrap();
    (quorum.client(options.ttl(TTL)).await, lone)
}

/// One holder with one hold, which ends with the TTL of a majority.
fn assert_one(holders: &[Holder], what: &str) {
    let [holder] = holders else { panic!("{what}: {holders:?}") };
    assert_eq!(holder.count, 1, "{what}: {holder:?}");
    assert!(holder.remaining.is_some_and(|left| left <= TTL), "{what}: {holder:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_inspection_shows_what_a_majority_keeps() {
    let quorum = Quorum::start(3).await;
    let (client, lone) = clients(&quorum).await;
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read] {
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        // A hold more on the first node, for longer; a mutex has no more than one.
        let again = match &lock {
            AnyLock::Reentrant(_, owner) => AnyGuard::Reentrant(
                lone.reentrant(kind.name()).unwrap().with_owner(owner).lock().await.unwrap(),
            ),
            AnyLock::Read(_, owner) => {
                AnyGuard::Read(lone.rwlock(kind.name()).unwrap().with_owner(owner).read().await.unwrap())
            }
            _ => {
                let long = LONG.as_millis().to_string();
                assert_eq!(quorum.run::<u64>(0b001, &["PEXPIRE", lock.key(), &long]).await, [1]);
                AnyGuard::Mutex(lone.mutex("unused").unwrap().lock().await.unwrap())
            }
        };
        let kept: Vec<u64> = quorum.run(0b001, &["PTTL", lock.key()]).await;
        assert!(u128::from(kept[0]) > TTL.as_millis(), "{kind:?}: the first node keeps it for longer");
        assert_one(&lock.inspect().await.unwrap().holders, &format!("{kind:?} on all"));
        quorum.run::<u64>(0b010, &["DEL", lock.key()]).await;
        assert_one(&lock.inspect().await.unwrap().holders, &format!("{kind:?} on two"));
        quorum.run::<u64>(0b100, &["DEL", lock.key()]).await;
        let seen = lock.inspect().await.unwrap();
        assert!(seen.holders.is_empty(), "{kind:?} on one: {seen:?}");
        again.release().await.unwrap();
        assert!(guard.release().await.is_err());
        eventually("free", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
    }
    drop((client, lone));
    quorum.finish().await;
}

/// Readers and a writer that one node knows of are not counted.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_inspection_counts_the_readers_of_a_majority() {
    let quorum = Quorum::start(3).await;
    let (client, lone) = clients(&quorum).await;
    let (lock, alone) = (client.rwlock("rw").unwrap(), lone.rwlock("rw").unwrap());
    let key = lock.name().key();
    let (owner, stranger) = (Owner::new(), Owner::new());
    let reading = lock.with_owner(&owner).read().await.unwrap();
    eventually("all have it", || async { quorum.having(0b111, key).await == 0b111 }).await;
    let beside = alone.with_owner(&stranger).read().await.unwrap();
    assert_eq!(quorum.run::<u64>(0b001, &["HGET", key, "readers"]).await, [2]);
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.reader_count), (Mode::Read, 1), "{seen:?}");
    assert_eq!(seen.readers[0].owner, owner.to_string());
    assert_one(&seen.readers, "readers");
    for guard in [reading, beside] {
        guard.release().await.unwrap();
    }
    eventually("free", || async { quorum.having(0b111, key).await == 0 }).await;
    let writing = alone.with_owner(&stranger).write().await.unwrap();
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.writer), (Mode::Free, None), "on one node");
    writing.release().await.unwrap();
    drop((client, lone));
    quorum.finish().await;
}
