//! Tasks of three clients pass a lock on, while calls are dropped, clients close, and others revoke
//! the lock: at random, in the middle of turns.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Error, Locks};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::{AnyGuard, AnyLock, Kind, Random, Server, patient, soon};

const CLIENTS: u64 = 3;
const TASKS: u64 = 8;
/// How often each client is made, used by its tasks, and ended.
const ROUNDS: u64 = 6;
/// That of the node timeout: a release waits for one answer.
const LONGEST_CLOSE: Duration = Duration::from_secs(15);
/// How often each task asks for the lock in a round.
const CALLS: usize = 60;

/// What happens to a client while its tasks have turns.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Nothing,
    Close,
    Revocation,
}

/// What the tasks of all clients have seen, outside of any lock.
#[derive(Default)]
struct Record {
    is_inside: AtomicBool,
    last_token: AtomicU64,
    grants: AtomicU64,
}

impl Record {
    /// A lease that is not ended by anybody else: no other one is valid, and its token is larger.
    fn enter(&self, guard: &AnyGuard) {
        assert!(!self.is_inside.swap(true, Ordering::SeqCst), "two valid leases: {guard:?}");
        let last = self.last_token.swap(guard.token(), Ordering::SeqCst);
        assert!(last < guard.token(), "{last}, then {guard:?}");
    }
}

async fn use_at_random(lock: AnyLock, event: Event, record: Arc<Record>, mut random: Random) {
    for _ in 0..CALLS {
        // A third of the calls may be dropped while they wait.
        let limit = Duration::from_micros(random.below(3_000));
        let outcome = match random.below(9) {
            0 => lock.try_lock().await.transpose(),
            1..4 => timeout(limit, lock.lock()).await.ok(),
            _ => Some(soon("the lock is granted", lock.lock()).await),
        };
        let guard = match outcome {
            Some(Ok(guard)) => guard,
            Some(Err(Error::Closed { .. })) if event == Event::Close => return,
            Some(Err(error)) => panic!("{error:?}"),
            None => continue,
        };
        record.grants.fetch_add(1, Ordering::Relaxed);
        let is_sole = event == Event::Nothing;
        if is_sole {
            record.enter(&guard);
        }
        if random.below(4) == 0 {
            tokio::task::yield_now().await;
        }
        if is_sole {
            record.is_inside.store(false, Ordering::SeqCst);
        }
        end_at_random(guard, is_sole, &mut random).await;
    }
}

async fn end_at_random(guard: AnyGuard, is_sole: bool, random: &mut Random) {
    match (random.below(8), guard) {
        (0..2, guard) => drop(guard),
        (2, guard) => {
            let mut release = Box::pin(guard.release());
            let _begun = poll_fn(|context| Poll::Ready(release.as_mut().poll(context))).await;
        }
        (3, AnyGuard::Write(guard)) => match guard.downgrade().await {
            Ok(guard) => drop(guard),
            Err(error) => assert!(!is_sole, "{error:?}"),
        },
        (_, guard) => {
            let outcome = guard.release().await;
            assert!(!is_sole || outcome.is_ok(), "{outcome:?}");
        }
    }
}

/// One client after the other: its tasks use the lock, and it settles.
async fn client(server: Arc<Server>, kind: Kind, event: Event, record: Arc<Record>, mut random: Random) {
    for _ in 0..ROUNDS {
        let turn = Duration::from_millis([1, 5, 50][usize::try_from(random.below(3)).unwrap()]);
        let locks: Locks = server.locks_with(patient().local_turn(turn)).await;
        let lock = kind.lock(&locks, "random");
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let random = Random::seeded(random.below(1 << 40));
            tasks.spawn(use_at_random(lock.clone(), event, Arc::clone(&record), random));
        }
        // In the middle of turns: once tasks of this client have had some of them.
        let grants = || record.grants.load(Ordering::Relaxed);
        for _ in 0..random.below(20) {
            let before = grants();
            while grants() < before + 40 && !tasks.is_empty() {
                timeout(Duration::from_millis(1), tasks.join_next())
                    .await
                    .ok()
                    .flatten()
                    .into_iter()
                    .for_each(Result::unwrap);
            }
            if event == Event::Revocation {
                lock.force_release().await.unwrap();
            }
        }
        if event == Event::Close {
            locks.close(LONGEST_CLOSE).await.unwrap();
        }
        while let Some(outcome) = soon("a task ends", tasks.join_next()).await {
            outcome.unwrap();
        }
        soon("all is released", locks.settled()).await;
        assert!(locks.is_idle(), "{locks:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_survive_drops_closes_and_revocations() {
    let mut random = Random::new();
    for kind in [Kind::Mutex, Kind::Write] {
        for event in [Event::Nothing, Event::Close, Event::Revocation] {
            let (server, record) = (Arc::new(Server::start().await), Arc::new(Record::default()));
            let mut clients = JoinSet::new();
            for _ in 0..CLIENTS {
                let random = Random::seeded(random.below(1 << 40));
                clients.spawn(client(Arc::clone(&server), kind, event, Arc::clone(&record), random));
            }
            while let Some(outcome) = clients.join_next().await {
                outcome.unwrap();
            }
            let grants = record.grants.load(Ordering::Relaxed);
            assert!(grants > CLIENTS * ROUNDS * TASKS, "{kind:?} {event:?}: {grants}");
            assert!(!server.run::<bool>(&["EXISTS", "lock:random"]).await, "{kind:?} {event:?}");
            server.assert_nothing_left().await;
        }
    }
}
