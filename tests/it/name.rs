//! `Name`: unusual names, and prefixes.

use std::time::Duration;

use redlatch::{Error, NameProblem, Options, Owner};

use crate::support::{KINDS, Server, soon};

#[tokio::test(flavor = "multi_thread")]
async fn name_with_special_characters_works_or_is_refused() {
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
        // The name is part of the message that grants the lock to a waiter.
        let waiting = tokio::spawn({
            let mutex = mutex.clone();
            async move { mutex.lock().await }
        });
        server.all_notified(mutex.name().key()).await;
        let before = server.published().await;
        guard.release().await.unwrap();
        soon(name, waiting).await.unwrap().unwrap().release().await.unwrap();
        assert!(server.published().await > before, "{name:?}: no message was published");
        let guard = locks.reentrant(name, &Owner::new()).unwrap().lock().await.unwrap();
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
        let refused = [
            locks.mutex(name).map(drop),
            locks.reentrant(name, &Owner::new()).map(drop),
            locks.rwlock(name).map(drop),
            locks.reentrant_in_scope(name).map(drop),
            locks.rwlock_in_scope(name).map(drop),
        ];
        for outcome in refused {
            let Err(Error::Name(error)) = outcome else { panic!("{name:?}: {outcome:?}") };
            assert_eq!(error.problem(), &problem);
        }
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// A queue entry is words separated by blanks, and one of them, the channel, begins with the
/// prefix.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_is_notified_if_the_prefix_has_blanks() {
    let server = Server::start().await;
    let poll_cap = Duration::from_secs(10);
    for prefix in ["my locks: ", " ", "tab\tline\nbreak\u{b}\r", "wide\u{3000}\u{a0}", "none:"] {
        let options = Options::new().prefix(prefix).poll_cap(poll_cap);
        let (locks, others) = (server.locks_with(options.clone()).await, server.locks_with(options).await);
        for kind in KINDS {
            let (rival, lock) = (kind.rival().lock(&others, kind.name()), kind.lock(&locks, kind.name()));
            assert_eq!(lock.key(), format!("{prefix}{}", kind.name()), "the prefix is used unchanged");
            let guard = rival.lock().await.unwrap();
            let waiting = tokio::spawn({
                let lock = lock.clone();
                async move { lock.lock().await }
            });
            server.all_notified(lock.key()).await;
            let before = server.published().await;
            guard.release().await.unwrap();
            let guard = soon(prefix, waiting).await.unwrap().unwrap();
            assert!(server.published().await > before, "{prefix:?} {kind:?}: no message was published");
            guard.release().await.unwrap();
        }
    }
    server.assert_nothing_left().await;
}
