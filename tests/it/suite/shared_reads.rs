//! Tasks of one client that read under one hold: reads without an owner.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use redlatch::{Error, LeaseEnd, Options, Owner, RwLock, RwLockReadGuard, Wakeups};

use super::local_turns::{long_turn, reports};
use crate::support::{AnyGuard, AnyLock, Setup, eventually, patient, soon};

pub type Reading = Pin<Box<dyn Future<Output = Result<RwLockReadGuard, Error>>>>;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A lock of a new client, to read without an owner.
pub async fn reading(setup: &Setup, name: &str, options: Options) -> RwLock {
    setup.client_with(options).await.rwlock(name).unwrap()
}

fn any(lock: &RwLock) -> AnyLock {
    AnyLock::SharedRead(lock.clone())
}

/// A call that waits: it was polled once.
pub async fn waiting(lock: &RwLock) -> Reading {
    let lock = lock.clone();
    let mut reading: Reading = Box::pin(async move { lock.read().await });
    let early = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await;
    assert!(early.is_pending(), "the lock is held");
    reading
}

/// How many of the servers' holds are those of readers.
async fn holds_of_readers(setup: &Setup, lock: &RwLock) -> u64 {
    let seen = setup.client().await.rwlock(lock.name().as_str()).unwrap().inspect().await.unwrap();
    seen.reader_count
}

/// How many holds the servers have.
pub async fn holds(setup: &Setup, lock: &RwLock) -> usize {
    setup.deployment.holds_and_token(&any(lock)).await.0.len()
}

pub async fn tasks_read_under_one_hold_without_a_request(setup: Setup) {
    // No renewal wakes a task that waits for the end of its lease.
    let lock = reading(&setup, "shared", long_turn().ttl(Duration::from_secs(600))).await;
    let rival = setup.rival("shared").await;
    let first = lock.read().await.unwrap();
    setup.is_held_on_all_nodes(&any(&lock)).await;
    let before = setup.deployment.scripts_run().await;
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(lock.read().await.unwrap());
    }
    guards.push(lock.try_read().await.unwrap().expect("it joins"));
    guards.push(lock.read_timeout(Duration::ZERO).await.unwrap());
    let scripts = setup.deployment.scripts_run().await - before;
    assert!(scripts <= setup.repairs(), "no request for 22 reads: {scripts}");
    assert_eq!(holds(&setup, &lock).await, 1);
    assert!(guards.iter().all(|guard| guard.lease().fencing_token() == first.lease().fencing_token()));
    let old = first.lease().clone();
    // A task that waits for its end is woken: it would look by itself a second later.
    let (mut ending, woken) = (Box::pin(old.lost()), Arc::new(Woken::default()));
    let waker = Waker::from(Arc::clone(&woken));
    assert!(ending.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    first.release().await.unwrap();
    assert!(woken.0.load(Ordering::SeqCst));
    assert_eq!(soon("it goes on", ending).await, LeaseEnd::Released);
    assert_eq!(old.end(), Some(LeaseEnd::Released));
    assert!(matches!(old.while_held(async {}).await, Err(Error::Released { .. })));
    assert!(!lock.is_held_by(&old).await.unwrap(), "it has left");
    assert!(guards.iter().all(|guard| !guard.lease().is_lost()), "the others read on");
    assert!(rival.try_lock().await.unwrap().is_none());
    for guard in guards {
        guard.release().await.unwrap();
    }
    // The last release was answered: nothing lingers.
    rival.try_lock().await.unwrap().expect("the lock is free").release().await.unwrap();
    drop((lock, rival));
    setup.finish().await;
}

