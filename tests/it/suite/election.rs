//! Elections: one leader at a time, and the next one after a release, a loss or an outage. The
//! candidates write down their terms in a record of the test's own.

use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redlatch::{Error, Lease, Locks};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::support::{Setup, eventually, soon, ttl};

const KEY: &str = "lock:leader";

/// A term: the candidate, and its lease.
type Term = (usize, Lease);

/// What the candidates do, as seen from outside.
#[derive(Default)]
struct Record {
    leading: AtomicUsize,
    terms: Mutex<Vec<Term>>,
}

/// Dropped with the work of a term.
struct Leading<'a>(&'a Record);

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        self.0.leading.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Record {
    fn terms(&self) -> MutexGuard<'_, Vec<Term>> {
        self.terms.lock().unwrap()
    }

    fn begin(&self, candidate: usize, lease: &Lease) -> Leading<'_> {
        assert!(!lease.is_lost());
        self.leading.fetch_add(1, Ordering::SeqCst);
        let mut terms = self.terms();
        let before = terms.last().and_then(|(_, before)| before.fencing_token());
        assert!(before < lease.fencing_token(), "{terms:?}, then {lease:?}");
        terms.push((candidate, lease.clone()));
        Leading(self)
    }

    async fn has_terms(&self, count: usize) {
        eventually("the next term begins", || async { self.terms().len() >= count }).await;
    }

    async fn steps_down(&self) {
        eventually("the leader steps down", || async { self.leading.load(Ordering::SeqCst) == 0 }).await;
    }
}

/// A candidate in a task of its own. Its term ends with a permit of `resign`.
fn compete(
    record: &Arc<Record>,
    candidate: usize,
    locks: &Locks,
    resign: &Arc<Semaphore>,
) -> JoinHandle<Result<usize, Error>> {
    let (record, locks, resign) = (Arc::clone(record), locks.clone(), Arc::clone(resign));
    tokio::spawn(async move {
        locks
            .elect("leader", async |lease: Lease| {
                let _leading = record.begin(candidate, &lease);
                resign.acquire().await.unwrap().forget();
                Ok(candidate)
            })
            .await
    })
}

/// The same, once the candidate is queued on the servers.
async fn queue(
    setup: &Setup,
    record: &Arc<Record>,
    candidate: usize,
    locks: &Locks,
    resign: &Arc<Semaphore>,
) -> JoinHandle<Result<usize, Error>> {
    let (record, locks, resign) = (Arc::clone(record), locks.clone(), Arc::clone(resign));
    setup.queued(KEY, async move { compete(&record, candidate, &locks, &resign).await.unwrap() }).await
}

/// Five candidates lead, each once, and in the order in which they came.
pub async fn one_candidate_leads_at_a_time(setup: Setup) {
    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let mut candidates = vec![compete(&record, 0, &setup.client().await, &resign)];
    record.has_terms(1).await;
    for candidate in 1..5 {
        candidates.push(queue(&setup, &record, candidate, &setup.client().await, &resign).await);
    }
    for candidate in 0..5 {
        record.has_terms(candidate + 1).await;
        assert_eq!(record.leading.load(Ordering::SeqCst), 1);
        resign.add_permits(1);
    }
    for (candidate, task) in candidates.into_iter().enumerate() {
        assert_eq!(soon("the election ends", task).await.unwrap().unwrap(), candidate);
    }
    let led: Vec<usize> = record.terms().iter().map(|(candidate, _)| *candidate).collect();
    if setup.nodes() == 1 {
        assert_eq!(led, [0, 1, 2, 3, 4]);
    }
    setup.finish().await;
}

/// The lease is revoked: the other candidate leads, and then the first one again.
pub async fn a_leader_that_lost_its_lease_competes_again(setup: Setup) {
    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let (first, second) = (setup.client().await, setup.client().await);
    let leader = compete(&record, 0, &first, &resign);
    record.has_terms(1).await;
    let other = queue(&setup, &record, 1, &second, &resign).await;
    assert!(second.mutex("leader").unwrap().force_release().await.unwrap());
    // The first one would learn of it from its next renewal.
    let revoked = record.terms()[0].1.clone();
    assert!(revoked.renew().await.is_err());
    record.has_terms(2).await;
    eventually("it steps down", || async { record.leading.load(Ordering::SeqCst) == 1 }).await;
    assert!(!leader.is_finished() && !other.is_finished());
    resign.add_permits(2);
    assert_eq!(soon("the second one resigns", other).await.unwrap().unwrap(), 1);
    assert_eq!(soon("the election ends", leader).await.unwrap().unwrap(), 0);
    let led: Vec<usize> = record.terms().iter().map(|(candidate, _)| *candidate).collect();
    // A stall may have ended the term of the second one, which then leads once more.
    assert!(led.starts_with(&[0, 1, 0]), "{led:?}");
    drop((first, second));
    setup.finish().await;
}

