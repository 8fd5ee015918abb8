//! Names and options that try to break something.

use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, NameProblem, Options, Owner, RestartGuard, Wakeups};

use crate::support::{Kind, Oracle, Server, eventually, soon};

#[tokio::test(flavor = "multi_thread")]
async fn names_hostile_ones_are_locks_like_any_other_or_typed_errors() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let longest = "x".repeat(512);
    for name in [
        "a b",
        "line\nbreak",
        "nul\0inside",
        "🔒🦀",
        "{tag}",
        "a{tag}b",
        "open{",
        ":",
        "*?[]\\",
        "$(true)",
        "\"'",
        &longest,
        "KEYS[1]",
        "-- x",
        "%s%.0f",
        "{a}:ended:1",
    ] {
        let mutex = locks.mutex(name).unwrap();
        let guard = soon(name, mutex.lock()).await.unwrap();
        assert_eq!(mutex.name().as_str(), name);
        let token: String = server.run(&["GET", &format!("lock:{name}")]).await;
        assert_eq!(mutex.inspect().await.unwrap().holders[0].owner, token);
        // Handed over through a message that carries the name.
        let waiting = tokio::spawn({
            let mutex = mutex.clone();
            async move { mutex.lock().await }
        });
        eventually("it queues", || async { server.lock_state(mutex.name()).await.waiters() == 1 }).await;
        let before = server.published().await;
        guard.release().await.unwrap();
        soon(name, waiting).await.unwrap().unwrap().release().await.unwrap();
        assert!(server.published().await > before, "{name:?}: it is notified");
        let guard = locks.reentrant(name).unwrap().with_owner(&Owner::new()).lock().await.unwrap();
        guard.release().await.unwrap();
    }
    let too_long = "x".repeat(600);
    for (name, problem) in [
        ("", NameProblem::Empty),
        (&too_long, NameProblem::TooLong { bytes: 600 }),
        ("}", NameProblem::BrokenHashTag),
        ("{}", NameProblem::BrokenHashTag),
        ("a}{b", NameProblem::BrokenHashTag),
        ("{a}:fence", NameProblem::Reserved),
        ("{a}:waiters", NameProblem::Reserved),
    ] {
        assert_eq!(locks.mutex(name).unwrap_err().problem(), &problem);
        assert_eq!(locks.reentrant(name).unwrap_err().problem(), &problem);
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// A waiter is written as words with blanks between, and its channel begins with the prefix.
#[tokio::test(flavor = "multi_thread")]
async fn names_with_blanks_in_the_prefix_are_handed_over() {
    let server = Server::start().await;
    let poll_cap = Duration::from_secs(10);
    for prefix in ["my locks: ", " ", "tab\tline\nbreak\u{b}\r", "wide\u{3000}\u{a0}", "none:"] {
        let options = Options::new().prefix(prefix).poll_cap(poll_cap);
        let (locks, others) = (server.locks_with(options.clone()).await, server.locks_with(options).await);
        for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write] {
            let (rival, lock) = (kind.rival().lock(&others, kind.name()), kind.lock(&locks, kind.name()));
            assert_eq!(lock.key(), format!("{prefix}{}", kind.name()), "as it was given");
            let guard = rival.lock().await.unwrap();
            let waiting = tokio::spawn({
                let lock = lock.clone();
                async move { lock.lock().await }
            });
            eventually("it queues", || async {
                waiting.is_finished() || server.queued_for(&lock).await == 1
            })
            .await;
            let before = server.published().await;
            guard.release().await.unwrap();
            let guard = soon(prefix, waiting).await.unwrap().unwrap();
            assert!(server.published().await > before, "{prefix:?} {kind:?}: it is notified");
            guard.release().await.unwrap();
        }
    }
    server.assert_nothing_left().await;
}

