//! `Options`: bounds, serde, options of a file section, and the outage limit.

use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, Options, RestartGuard, Wakeups};

use crate::support::{Server, eventually, soon};

fn read(section: &str) -> Options {
    serde_json::from_str(section).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn options_of_a_section_override_only_the_named_ones() {
    let server = Server::start().await;
    let base = read(r#"{"prefix": "svc:", "ttl": "20s", "write_ttl": "5s"}"#);
    let locks = Locks::builder().server(server.url()).options(base).connect().await.unwrap();
    let left = async |key: &str| server.run::<u64>(&["PTTL", key]).await;
    let (lock, write) = (async |locks: &Locks| locks.mutex("n").unwrap().lock().await.unwrap(), "svc:rw");
    // The section does not name the prefix: with the default, it would be another lock.
    let named = locks.with_options(read(r#"{"ttl": "9s"}"#)).unwrap();
    let guard = lock(&named).await;
    assert!((1..=9_000).contains(&left("svc:n").await));
    guard.release().await.unwrap();
    let guard = named.rwlock("rw").unwrap().write().await.unwrap();
    assert!((1..=5_000).contains(&left(write).await));
    guard.release().await.unwrap();
    // A named option is set, also to its default or to none.
    let reset = named.with_options(read(r#"{"ttl": "30s", "write_ttl": null}"#)).unwrap();
    let guard = lock(&reset).await;
    assert!((20_001..=30_000).contains(&left("svc:n").await));
    guard.release().await.unwrap();
    let guard = reset.rwlock("rw").unwrap().write().await.unwrap();
    assert!((20_001..=30_000).contains(&left(write).await));
    guard.release().await.unwrap();
    // Setters override like sections.
    let other = reset.with_options(Options::new().prefix("other:")).unwrap();
    let guard = lock(&other).await;
    assert!((20_001..=30_000).contains(&left("other:n").await));
    guard.release().await.unwrap();
    // Invalid values and names are refused.
    for section in [
        r#"{"ttl": null}"#,
        r#"{"ttl": 5000}"#,
        r#"{"ttl": "5"}"#,
        "[]",
        r#"{"ttl_ms": 5}"#,
        r#"{"prefix": 5}"#,
    ] {
        assert!(serde_json::from_str::<Options>(section).is_err(), "{section}");
    }
}

#[tokio::test]
async fn connection_options_are_refused_by_with_options() {
    let locks = Locks::builder().quorum((1..4).map(|port| format!("redis://127.0.0.1:{port}/")));
    let locks = locks.options(Options::new().node_timeout(Duration::from_secs(2))).connect_lazily().unwrap();
    for (name, options) in [
        ("node_timeout", Options::new().node_timeout(Duration::from_secs(1))),
        ("wakeups", Options::new().wakeups(Wakeups::Poll)),
        ("restart_guard", Options::new().restart_guard(RestartGuard::On)),
    ] {
        let refused = locks.with_options(options).unwrap_err();
        assert!(
            matches!(refused, Error::Config(ConfigError::ConnectionOption { option }) if option == name),
            "{refused:?}"
        );
    }
    // A connection option with its current value is accepted.
    locks.with_options(locks.options().clone().ttl(Duration::from_secs(5))).unwrap();
    locks.with_options(Options::new().wakeups(Wakeups::Push)).unwrap();
}

/// A limit of readers counts holds, so with it each task has its own: also if it is set for some
/// locks of a client only.
#[tokio::test]
async fn a_limit_of_readers_for_some_locks_counts_tasks() {
    let server = Server::start().await;
    let locks = server.locks_with(Options::new().ttl(Duration::from_secs(60))).await;
    let lock = locks.with_options(Options::new().max_readers(1)).unwrap().rwlock("x").unwrap();
    for _ in 0..20 {
        let (one, other) = tokio::join!(lock.read(), lock.read());
        let refused = [&one, &other].map(|outcome| matches!(outcome, Err(Error::TooManyReaders { .. })));
        assert_ne!(refused[0], refused[1], "{one:?} {other:?}");
        one.or(other).unwrap().release().await.unwrap();
    }
    drop((lock, locks));
    server.assert_nothing_left().await;
}

/// Calls retry for their own `outage_limit`: three of them outlast an outage of more than three
/// node timeouts, another fails after its limit.
#[tokio::test(flavor = "multi_thread")]
async fn outage_limit_bounds_how_long_a_call_retries() {
    const NODE_TIMEOUT: Duration = Duration::from_millis(500);
    let mut server = Server::start().await;
    server.kill();
    let options = Options::new().node_timeout(NODE_TIMEOUT);
    let locks = Locks::builder().server(server.url()).options(options).connect_lazily().unwrap();
    // The default is two node timeouts.
    let outcome = locks.mutex("x").unwrap().lock().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    let long = locks.with_options(read(r#"{"outage_limit": "1m"}"#)).unwrap();
    // One task waits for the server, the other two wait locally behind it.
    let waiting = [(); 3].map(|()| {
        let mutex = long.mutex("x").unwrap();
        tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
    });
    let short = locks.with_options(Options::new().outage_limit(3 * NODE_TIMEOUT)).unwrap();
    let start = std::time::Instant::now();
    let outcome = short.mutex("y").unwrap().lock().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    assert!(start.elapsed() >= 3 * NODE_TIMEOUT, "the limit counts from the call: {:?}", start.elapsed());
    assert!(waiting.iter().all(|task| !task.is_finished()));
    server.restart().await;
    for task in waiting {
        soon("the lock is granted", task).await.unwrap();
    }
    drop((locks, long, short));
    eventually("the lock is free", || async { !server.run::<bool>(&["EXISTS", "lock:x"]).await }).await;
}

#[test]
fn outage_limit_is_at_most_a_day() {
    let builder = Locks::builder().server("redis://127.0.0.1:1/");
    let refused = builder.options(Options::new().outage_limit(Duration::from_secs(86_401))).connect_lazily();
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, Error::Config(ConfigError::Span { option: "outage_limit", .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn options_out_of_bounds_are_refused_before_connecting() {
    // No server listens here: an attempt to connect would return another error.
    let url = "redis://127.0.0.1:1/";
    let ms = Duration::from_millis;
    let (day, none) = (Duration::from_secs(24 * 3600), Duration::ZERO);
    type Set = fn(Options, Duration) -> Options;
    let spans: [(&str, Set, Duration, Duration); 7] = [
        ("ttl", Options::ttl, ms(100), day),
        ("read_ttl", Options::read_ttl, ms(100), day),
        ("write_ttl", Options::write_ttl, ms(100), day),
        ("poll_cap", Options::poll_cap, ms(10), ms(10_000)),
        ("node_timeout", Options::node_timeout, ms(10), ms(60_000)),
        ("token_ttl", Options::token_ttl, ms(1_000), day),
        ("grant_within", Options::grant_within, ms(100), day),
    ];
    for (name, set, least, most) in spans {
        for value in [none, least - ms(1), most + ms(1), Duration::MAX] {
            let refused = Locks::builder().server(url).options(set(Options::new(), value)).connect().await;
            let Err(Error::Config(ConfigError::Span { option, value: found, least: from, most: to })) =
                refused
            else {
                panic!("{name} {value:?}: {refused:?}");
            };
            assert_eq!((option, found, from, to), (name, value, least, most));
        }
        for value in [least, most] {
            let accepted = Locks::builder().server(url).options(set(Options::new(), value)).connect().await;
            assert!(matches!(accepted, Err(Error::Redis { .. })), "{name} {value:?}: {accepted:?}");
        }
    }
    let over =
        Locks::builder().server(url).options(Options::new().hold_at_least(day + ms(1))).connect().await;
    let expected = "hold_at_least is 1day 1ms; it must be from 0s to 1day";
    assert_eq!(over.unwrap_err().to_string(), expected);
    let short = Locks::builder().server(url).options(Options::new().replicas(1, none)).connect().await;
    let expected = "replica_timeout is 0s; it must be from 1ms to 1day";
    assert_eq!(short.unwrap_err().to_string(), expected);
    // The TTL is 30 s by default, and the node timeout a second.
    let limited: [(&str, Set, &str, Set, Duration); 5] = [
        ("ttl", |options, _default| options, "max_hold", Options::max_hold, ms(30_000)),
        ("read_ttl", Options::read_ttl, "max_hold", Options::max_hold, ms(40_000)),
        ("write_ttl", Options::write_ttl, "max_hold", Options::max_hold, ms(40_000)),
        ("hold_at_least", Options::hold_at_least, "max_hold", Options::max_hold, ms(40_000)),
        (
            "replica_timeout",
            |options, span| options.replicas(1, span),
            "node_timeout",
            Options::node_timeout,
            ms(2_000),
        ),
    ];
    for (name, set, other, set_other, value) in limited {
        for most in [value - ms(1), value] {
            let options = set_other(set(Options::new(), value), most);
            let outcome = Locks::builder().server(url).options(options).connect().await;
            match outcome {
                Err(Error::Config(ConfigError::Longer { option, value: found, limit, most: to })) => {
                    assert_eq!((option, found, limit, to), (name, value, other, most));
                    assert!(to < value, "it is not longer");
                }
                Err(Error::Redis { .. }) => assert_eq!(most, value, "{name} was accepted"),
                outcome => panic!("{name}: {outcome:?}"),
            }
        }
    }
    for drift in [-0.1, 0.51, f64::NAN, f64::INFINITY] {
        let refused = Locks::builder().server(url).options(Options::new().drift(drift)).connect().await;
        assert!(matches!(refused, Err(Error::Config(ConfigError::Drift { .. }))), "{drift}");
    }
    let refused = async |options: Options| match Locks::builder().server(url).options(options).connect().await
    {
        Err(Error::Config(error)) => error,
        other => panic!("{other:?}"),
    };
    let depth = refused(Options::new().max_depth(0)).await;
    assert!(matches!(depth, ConfigError::NoDepth), "{depth:?}");
    let depth = refused(Options::new().max_depth(1_025)).await;
    assert!(matches!(depth, ConfigError::LargeDepth { depth: 1_025 }), "{depth:?}");
    let readers = refused(Options::new().max_readers(0)).await;
    assert!(matches!(readers, ConfigError::NoReaders), "{readers:?}");
    let readers = refused(Options::new().max_readers(100_001)).await;
    assert!(matches!(readers, ConfigError::ManyReaders { readers: 100_001 }), "{readers:?}");
    let prefix = refused(Options::new().prefix("p".repeat(129))).await;
    assert!(matches!(prefix, ConfigError::LongPrefix { bytes: 129 }), "{prefix:?}");
    let most = Options::new().max_depth(1_024).max_readers(100_000).prefix("p".repeat(128));
    assert!(matches!(Locks::builder().server(url).options(most).connect().await, Err(Error::Redis { .. })));
    for url in ["", "not a url", "http://127.0.0.1/", "redis://:secret@"] {
        let refused = Locks::open(url).await.unwrap_err();
        assert!(matches!(refused, Error::Config(ConfigError::Url { .. })), "{url:?}: {refused:?}");
        assert!(!format!("{refused:?} {refused}").contains("secret"));
    }
    assert!(matches!(Locks::open(url).await, Err(Error::Redis { .. })));
}

#[test]
fn options_are_serialized_with_units() {
    let read: Options =
        serde_json::from_str(r#"{"ttl": "5s", "renewal": "never", "max_hold": "9s"}"#).unwrap();
    let built = Options::new()
        .ttl(Duration::from_secs(5))
        .renewal(redlatch::Renewal::Never)
        .max_hold(Duration::from_secs(9));
    assert_eq!(read, built);
    assert_eq!(serde_json::from_str::<Options>(&serde_json::to_string(&built).unwrap()).unwrap(), built);
    assert_eq!(serde_json::from_str::<Options>("{}").unwrap(), Options::default());
    assert!(serde_json::from_str::<Options>(r#"{"tll": "5s"}"#).is_err(), "an unknown option is refused");
}

/// What `main` prints if it returns an error.
#[tokio::test]
async fn errors_are_sentences_in_debug() {
    let refused = Locks::builder().server("redis://127.0.0.1:1/").options(Options::new().ttl(Duration::ZERO));
    assert_eq!(
        format!("{:?}", refused.connect().await.unwrap_err()),
        "ttl is 0s; it must be from 100ms to 1day"
    );
    let down = Locks::open("redis://127.0.0.1:1/").await.unwrap_err();
    let text = format!("{down:?}");
    assert!(text.starts_with("could not connect to 127.0.0.1:1: "), "{text}");
    assert!(text.ends_with("(os error 111)"), "the source: {text}");
}

/// The guard needs other nodes to admit a node again, so it is refused where it would not protect.
#[tokio::test(flavor = "multi_thread")]
async fn restart_guard_is_refused_outside_a_quorum() {
    use redlatch::deadpool_redis::{Config, Runtime};
    // No server listens here: an attempt to connect would return another error.
    let url = "redis://127.0.0.1:1/";
    let guarded = || Options::new().restart_guard(RestartGuard::On);
    let refused = |outcome: Result<Locks, Error>| {
        assert!(matches!(outcome, Err(Error::Config(ConfigError::GuardOfOneNode))), "{outcome:?}");
    };
    let pool = Config::from_url(url).create_pool(Some(Runtime::Tokio1)).unwrap();
    refused(Locks::builder().server(url).options(guarded()).connect().await);
    refused(Locks::builder().pool(pool).options(guarded().wakeups(Wakeups::Poll)).connect().await);
    refused(Locks::builder().quorum([url]).options(guarded()).connect().await);
    #[cfg(feature = "sentinel")]
    refused(Locks::builder().sentinel([url], "mymaster").options(guarded()).connect().await);
    #[cfg(feature = "cluster")]
    refused(Locks::builder().cluster([url]).options(guarded()).connect().await);
    let server = Server::start().await;
    refused(server.locks().await.with_options(guarded()));
}
