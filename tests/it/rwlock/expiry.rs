//! Expiry: each holder has an expiry of its own, and so has the mark of a waiting writer.

use std::time::Duration;

use redlatch::{Error, LeaseEnd, Mode, Options, Owner, Renewal};

use super::{client, queued};
use crate::support::{Oracle, Server, Stopwatch, eventually, patient, soon, ttl};

/// Sends one request of a writer that never polls again: its words, and the shared words.
async fn wait_to_write(server: &Server, own: [&str; 2], shared: [&str; 4]) -> Vec<u64> {
    let script = include_str!("../../../lua/rwlock.lua");
    let keys = ["lock:rw", "{lock:rw}:waiters", "{lock:rw}:fence"];
    let mut words = vec!["EVAL", script, "3"];
    words.extend(keys.into_iter().chain(["write"]).chain(own).chain(["", ""]).chain(shared));
    let [busy] = server.run::<[Vec<u64>; 1]>(&words).await;
    busy
}

/// A renewal extends its own hold only.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_renewal_extends_only_its_own_hold() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let with = |options: Options| locks.with_options(options).unwrap().rwlock("rw").unwrap();
    let still = with(patient().renewal(Renewal::Never));
    let moving = with(ttl(6_000));
    let owners = [Owner::new(), Owner::new()];
    let guards = [
        still.with_owner(&owners[0]).read().await.unwrap(),
        moving.with_owner(&owners[1]).read().await.unwrap(),
    ];
    let fields = owners.map(|owner| format!("read:{owner}"));
    let value = |field: String| {
        let server = &server;
        async move { server.run::<String>(&["HGET", "lock:rw", &field]).await }
    };
    let before = [value(fields[0].clone()).await, value(fields[1].clone()).await];
    eventually("the other hold is renewed", || async { value(fields[1].clone()).await != before[1] }).await;
    assert_eq!(value(fields[0].clone()).await, before[0], "the other hold is unchanged");
    for guard in guards {
        assert!(!guard.lease().is_lost());
        guard.release().await.unwrap();
    }
    drop((still, moving, locks));
    server.assert_nothing_left().await;
}

/// A waiting writer dies without leaving the queue. It counts as dead one claim after its last
/// poll; waiters find that by polling.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_dead_waiting_writer_blocks_readers_for_one_claim() {
    let server = Server::start().await;
    let lock = client(&server, patient()).await;
    let reading = lock.read().await.unwrap();
    let start = Stopwatch::start();
    let busy = wait_to_write(
        &server,
        ["aa", ""],
        ["30000", "1", "3000", "lock:wake:00000000000000000000000000000000"],
    )
    .await;
    assert_eq!(busy.len(), 2);
    assert!(lock.try_read().await.unwrap().is_none(), "a new reader is kept out");
    let beside = soon("the waiter is admitted", lock.read()).await.unwrap();
    assert!(start.elapsed() > Duration::from_millis(2_900), "{start:?}");
    assert!(start.undisturbed() < Duration::from_millis(5_400), "{start:?}");
    reading.release().await.unwrap();
    beside.release().await.unwrap();
    lock.try_write()
        .await
        .unwrap()
        .expect("the dead writer does not block the lock")
        .release()
        .await
        .unwrap();
    drop(lock);
    server.assert_nothing_left().await;
}

/// A reader dies while it waits for an upgrade: its mark expires with its claim, its hold with its
/// TTL. Then the other reader's upgrade succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_upgrade_succeeds_after_dead_upgrader_expires() {
    let server = Server::start().await;
    let lock = client(&server, patient()).await;
    let short = client(&server, patient().read_ttl(Duration::from_secs(6))).await;
    let (dead, owner) = (Owner::new(), Owner::new());
    short.with_owner(&dead).read().await.unwrap().leak();
    let mine = lock.with_owner(&owner).read().await.unwrap();
    // The upgrader died after it was queued: its channel has no subscriber.
    let busy = wait_to_write(
        &server,
        ["aa", &dead.to_string()],
        ["6000", "1", "3000", "lock:wake:00000000000000000000000000000000"],
    )
    .await;
    assert_eq!(busy.len(), 2);
    assert!(matches!(lock.with_owner(&owner).write().await, Err(Error::WouldDeadlock { .. })));
    let start = Stopwatch::start();
    eventually("the dead upgrader's mark expires", || async { lock.try_read().await.unwrap().is_some() })
        .await;
    assert!(start.undisturbed() < Duration::from_millis(4_600), "{start:?}");
    let writing = soon("the upgrade is granted after the dead reader's TTL", lock.with_owner(&owner).write())
        .await
        .unwrap();
    assert!(start.undisturbed() < Duration::from_millis(9_300), "{start:?}");
    writing.release().await.unwrap();
    mine.release().await.unwrap();
    drop((lock, short));
    server.assert_nothing_left().await;
}

