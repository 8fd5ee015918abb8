//! The end of a client's thread, and calls after `close`.

use std::time::Duration;

use redlatch::{Error, LeaseEnd, Options};

use super::{Fixture, LONG, soon};
use crate::support::{Topology, Worker, patient};

/// What is not released when `main` returns is never released.
#[test]
fn a_program_that_ends_leaves_no_lock_held() {
    let fixture = Fixture::start(Topology::Standalone);
    let mut worker = Worker::start(&["blocking", &fixture.deployment.masters()[0].url()]);
    assert_eq!(worker.expect_line("holding"), "200");
    assert!(fixture.has("lock:x199"));
    worker.send("");
    worker.finish();
    let left = fixture.runtime.block_on(fixture.deployment.keys("lock:*"));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_thread_ends_with_the_last_guard() {
    let fixture = Fixture::start(Topology::Quorum3);
    let locks = fixture.locks(patient().ttl(LONG));
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().unwrap();
    drop((locks, mutex));
    // Without its thread, a release could not be confirmed.
    guard.release().unwrap();
    fixture.is_disconnected();
    fixture.is_released("lock:x");
}

/// The drop returns at its limit; the thread releases the lock once the server replies.
#[test]
fn the_last_drop_has_a_limit_and_the_release_continues() {
    let fixture = Fixture::start(Topology::Standalone);
    let options = Options::new().ttl(Duration::from_secs(300)).node_timeout(Duration::from_millis(500));
    let locks = fixture.locks(options);
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    fixture.deployment.pause();
    soon("the drop returns", move || drop((locks, guard)));
    fixture.deployment.resume();
    fixture.is_released("lock:x");
    fixture.is_disconnected();
}

/// The server does not come back: the thread gives the release up, as an async client does.
#[test]
fn the_thread_ends_although_the_server_does_not_answer() {
    let fixture = Fixture::start(Topology::Standalone);
    let options = Options::new().ttl(Duration::from_secs(1)).node_timeout(Duration::from_millis(100));
    let locks = fixture.locks(options);
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    let mut events = locks.as_async().events();
    fixture.deployment.pause();
    drop((locks, guard));
    let ended = async { while events.next().await.is_some() {} };
    fixture.runtime.block_on(crate::support::soon("the client ends", ended));
    fixture.deployment.resume();
}

/// Each call after the end, as the documentation of `close` has it.
#[test]
fn a_closed_client_acquires_nothing_and_still_inspects() {
    let fixture = Fixture::start(Topology::Standalone);
    let options = patient().ttl(LONG);
    let (locks, other) = (fixture.locks(options.clone()), fixture.locks(options));
    let (mutex, rw) = (locks.mutex("x").unwrap(), locks.rwlock("rw").unwrap());
    let (guard, writing) = (mutex.lock().unwrap(), rw.write().unwrap());
    let both = locks.all([mutex.clone(), locks.mutex("y").unwrap()]).unwrap();
    let ticket = other.mutex("z").unwrap().lock().unwrap().into_ticket().unwrap();
    locks.close(LONG).unwrap();
    assert!(!fixture.has("lock:x") && !fixture.has("lock:rw"));
    #[track_caller]
    fn is_closed<T>(outcome: Result<T, Error>) {
        let outcome = outcome.map(drop);
        assert!(matches!(outcome, Err(Error::Closed { .. })), "{outcome:?}");
    }
    is_closed(guard.check());
    is_closed(guard.renew());
    is_closed(mutex.lock());
    is_closed(mutex.try_lock());
    is_closed(both.lock());
    is_closed(rw.read());
    is_closed(writing.downgrade());
    is_closed(locks.mutex("z").unwrap().adopt(&ticket));
    let late = other.mutex("x").unwrap().lock().unwrap();
    assert!(mutex.is_locked().unwrap());
    guard.release().unwrap();
    assert!(fixture.has("lock:x"), "that of the other client");
    late.release().unwrap();
    locks.settled().unwrap();
    locks.close(LONG).unwrap();
    assert!(locks.is_idle() && !mutex.is_locked().unwrap());
    // The thread has lasted until now.
    drop((locks, mutex, rw, both));
    other.mutex("z").unwrap().adopt(&ticket).unwrap().release().unwrap();
}

/// A program that is blocking in one part and async in another.
#[test]
fn the_async_client_ends_with_the_thread() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(patient().ttl(LONG));
    let asynchronous = locks.as_async().clone();
    let guard = fixture.runtime.block_on(asynchronous.mutex("x").unwrap().lock()).unwrap();
    let lease = guard.lease().clone();
    assert!(locks.mutex("x").unwrap().try_lock().unwrap().is_none());
    drop(locks);
    assert!(!fixture.has("lock:x"), "the thread closed the client");
    assert_eq!(lease.end(), Some(LeaseEnd::Closed));
    fixture.is_disconnected();
    let outcome = fixture.runtime.block_on(asynchronous.mutex("x").unwrap().inspect()).map(drop);
    assert!(matches!(outcome, Err(Error::RuntimeEnded { .. })), "{outcome:?}");
    drop(guard);
}