pub async fn a_renewal_extends_a_shared_hold(setup: Setup) {
    let lock = reading(&setup, "renewed", long_turn().ttl(Duration::from_secs(60))).await;
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    let granted = second.lease().valid_until();
    let passed = Instant::now() + Duration::from_millis(500);
    eventually("time has passed", || async { Instant::now() >= passed }).await;
    first.lease().renew().await.unwrap();
    let by = second.lease().valid_until() - granted;
    assert!(by > Duration::from_millis(250), "one hold, one deadline, extended by {by:?}");
    let left = first.lease().clone();
    first.release().await.unwrap();
    assert!(matches!(left.renew().await, Err(Error::Released { .. })), "it has left the hold");
    assert!(!second.lease().is_lost());
    second.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn a_sole_reader_becomes_a_ticket(setup: Setup) {
    let (lock, next) =
        (reading(&setup, "handed", long_turn()).await, reading(&setup, "handed", patient()).await);
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    let refused = first.into_ticket().unwrap_err();
    assert!(matches!(refused.error(), Error::SharedHold { .. }), "{refused:?}");
    let first = refused.into_guard();
    assert!(!first.lease().is_lost() && !second.lease().is_lost());
    second.release().await.unwrap();
    let (lease, token) = (first.lease().clone(), first.lease().fencing_token());
    let ticket = first.into_ticket().unwrap();
    assert_eq!(lease.end(), Some(LeaseEnd::Leaked));
    // The next reader has a hold of its own, not that of the ticket.
    let third = lock.read().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 2);
    let adopted = next.adopt_read(&ticket).await.unwrap();
    assert_eq!(adopted.lease().fencing_token(), token);
    assert_eq!(holds(&setup, &lock).await, 2);
    third.release().await.unwrap();
    adopted.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 0);
    drop((lock, next));
    setup.finish().await;
}

pub async fn each_shared_read_reports_its_release_once(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let (lock, events) = (locks.rwlock("reported").unwrap(), locks.events());
    let mut guards = Vec::new();
    for _ in 0..5 {
        guards.push(lock.read().await.unwrap());
    }
    drop(guards);
    soon("settled() returns", locks.settled()).await;
    drop((lock, locks));
    assert_eq!(reports(events).await, (5, 5));
    setup.finish().await;
}

pub async fn one_task_asks_for_all_that_wait(setup: Setup) {
    // A turn is at most a quarter of what is granted: a reply grants a whole TTL, a message less.
    let locks = setup.client_with(long_turn().wakeups(Wakeups::Verify)).await;
    let (lock, rival) = (locks.rwlock("one").unwrap(), setup.rival("one").await);
    let held = rival.lock().await.unwrap();
    let asking = lock.clone();
    let first = setup.queued(lock.name().key(), async move { asking.read().await }).await;
    let (mut others, mut guards) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        others.push(waiting(&lock).await);
    }
    assert_eq!(setup.deployment.waiters(&any(&lock)).await, 1);
    held.release().await.unwrap();
    guards.push(soon("the first task reads", first).await.unwrap().unwrap());
    for other in others {
        guards.push(soon("the others read", other).await.unwrap());
    }
    assert_eq!(holds(&setup, &lock).await, 1);
    for guard in guards {
        guard.release().await.unwrap();
    }
    // Else the release would go on in the background, as it may for one node of a quorum.
    assert!(setup.nodes() > 1 || locks.is_idle(), "the last reader has waited for the reply");
    assert_eq!(holds(&setup, &lock).await, 0);
    drop((lock, locks, rival));
    setup.finish().await;
}

pub async fn dropped_readers_leave_nothing(setup: Setup) {
    let lock = reading(&setup, "drops", long_turn()).await;
    let rival = setup.rival("drops").await;
    let held = rival.lock().await.unwrap();
    let (first, second, third) = (waiting(&lock).await, waiting(&lock).await, waiting(&lock).await);
    drop(first); // another one asks instead
    held.release().await.unwrap();
    let guard = soon("the second task reads", second).await.unwrap();
    drop(third); // admitted, and dropped before it knows
    drop(guard);
    eventually("the lock is free", || async { holds(&setup, &lock).await == 0 }).await;
    drop((lock, rival));
    setup.finish().await;
}

pub async fn a_task_that_is_not_polled_keeps_no_hold(setup: Setup) {
    let turn = patient().local_turn(Duration::from_millis(300));
    let lock = reading(&setup, "stuck", turn).await;
    let rival = setup.rival("stuck").await;
    let held = rival.lock().await.unwrap();
    let (first, unpolled) = (waiting(&lock).await, waiting(&lock).await);
    held.release().await.unwrap();
    let guard = soon("the first task reads", first).await.unwrap();
    let expires = setup.deployment.kept_until(lock.name().key()).await;
    guard.release().await.unwrap();
    let guard = soon("another client writes", rival.lock()).await.unwrap();
    assert!(Instant::now() < expires, "it is released, and does not expire");
    guard.release().await.unwrap();
    drop((unpolled, lock, rival));
    setup.finish().await;
}

