//! Work under a lock: one call acquires, runs it and releases.

use std::future::{pending, poll_fn};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Error, Lease};

use crate::support::{Setup, eventually, soon, ttl};

/// An application's error.
#[derive(Debug)]
enum Failure {
    Own,
    Lock(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Lock(error)
    }
}

pub async fn work_runs_while_the_lock_is_held(setup: Setup) {
    let lock = setup.lock("run").await;
    let is_locked = async || setup.deployment.is_locked(&lock).await;
    let value = lock.run(async |lease: Lease| {
        assert!(!lease.is_lost() && lease.fencing_token().is_some());
        assert!(is_locked().await);
        Ok::<_, Failure>(42)
    });
    assert_eq!(soon("the work ends", value).await.unwrap(), 42);
    assert!(!is_locked().await, "released before it returned");
    let limited = lock.run_timeout(Duration::from_secs(20), async |_| Ok::<_, Failure>(7));
    assert_eq!(soon("the work ends", limited).await.unwrap(), 7);
    assert!(!is_locked().await);
    // In a task of its own: the future may be sent to another thread.
    let other = lock.clone();
    let spawned = tokio::spawn(async move { other.run(async |_| Ok::<_, Failure>(1)).await });
    assert_eq!(spawned.await.unwrap().unwrap(), 1);
    drop(lock);
    setup.finish().await;
}

pub async fn failed_work_releases_the_lock(setup: Setup) {
    let lock = setup.lock_with("fails", ttl(3_600_000)).await;
    let outcome = lock.run(async |_| Err::<(), _>(Failure::Own)).await;
    assert!(matches!(outcome, Err(Failure::Own)), "{outcome:?}");
    assert!(!setup.deployment.is_locked(&lock).await, "released before it returned");
    let panics = lock.clone();
    let panicked = tokio::spawn(async move {
        panics.run(async |_| -> Result<(), Failure> { panic!("a bug in the work") }).await
    });
    assert!(panicked.await.unwrap_err().is_panic());
    eventually("the lock is free", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop(lock);
    setup.finish().await;
}

pub async fn work_ends_with_the_lease(setup: Setup) {
    let lock = setup.lock("lost").await;
    let revoking = lock.clone();
    let outcome = lock.run(async |lease: Lease| {
        assert!(revoking.force_release().await?);
        assert!(lease.renew().await.is_err());
        pending::<Result<(), Failure>>().await
    });
    let outcome = soon("the work is dropped", outcome).await;
    assert!(matches!(outcome, Err(Failure::Lock(Error::Lost { .. }))), "{outcome:?}");
    drop((lock, revoking));
    setup.finish().await;
}

pub async fn work_does_not_begin_without_the_lock(setup: Setup) {
    let lock = setup.lock("busy").await;
    let held = setup.rival("busy").await.lock().await.unwrap();
    let work = async |_| -> Result<(), Failure> { panic!("it does not hold the lock") };
    let outcome = lock.run_timeout(Duration::from_millis(50), work).await;
    assert!(matches!(outcome, Err(Failure::Lock(Error::TimedOut { .. }))), "{outcome:?}");
    held.release().await.unwrap();
    drop(lock);
    setup.finish().await;
}

pub async fn dropped_work_releases_the_lock(setup: Setup) {
    let lock = setup.lock("dropped").await;
    let begun = std::sync::atomic::AtomicBool::new(false);
    let mut running = Box::pin(lock.run(async |_| {
        begun.store(true, std::sync::atomic::Ordering::SeqCst);
        pending::<Result<(), Failure>>().await
    }));
    soon(
        "the work begins",
        poll_fn(|context| {
            let ended = running.as_mut().poll(context);
            assert!(ended.is_pending());
            if begun.load(std::sync::atomic::Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        }),
    )
    .await;
    assert!(setup.deployment.is_locked(&lock).await);
    drop(running);
    eventually("the lock is free", || async { !setup.deployment.is_locked(&lock).await }).await;
    drop(lock);
    setup.finish().await;
}
