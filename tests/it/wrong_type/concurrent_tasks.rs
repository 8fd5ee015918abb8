//! Tasks that use one name for locks of two kinds: no two leases are valid at a time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redlatch::{Error, Options, Owner};
use tokio::task::JoinSet;

use super::share;
use crate::support::{AnyGuard, Kind, Oracle, Random, Server, eventually, soon, ttl};

/// Short leases, with a node timeout for a busy machine.
fn short(millis: u64) -> Options {
    ttl(millis).node_timeout(Duration::from_secs(5))
}

/// A period in which a lease was certainly valid, by the clock of this process.
#[derive(Clone, Copy, Debug)]
struct ValidPeriod {
    kind: Kind,
    from: Instant,
    until: Instant,
}

/// All such periods of a test.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<ValidPeriod>>>);

impl Record {
    fn add(&self, kind: Kind, from: Instant, until: Instant) {
        self.0.lock().unwrap().push(ValidPeriod { kind, from, until });
    }

    fn count(&self, kind: Kind) -> usize {
        self.0.lock().unwrap().iter().filter(|valid| valid.kind == kind).count()
    }

    /// Checks that no two periods overlap, except those of readers.
    fn assert_exclusive(&self) {
        let mut all: Vec<ValidPeriod> = self.0.lock().unwrap().clone();
        all.retain(|valid| valid.from < valid.until);
        all.sort_by_key(|valid| valid.from);
        for (place, one) in all.iter().enumerate() {
            let beside = all[place + 1..].iter().take_while(|other| other.from < one.until);
            let beside: Vec<&ValidPeriod> =
                beside.filter(|other| (one.kind, other.kind) != (Kind::Read, Kind::Read)).collect();
            assert!(beside.is_empty(), "{one:?} was valid together with {beside:?}");
        }
    }

    /// Holds a lease for a while, and releases it.
    async fn hold(&self, kind: Kind, guard: AnyGuard, span: Duration) {
        let from = Instant::now();
        let mut until = from;
        // A lost lease does not report since when: the last time that it was seen valid counts.
        loop {
            let now = Instant::now();
            if guard.lease().is_lost() {
                break;
            }
            until = now;
            if now >= from + span {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.add(kind, from, until);
        let _ = guard.release().await; // a lost lease is recorded all the same
    }

    /// Ends a lease as a crash does. No other lease may be valid before its deadline.
    fn leak(&self, kind: Kind, guard: AnyGuard) {
        let (from, lease) = (Instant::now(), guard.lease().clone());
        guard.leak();
        let until = lease.valid_until();
        if !lease.is_lost() {
            self.add(kind, from, until);
        }
    }
}

const TASKS: u64 = 4;

/// Each task has a client of its own. Some leases are leaked instead of released, as by a crash:
/// then the key expires while waiters are queued.
async fn tasks_of_two_kinds(kinds: [Kind; 2], span: Duration) {
    let server = Server::start().await;
    let record = Record::default();
    let end = Instant::now() + span;
    let mut tasks = JoinSet::new();
    for kind in kinds {
        for number in 0..TASKS {
            let lock = kind.lock(&server.locks_with(short(300)).await, "one-name");
            let record = record.clone();
            let mut random = Random::seeded(number + 100 * kind as u64);
            tasks.spawn(async move {
                let mut refused = 0;
                while Instant::now() < end {
                    match lock.for_another().lock_timeout(Duration::from_millis(500)).await {
                        Ok(guard) if random.below(4) == 0 => record.leak(kind, guard),
                        Ok(guard) => {
                            record.hold(kind, guard, Duration::from_millis(random.below(15))).await;
                        }
                        Err(Error::WrongType { .. }) => {
                            refused += 1;
                            tokio::time::sleep(Duration::from_millis(1 + random.below(5))).await;
                        }
                        Err(Error::TimedOut { .. } | Error::Lost { .. } | Error::Redis { .. }) => {}
                        Err(error) => panic!("{kind:?}: {error}"),
                    }
                }
                refused
            });
        }
    }
    let mut refused = 0_u64;
    while let Some(outcome) = tasks.join_next().await {
        refused += outcome.unwrap();
    }
    let counts = kinds.map(|kind| record.count(kind));
    println!("FIG {kinds:?}: {counts:?} leases, {refused} refusals in {span:?}");
    record.assert_exclusive();
    assert!(counts.iter().sum::<usize>() > 1, "{kinds:?}: {counts:?}");
    assert!(share(kinds[0], kinds[1]) || refused > 0, "{kinds:?}: no task met a lock of the other kind");
}

macro_rules! pairs {
    ($($short:ident, $long:ident = $one:ident, $other:ident;)+) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $short() {
                tasks_of_two_kinds([Kind::$one, Kind::$other], Duration::from_secs(3)).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = "takes long: scripts/test --full"]
            async fn $long() {
                tasks_of_two_kinds([Kind::$one, Kind::$other], Duration::from_secs(30)).await;
            }
        )+
    };
}

