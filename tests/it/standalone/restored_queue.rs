//! A queue from an earlier state, as after a restart from a snapshot or a failover to a replica
//! that lagged behind: its waiters are gone.

use std::time::Duration;

use redlatch::{Error, LeaseEnd};

use crate::suite::local_turns::{contended, waiting};
use crate::support::{
    AnyGuard, AnyLock, KINDS, Kind, Server, Stopwatch, eventually, notified_only, patient, soon,
};

/// For how long a released lock is reserved for a notified waiter that does not claim it.
const CLAIM: Duration = Duration::from_secs(3);

async fn queue(server: &Server, lock: &AnyLock) -> Vec<String> {
    server.run(&["ZRANGE", &waiters(lock), "0", "-1", "WITHSCORES"]).await
}

fn waiters(lock: &AnyLock) -> String {
    format!("{{{}}}:waiters", lock.key())
}

/// Restores an old queue before a live waiter, and releases the lock. Returns how long the waiter
/// waits for the restored entries.
async fn delay_by_restored_entries(
    server: &Server,
    lock: &AnyLock,
    old: &[String],
    waiter: AnyLock,
) -> Stopwatch {
    let guard = soon("the lock is held", lock.lock()).await.unwrap();
    let waiting = tokio::spawn(async move { waiter.lock().await });
    eventually("the waiter queues", || async { server.queued_for(lock).await == 1 }).await;
    for entry in old.chunks(2) {
        server.run::<()>(&["ZADD", &waiters(lock), &entry[1], &entry[0]]).await;
    }
    let start = Stopwatch::start();
    guard.release().await.unwrap();
    let served = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    let took = start.stop();
    served.release().await.unwrap();
    eventually("the lock is free", || async { !server.is_locked(lock).await }).await;
    took
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_queue_entries_do_not_delay_waiters() {
    let server = Server::start().await;
    let (locks, others) =
        (server.locks_with(notified_only()).await, server.locks_with(notified_only()).await);
    for kind in KINDS {
        let lock = kind.rival().lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        // One waiter acquires the lock, and one gives up.
        let waiter = kind.lock(&others, kind.name());
        let another = waiter.for_another();
        let served = tokio::spawn(async move { waiter.lock().await });
        eventually("the first waiter queues", || async { queue(&server, &lock).await.len() >= 2 }).await;
        let gives_up = tokio::spawn(async move { another.lock().await });
        eventually("the second waiter queues", || async { server.queued_for(&lock).await >= 1 }).await;
        let old = queue(&server, &lock).await;
        gives_up.abort();
        assert!(gives_up.await.is_err());
        guard.release().await.unwrap();
        soon("the first waiter is granted the lock", served).await.unwrap().unwrap().release().await.unwrap();
        soon("settled() returns", others.settled()).await;
        eventually("the lock is free", || async { !server.is_locked(&lock).await }).await;
        let took = delay_by_restored_entries(&server, &lock, &old, kind.lock(&others, kind.name())).await;
        println!("{kind:?}: delayed by {took:?} with {} restored entries", old.len() / 2);
        assert!(took.undisturbed() < CLAIM / 2, "{kind:?}: {took:?}");
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}

/// The server loses the hold of a client and has it in its queue again, and grants it the lock
/// after another client: its renewals succeed, but it must learn that it had lost the lock. Returns
/// its guard, and the token of the other client.
async fn granted_again(server: &Server, lock: &AnyLock, rival: &AnyLock) -> (AnyGuard, u64) {
    let held = rival.lock().await.unwrap();
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.unwrap() }
    });
    eventually("it queues", || async { queue(server, rival).await.len() >= 2 }).await;
    let old = queue(server, rival).await;
    held.release().await.unwrap();
    let guard = soon("it is granted the lock", waiting).await.unwrap();
    // The next renewal is due after ten seconds then, not after a third of the claim.
    guard.lease().renew().await.unwrap();
    server.run::<()>(&["DEL", rival.key()]).await;
    let between = rival.lock().await.unwrap();
    let token = between.token();
    between.release().await.unwrap();
    for entry in old.chunks(2) {
        server.run::<()>(&["ZADD", &waiters(rival), &entry[1], &entry[0]]).await;
    }
    // A request for the free lock grants it to the waiter.
    let denied = rival.try_lock().await.unwrap();
    assert!(denied.is_none() && server.is_locked(rival).await, "{rival:?}");
    assert!(!guard.lease().is_lost(), "it does not know");
    (guard, token)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_was_lost_and_granted_again_is_lost() {
    let server = Server::start().await;
    let (locks, others) = (server.locks_with(patient()).await, server.locks_with(patient()).await);
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        let (lock, rival) = (kind.lock(&locks, kind.name()), kind.lock(&others, kind.name()));
        let (guard, _) = granted_again(&server, &lock, &rival).await;
        server.kill_connections().await;
        let end = soon("it learns of the loss", guard.lease().lost()).await;
        assert_eq!(end, LeaseEnd::Revoked, "{kind:?}");
        eventually("it is released", || async { !server.is_locked(&rival).await }).await;
        drop(guard);
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}