/// It asks the servers itself, behind a writer that waits for the shared hold.
pub async fn a_task_with_other_options_keeps_no_hold(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let others = locks.with_options(long_turn().ttl(Duration::from_secs(9))).unwrap();
    let (lock, other) = (locks.rwlock("mixed").unwrap(), others.rwlock("mixed").unwrap());
    let rival = setup.rival("mixed").await;
    let held = rival.lock().await.unwrap();
    let first = tokio::spawn({
        let lock = lock.clone();
        async move { lock.read().await }
    });
    eventually("it queues", || async { setup.deployment.waiters(&rival).await == 1 }).await;
    let second = tokio::spawn(async move { other.read().await });
    let writing = rival.lock_in_task();
    eventually("the writer queues", || async { setup.deployment.waiters(&rival).await >= 2 }).await;
    held.release().await.unwrap();
    let guard = soon("the first task reads", first).await.unwrap().unwrap();
    eventually("the second task asks", || async { setup.deployment.waiters(&rival).await == 2 }).await;
    guard.release().await.unwrap();
    assert_eq!(holds_of_readers(&setup, &lock).await, 0, "no hold lingers");
    soon("the writer has its turn", writing).await.unwrap().unwrap().release().await.unwrap();
    soon("the second task reads", second).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, locks, others, rival));
    setup.finish().await;
}

pub async fn a_revoked_hold_is_lost_for_all_its_readers(setup: Setup) {
    let lock = reading(&setup, "revoked", long_turn()).await;
    let other = setup.client().await.rwlock("revoked").unwrap();
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    assert!(other.force_release_read().await.unwrap());
    assert!(first.lease().renew().await.is_err());
    for guard in [&first, &second] {
        assert_eq!(soon("its reader learns of it", guard.lease().lost()).await, LeaseEnd::Revoked);
    }
    for guard in [first, second] {
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    }
    // Revoked by the client itself: no task joins what it knows to be gone.
    let guard = lock.read().await.unwrap();
    assert!(lock.force_release_read().await.unwrap());
    let before = setup.deployment.scripts_run().await;
    let next = lock.read().await.unwrap();
    assert!(setup.deployment.scripts_run().await > before);
    drop(guard);
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn readers_share_only_what_they_may(setup: Setup) {
    // A request of the first read may reach a node of a quorum late: not three times in a row.
    let asks = async |one: &RwLock, other: &RwLock| {
        let mut asked = true;
        for _ in 0..3 {
            let first = one.read().await.unwrap();
            let before = setup.deployment.scripts_run().await;
            let second = other.read().await.unwrap();
            asked &= setup.deployment.scripts_run().await > before;
            second.release().await.unwrap();
            first.release().await.unwrap();
        }
        asked
    };
    let locks = setup.client_with(long_turn()).await;
    let with = |options| locks.with_options(options).unwrap().rwlock("rules").unwrap();
    let lock = with(long_turn());
    assert!(!asks(&lock, &with(long_turn())).await, "the same options");
    assert!(asks(&lock, &with(long_turn().ttl(Duration::from_secs(9)))).await, "others");
    assert!(asks(&lock, &lock.with_owner(&Owner::new())).await, "an owner");
    let owned = lock.with_owner(&Owner::new());
    assert!(asks(&owned, &owned).await, "the server counts the holds of an owner");
    let none = with(patient().local_turn(Duration::ZERO));
    assert!(asks(&none, &none).await, "no turn");
    assert!(!asks(&with(long_turn().max_readers(5)), &with(long_turn().max_readers(5))).await, "as it says");
    for limit in [5, 10_000] {
        let limited = setup.client_with(patient().max_readers(limit)).await.rwlock("rules").unwrap();
        assert!(asks(&limited, &limited).await, "{limit} readers, the default too if it was set");
    }
    drop((lock, owned, none));
    drop(locks);
    setup.finish().await;
}

pub async fn a_downgraded_hold_may_be_joined(setup: Setup) {
    let lock = reading(&setup, "down", long_turn()).await;
    let first = lock.write().await.unwrap().downgrade().await.unwrap();
    setup.is_held_on_all_nodes(&any(&lock)).await;
    let before = setup.deployment.scripts_run().await;
    let second = lock.read().await.unwrap();
    let scripts = setup.deployment.scripts_run().await - before;
    assert!(scripts <= setup.repairs(), "no request: {scripts}");
    assert_eq!(second.lease().fencing_token(), first.lease().fencing_token());
    first.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 1);
    second.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 0);
    drop(lock);
    setup.finish().await;
}