/// The writer's hold expires, and no message is published: the waiter that queued first acquires
/// first, on either side.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_waiters_acquire_by_age_after_dead_writer() {
    let server = Server::start().await;
    let dying =
        client(&server, patient().write_ttl(Duration::from_millis(700)).renewal(Renewal::Never)).await;
    let (lock, other) = (client(&server, patient()).await, client(&server, patient()).await);
    for reader_first in [true, false] {
        let dead = dying.write().await.unwrap();
        let token = dead.lease().fencing_token();
        dead.leak();
        let reader = |lock: redlatch::RwLock| async move {
            let guard = lock.read().await.unwrap();
            let token = guard.lease().fencing_token();
            guard.release().await.unwrap();
            token
        };
        let writer = |lock: redlatch::RwLock| async move { lock.write().await?.release().await };
        let (reader, writer) = if reader_first {
            let reader = queued(&server, &lock, reader(lock.clone())).await;
            (reader, queued(&server, &lock, writer(other.clone())).await)
        } else {
            let writer = queued(&server, &lock, writer(other.clone())).await;
            (queued(&server, &lock, reader(lock.clone())).await, writer)
        };
        let seen = soon("the waiter acquires", reader).await.unwrap();
        assert_eq!(seen == token, reader_first, "{seen:?} after {token:?}");
        soon("the waiter acquires", writer).await.unwrap().unwrap();
    }
    drop((dying, lock, other));
    server.assert_nothing_left().await;
}

/// One live reader among thousands of dead ones keeps the lock from being free.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_live_reader_blocks_writer_among_thousands_of_dead() {
    let server = Server::start().await;
    let lock = client(&server, patient()).await;
    for _ in 0..5 {
        let reading = lock.read().await.unwrap();
        let other = lock.read().await.unwrap();
        let mut dead = redis::pipe();
        for number in 0..4_000 {
            dead.hset("lock:rw", format!("read:{number}"), "1 dead").ignore();
        }
        dead.cmd("HINCRBY").arg(&["lock:rw", "readers", "4000"]).ignore();
        dead.exec_async(&mut server.connection().await).await.unwrap();
        assert_eq!(server.lock_state(lock.name()).await.mode, Mode::Read);
        assert!(lock.try_write().await.unwrap().is_none());
        other.release().await.unwrap();
        assert!(lock.try_write().await.unwrap().is_none());
        let writer = queued(&server, &lock, {
            let lock = lock.clone();
            async move { lock.write().await }
        })
        .await;
        let before = server.scripts_run().await;
        eventually("the writer polls", || async { server.scripts_run().await > before }).await;
        assert_eq!(server.lock_state(lock.name()).await.mode, Mode::Read, "the live reader still reads");
        reading.release().await.unwrap();
        soon("the waiter acquires", writer).await.unwrap().unwrap().release().await.unwrap();
        assert_eq!(server.lock_state(lock.name()).await.mode, Mode::Free);
    }
    drop(lock);
    server.assert_nothing_left().await;
}

/// A renewal by hand finds that one hold of an owner is lost. The other hold is asked about at
/// once, although its own next renewal is due only after minutes.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_renewal_by_hand_finds_losses_of_both_sides() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().ttl(Duration::from_secs(900))).await;
    let lock = locks.rwlock("sides").unwrap();
    let owner = Owner::new();
    let write = lock.with_owner(&owner).write().await.unwrap();
    let read = lock.with_owner(&owner).read().await.unwrap();
    server.run::<u64>(&["DEL", "lock:sides"]).await;
    let renewed = write.lease().renew().await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
    assert_eq!(soon("the other loss is known", read.lease().lost()).await, LeaseEnd::Revoked);
}

/// Another client revokes the hold under which tasks of this client read, and a renewal by hand
/// finds that. A task that reads now must not join the lost hold: it gets one of its own.
#[tokio::test(flavor = "multi_thread")]
async fn rwlock_standalone_reader_does_not_join_a_lost_hold() {
    let server = Server::start().await;
    // Tasks may join a hold for as long as possible: for a local turn, or a quarter of the TTL.
    let options = patient().local_turn(Duration::from_secs(10)).ttl(Duration::from_secs(60));
    let lock = server.locks_with(options).await.rwlock("rw").unwrap();
    let other = client(&server, patient()).await;
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    assert_eq!(server.lock_state(lock.name()).await.readers.len(), 1, "tasks join the hold");
    assert!(other.force_release_read().await.unwrap());
    let renewed = first.lease().renew().await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
    let next = lock.read().await.unwrap();
    assert!(!next.lease().is_lost(), "the task has joined the lost hold");
    assert_eq!(server.lock_state(lock.name()).await.readers.len(), 1);
    for lost in [first, second] {
        assert!(matches!(lost.release().await, Err(Error::Lost { .. })));
    }
    assert!(!next.lease().is_lost());
    next.release().await.unwrap();
    drop((lock, other));
    server.assert_nothing_left().await;
}
