//! Downgrades: from writing to reading.

use std::time::{Duration, Instant};

use redlatch::{Error, LossReason, Mode, Options, Owner, Renewal};

use super::{TTLS, queued, ttl_of};
use crate::support::{Hold, Setup, eventually, notified_only, patient, renewed_by, soon};

pub async fn downgrade_admits_readers_before_any_writer(setup: Setup) {
    let options = notified_only().read_ttl(Duration::from_secs(9)).write_ttl(Duration::from_secs(50));
    let (lock, other) = (setup.rwlock(options).await, setup.rwlock(notified_only()).await);
    for round in 0..5 {
        let writing = lock.write().await.unwrap();
        let old = writing.lease().clone();
        let reader = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.read().await }
        })
        .await;
        let writer = queued(&setup, &lock, {
            let other = other.clone();
            async move { other.write().await }
        })
        .await;
        let before = setup.published_before_grant(lock.name().key()).await;
        let mine = writing.downgrade().await.unwrap();
        assert!(old.is_lost(), "the write lease has ended");
        assert_eq!(mine.lease().fencing_token(), old.fencing_token(), "the token stays the same");
        let beside = soon("the waiting reader is admitted", reader).await.unwrap().unwrap();
        setup.assert_notified(before).await;
        assert!(
            setup.reads_after(beside.lease(), old.fencing_token()),
            "no writer was granted the lock in between"
        );
        assert!(!writer.is_finished() && !mine.lease().is_lost(), "round {round}");
        let until = mine.lease().valid_until();
        assert!(until < Instant::now() + Duration::from_secs(9), "the TTL of reading");
        mine.release().await.unwrap();
        beside.release().await.unwrap();
        soon("the writer acquires", writer).await.unwrap().unwrap().release().await.unwrap();
    }
    drop((lock, other));
    setup.finish().await;
}

