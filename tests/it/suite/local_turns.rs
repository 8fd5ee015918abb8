//! Tasks of one client that pass a hold on: a mutex, or the write side without an owner.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use redlatch::{Error, Event, Events, Fencing, Lease, LeaseEnd, Options};

use crate::support::{AnyGuard, AnyLock, Setup, eventually, patient, soon};

pub type Locking = Pin<Box<dyn Future<Output = Result<AnyGuard, Error>>>>;

/// Longer than a busy machine needs for a few passes.
const LONG_TURN: Duration = Duration::from_secs(7);

pub fn long_turn() -> Options {
    patient().local_turn(LONG_TURN)
}

/// A call that waits: it was polled once.
pub async fn waiting(lock: &AnyLock) -> Locking {
    let lock = lock.clone();
    let mut locking: Locking = Box::pin(async move { lock.lock().await });
    let early = poll_fn(|context| Poll::Ready(locking.as_mut().poll(context))).await;
    assert!(early.is_pending(), "the lock is held");
    locking
}

/// A hold that the server granted to a task after it had waited for another one of its client, and
/// reserved tokens for.
pub async fn contended(lock: &AnyLock) -> AnyGuard {
    let first = lock.lock().await.unwrap();
    let second = waiting(lock).await;
    let third = waiting(lock).await;
    first.release().await.unwrap();
    let second = soon("the second task acquires", second).await.unwrap();
    // Tokens are reserved once the client knows that the server's clock has passed the last one.
    lock.inspect().await.unwrap();
    second.release().await.unwrap();
    soon("the third task acquires", third).await.unwrap()
}

/// Takes turns among four tasks, and returns all leases. A turn ends early on a busy machine, and
/// the next task asks the servers: fewer than one request a turn shows that most asked nothing.
async fn take_turns(setup: &Setup, lock: &AnyLock, turns: usize) -> (AnyGuard, Vec<Lease>) {
    let mut guard = contended(lock).await;
    let mut queue = VecDeque::new();
    for _ in 0..3 {
        queue.push_back(waiting(lock).await);
    }
    let before = setup.deployment.scripts_run().await;
    let mut leases = Vec::new();
    for left in (0..turns).rev() {
        if left > 2 {
            queue.push_back(waiting(lock).await);
        }
        leases.push(guard.lease().clone());
        guard.release().await.unwrap();
        let next = queue.pop_front().unwrap();
        guard = soon("the next task has the hold", next).await.unwrap();
        assert!(!guard.lease().is_lost());
    }
    let requests = (setup.deployment.scripts_run().await - before) / setup.nodes() as u64;
    assert!(requests < turns as u64, "{requests} requests for {turns} turns");
    (guard, leases)
}

pub async fn tasks_pass_a_hold_on_without_a_request(setup: Setup) {
    let lock = setup.lock_with("turns", long_turn()).await;
    let (guard, leases) = take_turns(&setup, &lock, 40).await;
    assert!(leases.iter().all(|lease| lease.end() == Some(LeaseEnd::Released)));
    let tokens = leases.iter().chain([guard.lease()]).map(|lease| lease.fencing_token().unwrap());
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens grow");
    assert!(setup.deployment.is_locked(&lock).await);
    assert!(lock.is_held_by(&guard).await);
    let last = guard.token();
    // No token was used that the servers had not reserved, and what is left is given back.
    assert!(setup.deployment.holds_and_token(&lock).await.1 >= Some(last));
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    eventually("all nodes have the last token", || async {
        setup.deployment.holds_and_token(&lock).await.1 == Some(last)
    })
    .await;
    drop((leases, lock));
    setup.finish().await;
}

pub async fn holds_without_tokens_are_passed_on(setup: Setup) {
    let lock = setup.lock_with("plain", long_turn().fencing(Fencing::Off)).await;
    let (guard, leases) = take_turns(&setup, &lock, 40).await;
    assert!(leases.iter().all(|lease| lease.fencing_token().is_none()));
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop((leases, lock));
    setup.finish().await;
}

