//! Held locks: exclusion, renewal, fencing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Error, Fencing, Renewal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::support::{Setup, Stopwatch, eventually, patient, soon, ttl};

pub async fn holders_exclude_each_other_and_tokens_grow(setup: Setup) {
    const TASKS: u64 = 4;
    const TURNS: u64 = 8;
    // Load and store are not one atomic step: two holders at a time lose an increment.
    let counter = Arc::new(AtomicU64::new(0));
    let last_token = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let lock = setup.lock("counter").await;
        for _ in 0..TASKS {
            let (lock, counter, last_token) =
                (lock.for_another(), Arc::clone(&counter), Arc::clone(&last_token));
            tasks.spawn(async move {
                for _ in 0..TURNS {
                    let guard = soon("the lock is acquired", lock.lock()).await.unwrap();
                    let seen = counter.load(Ordering::SeqCst);
                    assert!(last_token.swap(guard.token(), Ordering::SeqCst) < guard.token(), "tokens grow");
                    tokio::task::yield_now().await;
                    counter.store(seen + 1, Ordering::SeqCst);
                    assert!(!guard.lease().is_lost());
                    guard.release().await.unwrap();
                }
            });
        }
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 4 * TASKS * TURNS);
    setup.finish().await;
}

pub async fn try_lock_returns_none_while_held(setup: Setup) {
    let (one, other) = (setup.lock("busy").await, setup.rival("busy").await);
    let guard = one.try_lock().await.unwrap().expect("the lock is free");
    assert!(other.try_lock().await.unwrap().is_none());
    assert!(one.for_rival().try_lock().await.unwrap().is_none());
    assert_eq!(setup.deployment.waiters(&one).await, 0, "try_lock does not queue");
    guard.release().await.unwrap();
    other.try_lock().await.unwrap().expect("the lock is free again").release().await.unwrap();
    drop((one, other));
    setup.finish().await;
}

