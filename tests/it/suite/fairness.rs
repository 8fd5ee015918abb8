//! No waiter starves, on either side, whether it is notified or polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redlatch::{Options, RwLock};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::{Setup, Stopwatch, idles, soon};

const HOLD: Duration = Duration::from_millis(10);

/// A waiter polls at least this often.
const POLL: Duration = Duration::from_secs(1);

/// If the reply to a release is late, the client sends it again. Once the next task holds the lock,
/// the effect of the first request stays unknown: [`Unconfirmed`](redlatch::Error::Unconfirmed). A
/// machine that stalls for the default second would fail these tests, which are about turns only.
const NODE_TIMEOUT: Duration = Duration::from_secs(10);

async fn lock(setup: &Setup) -> RwLock {
    setup.rwlock(Options::new().poll_cap(POLL).node_timeout(NODE_TIMEOUT)).await
}

/// Acquires the lock on one side and holds it for a moment.
async fn turn(lock: &RwLock, writes: bool, inside: &HolderCounts) {
    if writes {
        let guard = soon("the writer acquires", lock.write()).await.unwrap();
        inside.enter(true);
        sleep(HOLD).await;
        inside.leave(true);
        guard.release().await.unwrap();
    } else {
        let guard = soon("the reader acquires", lock.read()).await.unwrap();
        inside.enter(false);
        sleep(HOLD).await;
        inside.leave(false);
        guard.release().await.unwrap();
    }
}

/// The current holders, as counted by the holders themselves.
#[derive(Default)]
struct HolderCounts {
    readers: AtomicU64,
    writers: AtomicU64,
}

impl HolderCounts {
    fn enter(&self, writes: bool) {
        let side = if writes { &self.writers } else { &self.readers };
        let before = side.fetch_add(1, Ordering::SeqCst);
        let others = if writes { &self.readers } else { &self.writers }.load(Ordering::SeqCst);
        assert!(others == 0 && (!writes || before == 0), "{before} and {others} inside");
    }

    fn leave(&self, writes: bool) {
        if writes { &self.writers } else { &self.readers }.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Eight tasks take turns on one side. A single task on the other side must acquire within two
/// holds and one poll.
async fn single_task_enters(setup: Setup, the_one_writes: bool) {
    let (stop, inside) = (Arc::new(AtomicBool::new(false)), Arc::new(HolderCounts::default()));
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (lock, stop, inside) = (lock(&setup).await, Arc::clone(&stop), Arc::clone(&inside));
        tasks.spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                turn(&lock, !the_one_writes, &inside).await;
            }
        });
    }
    let one = lock(&setup).await;
    let mut waits = Vec::new();
    for _ in 0..15 {
        sleep(3 * HOLD).await;
        let start = Stopwatch::start();
        turn(&one, the_one_writes, &inside).await;
        waits.push(start.stop());
    }
    waits.sort_by_key(Stopwatch::undisturbed);
    println!("{:?} {:?}: waited and held for {waits:?}", setup.topology(), setup.wake);
    // A busy machine makes single waits longer, a side that starves most of them.
    assert!(waits[12].undisturbed() < 3 * HOLD + POLL, "waited and held for {waits:?}");
    stop.store(true, Ordering::SeqCst);
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    drop(one);
    setup.finish().await;
}

pub async fn writer_enters_among_eight_readers(setup: Setup) {
    single_task_enters(setup, true).await;
}

pub async fn reader_enters_among_eight_writers(setup: Setup) {
    single_task_enters(setup, false).await;
}

/// Four readers and four writers loop all the time: neither side falls below a fifth of its fair
/// share.
pub async fn readers_and_writers_get_fair_shares(setup: Setup) {
    const EACH: usize = 4;
    let end = Instant::now() + Duration::from_secs(20);
    let inside = Arc::new(HolderCounts::default());
    let mut tasks = JoinSet::new();
    for number in 0..2 * EACH {
        let (lock, writes, inside) = (lock(&setup).await, number % 2 == 0, Arc::clone(&inside));
        tasks.spawn(async move {
            let mut turns = 0_u64;
            while Instant::now() < end {
                turn(&lock, writes, &inside).await;
                turns += 1;
            }
            (writes, turns)
        });
    }
    let (mut all, mut fewest) = ([0, 0], [u64::MAX, u64::MAX]);
    while let Some(outcome) = tasks.join_next().await {
        let (writes, turns) = outcome.unwrap();
        all[usize::from(writes)] += turns;
        fewest[usize::from(writes)] = fewest[usize::from(writes)].min(turns);
    }
    let cell = (setup.topology(), setup.wake);
    println!("{cell:?}: readers {} writers {}, fewest {fewest:?}", all[0], all[1]);
    let fair = (all[0] + all[1]) / 2;
    for side in 0..2 {
        assert!(all[side] * 5 >= fair, "{all:?}");
        assert!(fewest[side] * 5 >= all[side] / EACH as u64, "{fewest:?} of {all:?}");
    }
    setup.finish().await;
}

/// Readers, writers and re-entrant owners of one client: all acquire.
pub async fn all_tasks_of_one_client_enter(setup: Setup) {
    let locks = setup.client().await;
    let lock = locks.rwlock("rw").unwrap();
    let inside = Arc::new(HolderCounts::default());
    let mut tasks = JoinSet::new();
    for number in 0..60 {
        let (lock, inside) = (lock.clone(), Arc::clone(&inside));
        tasks.spawn(async move {
            for _ in 0..4 {
                if number % 6 == 5 {
                    let owner = redlatch::Owner::new();
                    let outer = soon("the lock is acquired", lock.with_owner(&owner).write()).await.unwrap();
                    let inner = soon("the owner reads inside its own write", lock.with_owner(&owner).read())
                        .await
                        .unwrap();
                    inside.enter(true);
                    tokio::task::yield_now().await;
                    inside.leave(true);
                    inner.release().await.unwrap();
                    outer.release().await.unwrap();
                } else {
                    turn(&lock, number % 6 == 0, &inside).await;
                }
            }
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    idles(&locks).await;
    drop((lock, locks));
    setup.finish().await;
}
