//! Holding: exclusion, renewal, fencing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Error, Fencing, Options, Renewal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::support::{Setup, eventually, soon, ttl};

pub async fn excludes_and_fences(setup: Setup) {
    const TASKS: u64 = 4;
    const TURNS: u64 = 8;
    // Not atomic as a whole: two who are inside at a time lose an increment.
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
                    let guard = soon("a turn", lock.lock()).await.unwrap();
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

pub async fn says_busy_at_once(setup: Setup) {
    let (one, other) = (setup.lock("busy").await, setup.rival("busy").await);
    let guard = one.try_lock().await.unwrap().expect("it is free");
    assert!(other.try_lock().await.unwrap().is_none());
    assert!(one.for_rival().try_lock().await.unwrap().is_none());
    assert_eq!(setup.deployment.waiters(&one).await, 0, "who tries does not queue");
    guard.release().await.unwrap();
    other.try_lock().await.unwrap().expect("it is free again").release().await.unwrap();
    drop((one, other));
    setup.finish().await;
}

pub async fn renews_for_ten_ttls(setup: Setup) {
    // A busy machine may let nobody run for half of that.
    let span = Duration::from_millis(900);
    let lock = setup.lock_with("long", Options::new().ttl(span)).await;
    let other = setup.rival("long").await;
    let guard = lock.lock().await.unwrap();
    let end = Instant::now() + 10 * span;
    while Instant::now() < end {
        assert!(!guard.lease().is_lost());
        assert!(guard.lease().valid_until() <= std::time::Instant::now() + span);
        setup.assert_conservative(&lock, &guard).await;
        assert!(other.try_lock().await.unwrap().is_none(), "nobody else gets in");
        sleep(Duration::from_millis(20)).await;
    }
    guard.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn ends_with_its_ttl_if_never_renewed(setup: Setup) {
    let lock = setup.lock_with("short", ttl(300).renewal(Renewal::Never)).await;
    let other = setup.rival("short").await;
    let guard = lock.lock().await.unwrap();
    let ttl = Duration::from_millis(300);
    assert!(guard.lease().valid_until() < std::time::Instant::now() + ttl, "counted from before the request");
    let next = soon("the lease ends", other.lock()).await.unwrap();
    assert!(guard.lease().is_lost(), "lost here before anybody else gets in");
    assert!(next.token() > guard.token());
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    assert!(setup.deployment.is_held_by(&other, &next).await, "the late release changed nothing");
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

pub async fn ends_after_its_longest_hold(setup: Setup) {
    let longest = Duration::from_millis(2_000);
    let lock = setup.lock_with("capped", ttl(1_500).max_hold(longest)).await;
    let watcher = setup.lock("capped").await;
    let start = std::time::Instant::now();
    let guard = lock.lock().await.unwrap();
    // The hold counts from before the request left.
    let end = std::time::Instant::now() + longest;
    while !guard.lease().is_lost() {
        assert!(guard.lease().valid_until() <= end, "no renewal goes beyond the longest hold");
        sleep(Duration::from_millis(5)).await;
    }
    let held = start.elapsed();
    assert!(held > Duration::from_millis(1_500), "renewed meanwhile: {held:?}");
    // The server counts from the arrival of the last renewal, which asks for what was left when it
    // was sent.
    eventually("the server ends it as well", || async { !setup.deployment.is_locked(&watcher).await }).await;
    assert!(start.elapsed() < longest + Duration::from_millis(500), "{:?}", start.elapsed());
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    drop((lock, watcher));
    setup.finish().await;
}

pub async fn inspects(setup: Setup) {
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
    assert!(lock.is_locked().await && lock.is_held_by(&guard).await, "as the server has it");
    let json = serde_json::to_value(&held).unwrap();
    assert_eq!(json["fencing_token"], guard.token());
    assert!(json["holders"][0]["remaining_ms"].as_u64().unwrap() > 15_000);
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop(lock);
    setup.finish().await;
}

pub async fn leaks_on_request(setup: Setup) {
    let lock = setup.lock_with("leaked", ttl(400)).await;
    let guard = lock.lock().await.unwrap();
    let lease = guard.lease().clone();
    guard.leak();
    assert!(lease.is_lost(), "a leaked lease is not to be trusted");
    assert!(setup.deployment.is_locked(&lock).await, "and yet it is not released");
    eventually("its ttl frees it", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop(lock);
    setup.finish().await;
}

pub async fn fences_or_not(setup: Setup) {
    let plain = setup.lock_with("unfenced", ttl(30_000).fencing(Fencing::Off)).await;
    let guard = plain.lock().await.unwrap();
    assert_eq!(guard.lease().fencing_token(), None);
    // Handed over, a lease without fencing has no token either, and one with fencing has.
    let fenced = setup.lock("unfenced").await;
    let waiting = tokio::spawn({
        let fenced = fenced.clone();
        async move { fenced.lock().await }
    });
    eventually("it queues", || async { setup.deployment.waiters(&fenced).await == 1 }).await;
    guard.release().await.unwrap();
    let next = soon("handed over", waiting).await.unwrap().unwrap();
    let token = next.token();
    next.release().await.unwrap();
    let guard = fenced.lock().await.unwrap();
    assert!(guard.token() > token);
    guard.release().await.unwrap();
    drop((plain, fenced));
    setup.finish().await;
}

pub async fn refuses_what_it_does_not_own(setup: Setup) {
    let lock = setup.lock("squatted").await;
    let key = lock.key().to_owned();
    let other_kind = if setup.kind.name() == "mutex" {
        ["HSET", &key, "field", "1"]
    } else {
        ["SET", &key, "1", "KEEPTTL"]
    };
    let no_ttl: &[&str] =
        if setup.kind.name() == "mutex" { &["SET", &key, "1"] } else { &["HSET", &key, "field", "1"] };
    for squatter in [&["LPUSH", &key, "1"][..], &["SADD", &key, "1"], &other_kind, no_ttl] {
        setup.deployment.run_at::<redis::Value>(&key, squatter).await;
        let dump: Vec<Vec<u8>> = setup.deployment.run_at(&key, &["DUMP", &key]).await;
        for outcome in [
            soon("lock", lock.lock()).await.map(drop),
            lock.try_lock().await.map(drop),
            lock.lock_timeout(Duration::from_secs(5)).await.map(drop),
        ] {
            assert!(matches!(outcome, Err(Error::WrongType { .. })), "{squatter:?}: {outcome:?}");
        }
        if squatter != no_ttl {
            assert!(matches!(lock.inspect().await, Err(Error::WrongType { .. })));
        }
        assert!(matches!(lock.force_release().await, Err(Error::WrongType { .. })));
        assert_eq!(
            setup.deployment.run_at::<Vec<u8>>(&key, &["DUMP", &key]).await,
            dump,
            "{squatter:?} is left as it was"
        );
        setup.deployment.run_at::<i64>(&key, &["DEL", &key]).await;
    }
    lock.lock().await.unwrap().release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn keeps_tokens_growing_over_a_loss(setup: Setup) {
    let mut last = 0;
    let lock = setup.lock("fenced").await;
    let (deployment, counter) = (&setup.deployment, "{lock:fenced}:fence");
    for loss in ["none", "DEL", "FLUSHALL", "SET"] {
        match loss {
            "DEL" => drop(deployment.run_at::<i64>(counter, &["DEL", counter]).await),
            "FLUSHALL" => drop(deployment.run::<()>(&["FLUSHALL"]).await),
            // An old snapshot: the counter is back where it was long ago.
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
