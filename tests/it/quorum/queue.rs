//! The queue of a quorum: in order, told by the nodes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redlatch::{Locks, Options};

use super::{ALONE, CLEANED, KINDS, Quorum, named, no_quorum, options};
use crate::support::{eventually, soon};

/// Whoever is told in less was not looking.
const NEVER: Duration = Duration::from_secs(10);

fn patient() -> Options {
    Options::new().poll_cap(NEVER)
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_hands_over_in_order() {
    let quorum = Quorum::start(5).await;
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), patient()).await;
        let guard = quorum.take(&lock).await;
        let order = Arc::new(Mutex::new(vec![(0, guard.token())]));
        let mut waiting = Vec::new();
        for number in 1..=5 {
            let (other, order) = (quorum.lock(kind, kind.name(), patient()).await, Arc::clone(&order));
            waiting.push(tokio::spawn(async move {
                let guard = soon("a turn", other.lock()).await.unwrap();
                order.lock().unwrap().push((number, guard.token()));
                guard.release().await.unwrap();
            }));
            quorum.queued(0b11111, &lock, number).await;
        }
        let start = Instant::now();
        guard.release().await.unwrap();
        for task in waiting {
            task.await.unwrap();
        }
        let took = start.elapsed();
        println!("FIG {kind:?}: five handovers in {took:?}");
        assert!(took < Duration::from_secs(1), "told, not found: {took:?}");
        let order = order.lock().unwrap().clone();
        assert!(order.iter().map(|(number, _)| *number).eq(0..=5), "{order:?}");
        assert!(order.is_sorted_by(|(_, one), (_, next)| one < next), "{order:?}");
    }
    quorum.finish().await;
}

/// A waiter to which a majority has granted the lock is still queued on the node that has not: its
/// release ends that as well.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_release_leaves_the_queue_of_a_node_that_did_not_grant() {
    let quorum = Quorum::start(3).await;
    let among = |places: &[usize]| -> Vec<String> {
        places.iter().map(|place| quorum.servers[*place].url()).collect()
    };
    let pair = Locks::builder().quorum(among(&[0, 1])).options(options()).connect().await.unwrap();
    let lone = Locks::builder().quorum(among(&[2])).options(options()).connect().await.unwrap();
    let proxies = quorum.proxies().await;
    let client = quorum.client_behind(&proxies, options()).await;
    // The node that does not grant answers before the two that do: no answer is outstanding then.
    let slow_down = |by| proxies[..2].iter().for_each(|proxy| proxy.slow_down(by));
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let other = kind.rival().lock(&lone, kind.name()).lock().await.unwrap();
        let held = kind.rival().lock(&pair, kind.name()).lock().await.unwrap();
        eventually("held by two", || async { quorum.having(0b111, lock.key()).await == 0b111 }).await;
        let waiting = tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await }
        });
        quorum.queued(0b111, &lock, 1).await;
        slow_down(Some(Duration::from_millis(20)));
        held.release().await.unwrap();
        let guard = soon("granted by two", waiting).await.unwrap().unwrap();
        slow_down(None);
        quorum.queued(0b100, &lock, 1).await;
        guard.release().await.unwrap();
        let start = Instant::now();
        quorum.queued(0b100, &lock, 0).await;
        assert!(start.elapsed() < CLEANED, "{kind:?}: {:?}, and the queue lasts a minute", start.elapsed());
        assert!(!other.lease().is_lost(), "{kind:?}: nothing was granted there");
        other.release().await.unwrap();
    }
    drop((client, pair, lone));
    quorum.finish_behind(proxies).await;
}

/// One client after the other waits, for all kinds: the median, since a single one may be found by looking.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_hands_over_at_once() {
    let quorum = Quorum::start(3).await;
    for kind in KINDS {
        let holder = quorum.lock(kind.rival(), kind.name(), patient()).await;
        let lock = quorum.lock(kind, kind.name(), patient()).await;
        let mut times = Vec::new();
        for _ in 0..5 {
            let guard = quorum.take(&holder).await;
            let waiting = tokio::spawn({
                let lock = lock.for_another();
                async move { lock.lock().await }
            });
            quorum.queued(0b111, &holder, 1).await;
            let start = Instant::now();
            guard.release().await.unwrap();
            let guard = soon("handed over", waiting).await.unwrap().unwrap();
            times.push(start.elapsed());
            guard.release().await.unwrap();
        }
        times.sort();
        println!("FIG {kind:?}: {times:?}");
        assert!(times.iter().sum::<Duration>() < Duration::from_secs(1), "{kind:?}: {times:?}");
    }
    quorum.finish().await;
}

