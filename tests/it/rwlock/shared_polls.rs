//! Tasks of one client that wait to read share their polls.

use std::collections::BTreeMap;
use std::time::Duration;

use redlatch::{Options, RwLock, RwLockReadGuard};
use tokio::task::JoinHandle;

use super::{READ_LANE, client};
use crate::support::{NEVER, Server, Stopwatch, eventually, patient, soon};

const READERS: usize = 100;
const QUEUE: &str = "{lock:rw}:waiters";
/// The scores of waiters are below this, those of all marks are not.
const MARKS: f64 = (1u64 << 52) as f64;

/// A claim is as long as the TTL, and a poll is due after 0.7 of it.
fn options() -> Options {
    patient().read_ttl(Duration::from_secs(2)).poll_cap(NEVER)
}

/// Starts tasks that wait to read, and returns once all of them are queued.
async fn waiting(server: &Server, lock: &RwLock) -> Vec<JoinHandle<RwLockReadGuard>> {
    waiting_beside(server, lock, 0).await
}

/// The same, while some already wait.
async fn waiting_beside(server: &Server, lock: &RwLock, others: u64) -> Vec<JoinHandle<RwLockReadGuard>> {
    let tasks = (0..READERS).map(|_| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.read().await.unwrap() })
    });
    let tasks = tasks.collect();
    eventually("all readers wait", async || server.waiters(QUEUE).await == READERS as u64 + others).await;
    tasks
}

/// Until when each waiter counts as alive, by its attempt: the scores of the marks of polls.
async fn seen(server: &Server) -> BTreeMap<String, f64> {
    let entries: Vec<(String, f64)> = server.run(&["ZRANGE", QUEUE, "0", "-1", "WITHSCORES"]).await;
    entries
        .into_iter()
        .filter_map(|(entry, score)| Some((entry.strip_prefix("seen ")?.to_owned(), score)))
        .collect()
}

/// Returns once all of these waiters were seen again.
async fn seen_again(server: &Server, count: usize) {
    let before = seen(server).await;
    let is_later =
        |(attempt, score): (String, f64)| before.get(&attempt).is_none_or(|earlier| score > *earlier);
    eventually("all waiters were seen", async || {
        let marks = seen(server).await;
        marks.len() >= count && marks.into_iter().filter(|mark| is_later(mark.clone())).count() >= count
    })
    .await;
}

#[tokio::test]
async fn rwlock_standalone_one_poll_keeps_all_readers_of_a_client_waiting() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let readers = waiting(&server, &client(&server, options()).await).await;
    seen_again(&server, READERS).await;
    let before = server.scripts_run().await;
    for _ in 0..3 {
        seen_again(&server, READERS).await;
    }
    let polls = server.scripts_run().await - before;
    println!("{polls} scripts while {READERS} readers were seen three times");
    assert!(polls < READERS as u64 / 4, "{polls} scripts for {READERS} readers");
    writing.release().await.unwrap();
    all_enter(readers).await;
    assert_eq!(server.waiters(QUEUE).await, 0);
}

/// Only a poll of one reader alone removes dead waiters, but one of them suffices for that.
#[tokio::test]
async fn rwlock_standalone_one_reader_at_a_time_also_polls_alone() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let options = options().poll_cap(Duration::from_millis(50));
    let readers = waiting(&server, &client(&server, options).await).await;
    seen_again(&server, READERS).await;
    // Only the poll of one reader asks whether the lock is free before anything else.
    let (shared, alone) = (server.calls("cmdstat_zmscore:").await, server.calls("cmdstat_exists:").await);
    eventually("160 polls", async || server.calls("cmdstat_zmscore:").await >= shared + 160).await;
    let alone = server.calls("cmdstat_exists:").await - alone;
    println!("{alone} polls of one reader");
    assert!((1..=10).contains(&alone), "{alone} polls of one reader");
    writing.release().await.unwrap();
    all_enter(readers).await;
}

/// The task that polled for the others may be among those that give up.
#[tokio::test]
async fn rwlock_standalone_readers_are_kept_waiting_when_others_give_up() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let mut readers = waiting(&server, &client(&server, options()).await).await;
    // The longest wait is the next poll's: each round is likely to take the task that polls.
    while readers.len() > 1 {
        seen_again(&server, readers.len()).await;
        for reader in readers.drain(..readers.len() / 2) {
            reader.abort();
        }
        let left = readers.len() as u64;
        eventually("the others have left", async || server.waiters(QUEUE).await == left).await;
    }
    seen_again(&server, 1).await;
    writing.release().await.unwrap();
    readers.remove(0).await.unwrap().release().await.unwrap();
}

