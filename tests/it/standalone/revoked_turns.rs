//! A client revokes a lock while the grant of one of its own tasks is on the way to that task.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use redlatch::Locks;

use crate::suite::local_turns::{Locking, contended, waiting};
use crate::suite::shared_reads;
use crate::support::{AnyGuard, AnyLock, Kind, Proxy, Server, eventually, patient, soon};

/// Polls a call that waits until the server has queued it.
pub(super) async fn queued<T>(server: &Server, key: &str, call: &mut Pin<Box<dyn Future<Output = T>>>) {
    let queue = format!("{{{key}}}:waiters");
    let queues = async {
        while server.waiters(&queue).await == 0 {
            assert!(poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await.is_pending());
        }
    };
    soon("the call queues", queues).await;
}

/// Two tasks wait while another client holds the lock: the first one in Redis, the second one
/// behind it. Tokens will be reserved for both.
pub(super) async fn two_wait(server: &Server, lock: &AnyLock, rival: &AnyLock) -> (AnyGuard, [Locking; 2]) {
    contended(lock).await.release().await.unwrap();
    let held = rival.lock().await.unwrap();
    let mut first = waiting(lock).await;
    queued(server, lock.key(), &mut first).await;
    (held, [first, waiting(lock).await])
}

/// The message with the grant arrives before the lock is revoked, and the task runs after it: no
/// other task receives its hold, which the server does not have any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_is_revoked_before_its_task_runs_is_not_passed_on() {
    let server = Server::start().await;
    let options = patient().local_turn(Duration::from_secs(7));
    let (locks, others) = (server.locks_with(options.clone()).await, server.locks_with(options).await);
    for kind in [Kind::Mutex, Kind::Write] {
        let (lock, rival) = (kind.lock(&locks, kind.name()), kind.lock(&others, kind.name()));
        let (held, [first, second]) = two_wait(&server, &lock, &rival).await;
        held.release().await.unwrap();
        assert!(lock.force_release().await.unwrap(), "the first one has it");
        let first = soon("the first one learns of its grant", first).await.unwrap();
        // Only a machine that stood still for a second asks the server once more.
        let _revoked = first.release().await;
        let second = soon("the second one acquires", second).await.unwrap();
        assert!(
            server.run::<bool>(&["EXISTS", lock.key()]).await,
            "{kind:?}: another task has a revoked hold"
        );
        second.release().await.unwrap();
    }
    drop((locks, others));
    server.assert_nothing_left().await;
}

/// The same for a grant that comes while the request to revoke it is on its way to the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_is_granted_before_its_revocation_arrives_is_not_passed_on() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = patient().local_turn(Duration::from_secs(7));
    let locks = Locks::builder().server(proxy.url()).options(options.clone()).connect().await.unwrap();
    let lock = Kind::Mutex.lock(&locks, "x");
    let rival = Kind::Mutex.lock(&server.locks_with(options).await, "x");
    let (held, [first, second]) = two_wait(&server, &lock, &rival).await;
    proxy.hold_requests(true);
    let before = proxy.held();
    {
        let mut revoking = pin!(lock.force_release());
        assert!(poll_fn(|context| Poll::Ready(revoking.as_mut().poll(context))).await.is_pending());
        eventually("the request is on its way", async || proxy.held() > before).await;
        held.release().await.unwrap();
        proxy.hold_requests(false);
        assert!(soon("it is revoked", revoking).await.unwrap(), "the first one has it");
    }
    let first = soon("the first one learns of its grant", first).await.unwrap();
    let _revoked = first.release().await;
    let second = soon("the second one acquires", second).await.unwrap();
    assert!(server.run::<bool>(&["EXISTS", lock.key()]).await, "another task has a revoked hold");
    second.release().await.unwrap();
    drop((lock, locks, rival));
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_is_revoked_before_its_task_runs_is_not_joined() {
    let server = Server::start().await;
    let options = patient().local_turn(Duration::from_secs(7));
    let locks = server.locks_with(options.clone()).await;
    let rival = server.locks_with(options).await.rwlock("x").unwrap();
    let lock = locks.rwlock("x").unwrap();
    let held = rival.write().await.unwrap();
    let mut first = shared_reads::waiting(&lock).await;
    queued(&server, "lock:x", &mut first).await;
    held.release().await.unwrap();
    assert!(lock.force_release_read().await.unwrap(), "the reader has it");
    let first = soon("the reader learns of its grant", first).await.unwrap();
    let second = soon("another one reads", lock.read()).await.unwrap();
    assert!(server.run::<bool>(&["EXISTS", "lock:x"]).await, "another task reads by a revoked hold");
    let _revoked = first.release().await;
    second.release().await.unwrap();
    drop((locks, lock, rival));
    server.assert_nothing_left().await;
}
