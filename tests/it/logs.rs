//! `tracing` events and spans, and subscribers that panic, block or drop guards.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::{Error, LeaseEnd, Locks, Options, Owner, Renewal, Wakeups};
use tokio::task::JoinSet;

use crate::support::events::{listen, logged_with, on_event};
use crate::support::{Server, eventually, patient, renewed_by, soon, ttl};

fn errors_of(name: &str) -> Vec<String> {
    logged_with(name).into_iter().filter(|event| event.starts_with("ERROR")).collect()
}

/// A subscriber drops a guard, and then panics: the guard's lock is released, and other leases are
/// still renewed.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_may_drop_guards_and_panic() {
    listen();
    let server = Server::start().await;
    let locks = server.locks().await;
    for (number, panics) in [false, true].into_iter().enumerate() {
        let name = |what: &str| format!("subscriber-{number}-{what}");
        let lost = locks.mutex(name("lost")).unwrap().lock().await.unwrap();
        let other = locks.mutex(name("other")).unwrap().lock().await.unwrap();
        let kept = locks.mutex(name("kept")).unwrap().lock().await.unwrap();
        let other = Arc::new(Mutex::new(Some(other)));
        on_event(&name("lost"), {
            let (other, lease) = (Arc::clone(&other), lost.lease().clone());
            move || {
                assert_eq!(lease.end(), Some(LeaseEnd::Revoked), "the lease is lost before the event");
                drop(other.lock().unwrap().take());
                if panics {
                    // Without the panic hook, which would print a backtrace.
                    std::panic::resume_unwind(Box::new("the subscriber panics"));
                }
            }
        });
        let _: i64 = server.run(&["DEL", &format!("lock:{}", name("lost"))]).await;
        server.kill_connections().await; // the client renews all leases at once, in one batch
        soon("the lease is lost", lost.lease().lost()).await;
        eventually("the event is logged", || async { errors_of(&name("lost")).len() == 1 }).await;
        let is_released =
            || async { server.run::<i64>(&["EXISTS", &format!("lock:{}", name("other"))]).await == 0 };
        eventually("the dropped guard is released", is_released).await;
        // The other leases of the same batch are still renewed.
        server.kill_connections().await;
        renewed_by(kept.lease(), Duration::from_millis(1)).await;
        kept.release().await.unwrap();
        assert!(matches!(lost.release().await, Err(Error::Lost { .. })));
        assert_eq!(errors_of(&name("lost")).len(), 1, "{:?}", errors_of(&name("lost")));
        assert_eq!(errors_of(&name("other")), Vec::<String>::new());
    }
}

/// A subscriber blocks: the client's leases are still renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn subscriber_may_block() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(ttl(6_000)).await;
    let lost = locks.mutex("blocked-lost").unwrap().lock().await.unwrap();
    let kept = locks.mutex("blocked-kept").unwrap().lock().await.unwrap();
    let (unblock, blocked) = std::sync::mpsc::channel::<()>();
    on_event("blocked-lost", move || {
        let _unblocked = blocked.recv_timeout(Duration::from_secs(20)); // longer than a TTL
    });
    let _: i64 = server.run(&["DEL", "lock:blocked-lost"]).await;
    soon("the lease is lost", lost.lease().lost()).await;
    eventually("the event is logged", || async { errors_of("blocked-lost").len() == 1 }).await;
    renewed_by(kept.lease(), Duration::from_millis(1)).await;
    drop(unblock);
    kept.release().await.unwrap();
    assert!(matches!(lost.release().await, Err(Error::Lost { .. })));
}

/// `while_held` drops the guard at the deadline, before a renewal reports the loss.
#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_is_logged_once_if_while_held_drops_its_guard() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(ttl(600).node_timeout(Duration::from_secs(1))).await;
    let guard = locks.mutex("while-held").unwrap().lock().await.unwrap();
    server.pause();
    let work = async move {
        guard.lease().while_held(std::future::pending::<()>()).await?;
        guard.release().await
    };
    let outcome = soon("the lease is lost", work).await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    server.resume();
    soon("settled() returns", locks.settled()).await;
    let errors = errors_of("while-held");
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].starts_with("ERROR lost a lease: another client may hold the lock")
            && errors[0].contains("reason="),
        "{errors:?}"
    );
    // A released lease is not logged as lost.
    let locks = server.locks().await;
    locks.mutex("well").unwrap().lock().await.unwrap().release().await.unwrap();
    drop(locks.mutex("well").unwrap().lock().await.unwrap());
    soon("settled() returns", locks.settled()).await;
    assert_eq!(errors_of("lock=well"), Vec::<String>::new());
}

