//! The connection that waits for replicas: it leads to the server of the renewals, and confirms
//! also what other connections wrote.

use std::time::Duration;

use redlatch::{Error, Locks, Options, Owner};

use super::grants::{TIMEOUT, group, waits};
use crate::sentinel::monitor;
use crate::support::failover::{SLACK, caught_up, impatient, urls};
use crate::support::{
    AnyLock, Deployment, KINDS, Kind, Proxy, Server, Stopwatch, Topology, eventually, notified_only, soon,
    ttl,
};

const TTL: Duration = Duration::from_secs(6);

/// For how long a grant waits for replicas while the test acts.
const WAIT: Duration = Duration::from_secs(3);

/// With a node timeout that is longer than [`WAIT`].
fn waits_long() -> Options {
    notified_only().node_timeout(WAIT * 4 / 3).replicas(1, WAIT)
}

/// Waits until a client waits for replicas.
async fn wait_is_blocked(master: &Server) {
    eventually("a WAIT is blocked", || async {
        master.run::<String>(&["INFO", "clients"]).await.contains("blocked_clients:1\r")
    })
    .await;
}

/// Cuts the clients' connections that wait for replicas, or all others.
async fn cut(master: &Server, confirming: bool) {
    let list: String = master.run(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    let word =
        |line: &str, key: &str| line.split(' ').find_map(|word| word.strip_prefix(key)).unwrap().to_owned();
    let mine =
        list.lines().filter(|line| ["wait", "evalsha", "eval", "time"].contains(&&*word(line, "cmd=")));
    let (waiting, others): (Vec<_>, Vec<_>) = mine.partition(|line| word(line, "cmd=") == "wait");
    assert!(!waiting.is_empty() && !others.is_empty(), "expected both kinds of connections: {list}");
    for line in if confirming { waiting } else { others } {
        assert_eq!(master.run::<u64>(&["CLIENT", "KILL", "ID", &word(line, "id=")]).await, 1);
    }
}

/// The sentinels name a new master, and the old one still works, with a replica that confirms.
/// Whichever of a client's two connections is replaced, its grants and renewals go to one server.
async fn grants_are_where_renewals_are(confirming: bool) {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let sentinels = urls("127.0.0.1", deployment.sentinels());
    // No request times out: the client replaces no connection but the one that the test cuts.
    let options = notified_only().ttl(TTL).replicas(1, TIMEOUT);
    let locks = Locks::builder().sentinel(&sentinels, "mymaster").options(options).connect().await.unwrap();
    let (old, promoted) = (&deployment.masters()[0], &deployment.replicas()[0]);
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("before-{}", kind.name()));
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let port = promoted.port().to_string();
    promoted.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    let follower = Server::start().await;
    follower.run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    monitor(promoted, deployment.sentinels()).await;
    caught_up(promoted, 1).await;
    caught_up(old, 1).await;
    cut(old, confirming).await;
    let mut held = Vec::new();
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("after-{}", kind.name()));
        // This request uses the connection that was cut.
        assert!(!lock.is_locked().await);
        let guard = lock.lock().await.unwrap();
        let at = |server: &'static str, exists: u64| {
            assert_eq!(exists, u64::from(server == "the new master"), "{server}")
        };
        at("the new master", promoted.run(&["EXISTS", lock.key()]).await);
        at("the old master", old.run(&["EXISTS", lock.key()]).await);
        held.push((lock, guard));
    }
    for (lock, guard) in held {
        let until = guard.lease().valid_until() + TTL / 6;
        eventually("the lease is renewed", || async { guard.lease().valid_until() > until }).await;
        assert!(promoted.is_held_by(&lock, &guard).await, "{guard:?}");
        guard.release().await.unwrap();
    }
    drop(locks);
    promoted.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_sentinel_grants_follow_a_replaced_renewal_connection() {
    grants_are_where_renewals_are(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_sentinel_renewals_follow_a_replaced_wait_connection() {
    grants_are_where_renewals_are(true).await;
}

/// A connection falls silent with replies outstanding. The next call uses a new one.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_silent_connection_is_replaced() {
    let (master, replicas) = group(1).await;
    let proxy = Proxy::start(master.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(waits_long()).connect().await.unwrap();
    for kind in KINDS {
        let lock = |what: &str| kind.lock(&locks, &format!("{what}-{}", kind.name()));
        lock("first").lock().await.unwrap().release().await.unwrap();
        caught_up(&master, 1).await;
        replicas[0].pause();
        let silent = tokio::spawn({
            let lock = lock("silent");
            async move { lock.try_lock().await }
        });
        wait_is_blocked(&master).await;
        // This connection stays silent; a new one works.
        proxy.hold_requests(true);
        proxy.hold_replies(true);
        let outcome = soon("the call on the silent connection fails", silent).await.unwrap();
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
        proxy.hold_replies(false);
        replicas[0].resume();
        let start = Stopwatch::start();
        let guard = lock("next").try_lock().await.unwrap().unwrap();
        println!("served again after {:?}", start.elapsed());
        assert!(start.undisturbed() < WAIT, "{start:?}");
        proxy.hold_requests(false);
        guard.release().await.unwrap();
        let left = lock("silent");
        eventually("the failed call left no hold", || async { !master.is_locked(&left).await }).await;
    }
    drop(locks);
    proxy.outlive_clients().await;
    master.assert_nothing_left().await;
}

/// A client makes its second connection when it first waits for replicas.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_second_connection_is_made_on_demand() {
    let (master, _replicas) = group(1).await;
    let proxy = Proxy::start(master.port()).await;
    let polling = impatient().wakeups(redlatch::Wakeups::Poll);
    let plain = Locks::builder().server(proxy.url()).options(polling.clone()).connect().await.unwrap();
    for kind in KINDS {
        kind.lock(&plain, kind.name()).lock().await.unwrap().release().await.unwrap();
    }
    assert_eq!(proxy.connections(), 1);
    let locks = plain.with_options(polling.replicas(1, TIMEOUT)).unwrap();
    for kind in KINDS {
        let guard = kind.lock(&locks, kind.name()).lock().await.unwrap();
        assert!(kind.rival().lock(&plain, kind.name()).try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
    assert_eq!(proxy.connections(), 3, "the pair is made once");
    drop((plain, locks));
    proxy.outlive_clients().await;
    master.assert_nothing_left().await;
}

/// A replica timeout as long as the node timeout still ends with the number of replicas.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_timeout_may_equal_the_node_timeout() {
    let (master, replicas) = group(1).await;
    let limit = Duration::from_secs(3);
    let locks = master.locks_with(ttl(10_000).node_timeout(limit).replicas(1, limit)).await;
    replicas[0].pause();
    let start = Stopwatch::start();
    let outcome = Kind::Mutex.lock(&locks, "whole").try_lock().await;
    assert!(matches!(outcome, Err(Error::TooFewReplicas { confirmed: 0, required: 1, .. })), "{outcome:?}");
    assert!(start.undisturbed() < limit + SLACK, "{start:?}");
    replicas[0].resume();
    drop(locks);
    master.assert_nothing_left().await;
}

/// The server waits for replicas once for each request, one after the other, for longer than a node
/// timeout in all: it is not silent, so its connections stay, and each call has its own answer.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_many_calls_wait_in_turn() {
    let (master, replicas) = group(1).await;
    let (limit, timeout) = (Duration::from_secs(2), Duration::from_millis(200));
    let proxy = Proxy::start(master.port()).await;
    let options = ttl(20_000).node_timeout(limit).replicas(1, timeout);
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    Kind::Mutex.lock(&locks, "warm").lock().await.unwrap().release().await.unwrap();
    let connections = proxy.connections();
    replicas[0].pause();
    let calls = (0..25).map(|number| {
        let lock = Kind::Mutex.lock(&locks, &format!("turn-{number}"));
        tokio::spawn(async move { lock.try_lock().await })
    });
    for call in calls.collect::<Vec<_>>() {
        let outcome = call.await.unwrap();
        assert!(matches!(outcome, Err(Error::TooFewReplicas { confirmed: 0, .. })), "{outcome:?}");
    }
    replicas[0].resume();
    locks.settled().await;
    assert_eq!(proxy.connections(), connections, "none was replaced");
    drop(locks);
    proxy.outlive_clients().await;
    master.assert_nothing_left().await;
}

/// The first grant was not confirmed; then another client has had the lock, for longer than the
/// call waits. So it has timed out: replicas were not what it lacked.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_a_call_that_last_found_the_lock_held_has_timed_out() {
    let (master, replicas) = group(1).await;
    let locks = master.locks_with(ttl(10_000).replicas(1, TIMEOUT)).await;
    let plain = master.locks().await;
    let (lock, other) = (Kind::Mutex.lock(&locks, "x"), Kind::Mutex.lock(&plain, "x"));
    replicas[0].pause();
    let before = waits(&master).await;
    let waiting = tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(5)).await });
    eventually("a grant is not confirmed", async || waits(&master).await > before).await;
    let guard = soon("another client acquires the lock", other.lock()).await.unwrap();
    replicas[0].resume();
    let outcome = soon("the limit passes", waiting).await.unwrap();
    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
    guard.release().await.unwrap();
    drop((other, plain, locks));
    master.assert_nothing_left().await;
}

