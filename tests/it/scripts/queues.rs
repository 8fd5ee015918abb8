//! Queues with many dead waiters or many marks.

use std::time::Duration;

use super::client::{Acquire, Answer, Client, KEYS, MARKS, Request};
use crate::support::{Server, Stopwatch, eventually};
use Answer::{Busy, Final};

/// A channel without subscribers.
const UNHEARD: &str = "lock:wake:00000000000000000000000000000000";

fn on_one_server(kind: &'static str) -> Acquire {
    Acquire { kind, is_for_quorum: false }
}

/// Queues waiters without clients, as if they had polled just now.
async fn queue_without_subscribers(client: &Client, kind: &str, count: u64) {
    let (now, lane) = (client.time().await as i64, if kind == "read" { 1 << 52 } else { 0 });
    for number in 0..count as i64 {
        let (owner, depth) =
            if kind == "mutex" { (String::new(), "") } else { (format!("o{number}"), " 255") };
        let entry = format!("d{number} {kind} 3000 {UNHEARD} {owner}{depth}");
        let place = (now - 100_000 + number - lane).to_string();
        let _: i64 = client.run(&["ZADD", KEYS[2], &place, &entry]).await;
    }
    let _: i64 = client.run(&["PEXPIRE", KEYS[2], "60000"]).await;
}

/// More dead waiters are queued than one script passes over: the first live waiter acquires next
/// all the same.
#[tokio::test]
async fn no_request_overtakes_live_waiter_behind_many_dead_ones() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&["mutex", "reentrant", "write"]) {
        let take = |attempt, owner, proposal| acquire.fenced(owner, attempt, proposal);
        assert!(matches!(take("h", "oh", 10).send(&client).await, Final(1..)));
        queue_without_subscribers(&client, acquire.kind, 600).await;
        let living = take("l", "ol", 20).queued();
        assert_eq!(living.send(&client).await, Busy);
        assert_eq!(acquire.release("oh", "h").send(&client).await, Final(1));
        let mut polls = 0;
        loop {
            assert_eq!(
                take("n", "on", 30).send(&client).await,
                Busy,
                "{acquire:?}: the new attempt overtakes"
            );
            polls += 1;
            if living.send(&client).await != Busy {
                break;
            }
        }
        assert!(polls <= 12, "{acquire:?}: {polls} polls");
        assert_eq!(acquire.release("ol", "l").send(&client).await, Final(1), "{acquire:?}");
        client.flush().await;
    }
}

#[tokio::test]
async fn no_writer_overtakes_live_reader_behind_many_dead_ones() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [read, write] = ["read", "write"].map(on_one_server);
    assert!(matches!(write.fenced("oh", "h", 10).send(&client).await, Final(1..)));
    queue_without_subscribers(&client, "read", 1_000).await;
    let living = read.fenced("ol", "l", 20).queued();
    assert_eq!(living.send(&client).await, Busy);
    assert_eq!(write.release("oh", "h").send(&client).await, Final(1));
    let mut polls = 0;
    loop {
        assert_eq!(write.fenced("on", "n", 30).send(&client).await, Busy, "the new writer overtakes");
        polls += 1;
        if living.send(&client).await != Busy {
            break;
        }
    }
    assert!(polls <= 6, "{polls} polls");
}

/// Each dead writer keeps new readers out until its claim expires. The next one must not keep out a
/// reader that queued before it.
#[tokio::test]
async fn crash_loop_of_writers_does_not_starve_reader() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [read, write] = ["read", "write"].map(on_one_server);
    for channel in ["", UNHEARD] {
        assert!(matches!(read.fenced("oh", "h", 10).send(&client).await, Final(1..)));
        let crash = async |number: u64| {
            let crashing = write.fenced("oc", &format!("c{number}"), 10);
            let crashing = crashing.with("claim_ms", "300").with("channel", channel);
            assert_eq!(crashing.send(&client).await, Busy);
        };
        crash(0).await;
        let living = read.fenced("ol", "l", 20).with("claim_ms", "60000");
        assert_eq!(living.send(&client).await, Busy, "a writer waits before it");
        let (number, start) = (std::sync::atomic::AtomicU64::new(1), Stopwatch::start());
        eventually("the reader is granted the lock", || async {
            crash(number.fetch_add(1, std::sync::atomic::Ordering::Relaxed)).await;
            living.send(&client).await != Busy
        })
        .await;
        println!("FIG {:?}: a reader waited for a crash loop of writers ({channel:?})", start.elapsed());
        assert!(start.undisturbed() < Duration::from_secs(3), "one claim is 0.3 s: {start:?}");
        // A new reader still waits behind the writers.
        crash(1_000_000).await;
        assert_eq!(read.fenced("on", "n", 20).send(&client).await, Busy);
        client.flush().await;
    }
}

