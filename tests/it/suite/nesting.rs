//! Re-entry: counts, depth, local nesting, shared losses.

use std::time::Duration;

use redlatch::{Error, Nesting, Owner, ReentrantLock};

use super::readers::assert_gone;
use crate::support::{Setup, Stopwatch, eventually, idles, patient, soon, ttl};

async fn count(setup: &Setup, lock: &ReentrantLock) -> u64 {
    setup.state_of(lock.name()).await.writer.map_or(0, |hold| hold.count)
}

async fn remaining(setup: &Setup, lock: &ReentrantLock) -> Duration {
    setup.state_of(lock.name()).await.writer.unwrap().remaining
}

pub async fn nested_holds_are_counted_up_and_down(setup: Setup) {
    let lock = setup.client().await.reentrant("nested", &Owner::new()).unwrap();
    let owner = Owner::new();
    let mut guards = Vec::new();
    for depth in 1..=4 {
        guards.push(lock.with_owner(&owner).lock().await.unwrap());
        assert_eq!(count(&setup, &lock).await, depth);
        assert_eq!(guards[0].lease().fencing_token(), guards[depth as usize - 1].lease().fencing_token());
        let field = ["HGET", lock.name().key(), &owner.to_string()];
        let raw: Vec<Option<u64>> = setup.deployment.run_at(lock.name().key(), &field).await;
        let known = raw.iter().filter(|raw| **raw == Some(depth)).count();
        assert!(known >= setup.topology().majority(), "a majority has the owner's count: {raw:?}");
    }
    // In any order: a guard is a hold, not a place on a stack.
    for (left, index) in [(3, 1), (2, 0), (1, 1), (0, 0)] {
        guards.remove(index).release().await.unwrap();
        assert_eq!(count(&setup, &lock).await, left);
    }
    assert!(!setup.deployment.has_holders(lock.name()).await);
    drop(lock);
    setup.finish().await;
}

pub async fn owner_reenters_past_waiters(setup: Setup) {
    let locks = setup.client().await;
    let lock = locks.reentrant("passed", &Owner::new()).unwrap();
    let owner = Owner::new();
    let outer = lock.with_owner(&owner).lock().await.unwrap();
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.with_owner(&Owner::new()).lock().await?.release().await })
        })
        .collect();
    eventually("the waiters queue", || async { setup.state_of(lock.name()).await.waiting_writers == 1 })
        .await;
    let inner = soon("the owner re-enters before the waiters", lock.with_owner(&owner).lock()).await.unwrap();
    let limited = soon(
        "lock_timeout re-enters before the waiters",
        lock.with_owner(&owner).lock_timeout(Duration::from_secs(5)),
    )
    .await
    .unwrap();
    assert_eq!(count(&setup, &lock).await, 3);
    for guard in [inner, limited, outer] {
        guard.release().await.unwrap();
    }
    for waiter in waiting {
        soon("the lock is acquired", waiter).await.unwrap().unwrap();
    }
    drop((lock, locks));
    setup.finish().await;
}

/// An owner queues behind another task of its client, and then acquires the lock through another
/// client: the queued call must re-enter.
pub async fn queued_owner_reenters_after_acquiring_elsewhere(setup: Setup) {
    let (locks, elsewhere) = (setup.client().await, setup.client().await);
    let lock = locks.reentrant("meanwhile", &Owner::new()).unwrap();
    let owner = Owner::new();
    let first = lock.with_owner(&Owner::new()).lock().await.unwrap();
    // The queue in Redis: first the owner, through the other client; then a stranger. The owner
    // waits again behind the stranger, in this client's local queue.
    let key = lock.name().key();
    let outer = elsewhere.reentrant("meanwhile", &Owner::new()).unwrap();
    let outer = setup
        .queued(key, {
            let owner = owner.clone();
            async move { outer.with_owner(&owner).lock().await }
        })
        .await;
    let stranger = lock.clone();
    let stranger = setup
        .queued(key, async move { stranger.with_owner(&Owner::new()).lock().await?.release().await })
        .await;
    let before = setup.deployment.scripts_run().await;
    let inner = tokio::spawn({
        let lock = lock.clone();
        async move { lock.with_owner(&owner).lock().await }
    });
    // An owner tries once before it queues.
    eventually("the owner tries", || async { setup.deployment.scripts_run().await > before }).await;
    let before = setup.published_before_grant(key).await;
    first.release().await.unwrap();
    let outer = soon("the waiter is granted the lock", outer).await.unwrap().unwrap();
    setup.assert_notified(before).await;
    let inner = soon("the owner re-enters before the queued stranger", inner).await.unwrap().unwrap();
    assert_eq!(count(&setup, &lock).await, 2);
    inner.release().await.unwrap();
    outer.release().await.unwrap();
    soon("the stranger acquires", stranger).await.unwrap().unwrap();
    drop((lock, locks, elsewhere));
    setup.finish().await;
}

