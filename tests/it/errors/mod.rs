//! Errors: the failed operation, its lock and server, the cause, and whether the request may have
//! run.

mod connecting;
mod corrupt_keys;
mod outcomes;
mod runtime;

use std::error::Error as _;
use std::future::pending;

use redis::RedisError;
use redlatch::{Error, Locks, NodeAnswer, Operation, Options};

use crate::support::{KINDS, Kind, Server, patient};

/// The client library's error.
fn cause(error: &Error) -> &RedisError {
    error.source().unwrap().downcast_ref().unwrap_or_else(|| panic!("{error:?}"))
}

/// Options of tests that wait for node timeouts.
fn options() -> Options {
    Options::new().node_timeout(std::time::Duration::from_secs(1))
}

/// Checks the operation, lock and server of an error, and the beginning of its text.
#[track_caller]
fn assert_names(error: &Error, operation: Operation, lock: &str, server: Option<&str>) {
    let context = error.context().unwrap_or_else(|| panic!("{error:?}"));
    assert_eq!(context.operation(), operation, "{error:?}");
    assert_eq!(context.lock().map(redlatch::Name::as_str), Some(lock), "{error:?}");
    assert_eq!(context.server(), server, "{error:?}");
    let on = server.map_or(String::new(), |server| format!(" on {server}"));
    let begins = format!("could not {} lock {lock:?}{on}: ", operation.verb());
    assert!(error.to_string().starts_with(&begins), "{error}");
}

#[tokio::test]
async fn error_text_does_not_repeat_its_source() {
    // No server listens on these ports.
    let (one, other) = ("redis://127.0.0.1:1/", "redis://127.0.0.1:2/");
    let refused = Locks::open(one).await.unwrap_err();
    assert!(cause(&refused).is_connection_refusal(), "{refused:?}");
    assert_eq!(refused.to_string(), "could not connect to 127.0.0.1:1: the server could not be reached");
    assert!(refused.is_transient() && !refused.is_indeterminate());

    let too_few = Locks::builder().quorum([one, other]).connect().await.unwrap_err();
    assert!(too_few.source().is_none(), "two causes are no single source: {too_few:?}");
    let text = too_few.to_string();
    assert_eq!(text.matches("Connection refused").count(), 2, "{text}");
    let Error::NoQuorum { nodes, .. } = too_few else { panic!("{too_few:?}") };
    for (node, address) in nodes.iter().zip(["127.0.0.1:1", "127.0.0.1:2"]) {
        let NodeAnswer::Silent(error) = &node.answer else { panic!("{node:?}") };
        assert_eq!(node.node, address);
        assert_eq!(error.context().unwrap().server(), Some(address));
        assert!(cause(error).is_connection_refusal(), "{error:?}");
    }

    let unusable = Locks::open("http://127.0.0.1/").await.unwrap_err();
    assert!(!unusable.to_string().contains("did not parse"), "{unusable}");
    assert!(unusable.to_string().contains("like redis://HOST:PORT/"), "{unusable}");
    assert!(cause(&unusable).to_string().contains("did not parse"), "{unusable:?}");
    let unnamed = Locks::builder().server(one).connect_lazily().unwrap().mutex("").unwrap_err();
    assert!(unnamed.source().is_none() && unnamed.context().is_none(), "{unnamed:?}");
}

/// A refused connection carries no request, however the limit elapses.
#[tokio::test]
async fn unsent_requests_are_not_indeterminate_when_the_limit_elapses() {
    let locks = Locks::builder()
        .server("redis://127.0.0.1:1/")
        .options(options().outage_limit(std::time::Duration::from_secs(60)))
        .connect_lazily()
        .unwrap();
    for kind in KINDS {
        let limit = std::time::Duration::from_millis(200);
        let error = kind.lock(&locks, kind.name()).lock_timeout(limit).await.unwrap_err();
        assert!(cause(&error).is_connection_refusal(), "{error:?}");
        assert!(error.is_transient() && !error.is_indeterminate(), "{error:?}");
        assert!(error.to_string().ends_with("the server could not be reached"), "{error}");
    }
}