/// End marks are removed although waiters with long claims are alive.
#[tokio::test]
async fn end_marks_are_bounded_beside_waiters_with_long_claims() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mutex = on_one_server("mutex");
    assert!(matches!(mutex.fenced("o", "h", 0).send(&client).await, Final(1..)));
    for number in 0..150 {
        let waiter = mutex.fenced("o", &format!("w{number}"), 0).with("claim_ms", "20000");
        for _ in 0..2 {
            assert_eq!(waiter.send(&client).await, Busy);
        }
    }
    let marks = "local now = redis.call('TIME')
        for number = 1, 20000 do
          redis.call('ZADD', KEYS[1], 2^52 + (now[1] + 59) * 1000000 + 11, 'ended e' .. number)
        end";
    client.run::<redis::Value>(&["EVAL", marks, "1", KEYS[2]]).await;
    for number in 0..300 {
        let end = mutex.release("o", &format!("n{number}")).with("remember", "1");
        assert_eq!(end.send(&client).await, Final(0));
    }
    let marks: u64 = client.run(&["ZCOUNT", KEYS[2], MARKS, "+inf"]).await;
    assert!(marks <= 20_000 + 150, "{marks} marks");
    assert_eq!(client.waiters().await, 150, "no waiter is removed");
    // The oldest marks were removed first.
    let last = mutex.fenced("o", "n299", 0).send(&client).await;
    assert_eq!(last, Final(-1), "the newest mark remains");
}

/// An acquire that arrives after the attempt was downgraded must not be taken for a write grant.
#[tokio::test]
async fn write_acquire_is_refused_after_downgrade() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [read, write] = ["read", "write"].map(on_one_server);
    assert!(matches!(write.fenced("o", "a", 0).send(&client).await, Final(1..)));
    let downgrade = [("attempt", "a"), ("ttl_ms", "60000"), ("owner", "o")];
    let downgrade = Request::new("rwlock/downgrade", &downgrade);
    assert!(matches!(downgrade.send(&client).await, Final(1..)));
    let before = client.state().await;
    assert_eq!(write.fenced("o", "a", 0).send(&client).await, Final(-1));
    assert_eq!(client.state().await, before);
    assert!(matches!(read.fenced("p", "b", 0).send(&client).await, Final(1..)), "the attempt reads");
}

/// A companion key with a foreign value must not end a release half-way.
#[tokio::test]
async fn release_succeeds_with_corrupt_counter() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in ["mutex", "reentrant", "write"].map(on_one_server) {
        for waiter in [acquire.kind, "read"] {
            if waiter == "read" && acquire.kind != "write" {
                continue;
            }
            assert_eq!(acquire.unfenced("oh", "h").send(&client).await, Final(0));
            let waiting = on_one_server(waiter).unfenced("ow", "w").queued();
            assert_eq!(waiting.send(&client).await, Busy);
            client.run::<()>(&["DEL", KEYS[1]]).await;
            let _: i64 = client.run(&["RPUSH", KEYS[1], "x"]).await;
            let answer = acquire.release("oh", "h").try_send(&client).await;
            assert_eq!(answer.unwrap(), Final(1), "{acquire:?} before {waiter}");
            assert!(!client.exists(KEYS[0]).await, "{acquire:?} before {waiter}");
            client.flush().await;
        }
    }
}