/// Most give up at the same moment, with one limit for all. The rest must not lose their places
/// before one of them polls.
#[tokio::test]
async fn rwlock_standalone_readers_are_kept_waiting_when_most_give_up_at_once() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let options = options().read_ttl(Duration::from_secs(10)); // a claim of 3 s
    let mut readers = waiting(&server, &client(&server, options).await).await;
    for _ in 0..2 {
        seen_again(&server, READERS).await;
    }
    let rest = readers.split_off(READERS - 2);
    readers.iter().for_each(JoinHandle::abort);
    eventually("the others have left", async || server.waiters(QUEUE).await == 2).await;
    let start = Stopwatch::start();
    seen_again(&server, 2).await;
    assert!(start.undisturbed() < Duration::from_secs(5), "{start:?}");
    writing.release().await.unwrap();
    all_enter(rest).await;
}

#[tokio::test]
async fn rwlock_standalone_a_shared_poll_notices_a_lost_place() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let readers = waiting(&server, &client(&server, options()).await).await;
    seen_again(&server, READERS).await;
    let entries: Vec<(String, f64)> = server.run(&["ZRANGE", QUEUE, "0", "-1", "WITHSCORES"]).await;
    let places: Vec<(String, f64)> = entries.into_iter().filter(|(_, score)| *score < MARKS).collect();
    assert!(places.iter().all(|(_, score)| *score > -(READ_LANE as f64)));
    for (entry, _) in places.iter().step_by(3) {
        assert_eq!(server.run::<u64>(&["ZREM", QUEUE, entry]).await, 1);
    }
    eventually("all have their places again", async || {
        let entries: Vec<(String, f64)> = server.run(&["ZRANGE", QUEUE, "0", "-1", "WITHSCORES"]).await;
        places.iter().all(|place| entries.contains(place))
    })
    .await;
    // A queue that is lost as a whole.
    server.run::<u64>(&["DEL", QUEUE]).await;
    eventually("the queue is there again", async || {
        let entries: Vec<(String, f64)> = server.run(&["ZRANGE", QUEUE, "0", "-1", "WITHSCORES"]).await;
        places.iter().all(|place| entries.contains(place))
    })
    .await;
    writing.release().await.unwrap();
    all_enter(readers).await;
}

/// The queue is lost, and then the writer releases: no reader has a place, so each must ask.
#[tokio::test]
async fn rwlock_standalone_readers_without_places_do_not_enter_one_by_one() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let readers = waiting(&server, &client(&server, options()).await).await;
    seen_again(&server, READERS).await;
    server.run::<u64>(&["DEL", QUEUE]).await;
    writing.release().await.unwrap();
    all_enter(readers).await;
}

/// A future that is not polled any more loses its place, although its client polls for others.
#[tokio::test]
async fn rwlock_standalone_a_future_that_is_not_polled_is_not_kept_waiting() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let lock = client(&server, options()).await;
    let mut stalled = Box::pin(lock.read());
    let is_queued = async || server.waiters(QUEUE).await == 1;
    let until_queued = eventually("the reader waits", is_queued);
    assert!(tokio::select! { () = until_queued => true, _ = &mut stalled => false });
    let first: Vec<(String, f64)> = server.run(&["ZRANGE", QUEUE, "0", "0", "WITHSCORES"]).await;
    let (attempt, place) = (first[0].0.split(' ').next().unwrap(), first[0].1 + READ_LANE as f64);
    let readers = waiting_beside(&server, &lock, 1).await;
    // It was seen when it queued, and by polls of others until its own were missing.
    eventually("it counts as dead", async || {
        let now = server.time().await as f64;
        let is_seen = |until: &f64| *until > ((1u64 << 52) + 61_000_000) as f64 + now;
        now - place > 2e6 && !seen(&server).await.get(attempt).is_some_and(is_seen)
    })
    .await;
    writing.release().await.unwrap();
    all_enter(readers).await;
    drop(stalled);
}

async fn all_enter(readers: Vec<JoinHandle<RwLockReadGuard>>) {
    let enter = async {
        for reader in readers {
            reader.await.unwrap().release().await.unwrap();
        }
    };
    soon("all readers enter", enter).await;
}

/// The writer was killed, so one of the readers must notice.
#[tokio::test]
async fn rwlock_standalone_readers_enter_after_the_writer_expired() {
    let server = Server::start().await;
    let writing = client(&server, patient()).await.write().await.unwrap();
    let readers = waiting(&server, &client(&server, options()).await).await;
    seen_again(&server, READERS).await;
    server.run::<u64>(&["DEL", "lock:rw"]).await;
    all_enter(readers).await;
    assert!(writing.release().await.is_err());
}