pub async fn a_leaked_read_stays_until_its_ttl(setup: Setup) {
    let locks = setup.client_with(long_turn().ttl(Duration::from_secs(6))).await;
    let [lock, closed] = ["leaked", "closed"].map(|name| locks.rwlock(name).unwrap());
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    let old = first.lease().clone();
    first.leak();
    assert_eq!(old.end(), Some(LeaseEnd::Leaked));
    assert!(!second.lease().is_lost(), "the other reads on");
    let third = lock.read().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 2, "no task joins what is never released");
    third.release().await.unwrap();
    second.release().await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 1, "no release was sent");
    let (first, second) = (closed.read().await.unwrap(), closed.read().await.unwrap());
    first.leak();
    locks.close(Duration::from_secs(20)).await.unwrap();
    assert_eq!(second.lease().end(), Some(LeaseEnd::Closed));
    drop(second);
    assert_eq!(holds(&setup, &closed).await, 1, "nor by the close");
    eventually("both expire", || async { holds(&setup, &lock).await + holds(&setup, &closed).await == 0 })
        .await;
    drop((lock, closed, locks));
    setup.finish().await;
}

pub async fn a_close_ends_all_shared_reads(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let lock = locks.rwlock("closed").unwrap();
    let (first, second) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    locks.close(Duration::from_secs(20)).await.unwrap();
    assert_eq!(holds(&setup, &lock).await, 0);
    for guard in [first, second] {
        assert_eq!(guard.lease().end(), Some(LeaseEnd::Closed));
        guard.release().await.unwrap();
    }
    assert!(matches!(lock.read().await, Err(Error::Closed { .. })));
    drop((lock, locks));
    setup.finish().await;
}

pub async fn a_task_that_reads_learns_that_it_waits_for_itself(setup: Setup) {
    let lock = reading(&setup, "itself", long_turn()).await;
    let elsewhere = tokio::spawn({
        let lock = lock.clone();
        async move { lock.read().await }
    });
    let first = elsewhere.await.unwrap().unwrap();
    let outcome = lock.write_timeout(Duration::from_millis(300)).await;
    assert!(matches!(outcome, Err(Error::TimedOut { holds_itself: false, .. })), "{outcome:?}");
    let second = lock.read().await.unwrap();
    drop(first);
    let outcome = lock.write_timeout(Duration::from_millis(300)).await;
    assert!(matches!(outcome, Err(Error::TimedOut { holds_itself: true, .. })), "{outcome:?}");
    second.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

/// Readers without a pause keep out neither another client's writer nor one of their own, and none
/// of them reads while a writer writes.
pub async fn writers_have_their_turn_beside_shared_reads(setup: Setup) {
    let turn = patient().local_turn(Duration::from_millis(5));
    let lock = reading(&setup, "busy", turn).await;
    let rival = setup.rival("busy").await;
    let (reads, writing) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let busy: Vec<_> = (0..8)
        .map(|_| {
            let (lock, reads, writing) = (lock.clone(), Arc::clone(&reads), Arc::clone(&writing));
            tokio::spawn(async move {
                loop {
                    let guard = lock.read().await.unwrap();
                    reads.fetch_add(1, Ordering::SeqCst);
                    let overlaps = writing.load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    assert!(guard.lease().is_lost() || overlaps + writing.load(Ordering::SeqCst) == 0);
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    let mut late = 0;
    for round in 0..20 {
        let before = reads.load(Ordering::SeqCst);
        eventually("they read", || async { reads.load(Ordering::SeqCst) > before }).await;
        let key = lock.name().key();
        let lefts: Vec<i64> = setup.deployment.run_at(key, &["PTTL", key]).await;
        let left = lefts.into_iter().max().and_then(|left| u64::try_from(left).ok());
        let asked = Instant::now();
        let guard = match round % 2 {
            0 => soon("another client writes", rival.lock()).await.unwrap(),
            _ => AnyGuard::Write(soon("this client writes", lock.write()).await.unwrap()),
        };
        writing.store(1, Ordering::SeqCst);
        late += usize::from(left.is_some_and(|left| asked.elapsed() > Duration::from_millis(left) / 2));
        tokio::task::yield_now().await;
        assert!(!guard.lease().is_lost());
        writing.store(0, Ordering::SeqCst);
        guard.release().await.unwrap();
    }
    // A stall makes single writers late; holds that are not given up, all of one kind.
    assert!(late <= 5, "{late} writers came in because the hold expired");
    for task in busy {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    drop((lock, rival));
    setup.finish().await;
}