pub async fn no_hold_is_passed_on_if_the_turn_is_zero(setup: Setup) {
    let lock = setup.lock_with("none", patient().local_turn(Duration::ZERO)).await;
    let mut guard = contended(&lock).await;
    for _ in 0..3 {
        let before = setup.deployment.scripts_run().await;
        let next = waiting(&lock).await;
        guard.release().await.unwrap();
        guard = soon("the next task acquires", next).await.unwrap();
        assert!(setup.deployment.scripts_run().await > before);
    }
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn a_lease_that_was_passed_on_is_not_held(setup: Setup) {
    let lock = setup.lock_with("old", long_turn()).await;
    let guard = contended(&lock).await;
    let next = waiting(&lock).await;
    let old = guard.lease().clone();
    drop(guard); // a drop passes it on as well
    let guard = soon("the next task has the hold", next).await.unwrap();
    assert!(old.fencing_token() < guard.lease().fencing_token());
    let is_held = match &lock {
        AnyLock::Mutex(lock) => lock.is_held_by(&old).await.unwrap(),
        AnyLock::Write(lock) => lock.is_held_by(&old).await.unwrap(),
        _ => panic!("a kind that has no turns"),
    };
    assert!(!is_held);
    assert!(matches!(old.while_held(async {}).await, Err(Error::Released { .. })));
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn a_passed_hold_goes_on_if_its_receiver_is_dropped(setup: Setup) {
    let lock = setup.lock_with("dropped", long_turn()).await;
    let guard = contended(&lock).await;
    let (third, fourth) = (waiting(&lock).await, waiting(&lock).await);
    guard.release().await.unwrap();
    drop(third);
    let guard = soon("the task behind it has the hold", fourth).await.unwrap();
    // No task is behind this one: then it is released on the server.
    let last = waiting(&lock).await;
    guard.release().await.unwrap();
    drop(last);
    eventually("the lock is free", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop(lock);
    setup.finish().await;
}

pub async fn a_passed_hold_without_a_receiver_is_released(setup: Setup) {
    let turn = Duration::from_millis(300);
    let lock = setup.lock_with("stuck", patient().local_turn(turn)).await;
    let other = setup.rival("stuck").await;
    let guard = contended(&lock).await;
    let unpolled = waiting(&lock).await;
    let expires = setup.deployment.kept_until(lock.key()).await;
    guard.release().await.unwrap();
    let guard = soon("another client acquires", other.lock()).await.unwrap();
    assert!(Instant::now() < expires, "it is released, and does not expire");
    guard.release().await.unwrap();
    drop((unpolled, lock, other));
    setup.finish().await;
}

/// A task that waits in Redis alone reserves tokens for those that come meanwhile, if some have
/// come lately. A hold of a quorum is passed on only once all nodes have answered, so it may take
/// several rounds.
pub async fn tasks_that_come_while_one_waits_have_its_turn(setup: Setup) {
    let (lock, other) = (setup.lock_with("joined", long_turn()).await, setup.rival("joined").await);
    contended(&lock).await.release().await.unwrap();
    let mut has_passed = false;
    for _ in 0..50 {
        let held = soon("another client acquires", other.lock()).await.unwrap();
        let alone = lock.clone();
        let first = setup.queued(lock.key(), async move { alone.lock().await }).await;
        let second = waiting(&lock).await;
        held.release().await.unwrap();
        let first = soon("the task that waits acquires", first).await.unwrap().unwrap();
        let token = first.token();
        first.release().await.unwrap();
        let second = soon("the next task acquires", second).await.unwrap();
        // A reserved token: those of the server grow with its clock.
        has_passed |= second.token() == token + 1;
        second.release().await.unwrap();
        if has_passed {
            break;
        }
    }
    assert!(has_passed, "no hold was passed on in 50 rounds");
    drop((lock, other));
    setup.finish().await;
}

pub async fn a_hold_is_not_passed_to_a_call_with_other_options(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let lock = setup.kind.lock(&locks, "options");
    let shorter = long_turn().ttl(Duration::from_secs(20));
    let other = setup.kind.lock(&locks.with_options(shorter).unwrap(), "options");
    let guard = contended(&lock).await;
    let first = guard.token();
    let (next, last) = (waiting(&other).await, waiting(&lock).await);
    let before = setup.deployment.scripts_run().await;
    guard.release().await.unwrap();
    let guard = soon("the next task acquires", next).await.unwrap();
    assert!(setup.deployment.scripts_run().await > before, "it asks the servers");
    assert!(guard.token() > first);
    guard.release().await.unwrap();
    soon("the last task acquires", last).await.unwrap().release().await.unwrap();
    drop((lock, other, locks));
    setup.finish().await;
}

pub async fn other_clients_have_their_turn(setup: Setup) {
    let turn = patient().local_turn(Duration::from_millis(20));
    let (lock, other) = (setup.lock_with("shared", turn).await, setup.rival("shared").await);
    let busy: Vec<_> = (0..8)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                loop {
                    drop(lock.lock().await.unwrap().release().await);
                }
            })
        })
        .collect();
    let mut late = 0;
    for _ in 0..20 {
        let lefts: Vec<i64> = setup.deployment.run_at(lock.key(), &["PTTL", lock.key()]).await;
        let left = lefts.into_iter().max().and_then(|left| u64::try_from(left).ok());
        let start = Instant::now();
        let guard = soon("another client acquires", other.lock()).await.unwrap();
        late += usize::from(left.is_some_and(|left| start.elapsed() > Duration::from_millis(left) / 2));
        guard.release().await.unwrap();
    }
    // A stall makes single rounds late, a hold that is not given up all of them.
    assert!(late <= 5, "in {late} of 20 rounds, the hold expired");
    for task in busy {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    drop((lock, other));
    setup.finish().await;
}

