//! Whether a request that failed has taken effect, and whether a retry may help. The oracle is what
//! the server has.

use redlatch::{Error, Locks, Operation};

use super::{KINDS, assert_names, cause, inspect, options};
use crate::support::{Proxy, Server};

/// A proxy passes a request on, and then answers with an error of its own.
#[tokio::test]
async fn acquire_answered_with_an_unknown_error_leaves_no_lock_behind() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(options()).connect().await.unwrap();
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        // The server knows the scripts from now on.
        lock.lock().await.unwrap().release().await.unwrap();
        for (waits, failures) in [(false, 1), (true, 1), (false, 3)] {
            proxy.fail_replies(failures); // beyond the first, those to releases
            let outcome = if waits { lock.lock().await.map(drop) } else { lock.try_lock().await.map(drop) };
            let error = outcome.unwrap_err();
            locks.settled().await;
            assert_eq!(proxy.failures_left(), 0, "{kind:?}: the release was sent until it was answered");
            let held: u32 = server.run(&["EXISTS", &format!("lock:{}", kind.name())]).await;
            assert_eq!(held, 0, "{kind:?}: no client holds it; waits: {waits}, {failures} failures");
            assert!(cause(&error).to_string().contains("upstream failure"), "{error:?}");
            assert!(error.is_indeterminate() && !error.is_transient(), "{error:?}");
        }
    }
    drop(locks);
    proxy.outlive_clients().await;
}

#[tokio::test]
async fn release_answered_with_an_unknown_error_is_indeterminate() {
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
        // To read has no effect that could be unknown.
        proxy.fail_replies(1);
        let error = inspect(&lock).await.unwrap_err();
        assert!(!error.is_indeterminate(), "{error:?}");
        locks.settled().await;
        assert_eq!(server.run::<u32>(&["EXISTS", &format!("lock:{}", kind.name())]).await, 0, "{kind:?}");
    }
    drop(locks);
    proxy.outlive_clients().await;
}

#[tokio::test]
async fn release_whose_first_answer_is_lost_is_indeterminate_whatever_fails_last() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(options()).connect().await.unwrap();
    let mutex = locks.mutex("lost").unwrap();
    mutex.lock().await.unwrap().release().await.unwrap(); // the server knows the scripts from now on
    let guard = mutex.lock().await.unwrap();
    proxy.be_deaf(true); // the later deliveries are not sent
    proxy.lose_next_reply();
    let error = guard.release().await.unwrap_err();
    assert_eq!(server.run::<u32>(&["EXISTS", "lock:lost"]).await, 0, "the first delivery has released it");
    assert!(error.is_indeterminate() && error.is_transient(), "{error:?}");
    proxy.be_deaf(false);
    proxy.cut();
    locks.settled().await;
    drop((mutex, locks));
    proxy.outlive_clients().await;
}

/// What a server refuses up front has not run, and needs no release.
#[tokio::test]
async fn acquire_refused_up_front_has_no_effect_and_is_not_followed_up() {
    let server = Server::start().await;
    let address = format!("127.0.0.1:{}", server.port());
    let locks = server.locks_with(options()).await;
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
        ("OOM", false, &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]),
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
async fn try_on_a_silent_server_may_have_taken_effect() {
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
