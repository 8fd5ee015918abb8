//! `is_indeterminate` and `is_transient`: whether a failed request may have run, and whether a
//! retry may help. The tests compare with the server's keys.

use redlatch::{Error, Locks, Operation};

use super::{KINDS, assert_names, cause, options};
use crate::support::{Proxy, Server, patient};

/// A proxy forwards a request, and then replies with an error of its own.
#[tokio::test]
async fn acquire_with_an_unknown_error_leaves_no_lock() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(patient()).connect().await.unwrap();
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        // This loads the scripts.
        lock.lock().await.unwrap().release().await.unwrap();
        for (waits, failures) in [(false, 1), (true, 1), (false, 3)] {
            proxy.fail_replies(failures); // all but the first hit releases
            let outcome = if waits { lock.lock().await.map(drop) } else { lock.try_lock().await.map(drop) };
            let error = outcome.unwrap_err();
            locks.settled().await;
            assert_eq!(proxy.failures_left(), 0, "{kind:?}: the release was not retried");
            let held: u32 = server.run(&["EXISTS", &format!("lock:{}", kind.name())]).await;
            assert_eq!(held, 0, "{kind:?}: the lock is left; waits: {waits}, {failures} failures");
            assert!(cause(&error).to_string().contains("upstream failure"), "{error:?}");
            assert!(error.is_indeterminate() && !error.is_transient(), "{error:?}");
        }
    }
    drop(locks);
    proxy.outlive_clients().await;
}

#[tokio::test]
async fn release_with_an_unknown_error_is_indeterminate() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(options()).connect().await.unwrap();
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        lock.lock().await.unwrap().release().await.unwrap();
        let guard = lock.lock().await.unwrap();
        proxy.fail_replies(1);
        let error = guard.release().await.unwrap_err();
        assert!(error.is_indeterminate(), "{error:?}");
        assert_eq!(error.context().unwrap().operation(), Operation::Release, "{error:?}");
        // A read has no effect that could be unknown.
        proxy.fail_replies(1);
        let error = lock.inspect().await.unwrap_err();
        assert!(!error.is_indeterminate(), "{error:?}");
        locks.settled().await;
        assert_eq!(server.run::<u32>(&["EXISTS", &format!("lock:{}", kind.name())]).await, 0, "{kind:?}");
    }
    drop(locks);
    proxy.outlive_clients().await;
}

#[tokio::test]
async fn release_is_indeterminate_if_its_first_reply_was_lost() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(options()).connect().await.unwrap();
    let mutex = locks.mutex("lost").unwrap();
    mutex.lock().await.unwrap().release().await.unwrap(); // loads the scripts
    let guard = mutex.lock().await.unwrap();
    proxy.set_drops_requests(true); // later deliveries do not arrive
    proxy.lose_next_reply();
    let error = guard.release().await.unwrap_err();
    assert_eq!(server.run::<u32>(&["EXISTS", "lock:lost"]).await, 0, "the first delivery has released it");
    assert!(error.is_indeterminate() && error.is_transient(), "{error:?}");
    proxy.set_drops_requests(false);
    proxy.cut();
    locks.settled().await;
    drop((mutex, locks));
    proxy.outlive_clients().await;
}

/// An acquire that the server refuses up front has not run, so no release follows.
#[tokio::test]
async fn acquire_refused_up_front_is_not_released() {
    let server = Server::start().await;
    let address = format!("127.0.0.1:{}", server.port());
    let locks = server.locks().await;
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let refusals: [(&str, bool, &[&str], &[&str]); 5] = [
        (
            "NOPERM",
            false,
            &["ACL", "SETUSER", "default", "-evalsha"],
            &["ACL", "SETUSER", "default", "+evalsha"],
        ),
        ("OOM", true, &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]),
        ("READONLY", true, &["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]),
        (
            "NOREPLICAS",
            true,
            &["CONFIG", "SET", "min-replicas-to-write", "1"],
            &["CONFIG", "SET", "min-replicas-to-write", "0"],
        ),
        ("MASTERDOWN", true, &["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]),
    ];
    for (code, is_transient, begin, end) in refusals {
        if code == "MASTERDOWN" {
            server.run::<()>(&["CONFIG", "SET", "replica-serve-stale-data", "no"]).await;
        }
        for kind in KINDS {
            let lock = kind.lock(&locks, kind.name());
            lock.lock().await.unwrap().release().await.unwrap();
            server.run::<()>(begin).await;
            let error = lock.try_lock().await.unwrap_err();
            let ran = server.scripts_run().await;
            locks.settled().await;
            assert_eq!(server.scripts_run().await, ran, "{code}, {kind:?}: no release follows");
            server.run::<()>(end).await;
            assert!(
                cause(&error).to_string().contains(code) || cause(&error).code() == Some(code),
                "{error:?}"
            );
            assert!(!error.is_indeterminate(), "{code}, {kind:?}: {error:?}");
            assert_eq!(error.is_transient(), is_transient, "{code}, {kind:?}: {error:?}");
            assert_names(&error, Operation::Acquire, kind.name(), Some(&address));
            let what: Vec<String> = server.run(&["KEYS", "*"]).await;
            assert!(what.iter().all(|key| key.ends_with(":fence")), "{code}, {kind:?}: {what:?}");
        }
    }
}

#[tokio::test]
async fn try_on_a_silent_server_is_indeterminate() {
    let server = Server::start().await;
    let locks = server.locks_with(options()).await;
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        lock.lock().await.unwrap().release().await.unwrap();
        server.pause();
        let error = lock.try_lock().await.unwrap_err();
        assert!(matches!(error, Error::Redis { .. }), "{error:?}");
        assert!(error.is_indeterminate() && error.is_transient(), "{error:?}");
        assert!(error.to_string().contains("may have taken effect"), "{error}");
        server.resume();
        locks.settled().await;
        assert_eq!(server.run::<u32>(&["EXISTS", &format!("lock:{}", kind.name())]).await, 0, "{kind:?}");
    }
}
