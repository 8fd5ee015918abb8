//! `Locks::all` on one server: nested members, a close, a loss, and a contended name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Error, Locks, Member, Nesting, Options, Owner, Renewal};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::support::{Proxy, Server, eventually, patient, soon, ttl};

/// A try without a reply may have been granted all locks: it is undone.
#[tokio::test]
async fn a_try_without_a_reply_leaves_no_lock() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = Options::new().node_timeout(Duration::from_secs(3));
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    let all = locks.all([locks.mutex("a").unwrap(), locks.mutex("b").unwrap()]).unwrap();
    all.try_lock().await.unwrap().unwrap().release().await.unwrap();
    proxy.hold_replies(true);
    assert!(matches!(all.try_lock().await, Err(Error::Redis { .. })));
    assert_eq!(server.run::<u64>(&["EXISTS", "lock:a", "lock:b"]).await, 2, "the server has granted both");
    proxy.hold_replies(false);
    soon("settled() returns", locks.settled()).await;
    assert_eq!(server.run::<u64>(&["EXISTS", "lock:a", "lock:b"]).await, 0);
    drop((all, locks));
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

#[tokio::test]
async fn a_member_enters_the_hold_of_its_owner() {
    let server = Server::start().await;
    for nesting in [Nesting::Counted, Nesting::Local] {
        let locks = server.locks_with(patient().nesting(nesting)).await;
        let owner = Owner::new();
        let nested = locks.reentrant("nested", &owner).unwrap();
        let rw = locks.rwlock("rw").unwrap().with_owner(&owner);
        let all = locks
            .all([nested.clone().into(), locks.mutex("m").unwrap().into(), Member::Read(rw.clone())])
            .unwrap();
        let (outer, writing) = (nested.lock().await.unwrap(), rw.write().await.unwrap());
        let guard = soon("its owner holds them", all.lock()).await.unwrap();
        assert_eq!(guard.leases().get("nested").unwrap().fencing_token(), outer.lease().fencing_token());
        let stranger = locks.all([locks.reentrant("nested", &Owner::new()).unwrap()]).unwrap();
        assert!(stranger.try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
        assert!(!locks.mutex("m").unwrap().is_locked().await.unwrap());
        assert!(nested.is_locked().await.unwrap() && rw.is_locked().await.unwrap(), "the outer holds stay");
        outer.release().await.unwrap();
        writing.release().await.unwrap();
        assert!(!nested.is_locked().await.unwrap() && !rw.is_locked().await.unwrap());
        // First in the set, then alone.
        let guard = all.lock().await.unwrap();
        let inner = soon("its owner holds it", nested.lock()).await.unwrap();
        drop(guard);
        eventually("the set is released", || async { !rw.is_locked().await.unwrap() }).await;
        assert!(nested.is_locked().await.unwrap(), "the inner hold stays");
        inner.release().await.unwrap();
        assert!(!nested.is_locked().await.unwrap());
    }
}

#[tokio::test]
async fn a_set_is_closed_with_its_client() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let members = || ["a", "b"].map(|name| Member::from(locks.mutex(name).unwrap()));
    let guard = locks.all(members()).unwrap().lock().await.unwrap();
    locks.close(std::time::Duration::from_secs(20)).await.unwrap();
    assert!(guard.leases().iter().all(redlatch::Lease::is_lost));
    guard.release().await.expect("nothing is left to do");
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:a", "lock:b"]).await, 0);
    let closed = locks.all(members()).unwrap().try_lock().await.map(drop);
    assert!(matches!(closed, Err(Error::Closed { .. })), "{closed:?}");
}

/// The first lease is not renewed, and ends while the call waits for the second lock.
#[tokio::test]
async fn a_lease_that_ends_while_a_later_lock_is_waited_for_ends_the_call() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let short = ttl(300).renewal(Renewal::Never);
    let first = locks.with_options(short).unwrap().mutex("a").unwrap();
    let held = server.locks().await.mutex("b").unwrap().lock().await.unwrap();
    let all = locks.all([first, locks.mutex("b").unwrap()]).unwrap();
    let error = soon("the call ends", all.lock()).await.unwrap_err();
    assert!(matches!(&error, Error::Lost { .. }), "{error:?}");
    assert_eq!(error.context().unwrap().lock().unwrap().as_str(), "a");
    eventually("no place is left", || async { server.waiters("{lock:b}:waiters").await == 0 }).await;
    held.release().await.unwrap();
}

/// Each of 16 clients has a set of eight names, of which all have one in the middle.
#[tokio::test]
async fn one_contended_name_of_eight_starves_no_client() {
    const CLIENTS: usize = 16;
    const TURNS: u64 = 160;
    let server = Server::start().await;
    let (turns, inside) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let all_are_connected = Arc::new(Barrier::new(CLIENTS));
    let mut tasks = JoinSet::new();
    for client in 0..CLIENTS {
        let locks = server.locks().await;
        let (turns, inside) = (Arc::clone(&turns), Arc::clone(&inside));
        let all_are_connected = Arc::clone(&all_are_connected);
        tasks.spawn(async move {
            let own = |number| format!("{}-{client}-{number}", if number < 3 { "a" } else { "z" });
            let names = (0..7).map(own).chain(["middle".to_owned()]);
            let all = locks.all(names.map(|name| locks.mutex(name).unwrap())).unwrap();
            let mut own_turns = 0_u64;
            all_are_connected.wait().await;
            while turns.load(Ordering::SeqCst) < TURNS {
                let guard = soon("the set is acquired", all.lock()).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                (own_turns, _) = (own_turns + 1, turns.fetch_add(1, Ordering::SeqCst));
                guard.release().await.unwrap();
            }
            own_turns
        });
    }
    let shares = tasks.join_all().await;
    // Ten each on average.
    assert!(shares.iter().all(|turns| *turns >= 4), "{shares:?}");
}
