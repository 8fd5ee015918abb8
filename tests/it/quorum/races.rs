//! Many want one lock at a time, each node hears them in another order.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redlatch::Options;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::{ALONE, KINDS, Quorum, options};
use crate::support::{AnyLock, Kind, soon};

/// What two who race share. They begin each try together, and end it together.
struct Race {
    gate: Barrier,
    /// How many have got it in this try: the two of a counter by turns.
    granted: [AtomicU32; 2],
    inside: AtomicU32,
    token: AtomicU64,
}

/// How many rounds were won, and how many tries each round took.
async fn run(race: Arc<Race>, lock: AnyLock, rounds: usize) -> (usize, Vec<usize>) {
    let (mut won, mut tries, mut turn) = (0, Vec::new(), 0);
    while tries.len() < rounds {
        let mut tried = 0;
        loop {
            tried += 1;
            turn += 1;
            race.gate.wait().await;
            let guard = soon("an answer", lock.try_lock()).await.unwrap();
            let granted = &race.granted[turn % 2];
            granted.fetch_add(u32::from(guard.is_some()), Ordering::SeqCst);
            race.gate.wait().await;
            let winners = granted.load(Ordering::SeqCst);
            assert!(winners < 2, "both have it");
            race.granted[(turn + 1) % 2].store(0, Ordering::SeqCst);
            if let Some(guard) = guard {
                assert_eq!(race.inside.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                assert!(guard.token() > race.token.swap(guard.token(), Ordering::SeqCst), "tokens grow");
                assert!(!guard.lease().is_lost());
                tokio::task::yield_now().await;
                race.inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
                won += 1;
            }
            // What both began is over before the next round.
            race.gate.wait().await;
            if winners > 0 {
                break;
            }
        }
        tries.push(tried);
    }
    (won, tries)
}

/// How many rounds were decided within three tries.
async fn race(quorum: &Quorum, rounds: usize) -> usize {
    let race = Arc::new(Race {
        gate: Barrier::new(2),
        granted: Default::default(),
        inside: AtomicU32::new(0),
        token: AtomicU64::new(0),
    });
    let one = quorum.lock(Kind::Mutex, "race", options()).await;
    let other = quorum.lock(Kind::Mutex, "race", options()).await;
    let one = tokio::spawn(run(Arc::clone(&race), one, rounds));
    let other = tokio::spawn(run(race, other, rounds));
    let ((one, tries), (other, _)) = (one.await.unwrap(), other.await.unwrap());
    let decided = tries.iter().filter(|tries| **tries <= 3).count();
    let most = tries.iter().max();
    println!("FIG won {one} and {other} of {rounds}; {decided} within 3 tries, the slowest in {most:?}");
    assert_eq!(one + other, rounds);
    assert!(one.min(other) >= rounds / 20, "both progress: {one} and {other}");
    decided
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_decides_races_of_two() {
    let quorum = Quorum::start(5).await;
    let decided = race(&quorum, 500).await;
    assert!(decided >= 450, "{decided} of 500 within 3 tries");
    quorum.finish().await;
}

/// An even number may be split in two halves.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_decides_races_of_two_while_one_is_dead() {
    let mut quorum = Quorum::start(5).await;
    quorum.kill(0b00100);
    let decided = race(&quorum, 200).await;
    assert!(decided >= 180, "{decided} of 200 within 3 tries");
    quorum.restart(0b00100).await;
    quorum.finish().await;
}

/// Who is inside: readers together, writers alone.
#[derive(Default)]
struct Room {
    readers: AtomicI64,
    writers: AtomicI64,
    token: AtomicU64,
}

/// Takes so many turns, and how long the longest wait was.
async fn turns(lock: AnyLock, room: Arc<Room>, turns: usize) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..turns {
        let start = Instant::now();
        let guard = soon("a turn", lock.lock()).await.unwrap();
        longest = longest.max(start.elapsed());
        let reads = matches!(lock, AnyLock::Read(..));
        let side = if reads { &room.readers } else { &room.writers };
        side.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let (readers, writers) = (room.readers.load(Ordering::SeqCst), room.writers.load(Ordering::SeqCst));
        assert!(if reads { writers == 0 } else { readers == 0 && writers == 1 }, "{readers} and {writers}");
        let before = room.token.fetch_max(guard.token(), Ordering::SeqCst);
        assert!(reads || guard.token() > before, "{} after {before}", guard.token());
        assert!(!guard.lease().is_lost());
        side.fetch_sub(1, Ordering::SeqCst);
        soon("released", guard.release()).await.unwrap();
    }
    longest
}

async fn crowd(nodes: usize, kind: Kind, hanging: u32, options: &Options) {
    let quorum = Quorum::start(nodes).await;
    let room = Arc::new(Room::default());
    let mut tasks = JoinSet::new();
    for number in 0..4 {
        let kind = if number % 2 == 0 { kind } else { kind.rival() };
        let lock = quorum.lock(kind, "crowd", options.clone()).await;
        tasks.spawn(turns(lock, Arc::clone(&room), 25));
    }
    quorum.hang(hanging);
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    while let Some(wait) = tasks.join_next().await {
        longest = longest.max(wait.unwrap());
    }
    let took = start.elapsed();
    println!("FIG {kind:?} on {nodes}, {hanging:b} hanging: 100 turns in {took:?}, longest wait {longest:?}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    quorum.resume(hanging);
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_gives_turns_to_four() {
    for kind in KINDS {
        crowd(3, kind, 0, &options()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_gives_turns_to_four_while_a_minority_hangs() {
    for kind in KINDS {
        crowd(5, kind, 0b10010, &options()).await;
    }
}

/// All begin at the same moment, so that each node has another first one; nobody waits for long.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_resolves_split_votes() {
    let quorum = Quorum::start(5).await;
    for kind in ALONE {
        let mut locks = Vec::new();
        for _ in 0..12 {
            locks.push(quorum.lock(kind, kind.name(), options().poll_cap(Duration::from_secs(10))).await);
        }
        let gate = Arc::new(Barrier::new(locks.len()));
        let room = Arc::new(Room::default());
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for lock in locks {
            let (gate, room) = (Arc::clone(&gate), Arc::clone(&room));
            tasks.spawn(async move {
                gate.wait().await;
                turns(lock, room, 2).await
            });
        }
        let mut longest = Duration::ZERO;
        while let Some(wait) = tasks.join_next().await {
            longest = longest.max(wait.unwrap());
        }
        println!("FIG {kind:?}: 12 at a time, twice, in {:?}, longest wait {longest:?}", start.elapsed());
        assert!(longest < Duration::from_secs(5), "{longest:?}");
    }
    quorum.finish().await;
}
