//! Thousands of concurrent requests: they queue inside the client, and that time does not count as
//! silence of the server.

use std::time::{Duration, Instant};

use redlatch::{Error, Locks, Options, Wakeups};
use tokio::task::JoinSet;

use crate::support::{Proxy, Server, Stopwatch, count_waiters, eventually, queued, soon};

const MANY: usize = if cfg!(debug_assertions) { 20_000 } else { 200_000 };

/// Acquires and releases a lock for each number, all at the same time. Returns the errors.
async fn lock_all(locks: &Locks, numbers: std::ops::Range<usize>) -> Vec<Error> {
    let mut tasks = JoinSet::new();
    for number in numbers {
        let mutex = locks.mutex(format!("burst-{number}")).unwrap();
        tasks.spawn(async move { mutex.lock().await?.release().await });
    }
    let mut failed = Vec::new();
    while let Some(outcome) = tasks.join_next().await {
        failed.extend(outcome.unwrap().err());
    }
    failed
}

/// The last request waits for much longer than a node timeout, which is what 5,000 locks take: the
/// rate of a busy machine is part of the measurement.
#[tokio::test(flavor = "multi_thread")]
async fn burst_of_locks_succeeds_on_a_responding_server() {
    let server = Server::start().await;
    let patient = server.locks_with(Options::new().node_timeout(Duration::from_secs(60))).await;
    let mut limit = Duration::ZERO;
    for _ in 0..2 {
        let start = Instant::now();
        assert!(lock_all(&patient, 0..MANY / 10).await.is_empty());
        limit = start.elapsed() * 5 / 2; // the second time, connected and with memory
    }
    let mutex = patient.mutex("x").unwrap();
    let (lock, limited) = (size_of_val(&mutex.lock()), size_of_val(&mutex.lock_timeout(limit)));
    println!("FIG bytes of a future: {lock} to lock, {limited} within a limit");
    assert!(lock.max(limited) < 5_000, "each waiting call needs this much memory");
    drop((patient, mutex));
    loop {
        let locks = server.locks_with(Options::new().node_timeout(limit)).await;
        let start = Instant::now();
        let failed = lock_all(&locks, 0..MANY).await;
        let took = start.elapsed();
        println!("FIG {MANY} locks and releases: {took:?}");
        assert_eq!(failed.len(), 0, "of {MANY} failed, such as {:?}", failed.first());
        if took > 2 * limit {
            break;
        }
        // The machine was slower when that was measured: none has queued for longer than a limit.
        limit = took / 4;
    }
    server.assert_nothing_left().await;
}

/// Requests in the client's queue fail together with those that were sent.
#[tokio::test(flavor = "multi_thread")]
async fn queued_requests_fail_together_when_the_server_is_silent() {
    const TRIES: usize = 4_000;
    let server = Server::start().await;
    let limit = Duration::from_secs(2);
    let locks = server.locks_with(Options::new().node_timeout(limit)).await;
    locks.mutex("x").unwrap().try_lock().await.unwrap().unwrap().release().await.unwrap();
    server.pause();
    let start = Stopwatch::start();
    let mut tasks = JoinSet::new();
    for number in 0..TRIES {
        let mutex = locks.mutex(format!("burst-{number}")).unwrap();
        tasks.spawn(async move { mutex.try_lock().await });
    }
    let mut first = None;
    while let Some(outcome) = tasks.join_next().await {
        assert!(matches!(outcome.unwrap(), Err(Error::Redis { .. })));
        first.get_or_insert(start.elapsed());
    }
    let (first, last) = (first.unwrap(), start.stop());
    println!("FIG {TRIES} tries on a silent server: {first:?} to {last:?}");
    assert!(first >= limit, "{first:?}");
    // In batches of 256, one after the other, they would take 30 seconds.
    assert!(last.undisturbed() < 2 * limit, "{last:?}");
    server.resume();
    soon("settled() returns", locks.settled()).await;
    drop(locks);
    server.assert_nothing_left().await;
}