/// The only thread of this runtime is blocked for longer than the lease: no renewal is sent.
#[tokio::test]
async fn a_process_that_did_not_run_is_the_reason_of_a_loss() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(ttl(600)).await;
    let guard = locks.mutex("logged-stalled").unwrap().lock().await.unwrap();
    std::thread::sleep(Duration::from_millis(1_300));
    soon("the lease is lost", guard.lease().lost()).await;
    drop(guard);
    eventually("the loss is logged", || async { !errors_of("logged-stalled").is_empty() }).await;
    let errors = errors_of("logged-stalled");
    assert!(errors[0].ends_with("reason=\"this process did not run in time to renew it\""), "{errors:?}");
}

/// The event has the instance that lost the lock, the token, and the reason.
#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_is_logged_with_lock_holder_and_reason() {
    listen();
    let server = Server::start().await;
    let builder = Locks::builder().server(server.url()).options(patient());
    let locks = builder.client_name("billing").label("pod-7").connect().await.unwrap();
    let guard = locks.mutex("logged-holder").unwrap().lock().await.unwrap();
    let _: i64 = server.run(&["DEL", "lock:logged-holder"]).await;
    server.kill_connections().await; // the client asks at once
    soon("the lease is lost", guard.lease().lost()).await;
    eventually("the loss is logged", || async { !errors_of("logged-holder").is_empty() }).await;
    let expected = |lock: &str, reason: &str| {
        let server = format!("127.0.0.1:{}", server.port());
        format!(
            "ERROR lost a lease: another client may hold the lock lock={lock} holder=\"billing:pod-7\" token= server=\"{server}\" reason=\"{reason}\""
        )
    };
    // Without the digits of the token.
    let errors_of = |lock: &str| -> Vec<String> {
        let errors = errors_of(lock).into_iter().map(|error| {
            let (before, rest) = error.split_once("token=").unwrap();
            format!("{before}token={}", rest.trim_start_matches(|digit: char| digit.is_ascii_digit()))
        });
        errors.collect()
    };
    assert_eq!(errors_of("logged-holder"), [expected("logged-holder", "the server has ended it")]);
    // No renewal is needed, and so none is late.
    let longest = ttl(600).max_hold(Duration::from_millis(600)).drift(0.0);
    let ended = [
        ("logged-longest", longest, "it has reached max_hold"),
        ("logged-unrenewed", ttl(600).renewal(Renewal::Never), "its TTL expired; renewal is off"),
    ];
    for (name, options, reason) in ended {
        let guard = locks.with_options(options).unwrap().mutex(name).unwrap().lock().await.unwrap();
        soon("the lease is lost", guard.lease().lost()).await;
        eventually(name, || async { !errors_of(name).is_empty() }).await;
        drop(guard);
        assert_eq!(errors_of(name), [expected(name, reason)]);
    }
}

/// With 50 leases and 50 callers, one event when the outage starts and one when it ends.
#[tokio::test(flavor = "multi_thread")]
async fn outage_is_logged_once_when_it_starts_and_once_when_it_ends() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(Options::new().node_timeout(Duration::from_secs(3))).await;
    let mut guards = Vec::new();
    for number in 0..50 {
        guards.push(locks.mutex(format!("outage-{number}")).unwrap().lock().await.unwrap());
    }
    let label = format!("server=127.0.0.1:{}", server.port());
    let before = logged_with(&label).len();
    let logged = |level: &str| {
        let events = logged_with(&label).into_iter().skip(before);
        events.filter(|event| event.starts_with(level)).collect::<Vec<_>>()
    };
    server.pause();
    let mut tries = JoinSet::new();
    for number in 0..50 {
        let lock = locks.mutex(format!("try-{number}")).unwrap();
        tries.spawn(async move { lock.try_lock().await.map(drop) });
    }
    while let Some(outcome) = tries.join_next().await {
        assert!(outcome.unwrap().is_err());
    }
    server.resume();
    eventually("the end of the outage is logged", || async { !logged("INFO").is_empty() }).await;
    assert_eq!(logged("INFO").len(), 1, "{:?}", logged_with(&label));
    assert_eq!(logged("WARN").len(), 1, "{:?}", logged("WARN"));
    for event in logged("WARN").iter().chain(&logged("INFO")) {
        assert!(event.contains("holds=50"), "{event}");
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
}