pub async fn renewal_holds_lock_beyond_its_ttl(setup: Setup) {
    // On a busy machine, no task may run for some seconds.
    let span = Duration::from_secs(8);
    let lock = setup.lock_with("long", patient().ttl(span)).await;
    let other = setup.rival("long").await;
    let guard = lock.lock().await.unwrap();
    let end = Instant::now() + span + Duration::from_secs(1);
    while Instant::now() < end {
        assert!(!guard.lease().is_lost());
        assert!(guard.lease().valid_until() <= std::time::Instant::now() + span);
        setup.assert_conservative(&lock, &guard).await;
        assert!(other.try_lock().await.unwrap().is_none(), "no other client acquires");
        sleep(Duration::from_millis(20)).await;
    }
    guard.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn lease_ends_with_its_ttl_if_never_renewed(setup: Setup) {
    let lock = setup.lock_with("short", ttl(2_000).renewal(Renewal::Never)).await;
    let other = setup.rival("short").await;
    let guard = lock.lock().await.unwrap();
    let ttl = Duration::from_secs(2);
    assert!(
        guard.lease().valid_until() < std::time::Instant::now() + ttl,
        "the lease counts from before the request"
    );
    let next = soon("the other client acquires after the expiry", other.lock()).await.unwrap();
    assert!(guard.lease().is_lost(), "the lease is lost before another client acquires");
    assert!(next.token() > guard.token());
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    assert!(setup.deployment.is_held_by(&other, &next).await, "the late release changed nothing");
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn lease_ends_after_max_hold(setup: Setup) {
    let longest = Duration::from_millis(6_000);
    let lock = setup.lock_with("capped", ttl(4_500).max_hold(longest)).await;
    let watcher = setup.lock("capped").await;
    let start = Stopwatch::start();
    let guard = lock.lock().await.unwrap();
    // The hold counts from before the request left.
    let end = std::time::Instant::now() + longest;
    while !guard.lease().is_lost() {
        let until = guard.lease().valid_until();
        // An ended lease is valid until now, which may be later.
        assert!(until <= end || guard.lease().is_lost(), "no renewal exceeds max_hold");
        sleep(Duration::from_millis(5)).await;
    }
    let held = start.elapsed();
    assert!(held > Duration::from_millis(4_500), "renewed meanwhile: {held:?}");
    // The server counts from the arrival of the last renewal, which asks for what was left when it
    // was sent.
    eventually("the server ends the lease as well", || async { !setup.deployment.is_locked(&watcher).await })
        .await;
    // With a whole TTL, the last renewal would last 3 s longer.
    assert!(start.undisturbed() < longest + Duration::from_millis(1_500), "{start:?}");
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    drop((lock, watcher));
    setup.finish().await;
}

pub async fn inspect_reports_holder_and_token(setup: Setup) {
    let lock = setup.lock_with("seen", ttl(20_000)).await;
    let free = lock.inspect().await.unwrap();
    assert!(free.holders.is_empty() && free.waiters == 0 && free.fencing_token.is_none());
    assert!(!setup.deployment.is_locked(&lock).await);
    let guard = lock.lock().await.unwrap();
    let held = lock.inspect().await.unwrap();
    assert_eq!(held.holders.len(), 1);
    assert_eq!(held.holders[0].count, 1);
    let remaining = held.holders[0].remaining.unwrap();
    assert!(remaining > Duration::from_secs(15) && remaining <= Duration::from_secs(20), "{remaining:?}");
    assert_eq!(held.fencing_token, guard.lease().fencing_token());
    assert!(setup.deployment.is_locked(&lock).await && setup.deployment.is_held_by(&lock, &guard).await);
    assert!(lock.is_locked().await && lock.is_held_by(&guard).await, "the crate reports what the server has");
    let json = serde_json::to_value(&held).unwrap();
    assert_eq!(json["fencing_token"], guard.token());
    assert!(json["holders"][0]["remaining_ms"].as_u64().unwrap() > 15_000);
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop(lock);
    setup.finish().await;
}

pub async fn lease_has_no_token_if_fencing_is_off(setup: Setup) {
    let plain = setup.lock_with("unfenced", ttl(30_000).fencing(Fencing::Off)).await;
    let guard = plain.lock().await.unwrap();
    assert_eq!(guard.lease().fencing_token(), None);
    // A waiter with fencing is granted a token although the former holder had none.
    let fenced = setup.lock("unfenced").await;
    let waiting = fenced.lock_in_task();
    eventually("the waiter queues", || async { setup.deployment.waiters(&fenced).await == 1 }).await;
    guard.release().await.unwrap();
    let next = soon("the waiter is granted the lock", waiting).await.unwrap().unwrap();
    let token = next.token();
    next.release().await.unwrap();
    let guard = fenced.lock().await.unwrap();
    assert!(guard.token() > token);
    guard.release().await.unwrap();
    drop((plain, fenced));
    setup.finish().await;
}

pub async fn calls_return_wrong_type_for_foreign_value(setup: Setup) {
    let lock = setup.lock("squatted").await;
    let key = lock.key().to_owned();
    let other_kind = if setup.kind.name() == "mutex" {
        ["HSET", &key, "field", "1"]
    } else {
        ["SET", &key, "1", "KEEPTTL"]
    };
    let no_ttl: &[&str] =
        if setup.kind.name() == "mutex" { &["SET", &key, "1"] } else { &["HSET", &key, "field", "1"] };
    for foreign in [&["LPUSH", &key, "1"][..], &["SADD", &key, "1"], &other_kind, no_ttl] {
        setup.deployment.run_at::<redis::Value>(&key, foreign).await;
        let dump: Vec<Vec<u8>> = setup.deployment.run_at(&key, &["DUMP", &key]).await;
        for outcome in [
            soon("the lock is acquired", lock.lock()).await.map(drop),
            lock.try_lock().await.map(drop),
            lock.lock_timeout(Duration::from_secs(5)).await.map(drop),
        ] {
            assert!(matches!(outcome, Err(Error::WrongType { .. })), "{foreign:?}: {outcome:?}");
        }
        if foreign != no_ttl {
            assert!(matches!(lock.inspect().await, Err(Error::WrongType { .. })));
        }
        assert!(matches!(lock.force_release().await, Err(Error::WrongType { .. })));
        assert_eq!(
            setup.deployment.run_at::<Vec<u8>>(&key, &["DUMP", &key]).await,
            dump,
            "{foreign:?}: the value is unchanged"
        );
        setup.deployment.run_at::<i64>(&key, &["DEL", &key]).await;
    }
    lock.lock().await.unwrap().release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn tokens_grow_after_data_loss(setup: Setup) {
    let mut last = 0;
    let lock = setup.lock("fenced").await;
    let (deployment, counter) = (&setup.deployment, "{lock:fenced}:fence");
    for loss in ["none", "DEL", "FLUSHALL", "SET"] {
        match loss {
            "DEL" => drop(deployment.run_at::<i64>(counter, &["DEL", counter]).await),
            "FLUSHALL" => drop(deployment.run::<()>(&["FLUSHALL"]).await),
            // As after a restart from an old snapshot: the counter has an old value.
            "SET" => {
                drop(deployment.run_at::<()>(counter, &["SET", counter, "5", "PX", "60000"]).await);
            }
            _ => {}
        }
        for _ in 0..3 {
            let guard = lock.lock().await.unwrap();
            assert!(guard.token() > last, "after {loss}: {} after {last}", guard.token());
            last = guard.token();
            guard.release().await.unwrap();
        }
    }
    assert!(last < 1 << 53);
    drop(lock);
    setup.finish().await;
}