#[tokio::test]
async fn errors_name_operation_lock_and_server() {
    // All kinds at the same time, since each waits for several timeouts.
    let of_kind = async |kind: Kind| {
        let server = Server::start().await;
        let locks = server.locks().await;
        let address = format!("127.0.0.1:{}", server.port());
        let lock = kind.lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        let limit = std::time::Duration::from_millis(50);
        let late = lock.for_rival().lock_timeout(limit).await.unwrap_err();
        assert_names(&late, Operation::Acquire, kind.name(), Some(&address));
        assert!(matches!(late, Error::TimedOut { .. }) && late.is_transient(), "{late:?}");
        lock.force_release().await.unwrap();
        let lost = guard.release().await.unwrap_err();
        assert_names(&lost, Operation::Release, kind.name(), Some(&address));
        assert!(!lost.is_transient() && !lost.is_indeterminate(), "{lost:?}");
        let guard = lock.lock().await.unwrap();
        let lease = guard.lease().clone();
        let (ended, released) = tokio::join!(lease.while_held(pending::<()>()), guard.release());
        released.unwrap();
        assert_names(&ended.unwrap_err(), Operation::Hold, kind.name(), Some(&address));
        drop((lock, locks));
        let locks = server.locks_with(options()).await;
        let lock = kind.lock(&locks, kind.name());
        let guard = lock.lock().await.unwrap();
        server.pause();
        for (error, operation) in [
            (lock.for_rival().try_lock().await.unwrap_err(), Operation::Acquire),
            (lock.inspect().await.unwrap_err(), Operation::Inspect),
            (lock.force_release().await.unwrap_err(), Operation::ForceRelease),
            (guard.release().await.unwrap_err(), Operation::Release),
        ] {
            assert_names(&error, operation, kind.name(), Some(&address));
            assert!(cause(&error).is_timeout() && error.is_transient(), "{error:?}");
        }
        server.resume();
        locks.settled().await;
    };
    let [mutex, reentrant, read, write] = KINDS.map(of_kind);
    tokio::join!(mutex, reentrant, read, write);
}

#[tokio::test]
async fn quorum_error_counts_the_reply_of_each_node() {
    let mut servers = [Server::start().await, Server::start().await, Server::start().await];
    let locks =
        Locks::builder().quorum(servers.iter().map(Server::url)).options(patient()).connect().await.unwrap();
    let mutex = locks.mutex("counted").unwrap();
    // One of the two live nodes has another holder.
    servers[0].run::<()>(&["SET", "lock:counted", "another", "PX", "60000"]).await;
    servers[2].kill();
    let error = mutex.force_release().await.unwrap_err();
    assert_names(&error, Operation::ForceRelease, "counted", None);
    let text = error.to_string();
    assert!(text.contains("1 granted, 1 refused, 1 silent of 3 nodes; 2 must agree"), "{text}");
    assert!(error.is_indeterminate() && error.is_transient(), "{error:?}");
    let Error::NoQuorum { nodes, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(nodes[0].answer, NodeAnswer::Granted), "{nodes:?}");
    assert!(matches!(nodes[1].answer, NodeAnswer::Refused), "{nodes:?}");
    assert!(matches!(&nodes[2].answer, NodeAnswer::Silent(error) if cause(error).is_io_error()), "{nodes:?}");

    servers[1].run::<()>(&["ACL", "SETUSER", "default", "-evalsha"]).await;
    let error = mutex.try_lock().await.unwrap_err();
    assert_names(&error, Operation::Acquire, "counted", None);
    let Error::NoQuorum { nodes, .. } = &error else { panic!("{error:?}") };
    let NodeAnswer::Failed(denied) = &nodes[1].answer else { panic!("{nodes:?}") };
    assert_eq!(cause(denied).code(), Some("NOPERM"), "{denied:?}");
    assert_names(denied, Operation::Acquire, "counted", Some(&nodes[1].node));
    servers[1].run::<()>(&["ACL", "SETUSER", "default", "+evalsha"]).await;
}