fn traced(name: &str, what: &str) -> Vec<String> {
    logged_with(&format!("lock={name} ")).into_iter().filter(|event| event.starts_with(what)).collect()
}

/// One span and one event for each call; the event says what woke it.
#[tokio::test(flavor = "multi_thread")]
async fn acquiring_renewing_and_releasing_are_traced() {
    listen();
    let server = Server::start().await;
    let (locks, other) = (server.locks_with(ttl(3_000)).await, server.locks_with(ttl(3_000)).await);
    let polling = server.locks_with(ttl(3_000).wakeups(Wakeups::Poll)).await;
    let name = "traced-lock";
    let woken = |by: &str| traced(name, &format!("DEBUG acquired lock={name} woken=\"{by}\" waited="));

    let guard = locks.mutex(name).unwrap().lock().await.unwrap();
    assert_eq!(woken("at once").len(), 1, "{:?}", logged_with(name));
    assert!(other.mutex(name).unwrap().try_lock().await.unwrap().is_none());
    assert_eq!(traced(name, "DEBUG not acquired: the lock is held").len(), 1, "{:?}", logged_with(name));
    eventually("renewals are traced", || async { traced(name, "DEBUG renewed").len() >= 2 }).await;
    let limit = Duration::from_millis(20);
    assert!(other.mutex(name).unwrap().lock_timeout(limit).await.is_err());
    assert_eq!(traced(name, "DEBUG not acquired lock=").len(), 1, "{:?}", logged_with(name));

    let waits = |locks: &Locks| {
        let mutex = locks.mutex(name).unwrap();
        tokio::spawn(async move { mutex.lock().await.unwrap() })
    };
    eventually("the queue is empty", || async { server.queues().await.is_empty() }).await;
    let waiting = waits(&polling);
    eventually("the waiter queues", || async { !server.queues().await.is_empty() }).await;
    guard.release().await.unwrap();
    let guard = soon("the lock is granted", waiting).await.unwrap();
    assert_eq!(woken("polled").len(), 1, "{:?}", logged_with(name));
    // A task waits inside the client behind another task. Its turn comes once that task has the
    // lock; its request is granted if the lock is released before the request arrives.
    let in_background = || traced(name, "DEBUG released in the background").len();
    let before = in_background();
    let mut guard = guard;
    let until_woken_locally = async {
        while woken("local").is_empty() {
            let front = waits(&polling);
            eventually("the waiter queues", || async { !server.queues().await.is_empty() }).await;
            let spans = || traced(name, "SPAN acquire").len();
            let before = spans();
            let behind = waits(&polling);
            eventually("the second task waits inside the client", || async { spans() > before }).await;
            guard.release().await.unwrap();
            front.await.unwrap().release().await.unwrap();
            guard = behind.await.unwrap();
        }
        drop(guard);
    };
    soon("a task is woken locally", until_woken_locally).await;
    soon("settled() returns", polling.settled()).await;
    eventually("the event is logged", || async { in_background() > before }).await;

    // A client that has not subscribed yet polls. It subscribes once it finds the lock busy.
    let mut guard = locks.mutex(name).unwrap().lock().await.unwrap();
    eventually("the client is subscribed", || async {
        assert!(other.mutex(name).unwrap().lock_timeout(Duration::from_millis(300)).await.is_err());
        server.subscribers().await.len() == 1
    })
    .await;
    eventually("the queue is empty", || async { server.queues().await.is_empty() }).await;
    for _ in 0..5 {
        let waiting = waits(&other);
        eventually("the waiter queues", || async { !server.queues().await.is_empty() }).await;
        guard.release().await.unwrap();
        guard = soon("the lock is granted", waiting).await.unwrap();
        // A poll may happen at the same time.
        guard.release().await.unwrap();
        guard = locks.mutex(name).unwrap().lock().await.unwrap();
    }
    guard.release().await.unwrap();
    assert!(woken("notified").len() >= 3, "{:#?}", logged_with(name));
    assert!(!traced(name, "SPAN acquire").is_empty());
    assert_eq!(
        traced(name, "SPAN release").len(),
        logged_with(name).iter().filter(|event| event.starts_with("DEBUG released lock=")).count(),
    );
    drop((locks, other, polling));
    server.assert_nothing_left().await;
}