/// Both the leader and a waiting candidate outlast a server that is silent for longer than `lock`
/// waits. With a limit, the election ends with the error.
pub async fn an_election_outlasts_an_outage(setup: Setup) {
    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let options = || ttl(1_500).node_timeout(Duration::from_millis(500));
    let (first, second) = (setup.client_with(options()).await, setup.client_with(options()).await);
    let mut candidates = vec![compete(&record, 0, &first, &resign)];
    record.has_terms(1).await;
    candidates.push(queue(&setup, &record, 1, &second, &resign).await);
    // Queued in the same client as the second candidate, so it fails when that one's call does.
    let holder = setup.client().await.mutex("witness").unwrap().lock().await.unwrap();
    let witness = second.mutex("witness").unwrap();
    let failing = {
        let witness = witness.clone();
        setup.queued("lock:witness", async move { witness.lock().await.map(drop) }).await
    };
    let limited =
        second.with_options(second.options().clone().outage_limit(Duration::from_millis(300))).unwrap();
    setup.deployment.pause();
    record.steps_down().await;
    assert!(setup.failed(&soon("the queued call fails", failing).await.unwrap()));
    assert!(setup.failed(&soon("the next one fails", witness.lock()).await));
    let ended = limited.elect("other", async |_| Ok::<_, Error>(())).await;
    assert!(setup.failed(&ended), "{ended:?}");
    assert!(!candidates.iter().any(JoinHandle::is_finished));
    setup.deployment.resume();
    record.has_terms(2).await;
    resign.add_permits(2);
    for (candidate, task) in candidates.into_iter().enumerate() {
        assert_eq!(soon("the election ends", task).await.unwrap().unwrap(), candidate);
    }
    holder.release().await.unwrap();
    drop((first, second, limited, witness));
    setup.finish().await;
}

pub async fn an_election_ends_with_its_work(setup: Setup) {
    let locks = setup.client().await;
    let is_locked = async || !setup.deployment.keys(KEY).await.is_empty();
    let runs = AtomicUsize::new(0);
    let value = locks.elect("leader", async |_| {
        assert!(is_locked().await);
        runs.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Box<dyn std::error::Error>>(42)
    });
    assert_eq!(soon("the election ends", value).await.unwrap(), 42);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let failed = locks.elect("leader", async |_| Err::<(), _>(Box::<dyn std::error::Error>::from("my own")));
    assert_eq!(soon("the election ends", failed).await.unwrap_err().to_string(), "my own");
    let mutex = locks.mutex("leader").unwrap();
    assert!(!mutex.is_locked().await.unwrap(), "released before it returned");
    drop((mutex, locks));
    setup.finish().await;
}

/// Dropped while it leads, and while it waits.
pub async fn a_dropped_election_leaves_nothing(setup: Setup) {
    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let (locks, other) = (setup.client().await, setup.client().await);
    let leader = compete(&record, 0, &locks, &resign);
    record.has_terms(1).await;
    let waiting = {
        let other = other.clone();
        let work = |_: Lease| pending::<Result<(), Error>>();
        setup.queued(KEY, async move { other.elect("leader", work).await }).await
    };
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    leader.abort();
    assert!(leader.await.unwrap_err().is_cancelled());
    record.steps_down().await;
    locks.settled().await;
    other.settled().await;
    assert!(!other.mutex("leader").unwrap().is_locked().await.unwrap());
    assert_eq!(record.terms().len(), 1);
    drop((locks, other));
    setup.finish().await;
}

/// Nothing that a retry cannot change is retried.
pub async fn an_election_ends_with_a_lasting_error(setup: Setup) {
    let locks = setup.client().await;
    let never = async |_: Lease| -> Result<(), Error> { panic!("it does not lead") };
    let refused = locks.elect("", never).await;
    assert!(matches!(refused, Err(Error::Name(_))), "{refused:?}");
    let _: Vec<u64> = setup.deployment.run_at(KEY, &["RPUSH", KEY, "foreign"]).await;
    let foreign = soon("the election ends", locks.elect("leader", never)).await;
    assert!(matches!(foreign, Err(Error::WrongType { .. })), "{foreign:?}");
    let _: Vec<u64> = setup.deployment.run_at(KEY, &["DEL", KEY]).await;

    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let leader = compete(&record, 0, &locks, &resign);
    record.has_terms(1).await;
    let other = setup.client().await;
    let waiting = {
        let other = other.clone();
        setup.queued(KEY, async move { other.elect("leader", never).await }).await
    };
    other.close(Duration::from_secs(20)).await.unwrap();
    let closed = soon("the election ends", waiting).await.unwrap();
    assert!(matches!(closed, Err(Error::Closed { .. })), "{closed:?}");
    locks.close(Duration::from_secs(20)).await.unwrap();
    let closed = soon("the election ends", leader).await.unwrap();
    assert!(matches!(closed, Err(Error::Closed { .. })), "{closed:?}");
    drop((locks, other));
    setup.finish().await;
}

/// No candidate resigns: each term ends with the longest hold, and the other one leads.
pub async fn leaders_take_turns_with_a_longest_hold(setup: Setup) {
    let (record, resign) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
    let options = || ttl(900).max_hold(Duration::from_millis(900));
    let (first, second) = (setup.client_with(options()).await, setup.client_with(options()).await);
    let candidates = [compete(&record, 0, &first, &resign), compete(&record, 1, &second, &resign)];
    record.has_terms(4).await;
    resign.add_permits(2);
    for (candidate, task) in candidates.into_iter().enumerate() {
        assert_eq!(soon("the election ends", task).await.unwrap().unwrap(), candidate);
    }
    let led: Vec<usize> = record.terms().iter().map(|(candidate, _)| *candidate).collect();
    assert!(led.contains(&0) && led.contains(&1), "{led:?}");
    drop((first, second));
    setup.finish().await;
}
