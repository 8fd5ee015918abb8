//! Options: a section of a file overrides what it names; how long a call outlasts an outage.

use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, Options, RestartGuard, Wakeups};

use crate::support::{Server, eventually, soon};

fn read(section: &str) -> Options {
    serde_json::from_str(section).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn options_of_a_section_override_only_what_it_names() {
    let server = Server::start().await;
    let base = read(r#"{"prefix": "svc:", "ttl_ms": 20000, "write_ttl_ms": 5000}"#);
    let locks = Locks::builder().server(server.url()).options(base).connect().await.unwrap();
    let left = async |key: &str| server.run::<u64>(&["PTTL", key]).await;
    let (lock, write) = (async |locks: &Locks| locks.mutex("n").unwrap().lock().await.unwrap(), "svc:rw");
    // The prefix is not named: the default would be another lock.
    let named = locks.with_options(read(r#"{"ttl_ms": 9000}"#)).unwrap();
    let guard = lock(&named).await;
    assert!((1..=9_000).contains(&left("svc:n").await));
    guard.release().await.unwrap();
    let guard = named.rwlock("rw").unwrap().write().await.unwrap();
    assert!((1..=5_000).contains(&left(write).await));
    guard.release().await.unwrap();
    // What is named is set, also to its default, and to nothing.
    let reset = named.with_options(read(r#"{"ttl_ms": 30000, "write_ttl_ms": null}"#)).unwrap();
    let guard = lock(&reset).await;
    assert!((20_001..=30_000).contains(&left("svc:n").await));
    guard.release().await.unwrap();
    let guard = reset.rwlock("rw").unwrap().write().await.unwrap();
    assert!((20_001..=30_000).contains(&left(write).await));
    guard.release().await.unwrap();
    // Setters do as sections do.
    let other = reset.with_options(Options::new().prefix("other:")).unwrap();
    let guard = lock(&other).await;
    assert!((20_001..=30_000).contains(&left("other:n").await));
    guard.release().await.unwrap();
    // What cannot be read is refused.
    for section in [r#"{"ttl_ms": null}"#, r#"{"ttl": 5000}"#, r#"{"prefix": 5}"#] {
        assert!(serde_json::from_str::<Options>(section).is_err(), "{section}");
    }
}

#[tokio::test]
async fn options_of_the_connections_are_refused_for_locks() {
    let locks = Locks::builder().quorum((1..4).map(|port| format!("redis://127.0.0.1:{port}/")));
    let locks = locks.options(Options::new().node_timeout(Duration::from_secs(2))).connect_lazily().unwrap();
    for (name, options) in [
        ("node_timeout", Options::new().node_timeout(Duration::from_secs(1))),
        ("wakeups", Options::new().wakeups(Wakeups::Poll)),
        ("restart_guard", Options::new().restart_guard(RestartGuard::On)),
    ] {
        let refused = locks.with_options(options).unwrap_err();
        assert!(matches!(refused, ConfigError::ConnectionOption { option } if option == name), "{refused:?}");
    }
    // What does not differ has the effect that it names.
    locks.with_options(locks.options().clone().ttl(Duration::from_secs(5))).unwrap();
    locks.with_options(Options::new().wakeups(Wakeups::Push)).unwrap();
}

/// The server comes three node timeouts later. A call that began in the outage waits for all of its
/// own limit.
#[tokio::test(flavor = "multi_thread")]
async fn outage_limit_is_how_long_a_call_outlasts_an_outage() {
    const NODE_TIMEOUT: Duration = Duration::from_millis(500);
    let mut server = Server::start().await;
    server.kill();
    let options = Options::new().node_timeout(NODE_TIMEOUT);
    let locks = Locks::builder().server(server.url()).options(options).connect_lazily().unwrap();
    // It gives up after two node timeouts.
    let outcome = locks.mutex("x").unwrap().lock().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    let patient = locks.with_options(read(r#"{"outage_limit_ms": 60000}"#)).unwrap();
    // One waits for the server, the others of this client for that one.
    let waiting = [(); 3].map(|()| {
        let mutex = patient.mutex("x").unwrap();
        tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
    });
    let short = locks.with_options(Options::new().outage_limit(3 * NODE_TIMEOUT)).unwrap();
    let start = std::time::Instant::now();
    let outcome = short.mutex("y").unwrap().lock().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    assert!(start.elapsed() >= 3 * NODE_TIMEOUT, "counted from the call: {:?}", start.elapsed());
    assert!(waiting.iter().all(|task| !task.is_finished()));
    server.restart().await;
    for task in waiting {
        soon("granted", task).await.unwrap();
    }
    drop((locks, patient, short));
    eventually("nothing is held", || async { !server.run::<bool>(&["EXISTS", "lock:x"]).await }).await;
}

#[test]
fn outage_limit_is_at_most_a_day() {
    let builder = Locks::builder().server("redis://127.0.0.1:1/");
    let refused = builder.options(Options::new().outage_limit(Duration::from_secs(86_401))).connect_lazily();
    let refused = refused.unwrap_err();
    assert!(matches!(refused, ConfigError::Span { option: "outage_limit", .. }), "{refused:?}");
}