/// A master that is demoted unblocks every WAIT. A waiter then retries and acquires the lock.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_waiter_retries_after_a_demotion() {
    let (master, replicas) = group(1).await;
    let locks = master.locks_with(waits_long()).await;
    for kind in KINDS {
        caught_up(&master, 1).await;
        replicas[0].pause();
        let waiting = kind.lock(&locks, kind.name()).lock_in_task();
        wait_is_blocked(&master).await;
        master.run::<()>(&["REPLICAOF", "127.0.0.1", &replicas[0].port().to_string()]).await;
        master.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
        replicas[0].resume();
        let guard = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    drop(locks);
    master.assert_nothing_left().await;
}

/// A grant that another connection wrote, or that is nested in an unconfirmed hold, is confirmed,
/// too, even if the request itself writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_standalone_earlier_grants_are_confirmed() {
    let (master, replicas) = group(1).await;
    let proxy = Proxy::start(master.port()).await;
    let locks = Locks::builder()
        .server(proxy.url())
        .options(impatient().ttl(TTL).replicas(1, TIMEOUT))
        .connect()
        .await
        .unwrap();
    let plain = master.locks_with(impatient()).await;
    let too_few = |outcome: &Result<Option<_>, Error>| matches!(outcome, Err(Error::TooFewReplicas { .. }));
    // This makes the connections and loads the scripts.
    for kind in KINDS {
        kind.lock(&locks, "warm").lock().await.unwrap().release().await.unwrap();
    }
    for kind in KINDS {
        let name = format!("resent-{}", kind.name());
        caught_up(&master, 1).await;
        let before = waits(&master).await;
        replicas[0].pause();
        // The second delivery comes through a new connection and finds the lock granted.
        proxy.lose_next_reply();
        let outcome = kind.lock(&locks, &name).try_lock().await;
        assert!(too_few(&outcome), "{kind:?}: {outcome:?}");
        replicas[0].resume();
        eventually("the client has waited for replicas", || async { waits(&master).await > before }).await;
    }
    // Nested in a hold of the same owner with a longer TTL.
    let (name, owner) = ("nested", Owner::new());
    let of = |locks: &Locks, kind: Kind| match kind {
        Kind::Reentrant => AnyLock::Reentrant(locks.reentrant(name, &Owner::new()).unwrap(), owner.clone()),
        _ => AnyLock::Read(locks.rwlock("nested-rw").unwrap(), owner.clone()),
    };
    for kind in [Kind::Reentrant, Kind::Read] {
        for resent in [false, true] {
            caught_up(&master, 1).await;
            replicas[0].pause();
            let outer = of(&plain, kind).lock().await.unwrap();
            if resent {
                proxy.lose_next_reply();
            }
            let outcome = of(&locks, kind).try_lock().await;
            assert!(too_few(&outcome), "{kind:?}, resent {resent}: {outcome:?}");
            replicas[0].resume();
            outer.release().await.unwrap();
        }
    }
    // Granted to a waiter by another client's release. A client that knows the outage would fail.
    drop(locks);
    for kind in KINDS {
        let locks = master.locks_with(impatient().ttl(TTL).replicas(1, TIMEOUT)).await;
        let name = format!("handed-{}", kind.name());
        let holder = kind.rival().lock(&plain, &name);
        let guard = holder.lock().await.unwrap();
        let waiter = kind.lock(&locks, &name);
        let waiting = tokio::spawn(async move { waiter.lock().await });
        eventually("the waiter queues", || async { master.queued_for(&holder).await == 1 }).await;
        caught_up(&master, 1).await;
        replicas[0].pause();
        let before = waits(&master).await;
        guard.release().await.unwrap();
        eventually("the grant is refused twice", || async { waits(&master).await >= before + 2 }).await;
        assert!(!waiting.is_finished(), "{kind:?}");
        replicas[0].resume();
        soon("the grant is confirmed", waiting).await.unwrap().unwrap().release().await.unwrap();
    }
    drop(plain);
    proxy.outlive_clients().await;
    master.assert_nothing_left().await;
}
