//! Long queues, and queues that dead waiters keep joining.

use std::time::Duration;

use super::client::{Acquire, Answer, Client, KEYS, MARKS};
use crate::support::{Server, Stopwatch, eventually};
use Answer::{Busy, Final};

/// A channel without subscribers.
const UNHEARD: &str = "lock:wake:00000000000000000000000000000000";

fn on_one_server(kind: &'static str) -> Acquire {
    Acquire { kind, is_for_quorum: false }
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

/// The number of read holds of the owner `o`.
async fn holds(client: &Client) -> usize {
    let field: Option<String> = client.run(&["HGET", KEYS[0], "read:o"]).await;
    field.map_or(0, |words| words.split(' ').count() - 1)
}

#[tokio::test]
async fn owner_with_4000_queued_reads_never_exceeds_max_depth() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let [read, write] = ["read", "write"].map(on_one_server);
    // Longer than the test, also on a busy machine. The claim is the longest one: no waiter is
    // considered dead while the test queues the others.
    const HOUR: &str = "3600000";
    let writing = write.fenced("w", "w", 0).with("ttl_ms", HOUR);
    assert!(matches!(writing.send(&client).await, Final(1..)));
    let attempts: Vec<String> = (0..4000).map(|number| format!("r{number}")).collect();
    let take = |attempt: &str| read.fenced("o", attempt, 0).with("ttl_ms", HOUR).with("claim_ms", "60000");
    for attempt in &attempts {
        assert_eq!(take(attempt).send(&client).await, Busy);
    }
    assert_eq!(write.release("w", "w").send(&client).await, Final(1));
    let admitted = holds(&client).await;
    assert!((1..=255).contains(&admitted), "{admitted} holds");
    let mut granted = Vec::new();
    for attempt in &attempts {
        match take(attempt).send(&client).await {
            Final(1..) => granted.push(attempt),
            answer => assert_eq!(answer, Final(-4), "{attempt}"),
        }
        let holds = holds(&client).await;
        assert!(holds <= 255, "{attempt}: {holds} holds");
    }
    assert_eq!(granted.len(), 255, "the owner has max_depth holds");
    // A refused attempt is ended by its client; the others leave one after another.
    for attempt in attempts.iter().filter(|attempt| !granted.contains(attempt)) {
        let end = read.release("o", attempt).with("claim_ms", "60000");
        assert!(matches!(end.send(&client).await, Final(0..)));
    }
    assert_eq!(client.waiters().await, 0);
    for (index, attempt) in granted.iter().enumerate() {
        let answer = read.release("o", attempt).send(&client).await;
        assert_eq!(answer, Final(255 - i64::try_from(index).unwrap()), "{attempt}");
    }
    assert!(!client.exists("k").await);
}

/// One release in sixteen removes marks: those that have expired, and above 20,000 the oldest. The
/// waiters, and the newest mark, stay.
#[tokio::test]
async fn end_marks_are_removed_by_releases_and_force() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in ["mutex", "reentrant", "write"].map(on_one_server) {
        for by_force in [false, true] {
            assert!(matches!(acquire.fenced("o", "h", 0).send(&client).await, Final(1..)));
            assert_eq!(acquire.fenced("p", "w", 0).with("claim_ms", "60000").send(&client).await, Busy);
            let marks = "local now = redis.call('TIME')
                redis.call('ZADD', KEYS[1], 2^52 + now[1] * 1000000 - 1, 'ended expired')
                for number = 1, 20100 do
                  redis.call('ZADD', KEYS[1], 2^52 + (now[1] + 30) * 1000000 + 11 + number, 'ended e' .. number)
                end";
            client.run::<redis::Value>(&["EVAL", marks, "1", KEYS[1]]).await;
            let mut count = 0;
            let marks = async || client.run::<u64>(&["ZCOUNT", KEYS[1], MARKS, "+inf"]).await;
            while marks().await > 20_000 {
                count += 1;
                assert!(count < 500, "{acquire:?}, by force: {by_force}: the marks remain");
                let attempt = format!("n{count}");
                let end = acquire.release("o", &attempt).with("remember", "1");
                let end = if by_force { acquire.force(&attempt).with("only_from", "x") } else { end };
                assert_eq!(end.send(&client).await, Final(0));
            }
            let score = async |mark: &str| client.run::<Option<f64>>(&["ZSCORE", KEYS[1], mark]).await;
            assert_eq!(score("ended expired").await, None, "{acquire:?}");
            assert_eq!(score("ended e1").await, None, "{acquire:?}: the oldest ones go first");
            assert!(score(&format!("ended n{count}")).await.is_some(), "{acquire:?}: the newest one stays");
            assert_eq!(client.waiters().await, 1, "{acquire:?}");
            client.flush().await;
        }
    }
}

/// A client that waits for replicas asks how much of what its own connection has written they have.
/// So each grant writes, also one that finds that a release has granted the lock, for longer than
/// was asked for.
#[tokio::test]
async fn grant_that_is_found_writes() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let changes = async || {
        let info: String = client.run(&["INFO", "persistence"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:"));
        line.unwrap().parse::<u64>().unwrap()
    };
    for kind in ["mutex", "reentrant", "write"] {
        client.flush().await;
        let acquire = on_one_server(kind);
        assert!(matches!(acquire.fenced("a", "a", 7).send(&client).await, Final(1..)));
        let waiting = acquire.fenced("w", "w", 7).with("ttl_ms", "30000").with("claim_ms", "60000");
        assert_eq!(waiting.send(&client).await, Busy);
        assert_eq!(acquire.release("a", "a").send(&client).await, Final(1));
        let before = changes().await;
        assert!(matches!(waiting.send(&client).await, Final(1..)), "{kind}");
        assert!(changes().await > before, "{kind}: the grant wrote nothing");
    }
}