/// A downgrade ends the turn for which a write has reserved tokens.
pub async fn counter_stays_behind_the_clock_with_downgrades_in_turns(setup: Setup) {
    let lock = setup.client().await.rwlock("rw").unwrap(); // with the default turn
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..100 {
                    lock.write().await.unwrap().downgrade().await.unwrap().release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let time: Vec<Vec<u64>> = setup.deployment.run_at(lock.name().key(), &["TIME"]).await;
    let now = time.iter().map(|time| time[0] * 1_000_000 + time[1]).max().unwrap();
    let last = setup.state_of(lock.name()).await.last_token.unwrap();
    assert!(last < now + 10_000, "{} us ahead after 800 turns", last.saturating_sub(now));
    drop(lock);
    setup.finish().await;
}

pub async fn downgraded_lease_is_renewed(setup: Setup) {
    let short = Duration::from_secs(4);
    let lock = setup.rwlock(patient().read_ttl(short).write_ttl(Duration::from_secs(60))).await;
    let mine = lock.write().await.unwrap().downgrade().await.unwrap();
    renewed_by(mine.lease(), short / 2).await;
    assert!(setup.deployment.has_holders(lock.name()).await);
    mine.leak();
    eventually("the TTL of reading ends it", || async {
        setup.state_of(lock.name()).await.mode == Mode::Free
    })
    .await;
    drop(lock);
    setup.finish().await;
}

/// The reply is late: the lease counts from before the request left, not from the reply.
pub async fn late_downgrade_reply_yields_no_longer_lease(setup: Setup) {
    let proxy = setup.proxy().await;
    // Long enough that no renewal comes between the reply and the end of the test.
    let (read_ttl, late) = (Duration::from_secs(30), Duration::from_secs(1));
    let options = Options::new().read_ttl(read_ttl).node_timeout(Duration::from_secs(15)).drift(0.001);
    let lock = setup.client_behind(&proxy, options).await.rwlock("rw").unwrap();
    let watcher = setup.rwlock(patient()).await;
    let key = lock.name().key();
    // The server knows the script from here on.
    lock.write().await.unwrap().downgrade().await.unwrap().release().await.unwrap();
    let writing = lock.write().await.unwrap();
    proxy.hold_replies(true);
    let downgrading = tokio::spawn(writing.downgrade());
    eventually("the server has downgraded the lock", || async {
        setup.state_of(watcher.name()).await.mode == Mode::Read
    })
    .await;
    eventually("the server has held the downgraded lock for a while", || async {
        setup.deployment.kept_until(key).await < Instant::now() + read_ttl - late
    })
    .await;
    proxy.hold_replies(false);
    let reading = soon("the downgrade returns", downgrading).await.unwrap().unwrap();
    let (until, kept) = (reading.lease().valid_until(), setup.deployment.kept_until(key).await);
    assert!(until <= kept, "the lease outlasts the server's hold by {:?}", until - kept);
    reading.release().await.unwrap();
    drop((lock, watcher));
    setup.finish().await;
}

/// The downgrade of one hold does not shorten the owner's other holds, on either side.
pub async fn downgrade_keeps_ttl_of_other_holds(setup: Setup) {
    let locks = setup.client().await;
    let with = |seconds: u64| {
        let options = patient().ttl(Duration::from_secs(seconds)).renewal(Renewal::Never);
        locks.with_options(options).unwrap().rwlock("rw").unwrap()
    };
    let (short, long) = (with(TTLS[0]), with(TTLS[2]));
    let remaining = async || {
        let seen = setup.state_of(long.name()).await;
        let ttl = |hold: &Hold| ttl_of(hold.remaining);
        (seen.writer.as_ref().map(ttl), seen.readers.first().map(ttl))
    };
    let owner = Owner::new();
    let outer = long.with_owner(&owner).write().await.unwrap();
    let inner = short.with_owner(&owner).write().await.unwrap().downgrade().await.unwrap();
    assert_eq!(remaining().await, (Some(90), Some(30)), "beside a longer hold to write");
    let reading = long.with_owner(&owner).read().await.unwrap();
    let further = short.with_owner(&owner).write().await.unwrap().downgrade().await.unwrap();
    assert_eq!(remaining().await, (Some(90), Some(90)), "beside a longer hold to read");
    outer.release().await.unwrap();
    let kept = setup.deployment.kept_until(long.name().key()).await.duration_since(Instant::now());
    assert_eq!(ttl_of(kept), 90, "the key lasts until the latest expiry");
    for guard in [inner, further, reading] {
        guard.release().await.unwrap();
    }
    drop((long, short, locks));
    setup.finish().await;
}

/// A downgrade converts one of several write holds; the others remain.
pub async fn downgrade_converts_one_of_several_holds(setup: Setup) {
    let lock = setup.rwlock(patient()).await;
    let owner = Owner::new();
    let (outer, inner) =
        (lock.with_owner(&owner).write().await.unwrap(), lock.with_owner(&owner).write().await.unwrap());
    let reading = inner.downgrade().await.unwrap();
    let seen = setup.state_of(lock.name()).await;
    assert_eq!((seen.writer.unwrap().count, seen.readers[0].count), (1, 1));
    assert!(lock.try_read().await.unwrap().is_none(), "the owner still writes");
    let both = outer.downgrade().await.unwrap();
    let seen = setup.state_of(lock.name()).await;
    assert_eq!((seen.mode, seen.readers[0].count), (Mode::Read, 2));
    lock.try_read().await.unwrap().expect("a stranger reads beside the owner").release().await.unwrap();
    reading.release().await.unwrap();
    both.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

/// The reply is lost and the request sent again: the hold is downgraded once. A lost hold is not
/// downgraded.
pub async fn downgrade_counts_once_if_its_reply_is_lost(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = Options::new().node_timeout(Duration::from_millis(500));
    let lock = setup.client_behind(&proxy, options).await.rwlock("rw").unwrap();
    let watcher = setup.rwlock(patient()).await;
    lock.write().await.unwrap().downgrade().await.unwrap().release().await.unwrap();
    for _ in 0..10 {
        let writing = lock.write().await.unwrap();
        setup.lose_next_answer(&proxy);
        let reading = soon("the downgrade returns", writing.downgrade()).await.unwrap();
        let seen = setup.state_of(watcher.name()).await;
        assert_eq!((seen.mode, seen.readers.len(), seen.readers[0].count), (Mode::Read, 1, 1));
        reading.release().await.unwrap();
    }
    assert!(proxy.lost() >= 10);
    // No reply at all: an error, and the hold is released once the server can be reached.
    let writing = lock.write().await.unwrap();
    proxy.hold_replies(true);
    assert!(setup.failed(&writing.downgrade().await));
    proxy.hold_replies(false);
    eventually("the lock is released", || async { setup.state_of(watcher.name()).await.mode == Mode::Free })
        .await;
    // A downgrade that is dropped in the middle is released likewise.
    for micros in (0..2_000).step_by(100) {
        let writing = lock.write().await.unwrap();
        drop(tokio::time::timeout(Duration::from_micros(micros), writing.downgrade()).await);
        eventually("the lock is released", || async {
            setup.state_of(watcher.name()).await.mode == Mode::Free
        })
        .await;
    }
    let writing = lock.write().await.unwrap();
    assert!(watcher.force_release_write().await.unwrap());
    let lost = writing.downgrade().await;
    assert!(matches!(lost, Err(Error::Lost { reason: Some(LossReason::Revoked), .. })), "{lost:?}");
    assert_eq!(setup.state_of(watcher.name()).await.mode, Mode::Free);
    drop((lock, watcher));
    setup.finish().await;
}