/// The counter is rebuilt from the server's clock: what is reserved must not outrun it.
pub async fn tokens_grow_after_the_counter_is_lost_between_turns(setup: Setup) {
    let lock = setup.lock("short").await; // with the default turn
    let mut last = 0;
    for round in 0..20 {
        let mut guard = contended(&lock).await;
        for _ in 0..5 {
            let next = waiting(&lock).await;
            let token = guard.token();
            assert!(token > last, "{token} after {last}");
            last = token;
            guard.release().await.unwrap();
            guard = soon("the next task acquires", next).await.unwrap();
        }
        assert!(guard.token() > last);
        last = guard.token();
        guard.release().await.unwrap();
        if round % 5 == 4 {
            let fence = format!("{{{}}}:fence", lock.key());
            setup.deployment.run_at::<i64>(&fence, &["DEL", &fence]).await;
        }
    }
    drop(lock);
    setup.finish().await;
}

pub async fn tokens_of_a_revoked_turn_are_smaller_than_the_next(setup: Setup) {
    let lock = setup.lock_with("revoked", long_turn()).await;
    let other = setup.rival("revoked").await;
    let guard = contended(&lock).await;
    assert!(other.force_release().await.unwrap());
    let new = soon("another client acquires", other.lock()).await.unwrap();
    let next = waiting(&lock).await;
    // The client does not know yet, unless its turn is over.
    if guard.release().await.is_err() {
        drop(next); // it asks the servers
    } else {
        let guard = soon("the next task has the hold", next).await.unwrap();
        assert!(guard.token() < new.token(), "the resource refuses the former holder");
        let released = guard.release().await;
        assert!(matches!(released, Err(Error::NotHeld { .. } | Error::Lost { .. })), "{released:?}");
    }
    assert!(setup.deployment.is_locked(&lock).await, "the new holder is not released");
    new.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn a_forced_release_ends_the_turn_of_its_client(setup: Setup) {
    let lock = setup.lock_with("own", long_turn()).await;
    let other = setup.rival("own").await;
    let guard = contended(&lock).await;
    let next = waiting(&lock).await;
    assert!(lock.force_release().await.unwrap());
    let new = soon("another client acquires", other.lock()).await.unwrap();
    let released = guard.release().await;
    assert!(matches!(released, Err(Error::NotHeld { .. } | Error::Lost { .. })), "{released:?}");
    let first = new.token();
    new.release().await.unwrap();
    let guard = soon("the next task acquires", next).await.unwrap();
    assert!(guard.token() > first, "it is the server's grant");
    guard.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn a_lost_hold_is_not_passed_on(setup: Setup) {
    let lock = setup.lock_with("lost", long_turn()).await;
    let other = setup.rival("lost").await;
    let guard = contended(&lock).await;
    let next = waiting(&lock).await;
    assert!(other.force_release().await.unwrap());
    let new = soon("another client acquires", other.lock()).await.unwrap();
    let renewed = guard.lease().renew().await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
    let released = guard.release().await;
    assert!(matches!(released, Err(Error::Lost { .. })), "{released:?}");
    let first = new.token();
    new.release().await.unwrap();
    let guard = soon("the next task acquires", next).await.unwrap();
    assert!(guard.token() > first, "it is the server's grant");
    guard.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// The task to which the hold was passed on is not polled again, so its call never ends. A
/// shorter turn of another client, which begins after the close, shows that it did not just end.
pub async fn a_close_releases_a_hold_that_no_task_receives(setup: Setup) {
    let options = patient().ttl(Duration::from_secs(60));
    let locks = setup.client_with(options.clone().local_turn(Duration::from_secs(10))).await;
    let other = setup.client_with(options.local_turn(Duration::from_secs(1))).await;
    let lock = setup.kind.lock(&locks, "stuck");
    let guard = contended(&lock).await;
    let unpolled = waiting(&lock).await;
    guard.release().await.unwrap();
    let closed = locks.close(Duration::from_millis(500)).await;
    assert!(matches!(closed, Err(Error::Unreleased { count: 1..=2, .. })), "the call is open: {closed:?}");
    let reference = setup.kind.lock(&other, "a short turn");
    let guard = contended(&reference).await;
    let unpolled_too = waiting(&reference).await;
    guard.release().await.unwrap();
    eventually("the turn is over", || async { !setup.deployment.is_locked(&reference).await }).await;
    assert!(!setup.deployment.is_locked(&lock).await, "only the end of the turn would release it");
    drop((unpolled, unpolled_too, lock, reference, locks, other));
    setup.finish().await;
}

pub async fn a_close_releases_a_passed_hold(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let lock = setup.kind.lock(&locks, "closed");
    let guard = contended(&lock).await;
    let next = waiting(&lock).await;
    guard.release().await.unwrap();
    let mut closing = Box::pin(locks.close(Duration::from_secs(20)));
    let early = poll_fn(|context| Poll::Ready(closing.as_mut().poll(context))).await;
    assert!(early.is_pending(), "a call is open");
    let outcome = soon("the call ends", next).await;
    assert!(matches!(outcome, Err(Error::Closed { .. })), "{outcome:?}");
    closing.await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop((lock, locks));
    setup.finish().await;
}

/// A dropped guard has left its hold to a task that is not polled again.
pub async fn a_passed_hold_is_released_before_all_is_settled(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let (lock, rival) = (setup.kind.lock(&locks, "settled"), setup.rival("settled").await);
    let guard = contended(&lock).await;
    let unpolled = waiting(&lock).await;
    drop(guard);
    soon("settled() returns", locks.settled()).await;
    rival.try_lock().await.unwrap().expect("the lock is free").release().await.unwrap();
    drop((unpolled, lock, locks, rival));
    setup.finish().await;
}

/// How many grants and releases a client has reported until it was dropped.
pub async fn reports(mut events: Events) -> (usize, usize) {
    let (mut granted, mut released) = (0, 0);
    while let Some(event) = soon("the stream ends", events.next()).await {
        granted += usize::from(matches!(event, Event::Granted { .. }));
        released += usize::from(matches!(event, Event::Released { .. }));
    }
    (granted, released)
}

pub async fn each_hold_reports_its_release_once(setup: Setup) {
    let locks = setup.client_with(long_turn()).await;
    let (lock, events) = (setup.kind.lock(&locks, "dropped"), locks.events());
    let guard = contended(&lock).await;
    let next = waiting(&lock).await;
    drop(guard);
    soon("the next task has the hold", next).await.unwrap().release().await.unwrap();
    drop((lock, locks));
    assert_eq!(reports(events).await, (4, 4), "a dropped guard has left its hold to the next task");
    let locks = setup.client_with(long_turn()).await;
    let (lock, events) = (setup.kind.lock(&locks, "released"), locks.events());
    let guard = contended(&lock).await;
    let unpolled = waiting(&lock).await;
    guard.release().await.unwrap();
    drop(unpolled);
    soon("settled() returns", locks.settled()).await;
    drop((lock, locks));
    assert_eq!(reports(events).await, (3, 3), "a released hold was received by no task");
    setup.finish().await;
}
