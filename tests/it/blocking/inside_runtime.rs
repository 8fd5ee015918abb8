//! Calls on threads that must not block: each returns an error at once.

use std::fmt::Debug;
use std::time::Duration;

use redlatch::blocking::{Locks, MutexGuard};
use redlatch::{ConfigError, Error, LocksBuilder, Options, Owner};
use tokio::runtime::Builder;

use super::{Fixture, LONG, soon};
use crate::support::{Topology, patient};

#[track_caller]
fn assert_refused<T: Debug>(outcome: Result<T, impl Into<Error>>) {
    let error = outcome.map_err(Into::into).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::InsideRuntime)), "{error:?}");
    assert!(!error.is_transient() && !error.is_indeterminate(), "{error:?}");
    assert!(error.to_string().contains("redlatch::Locks"), "{error}");
}

/// Every call, on a thread that must not block.
fn assert_all_refused(builder: &LocksBuilder, locks: &Locks, guards: (MutexGuard, MutexGuard)) {
    assert_refused(Locks::connect(builder.clone()));
    assert_refused(Locks::connect_lazily(builder.clone()));
    let mutex = locks.mutex("other").unwrap();
    assert_refused(mutex.lock());
    assert_refused(mutex.lock_timeout(LONG));
    assert_refused(mutex.try_lock());
    assert_refused(mutex.run(|_| -> Result<(), Error> { panic!("it does not hold the lock") }));
    assert_refused(mutex.inspect());
    assert_refused(mutex.is_locked());
    assert_refused(mutex.is_held_by(guards.0.lease()));
    assert_refused(mutex.force_release());
    assert_refused(locks.reentrant("other", &Owner::new()).unwrap().lock());
    assert_refused(locks.all([mutex.clone()]).unwrap().lock());
    assert_refused(guards.0.renew());
    assert_refused(locks.rwlock("other").unwrap().read());
    assert_refused(locks.rwlock("other").unwrap().write());
    assert_refused(locks.settled());
    assert_refused(locks.close(LONG));
    assert_refused(locks.block_on(async {}));
    // What sends no request works.
    guards.0.check().unwrap();
    assert!(!locks.is_idle());
    assert_refused(guards.0.release());
    drop(guards.1);
}

/// In a task, in `spawn_blocking`, in `block_on` of either kind of runtime, and beside an entered
/// handle. The guards are released all the same.
#[test]
fn calls_on_a_runtime_return_an_error_and_change_nothing() {
    let fixture = Fixture::start(Topology::Standalone);
    let builder = fixture.builder();
    let locks = fixture.locks(patient().ttl(LONG));
    let guards = || {
        let lock = |name| locks.mutex(name).unwrap().lock_timeout(LONG).unwrap();
        (lock("released"), lock("dropped"))
    };
    let work = |guards| {
        let (builder, locks) = (builder.clone(), locks.clone());
        move || assert_all_refused(&builder, &locks, guards)
    };
    let current = Builder::new_current_thread().enable_all().build().unwrap();
    let task = work(guards());
    fixture.runtime.block_on(fixture.runtime.spawn(async move { task() })).unwrap();
    fixture.runtime.block_on(fixture.runtime.spawn_blocking(work(guards()))).unwrap();
    for runtime in [&fixture.runtime, &current] {
        let task = work(guards());
        runtime.block_on(async move { task() });
    }
    let task = work(guards());
    let entered = current.enter();
    task();
    drop(entered);
    fixture.is_released("lock:*");
    assert!(!fixture.has("*other*"));
}

/// The last drop would wait for the release for two minutes, were it not on a runtime.
#[test]
fn a_drop_on_a_runtime_waits_for_nothing() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(Duration::from_secs(300)).node_timeout(LONG));
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    fixture.deployment.pause();
    soon("the drop returns", move || {
        let runtime = Builder::new_current_thread().build().unwrap();
        runtime.block_on(async move { drop((locks, guard)) });
    });
    fixture.deployment.resume();
    fixture.is_released("lock:x");
    fixture.is_disconnected();
}
