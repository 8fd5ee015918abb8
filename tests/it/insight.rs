//! What a program can observe: the stream of events, metrics as Prometheus reads them, and spans.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use redlatch::{Error, Event, Events, Locks, LossReason, Options, Owner, Renewal};

use crate::support::events::{TRACED, listen, logged_with};
use crate::support::{Server, Stopwatch, eventually, soon, ttl};

/// The next event that is not a renewal.
async fn next(events: &mut Events) -> Event {
    loop {
        match soon("an event", events.next()).await.unwrap() {
            Event::Renewed { .. } => {}
            event => return event,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_grants_renewals_losses_and_releases() {
    let server = Server::start().await;
    let locks = server.locks_with(ttl(60_000)).await;
    let earlier = locks.mutex("earlier").unwrap().lock().await.unwrap();
    let (mut events, asked) = (locks.events(), Stopwatch::start());
    let guard = locks.rwlock("seen").unwrap().write().await.unwrap();
    let token = guard.lease().fencing_token();
    match next(&mut events).await {
        Event::Granted { lock, kind: "write", token: granted, waited, .. } => {
            assert_eq!((lock.as_str(), granted), ("seen", token));
            assert!(waited <= asked.elapsed());
        }
        other => panic!("{other:?}"),
    }
    // On a new connection, the client renews all leases at once.
    server.kill_connections().await;
    let renewed = soon("a renewal", events.next()).await.unwrap();
    assert!(matches!(&renewed, Event::Renewed { valid_for, .. } if *valid_for <= Duration::from_secs(60)));
    guard.release().await.unwrap();
    match next(&mut events).await {
        Event::Released { lock, kind: "write", .. } => assert_eq!(lock.as_str(), "seen"),
        other => panic!("{other:?}"),
    }
    // A guard that was granted before anybody listened, and is dropped.
    drop(earlier);
    match next(&mut events).await {
        Event::Released { lock, kind: "mutex", .. } => assert_eq!(lock.as_str(), "earlier"),
        other => panic!("{other:?}"),
    }
    let lost = locks.mutex("lost").unwrap().lock().await.unwrap();
    assert!(matches!(next(&mut events).await, Event::Granted { kind: "mutex", .. }));
    server.run::<i64>(&["DEL", "lock:lost"]).await;
    server.kill_connections().await;
    match next(&mut events).await {
        Event::Lost { lock, reason, .. } => {
            assert_eq!((lock.as_str(), reason), ("lost", LossReason::Revoked));
        }
        other => panic!("{other:?}"),
    }
    drop(lost);
    soon("settled() returns", locks.settled()).await;
    drop(locks);
    soon("the stream ends", async { while events.next().await.is_some() {} }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_outages() {
    let server = Server::start().await;
    let options = Options::new().ttl(Duration::from_secs(3)).node_timeout(Duration::from_millis(300));
    let locks = Locks::builder().server(server.url()).options(options).connect_lazily().unwrap();
    let mut events = locks.events();
    server.pause();
    assert!(locks.mutex("paused").unwrap().try_lock().await.is_err());
    let address = format!("127.0.0.1:{}", server.port());
    match next(&mut events).await {
        Event::OutageBegan { server, holds: 0, .. } => assert_eq!(*server, *address),
        other => panic!("{other:?}"),
    }
    server.resume();
    let lock = locks.mutex("again").unwrap();
    eventually("the server answers", async || lock.try_lock().await.is_ok()).await;
    loop {
        match next(&mut events).await {
            Event::OutageEnded { server, after, .. } => {
                assert_eq!(*server, *address);
                assert!(after > Duration::ZERO);
                break;
            }
            // Comes first if the retried release of "paused" has ended the outage.
            Event::Granted { lock, .. } if lock.as_str() == "again" => {}
            // The server was silent again for as long.
            Event::Released { .. } | Event::OutageBegan { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// The requests of a set that is released end an outage, and no later one is needed to say so.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_an_outage_is_reported_without_another_request() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let set = locks.all([locks.mutex("one").unwrap(), locks.mutex("two").unwrap()]).unwrap();
    let guard = set.lock().await.unwrap();
    let mut events = locks.events();
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    assert!(locks.mutex("three").unwrap().try_lock().await.is_err());
    assert!(matches!(next(&mut events).await, Event::OutageBegan { .. }));
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    guard.release().await.unwrap();
    while !matches!(next(&mut events).await, Event::OutageEnded { .. }) {}
}

/// A task that hangs never drops its guard: the loss of its lease is reported all the same.
#[tokio::test(flavor = "multi_thread")]
async fn the_loss_of_a_hanging_task_is_reported() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut events = locks.events();
    let unrenewed = ttl(600).renewal(Renewal::Never);
    let longest = ttl(300).max_hold(Duration::from_millis(300)).drift(0.0);
    for (options, expected) in [(unrenewed, LossReason::Expired), (longest, LossReason::MaxHold)] {
        let locks = locks.with_options(options).unwrap();
        let mut hanging = BTreeMap::new();
        for number in 0..20 {
            let name = format!("hangs-{number}");
            hanging.insert(name.clone(), locks.mutex(name).unwrap().lock().await.unwrap());
        }
        let mut left: BTreeSet<String> = hanging.keys().cloned().collect();
        while !left.is_empty() {
            if let Event::Lost { lock, reason, .. } = next(&mut events).await {
                assert_eq!(reason, expected);
                assert!(left.remove(lock.as_str()), "{lock} is reported twice");
            }
        }
        for guard in hanging.into_values() {
            match guard.release().await.unwrap_err() {
                Error::Lost { reason, .. } => assert_eq!(reason, Some(expected)),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A server that refuses one lock for good is well: its other holds are in no danger.
#[tokio::test(flavor = "multi_thread")]
async fn a_lasting_error_of_one_lock_is_no_outage() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut events = locks.events();
    server.run::<()>(&["RPUSH", "{lock:spoilt}:fence", "x"]).await;
    assert!(locks.mutex("spoilt").unwrap().try_lock().await.is_err());
    let _guard = locks.mutex("sound").unwrap().lock().await.unwrap();
    match next(&mut events).await {
        Event::Granted { lock, .. } => assert_eq!(lock.as_str(), "sound"),
        other => panic!("{other:?}"),
    }
}

/// A receiver that does not read misses events, and holds up no lock.
#[tokio::test(flavor = "multi_thread")]
async fn unread_events_are_counted() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut events = locks.events();
    let lock = locks.mutex("unread").unwrap();
    for _ in 0..600 {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    // 1,200 events, of which 1,024 are kept.
    assert!(matches!(next(&mut events).await, Event::Missed(176)));
    assert!(matches!(next(&mut events).await, Event::Granted { .. }));
}

/// The value of a sample, as Prometheus reads it.
fn sample(handle: &PrometheusHandle, name: &str) -> f64 {
    let text = handle.render();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{name} is not in\n{text}"))
}

/// A lock that a release grants is held for a claim, far less than its TTL, and renewed after a
/// third of it: this is not late. No renewal is later than its grant is old.
#[tokio::test]
async fn first_renewal_after_a_notification_is_not_late() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let server = Server::start().await;
    let (locks, other) = (server.locks_with(Options::new()).await, server.locks_with(Options::new()).await);
    let guard = locks.mutex("claimed").unwrap().lock().await.unwrap();
    let waiting = tokio::spawn(async move { other.mutex("claimed").unwrap().lock().await.unwrap() });
    eventually("it queues", async || server.waiters("{lock:claimed}:waiters").await == 1).await;
    let granted = Stopwatch::start();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap();
    let lag = "redlatch_lease_renewal_lag";
    eventually("it is renewed", async || handle.render().contains(&format!("{lag}_count"))).await;
    let lag = sample(&handle, &format!("{lag}_sum{{kind=\"mutex\"}}"));
    let age = granted.elapsed().as_secs_f64();
    assert!(lag <= age, "late by {lag} s, {age} s after the grant");
    guard.release().await.unwrap();
}

/// On one thread, so that the recorder of this thread gets everything.
#[tokio::test]
async fn metrics_are_readable_by_prometheus() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let server = Server::start().await;
    let (locks, other) = (server.locks().await, server.locks().await);
    let loss = "redlatch_lease_losses{kind=\"mutex\",reason=\"revoked\"}";
    let outage = format!("redlatch_server_outages{{server=\"127.0.0.1:{}\"}}", server.port());
    let failing = outage.replace("outages", "failing");
    for name in [
        loss,
        &outage,
        &failing,
        "redlatch_lock_acquisitions{kind=\"read\",outcome=\"granted\",wake=\"polled\"}",
    ] {
        assert_eq!(sample(&handle, name), 0.0, "{name}: what alerts are for is there from the start");
    }
    assert!(handle.render().contains("# HELP redlatch_lease_losses Leases"));
    let lock = locks.mutex("measured").unwrap();
    let elsewhere = other.mutex("measured").unwrap();
    let guard = lock.lock().await.unwrap();
    // On a new connection, the client renews its lease at once.
    server.kill_connections().await;
    let renewals = "redlatch_lease_renewals{kind=\"mutex\",outcome=\"renewed\"}";
    eventually("a renewal", async || handle.render().contains(renewals) && sample(&handle, renewals) >= 1.0)
        .await;
    assert!(elsewhere.try_lock().await.unwrap().is_none());
    // Only a call that had the time to queue has waited.
    let contentions = "redlatch_lock_contentions{kind=\"mutex\"}";
    let (mut limit, mut timeouts) = (Duration::from_millis(50), 0.0);
    let until_contended = async {
        while !handle.render().contains(contentions) {
            assert!(elsewhere.lock_timeout(limit).await.is_err());
            (limit, timeouts) = (2 * limit, timeouts + 1.0);
        }
    };
    soon("a call waits", until_contended).await;
    let waiting = tokio::spawn({
        let elsewhere = elsewhere.clone();
        async move { elsewhere.lock().await.unwrap() }
    });
    eventually("it waits", async || sample(&handle, "redlatch_lock_waiting{kind=\"mutex\"}") == 1.0).await;
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap();
    server.run::<i64>(&["DEL", "lock:measured"]).await;
    assert!(guard.lease().renew().await.is_err());
    drop(guard);
    eventually("the loss is counted", async || sample(&handle, loss) == 1.0).await;
    let acquired =
        |labels: &str| sample(&handle, &format!("redlatch_lock_acquisitions{{kind=\"mutex\",{labels}}}"));
    assert_eq!(acquired("outcome=\"granted\",wake=\"at once\""), 1.0);
    // A poll may be under way at the release.
    let woken = ["notified", "polled"].map(|by| acquired(&format!("outcome=\"granted\",wake=\"{by}\"")));
    assert_eq!(woken.iter().sum::<f64>(), 1.0);
    assert_eq!(acquired("outcome=\"held\",wake=\"none\""), 1.0);
    for (name, count) in [
        ("redlatch_lock_waiting{kind=\"mutex\"}", 0.0),
        (contentions, 2.0),
        ("redlatch_lock_wait_duration_count{kind=\"mutex\",outcome=\"granted\"}", 2.0),
        ("redlatch_lock_wait_duration_count{kind=\"mutex\",outcome=\"timed_out\"}", timeouts),
        ("redlatch_lock_hold_duration_count{kind=\"mutex\",end=\"released\"}", 1.0),
        ("redlatch_lock_hold_duration_count{kind=\"mutex\",end=\"revoked\"}", 1.0),
    ] {
        assert_eq!(sample(&handle, name), count, "{name}");
    }
    assert!(sample(&handle, "redlatch_lease_renewal_lag_count{kind=\"mutex\"}") >= 1.0);
    assert!(sample(&handle, "redlatch_client_requests") > 5.0);
    // An outage.
    let impatient = ttl(600).node_timeout(Duration::from_millis(100));
    let impatient = Locks::builder().server(server.url()).options(impatient).connect_lazily().unwrap();
    server.pause();
    assert!(impatient.mutex("paused").unwrap().try_lock().await.is_err());
    eventually("the outage counts", async || sample(&handle, &failing) >= 1.0).await;
    server.resume();
    assert_eq!(sample(&handle, &outage), 1.0);
    eventually("it answers again", async || impatient.mutex("paused").unwrap().try_lock().await.is_ok())
        .await;
    eventually("its end counts", async || sample(&handle, &failing) == 0.0).await;
    // A client that ends during an outage does not count any more.
    server.pause();
    assert!(impatient.mutex("paused").unwrap().try_lock().await.is_err());
    eventually("the outage counts", async || sample(&handle, &failing) >= 1.0).await;
    drop(impatient);
    eventually("the client has ended", async || sample(&handle, &failing) == 0.0).await;
    server.resume();
    // Many at once share calls.
    let pairs = (0..64).map(|number| {
        let lock = locks.mutex(format!("many-{number}")).unwrap();
        tokio::spawn(async move { lock.lock().await.unwrap().release().await.unwrap() })
    });
    for pair in pairs.collect::<Vec<_>>() {
        pair.await.unwrap();
    }
    assert!(sample(&handle, "redlatch_client_batches") >= 1.0);
}

/// Nested holds that enter at once, while other tasks of the client wait, are no contention.
#[tokio::test]
async fn nested_calls_are_not_contention() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let server = Server::start().await;
    let locks = server.locks().await;
    let lock = |owner: &Owner| locks.reentrant("nested", owner).unwrap();
    let owner = Owner::new();
    let outer = lock(&owner).lock().await.unwrap();
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock(&Owner::new());
            tokio::spawn(async move { lock.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    let waits = "redlatch_lock_waiting{kind=\"reentrant\"}";
    eventually("three wait", async || handle.render().contains(waits) && sample(&handle, waits) == 3.0).await;
    let inner = lock(&owner).lock().await.unwrap();
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    for task in waiting {
        task.await.unwrap();
    }
    assert_eq!(sample(&handle, "redlatch_lock_contentions{kind=\"reentrant\"}"), 3.0);
    let at_once = "redlatch_lock_acquisitions{kind=\"reentrant\",outcome=\"granted\",wake=\"at once\"}";
    assert_eq!(sample(&handle, at_once), 2.0);
}

/// The names of metrics in a text, with `_` between their words.
fn names(text: &str, prefix: &str) -> BTreeSet<String> {
    let word = |rest: &str| -> String {
        rest.chars().take_while(|sign| sign.is_ascii_lowercase() || matches!(sign, '.' | '_')).collect()
    };
    text.split(prefix).skip(1).map(|rest| word(rest).replace('.', "_")).collect()
}

#[test]
fn page_and_dashboard_have_the_metrics_of_the_code() {
    let code = names(include_str!("../../src/measure.rs"), "\"redlatch.");
    assert_eq!(code.len(), 12);
    let page = include_str!("../../docs/metrics.md");
    assert_eq!(names(page, "| `redlatch."), code);
    for text in [page, include_str!("../../docs/metrics/dashboard.json")] {
        for name in names(text, "redlatch_") {
            assert!(code.contains(name.trim_end_matches("_bucket")), "{name}");
        }
    }
    serde_json::from_str::<serde_json::Value>(include_str!("../../docs/metrics/dashboard.json")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_cover_acquire_wait_hold_renew_and_release() {
    listen();
    let server = Server::start().await;
    let (locks, other) = (server.locks_with(ttl(3_000)).await, server.locks().await);
    let name = format!("{TRACED}spans");
    let spans = |start: &str| -> Vec<String> {
        logged_with(&name).into_iter().filter(|line| line.starts_with(start)).collect()
    };
    let mut guard = locks.mutex(&*name).unwrap().lock().await.unwrap();
    let token = guard.lease().fencing_token().unwrap();
    eventually("it was renewed", async || {
        spans("RECORDED SPAN renew").iter().any(|span| span.contains("outcome=\"renewed\""))
    })
    .await;
    let is_notified = || spans("RECORDED SPAN wait").iter().any(|span| span.contains("woken=\"notified\""));
    let until_notified = async {
        loop {
            let (lock, before) = (other.mutex(&*name).unwrap(), spans("SPAN wait").len());
            // After a renewal, since a waiter polls when the lease that it was told of would have
            // ended.
            let waiting = tokio::spawn(async move { lock.lock().await.unwrap() });
            eventually("it waits", async || spans("SPAN wait").len() > before).await;
            guard.release().await.unwrap();
            let next = waiting.await.unwrap();
            if is_notified() {
                break;
            }
            // It has polled just then, as after a stall.
            next.release().await.unwrap();
            guard = locks.mutex(&*name).unwrap().lock().await.unwrap();
        }
    };
    soon("a waiter is notified", until_notified).await;
    let has = |start: &str, fields: &[String]| {
        let found = spans(start).into_iter().any(|span| fields.iter().all(|field| span.contains(field)));
        assert!(found, "{start} {fields:?} is not in {:?}", spans(""));
    };
    let text = |text: &str| text.to_owned();
    for (start, fields) in [
        ("SPAN acquire", vec![format!("lock={name}"), text("kind=\"mutex\"")]),
        ("RECORDED SPAN acquire", vec![text("outcome=\"granted\"")]),
        ("RECORDED SPAN acquire", vec![text("waited=")]),
        ("RECORDED SPAN acquire", vec![format!("token={}", token.get())]),
        ("RECORDED SPAN acquire", vec![text("woken=\"notified\"")]),
        ("RECORDED SPAN wait", vec![text("woken=\"notified\"")]),
        ("SPAN hold", vec![format!("token={}", token.get()), text("kind=\"mutex\"")]),
        ("RECORDED SPAN hold", vec![text("end=\"released\"")]),
        ("RECORDED SPAN hold", vec![text("end=\"dropped\"")]),
        ("SPAN release", vec![text("kind=\"mutex\"")]),
        ("RECORDED SPAN release", vec![text("outcome=\"released\"")]),
    ] {
        has(start, &fields);
    }
}