/// A call gives up while its request is in the client's queue: nothing was sent, so nothing is sent
/// to undo it.
#[tokio::test(flavor = "multi_thread")]
async fn abandoned_request_in_the_queue_is_never_sent() {
    const TRIES: u64 = 4_000;
    let server = Server::start().await;
    let locks = server.locks_with(Options::new().node_timeout(Duration::from_secs(20))).await;
    locks.mutex("x").unwrap().try_lock().await.unwrap().unwrap().release().await.unwrap();
    let before = server.scripts_run().await;
    server.pause();
    let mut tasks = JoinSet::new();
    for number in 0..TRIES {
        let mutex = locks.mutex(format!("burst-{number}")).unwrap();
        tasks.spawn(async move { mutex.lock_timeout(Duration::from_secs(1)).await });
    }
    while let Some(outcome) = tasks.join_next().await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
    }
    server.resume();
    soon("settled() returns", locks.settled()).await;
    // At most 64 single requests and 4 batches of 64 were sent; each of them is released.
    let run = server.scripts_run().await - before;
    println!("FIG {run} scripts for {TRIES} calls that gave up");
    assert!(run <= 2 * (64 + 4 * 64) + 64, "{run}");
    drop(locks);
    server.assert_nothing_left().await;
}

/// The requests have left that queue, in batches: the server may have granted them, so each one is
/// undone.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_dropped_after_their_batch_was_written_leave_no_lock() {
    const CALLS: usize = 40;
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let patient = Options::new().node_timeout(Duration::from_secs(20));
    let locks = Locks::builder().server(proxy.url()).options(patient).connect().await.unwrap();
    locks.mutex("first").unwrap().try_lock().await.unwrap().unwrap().release().await.unwrap();
    proxy.hold_replies(true);
    let mut tasks = JoinSet::new();
    for number in 0..CALLS {
        let mutex = locks.mutex(format!("burst-{number}")).unwrap();
        tasks.spawn(async move { mutex.try_lock().await });
    }
    let held = async || server.run::<Vec<String>>(&["KEYS", "lock:burst-*"]).await.len();
    // Eight requests leave alone, and the next ones in a batch. Some may wait for an answer.
    eventually("a batch is granted", async || held().await > 8).await;
    tasks.shutdown().await;
    proxy.hold_replies(false);
    soon("settled() returns", locks.settled()).await;
    assert_eq!(held().await, 0);
    drop(locks);
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// A call that waits in Redis is dropped while its next poll is in the client's queue: the poll is
/// never sent, but its place there is given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_poll_that_was_not_sent_leaves_no_place() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let polls = Options::new().node_timeout(Duration::from_secs(20)).wakeups(Wakeups::Poll);
    let locks = server.locks_with(polls.poll_cap(Duration::from_secs(1))).await;
    let places = count_waiters("{lock:x}:waiters");
    let lock = locks.mutex("x").unwrap();
    let waiting =
        queued(async || vec![server.run(&places).await], async move { lock.lock().await.map(drop) }).await;
    server.pause();
    let mut tasks = JoinSet::new();
    for number in 0..2_000 {
        let mutex = locks.mutex(format!("burst-{number}")).unwrap();
        tasks.spawn(async move { mutex.try_lock().await.map(drop) });
    }
    let later = Instant::now() + Duration::from_secs(2);
    eventually("a poll was due", async || Instant::now() > later).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    server.resume();
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap().unwrap();
    }
    soon("settled() returns", locks.settled()).await;
    assert_eq!(server.run::<u64>(&places).await, 0);
    guard.release().await.unwrap();
    drop((locks, holder));
    server.assert_nothing_left().await;
}

/// With twelve tasks, some requests are sent alone and others gather. None waits for the reply to
/// another one: over a slow network that would double the time of each request.
#[tokio::test]
async fn few_more_tasks_than_are_sent_alone_take_no_longer() {
    let server = Server::start().await;
    let proxy = Proxy::before(vec![server.port()]).await;
    // A call for four locks fits into the bytes that the proxy delays at a time.
    let options = Options::new().prefix("");
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    let took = async |tasks: usize| {
        let start = Stopwatch::start();
        let mut running = JoinSet::new();
        for number in 0..tasks {
            let mutex = locks.mutex(format!("{number}")).unwrap();
            running.spawn(async move {
                for _ in 0..5 {
                    mutex.lock().await.unwrap().release().await.unwrap();
                }
            });
        }
        running.join_all().await;
        start.stop()
    };
    // A busy machine makes single times longer, a mistake all of them.
    let thrice = async |tasks| [took(tasks).await, took(tasks).await, took(tasks).await];
    took(24).await; // the scripts are known then
    proxy.slow_down(Some(Duration::from_millis(40)));
    let alone = thrice(8).await.iter().map(Stopwatch::elapsed).min().unwrap();
    for tasks in [12, 16] {
        let beside_others = thrice(tasks).await.iter().map(Stopwatch::undisturbed).min().unwrap();
        println!("FIG 8 tasks {alone:?}, {tasks} tasks {beside_others:?}");
        assert!(beside_others < alone * 3 / 2, "{tasks} tasks: {beside_others:?}, 8 tasks: {alone:?}");
    }
}
