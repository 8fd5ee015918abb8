//! Renewals that the application asks for.

use std::time::{Duration, Instant};

use redlatch::{Error, LeaseEnd, Renewal};

use crate::support::{Setup, eventually, renewed_by, soon, ttl};

/// How long a test waits before it renews.
const PASSED: Duration = Duration::from_millis(500);

async fn passes(until: Instant) {
    eventually("time has passed", || async { Instant::now() >= until }).await;
}

/// When a majority of the servers lets a key expire, by their clock, in milliseconds.
async fn expiry(setup: &Setup, key: &str) -> i64 {
    let script = "local now = redis.call('TIME')
        return now[1] * 1000 + math.floor(now[2] / 1000) + redis.call('PTTL', KEYS[1])";
    let mut ends = Vec::new();
    for server in setup.deployment.homes(key).await {
        ends.push(server.run::<i64>(&["EVAL", script, "1", key]).await);
    }
    ends.sort();
    ends[ends.len() - setup.topology().majority()]
}

pub async fn renew_extends_a_lease_that_is_never_renewed(setup: Setup) {
    let lock = setup.lock_with("by-hand", ttl(30_000).renewal(Renewal::Never)).await;
    let other = setup.rival("by-hand").await;
    let guard = lock.lock().await.unwrap();
    let granted = guard.lease().valid_until();
    let before = expiry(&setup, lock.key()).await;
    passes(Instant::now() + PASSED).await;
    assert!(guard.lease().valid_until() < granted + PASSED / 2, "it is not renewed on its own");
    let until = guard.lease().renew().await.unwrap();
    assert!(until > granted + PASSED / 2, "extended by {:?}", until - granted);
    assert!(guard.lease().clone().valid_until() >= granted + PASSED / 2, "every clone has the new deadline");
    setup.assert_conservative(&lock, &guard).await;
    let extended = expiry(&setup, lock.key()).await - before;
    assert!(extended > 250, "the servers' hold is extended by {extended} ms");
    assert!(other.try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop((lock, other));
    setup.finish().await;
}

pub async fn automatic_renewals_continue_after_one_by_hand(setup: Setup) {
    let lock = setup.lock_with("both", ttl(6_000)).await;
    let guard = lock.lock().await.unwrap();
    let until = guard.lease().renew().await.unwrap();
    assert!(guard.lease().valid_until() + PASSED > until);
    renewed_by(guard.lease(), Duration::from_millis(1_500)).await;
    let until = guard.lease().renew().await.unwrap();
    assert!(guard.lease().valid_until() + PASSED > until);
    renewed_by(guard.lease(), Duration::from_millis(1_500)).await;
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn renew_never_exceeds_max_hold(setup: Setup) {
    let span = Duration::from_secs(20);
    let lock = setup.lock_with("capped", ttl(20_000).max_hold(span).renewal(Renewal::Never)).await;
    let guard = lock.lock().await.unwrap();
    let granted = guard.lease().valid_until();
    passes(Instant::now() + PASSED).await;
    assert!(guard.lease().renew().await.unwrap() < granted + PASSED / 2);
    assert!(!guard.lease().is_lost());
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn renew_of_a_revoked_lease_returns_lost(setup: Setup) {
    let lock = setup.lock_with("revoked", ttl(30_000).renewal(Renewal::Never)).await;
    let other = setup.rival("revoked").await;
    let guard = lock.lock().await.unwrap();
    assert!(setup.kind.lock(&setup.client().await, "revoked").force_release().await.unwrap());
    let next = other.lock().await.unwrap();
    assert!(!guard.lease().is_lost(), "nothing has asked the servers since");
    let outcome = guard.lease().renew().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    assert_eq!(guard.lease().end(), Some(LeaseEnd::Revoked));
    assert!(setup.deployment.is_held_by(&other, &next).await);
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    assert!(setup.deployment.is_held_by(&other, &next).await);
    next.release().await.unwrap();
    drop((lock, other));
    setup.finish().await;
}

/// The server extends the hold in time, but its reply comes after the deadline.
pub async fn renew_never_revives_a_lease(setup: Setup) {
    let proxy = setup.proxy().await;
    let options = ttl(2_000).renewal(Renewal::Never).node_timeout(Duration::from_secs(30));
    let lock = setup.lock_behind(&proxy, "late", options).await;
    let watcher = setup.lock("late").await;
    let guard = lock.lock().await.unwrap();
    let before = setup.deployment.scripts_run().await;
    proxy.hold_replies(true);
    let lease = guard.lease().clone();
    let renewing = tokio::spawn(async move { lease.renew().await });
    eventually("the servers have extended the hold", || async {
        setup.deployment.scripts_run().await >= before + setup.nodes() as u64
    })
    .await;
    assert_eq!(soon("the deadline passes", guard.lease().lost()).await, LeaseEnd::Lost);
    proxy.hold_replies(false);
    let outcome = soon("the reply arrives", renewing).await.unwrap();
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    assert!(guard.lease().is_lost());
    let outcome = guard.lease().renew().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    eventually("the late hold is released", || async { !setup.deployment.is_locked(&watcher).await }).await;
    drop((guard, lock, watcher));
    setup.finish().await;
}

pub async fn renew_fails_while_servers_are_stopped(setup: Setup) {
    let options = ttl(60_000).renewal(Renewal::Never).node_timeout(Duration::from_millis(500));
    let lock = setup.lock_with("stopped", options).await;
    let guard = lock.lock().await.unwrap();
    let granted = guard.lease().valid_until();
    setup.deployment.pause();
    let outcome = guard.lease().renew().await;
    assert!(setup.failed(&outcome), "{outcome:?}");
    assert!(guard.lease().valid_until() < granted + PASSED / 2, "no deadline moves without a reply");
    assert!(!guard.lease().is_lost());
    setup.deployment.resume();
    eventually("the servers answer again", || async { guard.lease().renew().await.is_ok() }).await;
    assert!(guard.lease().valid_until() > granted + PASSED / 2);
    guard.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn renew_returns_how_the_lease_has_ended(setup: Setup) {
    let locks = setup.client_with(ttl(3_000)).await;
    let lock = setup.kind.lock(&locks, "ended");
    let guard = lock.lock().await.unwrap();
    let lease = guard.lease().clone();
    guard.release().await.unwrap();
    assert!(matches!(lease.renew().await, Err(Error::Released { .. })));
    let guard = lock.lock().await.unwrap();
    let lease = guard.lease().clone();
    guard.leak();
    assert!(lease.is_lost(), "a leaked lease is not valid");
    assert!(setup.deployment.is_locked(&lock).await, "a leaked lock is not released");
    assert!(matches!(lease.renew().await, Err(Error::Released { .. })));
    eventually("the TTL ends the lease", || async { !setup.deployment.is_locked(&lock).await }).await;
    let guard = lock.lock().await.unwrap();
    locks.close(Duration::from_secs(60)).await.unwrap();
    assert!(matches!(guard.lease().renew().await, Err(Error::Closed { .. })));
    drop((guard, lock, locks));
    setup.finish().await;
}