/// With a complete owner, a reader of the log could enter and release its locks.
#[tokio::test(flavor = "multi_thread")]
async fn traces_have_no_complete_owner() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(ttl(6_000)).await;
    let owner = Owner::new();
    let lock = locks.reentrant("traced-owned", &owner).unwrap();
    let guard = lock.lock().await.unwrap();
    eventually("renewals are traced", || async { !traced("traced-owned", "DEBUG renewed").is_empty() }).await;
    guard.release().await.unwrap();
    drop(lock.lock().await.unwrap());
    soon("settled() returns", locks.settled()).await;
    let logged = logged_with("traced-owned");
    assert!(logged.iter().any(|event| event.contains("owner=")), "{logged:#?}");
    let whole = owner.to_string();
    assert!(logged.iter().all(|event| !event.contains(&whole)), "{logged:#?}");
}

/// A task waits for a lock that it holds itself: it says so once, at the front of its client's
/// queue and behind another task, and so does the error. A task that waits for another one says
/// nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_itself_is_warned_once() {
    listen();
    let server = Server::start().await;
    let locks = server.locks_with(patient().poll_cap(Duration::from_millis(100))).await;
    let warnings = |name: &str| {
        let events = logged_with(name).into_iter();
        events.filter(|event| event.starts_with("WARN a task waits for a lock that it holds itself")).count()
    };
    for name in ["self-front", "self-behind"] {
        let mutex = locks.mutex(name).unwrap();
        let reentrant = locks.reentrant(format!("{name}-reentrant"), &Owner::new()).unwrap();
        let guards = (mutex.lock().await.unwrap(), reentrant.lock().await.unwrap());
        let others: Vec<_> = [name.to_owned(), format!("{name}-reentrant")]
            .into_iter()
            .filter(|_| name == "self-behind")
            .map(|name| {
                let lock = locks.mutex(&name).unwrap();
                let other = locks.reentrant(&name, &Owner::new()).unwrap();
                tokio::spawn(async move {
                    if name.ends_with("reentrant") {
                        drop(other.lock().await)
                    } else {
                        drop(lock.lock().await)
                    }
                })
            })
            .collect();
        for lock in [mutex.name().key(), reentrant.name().key()].into_iter().filter(|_| !others.is_empty()) {
            let queue = format!("{{{lock}}}:waiters");
            eventually("another task is in front", || async { server.waiters(&queue).await == 1 }).await;
        }
        let both = [format!("lock={name} "), format!("lock={name}-reentrant ")];
        let nested = reentrant.with_owner(&Owner::new());
        let warned = async {
            eventually("both are warned", || async { both.iter().all(|lock| warnings(lock) > 0) }).await;
            let polled = server.scripts_run().await + 40;
            eventually("tasks wait on", || async { server.scripts_run().await >= polled }).await;
        };
        tokio::select! {
            () = warned => {}
            outcomes = async { tokio::join!(mutex.lock(), nested.lock()) } => panic!("{outcomes:?}"),
        }
        for lock in &both {
            assert_eq!(warnings(lock), 1, "{:?}", logged_with(name));
        }
        let limit = Duration::from_millis(100);
        let outcomes = tokio::join!(mutex.lock_timeout(limit), nested.lock_timeout(limit));
        for error in [outcomes.0.unwrap_err(), outcomes.1.unwrap_err()] {
            assert!(matches!(error, Error::TimedOut { holds_itself: true, .. }), "{error:?}");
            assert!(error.to_string().contains("the task that waits holds it"), "{error}");
        }
        let (elsewhere, before) = (mutex.clone(), warnings(&both[0]));
        let waiting = tokio::spawn(async move { elsewhere.lock_timeout(Duration::from_millis(10)).await });
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::TimedOut { holds_itself: false, .. }), "{error:?}");
        guards.0.release().await.unwrap();
        guards.1.release().await.unwrap();
        for other in others {
            other.await.unwrap();
        }
        assert_eq!(warnings(&both[0]), before, "only for that task");
    }
}