pairs! {
    mutex_and_reentrant_tasks_exclude_each_other, mutex_and_reentrant_tasks_exclude_each_other_for_long = Mutex, Reentrant;
    mutex_and_read_tasks_exclude_each_other, mutex_and_read_tasks_exclude_each_other_for_long = Mutex, Read;
    mutex_and_write_tasks_exclude_each_other, mutex_and_write_tasks_exclude_each_other_for_long = Mutex, Write;
    reentrant_and_read_tasks_exclude_each_other, reentrant_and_read_tasks_exclude_each_other_for_long = Reentrant, Read;
    reentrant_and_write_tasks_exclude_each_other, reentrant_and_write_tasks_exclude_each_other_for_long = Reentrant, Write;
    read_and_write_tasks_exclude_each_other, read_and_write_tasks_exclude_each_other_for_long = Read, Write;
}

/// Retries after each refusal, until the lock is granted.
async fn lock_after_refusals(server: &Server, kind: Kind, record: Record) {
    let lock = kind.lock(&server.locks_with(short(1_000)).await, "one-name");
    eventually("the server grants the lock", || async {
        match lock.lock_timeout(Duration::from_secs(3)).await {
            Ok(guard) => {
                record.hold(kind, guard, Duration::from_millis(300)).await;
                true
            }
            Err(Error::WrongType { .. } | Error::TimedOut { .. }) => false,
            Err(error) => panic!("{kind:?}: {error}"),
        }
    })
    .await;
}

/// A holds the write lock. Y and Z try the re-entrant lock of the same name, W queues to write.
/// Then the lease of A vanishes.
async fn a_lease_vanishes(by_expiry: bool) {
    let server = Server::start().await;
    let record = Record::default();
    let writer = server.locks_with(short(1_000)).await.rwlock("one-name").unwrap();
    let guard = writer.write().await.unwrap();
    let reentrant = server.locks_with(short(1_000)).await.reentrant("one-name", &Owner::new()).unwrap();
    // Y is refused at once, without being queued.
    let refused = soon("Y is refused", reentrant.with_owner(&Owner::new()).lock()).await;
    assert!(super::is_wrong_type(&refused), "{refused:?}");
    let waiting = tokio::spawn({
        let (lock, record) =
            (server.locks_with(short(1_000)).await.rwlock("one-name").unwrap(), record.clone());
        async move {
            match lock.write_timeout(Duration::from_secs(3)).await {
                Ok(guard) => {
                    record.hold(Kind::Write, AnyGuard::Write(guard), Duration::from_millis(300)).await
                }
                // Y or Z acquired first, or held the name until the limit.
                Err(Error::WrongType { .. } | Error::TimedOut { .. }) => {}
                Err(error) => panic!("W: {error}"),
            }
        }
    });
    eventually("W queues", || async { server.lock_state(writer.name()).await.waiting_writers == 1 }).await;
    let refused = soon("Z is refused", reentrant.with_owner(&Owner::new()).lock()).await;
    assert!(super::is_wrong_type(&refused), "{refused:?}");
    assert_eq!(server.lock_state(writer.name()).await.waiters(), 1, "only W is queued");
    if by_expiry {
        record.leak(Kind::Write, AnyGuard::Write(guard));
    } else {
        guard.leak(); // the deletion below ends the lease of A
        server.run::<()>(&["DEL", "lock:one-name"]).await;
    }
    let others =
        [Kind::Reentrant, Kind::Reentrant].map(|kind| lock_after_refusals(&server, kind, record.clone()));
    let [one, other] = others;
    tokio::join!(one, other);
    soon("W ends", waiting).await.unwrap();
    record.assert_exclusive();
    assert_eq!(record.count(Kind::Reentrant), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_two_kinds_exclude_each_other_after_an_expiry() {
    a_lease_vanishes(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_two_kinds_exclude_each_other_after_a_deletion() {
    a_lease_vanishes(false).await;
}
