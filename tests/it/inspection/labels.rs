//! Labels: `inspect` reports the holder's client name and label.

use std::time::Duration;

use redlatch::{Holder, Locks, Options, Owner};

use crate::support::{Server, queued, soon};

async fn labelled(server: &Server, client_name: &str, label: &str) -> Locks {
    let builder = Locks::builder().server(server.url()).client_name(client_name).label(label);
    builder.connect().await.unwrap()
}

fn labels(holder: &Holder) -> (Option<&str>, Option<&str>) {
    (holder.client_name(), holder.label())
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_reports_client_name_and_label() {
    let server = Server::start().await;
    let other = server.locks().await;
    for (builder, expected) in [
        (Locks::builder(), (None, None)),
        (Locks::builder().client_name("billing"), (Some("billing"), None)),
        (Locks::builder().label("pod-7"), (None, Some("pod-7"))),
        (Locks::builder().client_name("billing").label("pod-7"), (Some("billing"), Some("pod-7"))),
    ] {
        let alone = Options::new().local_turn(Duration::ZERO); // two reads are two holds
        let locks = builder.server(server.url()).options(alone).connect().await.unwrap();
        let guard = locks.mutex("m").unwrap().lock().await.unwrap();
        let seen = other.mutex("m").unwrap().inspect().await.unwrap();
        assert_eq!(labels(&seen.holders[0]), expected);
        // The attempt on the server: 32 digits, and no further byte for a client without labels.
        let attempt: String = server.run(&["GET", "lock:m"]).await;
        let suffix = match expected {
            (None, None) => String::new(),
            (name, None) => format!(":{}", name.unwrap()),
            (name, label) => format!(":{}:{}", name.unwrap_or_default(), label.unwrap()),
        };
        let id = attempt.strip_suffix(&suffix).unwrap();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{attempt}");
        let json = serde_json::to_value(&seen.holders[0]).unwrap();
        assert_eq!((json["client_name"].as_str(), json["label"].as_str()), expected);
        assert_eq!(json["owner"], attempt);
        assert!(locks.mutex("m").unwrap().is_held_by(guard.lease()).await.unwrap());
        guard.release().await.unwrap();

        let rwlock = locks.rwlock("rw").unwrap();
        let guard = rwlock.write().await.unwrap();
        let seen = other.rwlock("rw").unwrap().inspect().await.unwrap();
        assert_eq!(labels(seen.writer.as_ref().unwrap()), expected);
        assert!(rwlock.is_held_by(guard.lease()).await.unwrap());
        // A sole reader and several readers have different layouts.
        let one = guard.downgrade().await.unwrap();
        let seen = other.rwlock("rw").unwrap().inspect().await.unwrap();
        assert_eq!(labels(&seen.readers[0]), expected);
        let another = rwlock.read().await.unwrap();
        let seen = other.rwlock("rw").unwrap().inspect().await.unwrap();
        assert_eq!(seen.readers.len(), 2);
        for reader in &seen.readers {
            assert_eq!(labels(reader), expected);
        }
        one.release().await.unwrap();
        another.release().await.unwrap();
    }
}

/// For a hold with an owner, the server replies with the owner, which several clients may share.
#[tokio::test(flavor = "multi_thread")]
async fn inspect_reports_no_label_for_a_hold_with_an_owner() {
    let server = Server::start().await;
    let (locks, owner) = (labelled(&server, "billing", "pod-7").await, Owner::new());
    let reentrant = locks.reentrant("re", &owner).unwrap();
    let outer = reentrant.lock().await.unwrap();
    let inner = reentrant.lock().await.unwrap();
    let seen = reentrant.inspect().await.unwrap();
    assert_eq!((seen.holders[0].count, labels(&seen.holders[0])), (2, (None, None)));
    assert_eq!(seen.holders[0].owner, owner.to_string());
    // The hash has both attempts with their labels.
    let fields: Vec<String> = server.run(&["HKEYS", "lock:re"]).await;
    assert_eq!(fields.iter().filter(|field| field.ends_with(":billing:pod-7")).count(), 2, "{fields:?}");
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    let rwlock = locks.rwlock("rw").unwrap().with_owner(&owner);
    let guard = rwlock.write().await.unwrap();
    assert_eq!(labels(rwlock.inspect().await.unwrap().writer.as_ref().unwrap()), (None, None));
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_reports_attempts_of_other_programs() {
    let server = Server::start().await;
    let mutex = server.locks().await.mutex("x").unwrap();
    for word in ["a", "backup@host-3:1234", "8743c9c0-0795-4907-87fd-6c719a6b4586:61:a", "two words:a:b"] {
        server.run::<()>(&["SET", "lock:x", word, "PX", "60000"]).await;
        let seen = mutex.inspect().await.unwrap();
        assert_eq!((seen.holders[0].owner.as_str(), labels(&seen.holders[0])), (word, (None, None)));
    }
    // A program that writes labels in the same form is reported like a client of this crate.
    let word = format!("{}:cron:host-3", "0123456789abcdef".repeat(2));
    server.run::<()>(&["SET", "lock:x", &word, "PX", "60000"]).await;
    let seen = mutex.inspect().await.unwrap();
    assert_eq!(labels(&seen.holders[0]), (Some("cron"), Some("host-3")));
}

#[tokio::test(flavor = "multi_thread")]
async fn holder_display_has_labels_and_a_shortened_attempt() {
    let server = Server::start().await;
    let locks = labelled(&server, "billing", "pod-7").await;
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().await.unwrap();
    let seen = mutex.inspect().await.unwrap();
    let attempt: String = server.run(&["GET", "lock:x"]).await;
    let (debug, line) = (format!("{seen:?}"), seen.holders[0].to_string());
    assert_eq!(labels(&seen.holders[0]), (Some("billing"), Some("pod-7")));
    let start = format!("billing:pod-7 ({}…), 1 hold, ", &attempt[..8]);
    assert!(line.starts_with(&start) && line.ends_with("s left"), "{line}");
    assert!(!debug.contains(&attempt[..9]) && !line.contains(&attempt[..9]), "{debug} {line}");
    guard.release().await.unwrap();
    // Another program's value cannot break a log line.
    server.run::<()>(&["SET", "lock:x", "\u{1b}[2J\nroot logged in", "PX", "60000"]).await;
    let line = mutex.inspect().await.unwrap().holders[0].to_string();
    assert!(line.starts_with(r"\u{1b}[2J\nroo…, 1 hold, "), "{line}");
}

/// The scripts accept an attempt of 128 bytes.
#[tokio::test(flavor = "multi_thread")]
async fn longest_labels_fit_into_every_request() {
    let servers = [Server::start().await, Server::start().await, Server::start().await];
    let (name, label, owner) = ("n".repeat(31), "l".repeat(63), Owner::new());
    let builder = || Locks::builder().client_name(&name).label(&label);
    for builder in [builder().server(servers[0].url()), builder().quorum(servers.iter().map(Server::url))] {
        let locks = builder.connect().await.unwrap();
        let mutex = locks.mutex("m").unwrap();
        let guard = mutex.lock().await.unwrap();
        let seen = mutex.inspect().await.unwrap();
        assert_eq!(labels(&seen.holders[0]), (Some(name.as_str()), Some(label.as_str())));
        assert_eq!(seen.holders[0].owner.len(), 128);
        guard.release().await.unwrap();
        let reentrant = locks.reentrant("re", &owner).unwrap();
        let outer = reentrant.lock().await.unwrap();
        reentrant.lock().await.unwrap().release().await.unwrap();
        outer.release().await.unwrap();
        let rwlock = locks.rwlock("rw").unwrap();
        let reading = rwlock.read().await.unwrap();
        assert!(rwlock.try_write().await.unwrap().is_none());
        reading.release().await.unwrap();
        let writing = rwlock.write().await.unwrap();
        writing.downgrade().await.unwrap().release().await.unwrap();
        assert!(mutex.lock().await.unwrap().lease().fencing_token().is_some());
        assert!(mutex.force_release().await.is_ok());
    }
}

/// A message names the attempt, so it must reach the mailbox with labels, too. A waiter that does
/// not receive it polls, which is one more script for each release.
#[tokio::test(flavor = "multi_thread")]
async fn labelled_waiters_are_notified() {
    const ROUNDS: u64 = 5;
    let server = Server::start().await;
    let holding = labelled(&server, "billing", "pod-7").await.mutex("x").unwrap();
    let waiting = labelled(&server, "billing", "pod-8").await.mutex("x").unwrap();
    let mut scripts = 0;
    for _ in 0..ROUNDS {
        let guard = holding.lock().await.unwrap();
        let count = async || vec![server.waiters("{lock:x}:waiters").await];
        let mutex = waiting.clone();
        let task = queued(count, async move { mutex.lock().await }).await;
        let before = server.scripts_run().await;
        guard.release().await.unwrap();
        let next = soon("the lock is granted", task).await.unwrap().unwrap();
        scripts += server.scripts_run().await - before;
        let seen = holding.inspect().await.unwrap();
        assert_eq!(labels(&seen.holders[0]), (Some("billing"), Some("pod-8")));
        next.release().await.unwrap();
    }
    // A poll may happen between release and message by chance, but not in every round.
    assert!(scripts < 2 * ROUNDS, "{scripts} scripts for {ROUNDS} releases");
    drop((holding, waiting));
    server.assert_nothing_left().await;
}