pub async fn ttl_is_largest_of_nested_holds(setup: Setup) {
    let locks = setup.client().await;
    let owner = Owner::new();
    let with = |seconds: u64| {
        locks.with_options(ttl(seconds * 1_000)).unwrap().reentrant("timed", &Owner::new()).unwrap()
    };
    let (short, long) = (with(5), with(60));
    let outer = long.with_owner(&owner).lock().await.unwrap();
    let inner = short.with_owner(&owner).lock().await.unwrap();
    assert!(
        remaining(&setup, &long).await > Duration::from_secs(50),
        "an inner hold with a shorter TTL does not shorten"
    );
    inner.release().await.unwrap();
    assert!(remaining(&setup, &long).await > Duration::from_secs(50), "the inner release does not shorten");
    outer.release().await.unwrap();
    let outer = short.with_owner(&owner).lock().await.unwrap();
    let inner = long.with_owner(&owner).lock().await.unwrap();
    let now = remaining(&setup, &long).await;
    assert!(
        now > Duration::from_secs(50) && now <= Duration::from_secs(60),
        "the larger TTL, not the sum: {now:?}"
    );
    for guard in [inner, outer] {
        guard.release().await.unwrap();
    }
    drop((short, long, locks));
    setup.finish().await;
}

pub async fn stale_release_leaves_new_hold_alone(setup: Setup) {
    let lock = setup.client().await.reentrant("foreign", &Owner::new()).unwrap();
    let (owner, stranger) = (Owner::new(), Owner::new());
    let guard = lock.with_owner(&owner).lock().await.unwrap();
    let lost = guard.lease().clone();
    assert!(lock.force_release().await.unwrap());
    let next = lock.with_owner(&stranger).lock().await.unwrap();
    assert_gone(guard.release().await);
    assert!(lost.is_lost());
    assert!(
        setup.deployment.has_holder(lock.name(), &stranger).await
            && !setup.deployment.has_holder(lock.name(), &owner).await
    );
    // An owner's release of a hold that has ended does not touch its new hold either.
    next.release().await.unwrap();
    let old = lock.with_owner(&owner).lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    let new = lock.with_owner(&owner).lock().await.unwrap();
    assert_gone(old.release().await);
    assert_eq!(count(&setup, &lock).await, 1);
    new.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn loss_ends_leases_at_every_depth(setup: Setup) {
    let locks = setup.client_with(ttl(3_000)).await;
    let lock = locks.reentrant("lost", &Owner::new()).unwrap();
    let slow = locks.with_options(ttl(60_000)).unwrap().reentrant("lost", &Owner::new()).unwrap();
    let owner = Owner::new();
    // The leases with the long TTL would not be renewed for 20 s, or at all: the renewal of the
    // short one reports the loss to them.
    let never = ttl(60_000).renewal(redlatch::Renewal::Never);
    let never = locks.with_options(never).unwrap().reentrant("lost", &Owner::new()).unwrap();
    let outermost = never.with_owner(&owner).lock().await.unwrap();
    let outer = slow.with_owner(&owner).lock().await.unwrap();
    let middle = lock.with_owner(&owner).lock().await.unwrap();
    let inner = slow.with_owner(&owner).lock().await.unwrap();
    let start = Stopwatch::start();
    let leases = [&outermost, &outer, &middle, &inner].map(|guard| guard.lease());
    setup.deployment.delete_until_lost(lock.name().key(), &leases).await;
    for lease in leases {
        soon("the end is reported", lease.lost()).await;
    }
    assert!(start.undisturbed() < Duration::from_secs(3), "{start:?}");
    for guard in [inner, middle, outer, outermost] {
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    }
    drop((lock, slow, never, locks));
    setup.finish().await;
}

/// A nested grant with a token of its own shows that the outer hold is gone, long before a renewal
/// would.
pub async fn nested_grant_shows_the_loss_of_the_outer_hold(setup: Setup) {
    let locks = setup.client_with(ttl(600_000)).await;
    let lock = locks.reentrant("outer", &Owner::new()).unwrap();
    let outer = lock.lock().await.unwrap();
    assert!(setup.client().await.reentrant("outer", &Owner::new()).unwrap().force_release().await.unwrap());
    let inner = lock.lock().await.unwrap();
    soon("the loss is noticed", outer.lease().lost()).await;
    assert!(!inner.lease().is_lost());
    inner.release().await.unwrap();
    assert_gone(outer.release().await);
    drop((lock, locks));
    setup.finish().await;
}

pub async fn lock_returns_too_deep_beyond_max_depth(setup: Setup) {
    for nesting in [Nesting::Counted, Nesting::Local] {
        let lock = setup
            .client_with(patient().max_depth(3).nesting(nesting))
            .await
            .reentrant("deep", &Owner::new())
            .unwrap();
        let owner = Owner::new();
        let mut guards = Vec::new();
        for _ in 0..3 {
            guards.push(lock.with_owner(&owner).lock().await.unwrap());
        }
        for outcome in [
            lock.with_owner(&owner).lock().await.map(drop),
            lock.with_owner(&owner).try_lock().await.map(drop),
            lock.with_owner(&owner).lock_timeout(Duration::from_secs(1)).await.map(drop),
        ] {
            assert!(matches!(outcome, Err(Error::TooDeep { depth: 3, .. })), "{nesting:?}: {outcome:?}");
        }
        guards.pop().unwrap().release().await.unwrap();
        guards.push(lock.with_owner(&owner).lock().await.unwrap());
        for guard in guards {
            guard.release().await.unwrap();
        }
        assert!(!setup.deployment.has_holders(lock.name()).await);
    }
    setup.finish().await;
}

pub async fn local_nesting_makes_no_round_trip(setup: Setup) {
    let locks = setup.client_with(ttl(5_000).nesting(Nesting::Local)).await;
    let lock = locks.reentrant("local", &Owner::new()).unwrap();
    let owner = Owner::new();
    let outer = lock.with_owner(&owner).lock().await.unwrap();
    let before = setup.deployment.scripts_run().await;
    let mut guards = Vec::new();
    for _ in 0..20 {
        guards.push(lock.with_owner(&owner).lock().await.unwrap());
    }
    let scripts = setup.deployment.scripts_run().await - before;
    assert!(scripts < 20, "20 holds cost {scripts} scripts"); // renewals may have run meanwhile
    assert_eq!(count(&setup, &lock).await, 1, "Redis has one hold");
    assert!(lock.with_owner(&Owner::new()).try_lock().await.unwrap().is_none());
    let token = outer.lease().fencing_token();
    assert!(guards.iter().all(|guard| guard.lease().fencing_token() == token));
    // The outermost guard may be released first: the last guard releases the lock.
    outer.release().await.unwrap();
    assert!(setup.deployment.has_holder(lock.name(), &owner).await);
    let last = guards.pop().unwrap();
    guards.clear();
    assert!(setup.deployment.has_holder(lock.name(), &owner).await && !last.lease().is_lost());
    last.release().await.unwrap();
    assert!(!setup.deployment.has_holders(lock.name()).await);
    // A lost hold is not shared any more: the next acquire asks the server.
    let old = lock.with_owner(&owner).lock().await.unwrap();
    let outer = lock.with_owner(&owner).lock().await.unwrap();
    lock.force_release().await.unwrap();
    soon("the loss is known", old.lease().lost()).await;
    assert!(
        matches!(outer.release().await, Err(Error::Lost { .. })),
        "although it does not release the hold"
    );
    let new = lock.with_owner(&owner).lock().await.unwrap();
    assert!(new.lease().fencing_token() > old.lease().fencing_token());
    assert!(matches!(old.release().await, Err(Error::Lost { .. })));
    assert!(setup.deployment.has_holder(lock.name(), &owner).await);
    // The new hold is still shared after the old guard was released.
    let before = setup.deployment.scripts_run().await;
    for _ in 0..20 {
        guards.push(lock.with_owner(&owner).lock().await.unwrap());
    }
    let scripts = setup.deployment.scripts_run().await - before;
    assert!(scripts < 20, "20 holds cost {scripts} scripts");
    assert_eq!(count(&setup, &lock).await, 1, "Redis has one hold");
    guards.clear();
    new.release().await.unwrap();
    // A hold that one guard leaks is lost to the other guards: none of them reports a release.
    let outer = lock.with_owner(&owner).lock().await.unwrap();
    lock.with_owner(&owner).lock().await.unwrap().leak();
    assert!(outer.lease().is_lost() && setup.deployment.has_holder(lock.name(), &owner).await);
    assert!(matches!(outer.release().await, Err(Error::Lost { .. })));
    eventually("the TTL ends the lease", || async { !setup.deployment.has_holders(lock.name()).await }).await;
    idles(&locks).await;
    drop((lock, locks));
    setup.finish().await;
}

/// Then the lock belongs to no owner: not even that of the hold enters before the end.
pub async fn only_the_last_release_leaves_a_lock_held(setup: Setup) {
    let options = ttl(20_000).hold_at_least(Duration::from_secs(60));
    let lock = setup.client_with(options).await.reentrant("kept", &Owner::new()).unwrap();
    let owner = Owner::new();
    let (outer, inner) =
        (lock.with_owner(&owner).lock().await.unwrap(), lock.with_owner(&owner).lock().await.unwrap());
    outer.release().await.unwrap();
    assert_eq!(count(&setup, &lock).await, 1);
    assert!(setup.state_of(lock.name()).await.writer.unwrap().owner == owner.to_string());
    lock.with_owner(&owner).lock().await.unwrap().release().await.unwrap();
    inner.release().await.unwrap();
    assert!(remaining(&setup, &lock).await > Duration::from_secs(20), "longer than the TTL");
    assert!(lock.with_owner(&owner).try_lock().await.unwrap().is_none());
    assert!(lock.force_release().await.unwrap());
    drop(lock);
    setup.finish().await;
}

pub async fn one_of_several_holds_is_adopted(setup: Setup) {
    let (lock, next) = (
        setup.client().await.reentrant("nested", &Owner::new()).unwrap(),
        setup.client().await.reentrant("nested", &Owner::new()).unwrap(),
    );
    let owner = Owner::new();
    let outer = lock.with_owner(&owner).lock().await.unwrap();
    let ticket = lock.with_owner(&owner).lock().await.unwrap().into_ticket().unwrap();
    assert_eq!(ticket.owner(), Some(&owner));
    let inner = next.adopt(&ticket).await.unwrap();
    assert_eq!(inner.owner(), &owner);
    assert_eq!(count(&setup, &lock).await, 2);
    outer.release().await.unwrap();
    assert_eq!(count(&setup, &lock).await, 1);
    assert!(!inner.lease().is_lost());
    inner.release().await.unwrap();
    assert!(!setup.deployment.has_holders(lock.name()).await);
    drop((lock, next));
    setup.finish().await;
}

pub async fn guards_of_one_local_hold_become_no_ticket(setup: Setup) {
    let locks = setup.client_with(patient().nesting(Nesting::Local)).await;
    let lock = locks.reentrant("local", &Owner::new()).unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let refused = inner.into_ticket().unwrap_err();
    assert!(matches!(refused.error(), Error::SharedHold { .. }), "{refused:?}");
    let inner = refused.into_guard();
    assert!(!inner.lease().is_lost() && !outer.lease().is_lost());
    inner.release().await.unwrap();
    let adopted = lock.adopt(&outer.into_ticket().unwrap()).await.unwrap();
    let nested = lock.lock().await.unwrap(); // inside the adopted hold, without a request
    assert_eq!(count(&setup, &lock).await, 1);
    nested.release().await.unwrap();
    adopted.release().await.unwrap();
    assert!(!setup.deployment.has_holders(lock.name()).await);
    drop((lock, locks));
    setup.finish().await;
}