#[tokio::test]
async fn options_out_of_bounds_are_refused_before_anything_is_sent() {
    // Nobody listens here: an attempt to connect would be another error.
    let url = "redis://127.0.0.1:1/";
    let ms = Duration::from_millis;
    let (day, none) = (Duration::from_secs(24 * 3600), Duration::ZERO);
    type Set = fn(Options, Duration) -> Options;
    let spans: [(&str, Set, Duration, Duration); 8] = [
        ("ttl", Options::ttl, ms(100), day),
        ("read_ttl", Options::read_ttl, ms(100), day),
        ("write_ttl", Options::write_ttl, ms(100), day),
        ("poll_cap", Options::poll_cap, ms(10), ms(10_000)),
        ("node_timeout", Options::node_timeout, ms(10), ms(60_000)),
        ("token_ttl", Options::token_ttl, ms(1_000), day),
        ("grant_within", Options::grant_within, ms(100), day),
        // Up to the node timeout, which is a second.
        ("replica_timeout", |options, span| options.replicas(1, span), ms(1), ms(1_000)),
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
    // The longest TTL is 30 s by default, unless one of the two sides has a longer one.
    let (sides, second): ([Set; 2], _) = ([Options::read_ttl, Options::write_ttl], ms(1_000));
    let longer = sides.map(|set| (set(Options::new(), ms(40_000)), ms(40_000)));
    for (options, ttl) in [(Options::new(), ms(30_000))].into_iter().chain(longer) {
        let refused =
            Locks::builder().server(url).options(options.clone().max_hold(ttl - second)).connect().await;
        assert!(
            matches!(&refused, Err(Error::Config(ConfigError::ShortHold { longest, ttl: than }))
                if (*longest, *than) == (ttl - second, ttl)),
            "{options:?}: {refused:?}"
        );
        let accepted = Locks::builder().server(url).options(options.max_hold(ttl)).connect().await;
        assert!(matches!(accepted, Err(Error::Redis { .. })), "{accepted:?}");
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
fn options_are_read_with_serde_in_milliseconds() {
    let read: Options =
        serde_json::from_str(r#"{"ttl_ms": 5000, "renewal": "never", "max_hold_ms": 9000}"#).unwrap();
    let built = Options::new()
        .ttl(Duration::from_secs(5))
        .renewal(redlatch::Renewal::Never)
        .max_hold(Duration::from_secs(9));
    assert_eq!(read, built);
    assert_eq!(serde_json::from_str::<Options>(&serde_json::to_string(&built).unwrap()).unwrap(), built);
    assert_eq!(serde_json::from_str::<Options>("{}").unwrap(), Options::default());
    assert!(serde_json::from_str::<Options>(r#"{"tll_ms": 5000}"#).is_err(), "a misspelt option is refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_not_shown() {
    let server = Server::start().await;
    server.run::<()>(&["CONFIG", "SET", "requirepass", "s3cret"]).await;
    let url = server.url().replace("redis://", "redis://:s3cret@");
    let locks = Locks::open(&url).await.unwrap();
    let mutex = locks.mutex("quiet").unwrap();
    let guard = mutex.lock().await.unwrap();
    let shown = format!("{locks:?} {mutex:?} {guard:?} {:?}", guard.lease());
    let token: String = mutex.inspect().await.unwrap().holders[0].owner.clone();
    assert!(!shown.contains("s3cret") && !shown.contains(&token), "{shown}");
    guard.release().await.unwrap();
    let wrong = Locks::open(&url.replace("s3cret", "wr0ng")).await.unwrap_err();
    assert!(matches!(wrong, Error::Redis { .. }) && !format!("{wrong:?}").contains("wr0ng"), "{wrong:?}");
}

/// Nobody could admit a node that is alone: what is not there must not be believed to be.
#[tokio::test(flavor = "multi_thread")]
async fn options_refuse_a_restart_guard_outside_a_quorum() {
    use redlatch::deadpool_redis::{Config, Runtime};
    // Nobody listens here: an attempt to connect would be another error.
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
    {
        use redlatch::deadpool_redis::cluster;
        let pool =
            cluster::Config::from_urls(vec![url.to_owned()]).create_pool(Some(Runtime::Tokio1)).unwrap();
        refused(Locks::builder().cluster([url]).options(guarded()).connect().await);
        refused(
            Locks::builder().cluster_pool(pool).options(guarded().wakeups(Wakeups::Poll)).connect().await,
        );
    }
    let server = Server::start().await;
    refused(server.locks().await.with_options(guarded()).map_err(Error::from));
}
