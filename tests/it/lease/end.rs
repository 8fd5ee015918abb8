//! `LeaseEnd`: how a lease ended, as tasks with a clone of the lease see it.

use std::time::Duration;

use redlatch::{Error, Lease, LeaseEnd, Options, Renewal};
use tokio::task::JoinHandle;

use crate::support::{AnyGuard, Deployment, KINDS, Kind, Server, Topology, eventually, soon, ttl};

/// A task that waits for the end of a lease, and a task that works under it.
struct Watch {
    lease: Lease,
    waiting: JoinHandle<LeaseEnd>,
    working: JoinHandle<Result<(), Error>>,
}

impl Watch {
    fn of(guard: &AnyGuard) -> Watch {
        let lease = guard.lease().clone();
        assert_eq!(lease.end(), None);
        let waiting = tokio::spawn({
            let lease = lease.clone();
            async move { lease.lost().await }
        });
        let working = tokio::spawn({
            let lease = lease.clone();
            async move { lease.while_held(std::future::pending()).await }
        });
        Watch { lease, waiting, working }
    }

    /// Returns the end, on which all calls agree, and the error that `while_held` returned.
    async fn ends(self) -> (LeaseEnd, Error) {
        let end = soon("lost() returns", self.waiting).await.unwrap();
        let error = soon("while_held() returns", self.working).await.unwrap().unwrap_err();
        assert!(self.lease.is_lost());
        assert_eq!((self.lease.end(), self.lease.lost().await), (Some(end), end));
        (end, error)
    }
}

/// The holder releases, drops or leaks its guard, or downgrades.
#[tokio::test(flavor = "multi_thread")]
async fn lease_end_is_released_or_leaked_by_its_holder() {
    for topology in [Topology::Standalone, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        let locks = deployment.client(Options::new()).await;
        for kind in KINDS {
            let lock = kind.lock(&locks, kind.name());
            let guard = lock.lock().await.unwrap();
            let watch = Watch::of(&guard);
            guard.release().await.unwrap();
            let (end, error) = watch.ends().await;
            assert!(
                end == LeaseEnd::Released && matches!(error, Error::Released { .. }),
                "{end:?} {error:?}"
            );

            let guard = soon("the lock is granted", lock.lock()).await.unwrap();
            let watch = Watch::of(&guard);
            drop(guard);
            assert_eq!(watch.ends().await.0, LeaseEnd::Released, "dropped");

            let guard = soon("the lock is granted", lock.lock()).await.unwrap();
            let watch = Watch::of(&guard);
            guard.leak();
            let (end, error) = watch.ends().await;
            assert!(end == LeaseEnd::Leaked && matches!(error, Error::Released { .. }), "{end:?} {error:?}");
            let kept = deployment.run_at::<i64>(lock.key(), &["EXISTS", lock.key()]).await;
            let kept = kept.iter().sum::<i64>();
            assert!(kept >= topology.majority() as i64, "{kept} servers still hold the leaked lock");
        }
        let AnyGuard::Write(writing) = Kind::Write.lock(&locks, "down").lock().await.unwrap() else {
            unreachable!("it writes")
        };
        let old = writing.lease().clone();
        let reading = writing.downgrade().await.unwrap();
        assert_eq!((old.end(), reading.lease().end()), (Some(LeaseEnd::Released), None));
        reading.release().await.unwrap();
    }
}

/// The server reports the loss before the deadline.
#[tokio::test(flavor = "multi_thread")]
async fn lease_end_is_revoked_after_force_release() {
    for topology in [Topology::Standalone, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        // A busy machine must not keep the renewal waiting until the deadline.
        let locks = deployment.client(ttl(6_000)).await;
        let mut held = Vec::new();
        for (kind, by_hand) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let lock = kind.lock(&locks, &format!("{}-{by_hand}", kind.name()));
            let guard = lock.lock().await.unwrap();
            held.push((Watch::of(&guard), guard, lock, by_hand));
        }
        for (_, guard, lock, by_hand) in &held {
            if *by_hand {
                deployment.delete_until_lost(lock.key(), &[guard.lease()]).await;
            } else {
                assert!(lock.force_release().await.unwrap());
            }
        }
        for (watch, guard, ..) in held {
            let (end, error) = watch.ends().await;
            assert!(end == LeaseEnd::Revoked && matches!(error, Error::Lost { .. }), "{end:?} {error:?}");
            assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
        }
    }
}

/// The deadline passes: renewal is off, or the server hangs.
#[tokio::test(flavor = "multi_thread")]
async fn lease_end_is_lost_after_its_deadline() {
    let server = Server::start().await;
    let locks = server.locks_with(ttl(600).node_timeout(Duration::from_secs(1))).await;
    let never =
        locks.with_options(ttl(300).renewal(Renewal::Never).node_timeout(Duration::from_secs(1))).unwrap();
    for kind in KINDS {
        let guard = kind.lock(&never, kind.name()).lock().await.unwrap();
        let watch = Watch::of(&guard);
        let (end, error) = watch.ends().await;
        assert!(end == LeaseEnd::Lost && matches!(error, Error::Lost { .. }), "{end:?} {error:?}");
        // A later release does not change the end.
        let lease = guard.lease().clone();
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
        assert_eq!(lease.end(), Some(LeaseEnd::Lost));
    }
    let mut watches = Vec::new();
    for kind in KINDS {
        let guard = kind.lock(&locks, &format!("silent-{}", kind.name())).lock().await.unwrap();
        watches.push((Watch::of(&guard), guard));
    }
    server.pause();
    for (watch, guard) in watches {
        assert_eq!(watch.ends().await.0, LeaseEnd::Lost);
        drop(guard);
    }
    server.resume();
    let keys = || async { server.run::<Vec<String>>(&["KEYS", "lock:*"]).await };
    eventually("the locks are released", || async { keys().await.is_empty() }).await;
}

/// Work that never waits cannot be dropped at the deadline: its result says nothing.
#[tokio::test]
async fn work_that_blocks_past_the_deadline_is_not_done() {
    let server = Server::start().await;
    let locks = server.locks_with(ttl(300).renewal(Renewal::Never)).await;
    for kind in KINDS {
        let guard = kind.lock(&locks, kind.name()).lock().await.unwrap();
        let work = async { std::thread::sleep(Duration::from_millis(400)) };
        let outcome = guard.lease().while_held(work).await;
        assert!(matches!(outcome, Err(Error::Lost { .. })), "{kind:?}: {outcome:?}");
        assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    }
}
