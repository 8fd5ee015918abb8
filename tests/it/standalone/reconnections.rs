//! A client that has lost its connection, and has made a new one.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use redlatch::{Event, LeaseEnd, Locks, Options, Wakeups};

use crate::suite::local_turns::{contended, waiting};
use crate::support::{AnyLock, Proxy, Server, eventually, patient, soon};

/// Two requests on a silent connection fail one after the other. After the first one, the client
/// connects again: what the second one meets says nothing of the new connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_failure_of_a_former_connection_keeps_the_new_one() {
    let limit = Duration::from_secs(5);
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = Options::new().node_timeout(limit).wakeups(Wakeups::Poll);
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    let trying = |name: &str| {
        let lock = locks.mutex(name).unwrap();
        async move { lock.try_lock().await }
    };
    proxy.hold_requests(true);
    let first = tokio::spawn(trying("first"));
    let later = Instant::now() + limit / 5;
    eventually("a part of the limit has passed", || async { Instant::now() > later }).await;
    let second = tokio::spawn(trying("second"));
    assert!(soon("it fails", first).await.unwrap().is_err());
    let guard = trying("third").await.unwrap().expect("it is free, and the client has connected again");
    let connections = proxy.connections();
    assert!(soon("it fails", second).await.unwrap().is_err());
    guard.release().await.unwrap();
    assert_eq!(proxy.connections(), connections, "the new connection is kept");
    proxy.hold_requests(false);
    soon("all is released", locks.settled()).await;
    drop(locks);
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// An answer ends the outage of a call that waits: two short ones, further apart than it outlasts
/// one, are not one long outage.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_waits_outlasts_several_short_outages() {
    let limit = Duration::from_secs(6);
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let polls = Options::new().wakeups(Wakeups::Poll).poll_cap(limit / 20).node_timeout(limit / 8);
    let locks = Locks::builder().server(proxy.url()).options(polls.outage_limit(limit));
    let locks = locks.connect_lazily().unwrap();
    let mut events = locks.events();
    let lock = locks.mutex("x").unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await });
    for _ in 0..2 {
        let later = Instant::now() + limit;
        eventually("the limit has passed", || async { Instant::now() > later }).await;
        proxy.set_drops_requests(true);
        proxy.cut();
        let began = async { while !matches!(events.next().await, Some(Event::OutageBegan { .. })) {} };
        soon("an outage begins", began).await;
        proxy.set_drops_requests(false);
        proxy.cut();
        let answered = server.scripts_run().await + 3;
        let goes_on = || async { waiting.is_finished() || server.scripts_run().await >= answered };
        eventually("the next polls are answered", goes_on).await;
    }
    assert!(!waiting.is_finished(), "it failed though the server answered between");
    guard.release().await.unwrap();
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    drop((locks, holder));
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// A hold that is between two tasks is none of the leases that a client asks about on a new
/// connection. The task that receives it must learn that the server has lost it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_lost_on_its_way_to_the_next_task_is_asked_about() {
    let server = Server::start().await;
    lost_on_its_way(&server.locks_with(long_turn()).await, &server, "").await;
    server.assert_nothing_left().await;
}

pub fn long_turn() -> Options {
    patient().ttl(Duration::from_secs(600)).local_turn(Duration::from_secs(10))
}

/// For a client with [long turns](long_turn), and a server that has all names with this tag.
pub async fn lost_on_its_way(locks: &Locks, server: &Server, tag: &str) {
    let [passed, other] = ["passed", "other"].map(|name| format!("{tag}{name}"));
    let keys = [&passed, &other].map(|name| format!("lock:{name}"));
    let holder = || async { server.run::<Option<String>>(&["GET", &keys[0]]).await };
    let other = locks.mutex(&other).unwrap().lock().await.unwrap();
    let lock = AnyLock::Mutex(locks.mutex(&passed).unwrap());
    let receiver = loop {
        let guard = contended(&lock).await;
        let receiver = waiting(&lock).await;
        let before = holder().await;
        guard.release().await.unwrap();
        if holder().await == before {
            break receiver;
        }
        // Just then, the client asked about the lease: such a hold is not passed on.
        soon("the next task acquires", receiver).await.unwrap().release().await.unwrap();
    };
    server.run::<u64>(&["DEL", &keys[0], &keys[1]]).await;
    server.kill_connections().await;
    let asked = soon("the client has asked about its leases", other.lease().lost()).await;
    assert_eq!(asked, LeaseEnd::Revoked);
    let received = soon("the next task has the hold", receiver).await.unwrap();
    // A call that learns it before it returns has acquired the lock again.
    if holder().await.is_none() {
        let end = soon("the client asks about it too", received.lease().lost()).await;
        assert_eq!(end, LeaseEnd::Revoked);
    }
}

/// The reply to a task that is polled late came from a connection before this one. The client has
/// asked about its leases meanwhile, and this was none of them yet. One thread: no reply can come
/// during the first poll.
#[tokio::test]
async fn a_grant_that_is_learned_late_is_asked_about() {
    let server = Server::start().await;
    let locks = server.locks_with(long_turn()).await;
    let other = locks.mutex("other").unwrap().lock().await.unwrap();
    let lock = locks.mutex("late").unwrap();
    let mut late = pin!(lock.lock());
    assert!(poll_fn(|context| Poll::Ready(late.as_mut().poll(context))).await.is_pending());
    eventually("the server grants it", || async { server.run::<bool>(&["EXISTS", "lock:late"]).await }).await;
    // Replies come in the order of the requests.
    let next = locks.mutex("next").unwrap().lock().await.unwrap();
    server.run::<u64>(&["DEL", "lock:late", "lock:other"]).await;
    server.kill_connections().await;
    let asked = soon("the client has asked about its leases", other.lease().lost()).await;
    assert_eq!(asked, LeaseEnd::Revoked);
    let learned = soon("the task has the hold", late).await.unwrap();
    assert!(!server.run::<bool>(&["EXISTS", "lock:late"]).await, "its reply came before");
    let end = soon("the client asks about it too", learned.lease().lost()).await;
    assert_eq!(end, LeaseEnd::Revoked);
    next.release().await.unwrap();
    drop((learned, other));
    soon("all is released", locks.settled()).await;
    server.assert_nothing_left().await;
}

/// A server that was demoted, and must not serve stale data, refuses everything (MASTERDOWN). Its
/// address leads to its successor already.
#[tokio::test(flavor = "multi_thread")]
async fn connection_to_a_replica_without_its_master_is_given_up() {
    let (old, new) = (Server::start().await, Server::start().await);
    let proxy = Proxy::start(old.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(patient()).connect().await.unwrap();
    let lock = locks.mutex("a").unwrap();
    lock.lock().await.unwrap().release().await.unwrap();
    old.run::<()>(&["CONFIG", "SET", "replica-serve-stale-data", "no"]).await;
    old.run::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await;
    proxy.lead_to(new.port());
    eventually("the successor serves it", || async { lock.try_lock().await.is_ok() }).await;
    drop((lock, locks));
    proxy.outlive_clients().await;
}
