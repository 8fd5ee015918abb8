//! Tasks that use one name for locks of two kinds: never two valid leases at a time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redlatch::{Error, Options, Owner};
use tokio::task::JoinSet;

use super::share;
use crate::support::{AnyGuard, Kind, Oracle, Random, Server, eventually, soon, ttl};

/// Short leases, on a machine that may be busy with something else.
fn short(millis: u64) -> Options {
    ttl(millis).node_timeout(Duration::from_secs(5))
}

/// From when until when a lease was valid for certain, by the clock of this process.
#[derive(Clone, Copy, Debug)]
struct Valid {
    kind: Kind,
    from: Instant,
    until: Instant,
}

/// What was seen outside of the locks.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<Valid>>>);

impl Record {
    fn add(&self, kind: Kind, from: Instant, until: Instant) {
        self.0.lock().unwrap().push(Valid { kind, from, until });
    }

    fn count(&self, kind: Kind) -> usize {
        self.0.lock().unwrap().iter().filter(|valid| valid.kind == kind).count()
    }

    /// Readers may be valid together; no others may.
    fn assert_exclusive(&self) {
        let mut all: Vec<Valid> = self.0.lock().unwrap().clone();
        all.retain(|valid| valid.from < valid.until);
        all.sort_by_key(|valid| valid.from);
        for (place, one) in all.iter().enumerate() {
            let beside = all[place + 1..].iter().take_while(|other| other.from < one.until);
            let beside: Vec<&Valid> =
                beside.filter(|other| (one.kind, other.kind) != (Kind::Read, Kind::Read)).collect();
            assert!(beside.is_empty(), "{one:?} was valid together with {beside:?}");
        }
    }

    /// Holds a lease for a while, and releases it.
    async fn hold(&self, kind: Kind, guard: AnyGuard, span: Duration) {
        let from = Instant::now();
        let mut until = from;
        // Once it is lost, it does not say since when: what counts is when it was seen to be valid.
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
        let _ = guard.release().await; // one that a busy machine has lost is recorded all the same
    }

    /// Ends a lease as a crash does. For as long as its deadline says, no other lease may be valid.
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

/// Each task has a client of its own. Some of them stop renewing instead of releasing, as a crash
/// does: then the key ends while others are queued.
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
    assert!(share(kinds[0], kinds[1]) || refused > 0, "{kinds:?}: they met");
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

/// Tries again after each refusal, until it is granted.
async fn persists(server: &Server, kind: Kind, record: Record) {
    let lock = kind.lock(&server.locks_with(short(1_000)).await, "one-name");
    eventually("it is granted", || async {
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

/// A writes; Y and Z want the re-entrant lock of the same name, W wants to write; then the lease of
/// A vanishes.
async fn a_lease_vanishes(by_expiry: bool) {
    let server = Server::start().await;
    let record = Record::default();
    let writer = server.locks_with(short(1_000)).await.rwlock("one-name").unwrap();
    let guard = writer.write().await.unwrap();
    let reentrant = server.locks_with(short(1_000)).await.reentrant("one-name").unwrap();
    // Y is refused at once, and queues for nothing.
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
                // Y or Z had the name first, or had it for long.
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
        guard.leak(); // nothing protects the lease of A from what comes
        server.run::<()>(&["DEL", "lock:one-name"]).await;
    }
    let others = [Kind::Reentrant, Kind::Reentrant].map(|kind| persists(&server, kind, record.clone()));
    let [one, other] = others;
    tokio::join!(one, other);
    soon("W ends", waiting).await.unwrap();
    record.assert_exclusive();
    assert_eq!(record.count(Kind::Reentrant), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_leases_are_valid_after_a_lease_expires_before_waiters_of_two_kinds() {
    a_lease_vanishes(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_leases_are_valid_after_a_key_is_deleted_before_waiters_of_two_kinds() {
    a_lease_vanishes(false).await;
}
