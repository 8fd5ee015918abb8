//! What `inspect` reports while the nodes differ: what a majority holds.

use std::time::Duration;

use redlatch::{Holder, Locks, Mode, Owner, Renewal};

use super::{Quorum, options};
use crate::support::{AnyGuard, AnyLock, Kind, eventually};

const TTL: Duration = Duration::from_secs(60);

/// The TTL of the hold on the first node alone.
const LONG: Duration = Duration::from_secs(3_600);

/// Opens a client of all nodes, and one of the first node alone, whose TTL is longer.
async fn clients(quorum: &Quorum) -> (Locks, Locks) {
    let options = options().renewal(Renewal::Never);
    let lone = quorum.client_of(0b001, options.clone().ttl(LONG)).await;
    (quorum.client(options.ttl(TTL)).await, lone)
}

/// Checks that there is one holder with one hold, which expires with the majority's TTL.
fn assert_one(holders: &[Holder], what: &str) {
    let [holder] = holders else { panic!("{what}: {holders:?}") };
    assert_eq!(holder.count, 1, "{what}: {holder:?}");
    assert!(holder.remaining.is_some_and(|left| left <= TTL), "{what}: {holder:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_inspect_reports_holds_of_a_majority() {
    let quorum = Quorum::start(3).await;
    let (client, lone) = clients(&quorum).await;
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read] {
        let lock = kind.lock(&client, kind.name());
        let guard = quorum.take(&lock).await;
        // The owner has one more hold on the first node, with a longer TTL. A mutex has only one
        // hold: extend its TTL there.
        let again = match &lock {
            AnyLock::Reentrant(_, owner) => {
                AnyGuard::Reentrant(lone.reentrant(kind.name(), owner).unwrap().lock().await.unwrap())
            }
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
        assert!(u128::from(kept[0]) > TTL.as_millis(), "{kind:?}: the first node has the longer TTL");
        assert_one(&lock.inspect().await.unwrap().holders, &format!("{kind:?} on three nodes"));
        quorum.run::<u64>(0b010, &["DEL", lock.key()]).await;
        assert_one(&lock.inspect().await.unwrap().holders, &format!("{kind:?} on two nodes"));
        quorum.run::<u64>(0b100, &["DEL", lock.key()]).await;
        let seen = lock.inspect().await.unwrap();
        assert!(seen.holders.is_empty(), "{kind:?} on one node: {seen:?}");
        again.release().await.unwrap();
        assert!(guard.release().await.is_err());
        quorum.wait_for(0b111, 0, &lock).await;
    }
    drop((client, lone));
    quorum.finish().await;
}

/// Readers and a writer that only one node knows are not counted.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_inspect_counts_readers_of_a_majority() {
    let quorum = Quorum::start(3).await;
    let (client, lone) = clients(&quorum).await;
    let (lock, alone) = (client.rwlock("rw").unwrap(), lone.rwlock("rw").unwrap());
    let key = lock.name().key();
    let (owner, stranger) = (Owner::new(), Owner::new());
    let reading = lock.with_owner(&owner).read().await.unwrap();
    eventually("all nodes have the lock", || async { quorum.having(0b111, key).await == 0b111 }).await;
    let beside = alone.with_owner(&stranger).read().await.unwrap();
    assert_eq!(quorum.run::<u64>(0b001, &["HGET", key, "readers"]).await, [2]);
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.reader_count), (Mode::Read, 1), "{seen:?}");
    assert_eq!(seen.readers[0].owner, owner.to_string());
    assert_one(&seen.readers, "readers");
    for guard in [reading, beside] {
        guard.release().await.unwrap();
    }
    eventually("the lock is free", || async { quorum.having(0b111, key).await == 0 }).await;
    let writing = alone.with_owner(&stranger).write().await.unwrap();
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.mode, seen.writer), (Mode::Free, None), "one node's writer is not reported");
    writing.release().await.unwrap();
    drop((client, lone));
    quorum.finish().await;
}