/// A renewal by hand proves no more than one of the client.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_renewed_meanwhile_is_lost() {
    let server = Server::start().await;
    let (locks, others) = (server.locks_with(patient()).await, server.locks_with(patient()).await);
    let [lock, rival] = [&locks, &others].map(|locks| Kind::Mutex.lock(locks, "renewed"));
    let (guard, _) = granted_again(&server, &lock, &rival).await;
    server.kill_connections().await;
    let renewing = async {
        while !guard.lease().is_lost() {
            let _also_without_a_connection = guard.lease().renew().await;
        }
    };
    soon("it learns of the loss", renewing).await;
    drop((guard, lock, locks, rival, others));
    server.assert_nothing_left().await;
}

/// It becomes a ticket before the client asks about it: adopted, it would have a smaller token than
/// another client had.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_adopted_meanwhile_is_lost() {
    let server = Server::start().await;
    let (locks, others) = (server.locks_with(patient()).await, server.locks_with(patient()).await);
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
        let (lock, rival) = (kind.lock(&locks, kind.name()), kind.lock(&others, kind.name()));
        let (guard, _) = granted_again(&server, &lock, &rival).await;
        let adopted = lock.adopt(&guard.into_ticket().unwrap()).await;
        assert!(matches!(adopted, Err(Error::Lost { .. })), "{kind:?}: {adopted:?}");
        eventually("it is released", || async { !server.is_locked(&rival).await }).await;
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}

/// Another request has found the connection closed; the client has asked about no lease yet.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_released_on_a_new_connection_was_lost() {
    let server = Server::start().await;
    let others = server.locks_with(patient()).await;
    for round in 0..20 {
        for kind in [Kind::Mutex, Kind::Reentrant, Kind::Write] {
            // A new client: one that had another connection before may yet ask because of that.
            let locks = server.locks_with(patient()).await;
            let name = format!("{}-{round}", kind.name());
            let (lock, rival) = (kind.lock(&locks, &name), kind.lock(&others, &name));
            let (guard, _) = granted_again(&server, &lock, &rival).await;
            server.kill_connections().await;
            locks.mutex("other").unwrap().inspect().await.unwrap();
            let released = guard.release().await;
            assert!(matches!(released, Err(Error::Lost { .. })), "{round}, {kind:?}: {released:?}");
            eventually("it is released", || async { !server.is_locked(&rival).await }).await;
        }
    }
    drop(others);
    server.assert_nothing_left().await;
}

/// The client asks about all leases, and then compares the tokens of those that may have been
/// granted again. Released in between, such a one was lost all the same, and is not passed on.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_released_meanwhile_was_lost() {
    let server = Server::start().await;
    let options = || patient().local_turn(Duration::from_secs(10));
    let (locks, others) = (server.locks_with(options()).await, server.locks_with(patient()).await);
    for round in 0..20 {
        let name = round.to_string();
        let [lock, rival] = [&locks, &others].map(|locks| Kind::Mutex.lock(locks, &name));
        contended(&lock).await.release().await.unwrap();
        let asked = locks.mutex(format!("asked-{name}")).unwrap().lock().await.unwrap();
        let (guard, token) = granted_again(&server, &lock, &rival).await;
        let next = waiting(&lock).await;
        server.run::<()>(&["DEL", asked.lease().name().key()]).await;
        server.kill_connections().await;
        soon("the client has asked about its leases", asked.lease().lost()).await;
        let released = guard.release().await;
        assert!(matches!(released, Err(Error::Lost { .. })), "{round}: {released:?}");
        let next = soon("the next task acquires", next).await.unwrap();
        assert!(next.token() > token, "{round}: it has a hold that was lost");
        next.release().await.unwrap();
        drop(asked);
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}