/// The first in the queue is gone without a word: nobody listens to its channel, so the next one is told.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_passes_a_waiter_that_died() {
    let quorum = Quorum::start(5).await;
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), patient()).await;
        let guard = quorum.take(&lock).await;
        // With its runtime ends all that could give its place back.
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let urls = quorum.urls();
        let dead = runtime.spawn(async move {
            let client = redlatch::Locks::builder().quorum(urls).options(patient()).connect().await.unwrap();
            drop(kind.lock(&client, kind.name()).lock().await);
        });
        quorum.queued(0b11111, &lock, 1).await;
        let waiting = tokio::spawn({
            let lock = quorum.lock(kind, kind.name(), patient()).await;
            async move { lock.lock().await }
        });
        quorum.queued(0b11111, &lock, 2).await;
        runtime.shutdown_background();
        assert!(dead.await.is_err(), "it waited until it died");
        for server in &quorum.servers {
            eventually("one listens", || async { server.subscribers().await.len() == 1 }).await;
        }
        let start = Instant::now();
        guard.release().await.unwrap();
        let guard = soon("handed over", waiting).await.unwrap().unwrap();
        println!("FIG {kind:?}: past the dead in {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        guard.release().await.unwrap();
        drop(lock);
        for server in &quorum.servers {
            eventually("all have gone", || async { server.subscribers().await.is_empty() }).await;
        }
    }
    quorum.finish().await;
}

/// It died so that nobody noticed, and its claim keeps the lock for no longer than it says.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_passes_a_waiter_that_hangs() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let options = || options().ttl(Duration::from_secs(1));
    for kind in ALONE {
        let lock = quorum.lock(kind, kind.name(), options()).await;
        let guard = quorum.take(&lock).await;
        let silent = kind.lock(&quorum.client_behind(&proxies, options()).await, kind.name());
        let hanging = tokio::spawn(async move { silent.lock().await.map(drop) });
        quorum.queued(0b111, &lock, 1).await;
        let waiting = tokio::spawn({
            let lock = quorum.lock(kind, kind.name(), options()).await;
            async move { lock.lock().await }
        });
        quorum.queued(0b111, &lock, 2).await;
        for proxy in &proxies {
            proxy.hold_replies(true);
            proxy.hold_requests(true);
            proxy.be_deaf(true);
        }
        let start = Instant::now();
        guard.release().await.unwrap();
        let guard = soon("handed over", waiting).await.unwrap().unwrap();
        println!("FIG {kind:?}: past the silent in {:?}", start.elapsed());
        assert!(start.elapsed() > Duration::from_millis(500), "nobody knew that it is gone");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        guard.release().await.unwrap();
        for proxy in &proxies {
            proxy.hold_replies(false);
            proxy.hold_requests(false);
            proxy.be_deaf(false);
        }
        // It may have gone on as soon as it could, or given up.
        let _ = soon("its end", hanging).await.unwrap();
        eventually("free", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
    }
    quorum.finish_behind(proxies).await;
}

/// A crowd inside one client gives up together, and each is told of all nodes that failed.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_crowds_lose_patience_together() {
    let quorum = Quorum::start(5).await;
    let options = options().ttl(Duration::from_secs(1));
    for kind in KINDS {
        let lock = quorum.lock(kind, kind.name(), options.clone()).await;
        quorum.hang(0b01101);
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..60_u64 {
            let lock = lock.for_another();
            tasks.spawn(async move {
                if number % 3 == 0 {
                    lock.lock_timeout(Duration::from_millis(700 + 5 * number)).await.map(drop)
                } else {
                    lock.lock().await.map(drop)
                }
            });
        }
        while let Some(outcome) = tasks.join_next().await {
            let (answered, failures) = no_quorum(outcome.unwrap());
            assert_eq!((answered, named(&failures)), (2, quorum.labels(0b01101)), "{kind:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        quorum.resume(0b01101);
        eventually("free", || async { quorum.having(quorum.all(), lock.key()).await == 0 }).await;
    }
    quorum.finish().await;
}
