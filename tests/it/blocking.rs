//! `redlatch::blocking`: the same locks from threads without a runtime. The servers are asked with
//! raw commands, on a runtime of the test's own.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use redlatch::blocking::{Locks, MutexGuard};
use redlatch::{ConfigError, Error, Lease, LeaseEnd, LocksBuilder, Mode, Options, Owner};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::support::{Deployment, LONGEST_WAIT, Server, Topology, Worker, eventually};

/// A limit of a client's calls that no test reaches.
const LONG: Duration = Duration::from_secs(60);

/// The servers, and the runtime that asks them.
struct Fixture {
    runtime: Runtime,
    deployment: Arc<Deployment>,
}

impl Fixture {
    fn start(topology: Topology) -> Fixture {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let deployment = Arc::new(runtime.block_on(Deployment::start(topology)));
        Fixture { runtime, deployment }
    }

    fn builder(&self) -> LocksBuilder {
        let urls = self.deployment.entrances().iter().map(Server::url);
        let builder = redlatch::Locks::builder();
        match self.deployment.topology() {
            Topology::Standalone => builder.server(urls.last().unwrap()),
            Topology::Cluster => builder.cluster(urls),
            Topology::Quorum3 => builder.quorum(urls),
            other => panic!("no client for {other:?}"),
        }
    }

    fn locks(&self, options: Options) -> Locks {
        Locks::connect(self.builder().options(options).client_name("blocked")).unwrap()
    }

    fn has(&self, key: &str) -> bool {
        !self.runtime.block_on(self.deployment.keys(key)).is_empty()
    }

    fn is_released(&self, key: &str) {
        let is_free = || async { self.deployment.keys(key).await.is_empty() };
        self.runtime.block_on(eventually("the lock is free", is_free));
    }

    /// The client's thread has ended: its connections were those of its runtime.
    fn is_disconnected(&self) {
        self.runtime.block_on(eventually("the client is disconnected", || async {
            let lists: Vec<String> = self.deployment.run(&["CLIENT", "LIST"]).await;
            !lists.concat().contains(" name=blocked")
        }));
    }
}

/// Runs this on a thread of its own, and fails if it does not end: a deadlock.
fn soon<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    is_done.recv_timeout(LONGEST_WAIT).unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// A program with one thread blocks for three TTLs, and keeps its lease.
#[test]
fn a_lease_is_renewed_while_the_only_thread_of_the_program_blocks() {
    const TTL_MS: i64 = 2_000;
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(Duration::from_millis(2_000)));
    let guard = locks.mutex("long").unwrap().lock().unwrap();
    let token = guard.check().unwrap();
    assert!(token.is_some());
    let (done, is_done) = mpsc::channel();
    let deployment = Arc::clone(&fixture.deployment);
    fixture.runtime.spawn(async move {
        let server = &deployment.masters()[0];
        let holder: String = server.run(&["GET", "lock:long"]).await;
        let (start, mut renewals, mut last) = (server.time().await, 0, TTL_MS);
        while renewals < 3 || server.time().await - start < 3_000 * TTL_MS {
            let left: i64 = server.run(&["PTTL", "lock:long"]).await;
            assert!(left > 0, "expired after {renewals} renewals");
            renewals += i64::from(left > last);
            last = left;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let same: String = server.run(&["GET", "lock:long"]).await;
        done.send(holder == same).unwrap();
    });
    assert!(is_done.recv_timeout(LONGEST_WAIT).unwrap(), "another holder came");
    assert_eq!(guard.check().unwrap(), token);
    guard.release().unwrap();
    assert!(!fixture.has("lock:long"));
}

fn every_kind_is_acquired_and_released_on(topology: Topology) {
    let fixture = Fixture::start(topology);
    let options = Options::new().ttl(LONG);
    let (locks, other) = (fixture.locks(options.clone()), fixture.locks(options));
    let limit = Duration::from_millis(1);

    let (mutex, rival) = (locks.mutex("mutex").unwrap(), other.mutex("mutex").unwrap());
    let guard = mutex.lock().unwrap();
    assert!(fixture.has("lock:mutex"));
    assert!(rival.try_lock().unwrap().is_none());
    assert!(matches!(rival.lock_timeout(limit), Err(Error::TimedOut { .. })));
    assert!(rival.is_locked().unwrap() && rival.is_held_by(guard.lease()).unwrap());
    assert_eq!(rival.inspect().unwrap().fencing_token, guard.check().unwrap());
    guard.release().unwrap();
    assert!(!fixture.has("lock:mutex"));
    let first = mutex.run(|lease| lease.check()).unwrap();
    assert!(rival.run_timeout(LONG, |lease| lease.check()).unwrap() > first);

    let owner = Owner::new();
    let reentrant = locks.reentrant("reentrant", &owner).unwrap();
    let outer = reentrant.lock().unwrap();
    let inner = reentrant.try_lock().unwrap().unwrap();
    assert_eq!((inner.owner(), inner.check().unwrap()), (&owner, outer.check().unwrap()));
    inner.release().unwrap();
    let rival = other.reentrant("reentrant", &Owner::new()).unwrap();
    assert!(rival.try_lock().unwrap().is_none());
    assert!(reentrant.is_held_by(&owner).unwrap());
    assert!(rival.force_release().unwrap());
    assert!(matches!(outer.release(), Err(Error::NotHeld { .. } | Error::Lost { .. })));
    assert!(!fixture.has("lock:reentrant"));

    let (rw, rival) = (locks.rwlock("rw").unwrap(), other.rwlock("rw").unwrap());
    let writing = rw.write().unwrap();
    assert!(rival.try_read().unwrap().is_none() && rival.try_write().unwrap().is_none());
    let reading = writing.downgrade().unwrap();
    let beside = rival.read().unwrap();
    assert_eq!(rival.inspect().unwrap().mode, Mode::Read);
    assert!(matches!(rival.write_timeout(limit), Err(Error::TimedOut { .. })));
    reading.release().unwrap();
    beside.release().unwrap();
    rival.run_write(|lease| lease.check()).unwrap();
    rival.run_read(|lease| lease.check()).unwrap();
    assert!(!fixture.has("lock:rw"));

    assert!(locks.is_idle() && other.is_idle());
}

#[test]
fn every_kind_is_acquired_and_released_on_one_server() {
    every_kind_is_acquired_and_released_on(Topology::Standalone);
}

#[test]
fn every_kind_is_acquired_and_released_on_a_cluster() {
    every_kind_is_acquired_and_released_on(Topology::Cluster);
}

#[test]
fn every_kind_is_acquired_and_released_on_a_quorum() {
    every_kind_is_acquired_and_released_on(Topology::Quorum3);
}

/// A thread waits, and another one releases.
#[test]
fn a_waiting_thread_acquires_after_a_release() {
    let fixture = Fixture::start(Topology::Standalone);
    let options = Options::new().ttl(LONG);
    let (locks, other) = (fixture.locks(options.clone()), fixture.locks(options));
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    let (granted, is_granted) = mpsc::channel();
    let waiter = thread::spawn(move || {
        let guard = other.mutex("x").unwrap().lock().unwrap();
        granted.send(guard.check().unwrap()).unwrap();
    });
    let queue = "{lock:x}:waiters";
    fixture.runtime.block_on(eventually("the thread is queued", || async {
        fixture.deployment.masters()[0].waiters(queue).await == 1
    }));
    let token = guard.check().unwrap();
    guard.release().unwrap();
    assert!(is_granted.recv_timeout(LONGEST_WAIT).unwrap() > token);
    waiter.join().unwrap();
}

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
    let locks = fixture.locks(Options::new().ttl(LONG));
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
    let locks = fixture.locks(Options::new().ttl(LONG));
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
    let options = Options::new().ttl(Duration::from_secs(300)).node_timeout(Duration::from_millis(100));
    let locks = fixture.locks(options);
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    fixture.deployment.pause();
    soon("the drop returns", move || drop((locks, guard)));
    fixture.deployment.resume();
    fixture.is_released("lock:x");
    fixture.is_disconnected();
}

#[test]
fn panicking_work_and_failing_work_release_the_lock() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(LONG));
    let mutex = locks.mutex("x").unwrap();
    let panics = |_: Lease| -> Result<(), Error> { panic!("a bug in the work") };
    catch_unwind(AssertUnwindSafe(|| mutex.run(panics))).unwrap_err();
    fixture.is_released("lock:x");
    let failed = mutex.run(|_| Err::<(), Box<dyn std::error::Error>>("my own".into()));
    assert_eq!(failed.unwrap_err().to_string(), "my own");
    assert!(!fixture.has("lock:x"), "released before it returned");
}

/// Work that ends after its lease is no success, and `check` says so before.
#[test]
fn a_revoked_lease_fails_the_work() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(Duration::from_millis(900)));
    let other = fixture.locks(Options::new());
    let mutex = locks.mutex("x").unwrap();
    let outcome = mutex.run(|lease| {
        assert!(other.mutex("x")?.force_release()?);
        // A thread that blocks is woken as well.
        assert_eq!(locks.block_on(lease.lost())?, LeaseEnd::Revoked);
        let lost = lease.check().unwrap_err();
        assert!(matches!(lost, Error::Lost { .. }), "{lost:?}");
        Ok::<_, Error>(42)
    });
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
}

#[test]
fn a_closed_client_acquires_nothing_and_still_inspects() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(LONG));
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    locks.close(LONG).unwrap();
    assert!(!fixture.has("lock:x"));
    assert!(matches!(guard.check(), Err(Error::Closed { .. })));
    assert!(matches!(locks.mutex("x").unwrap().lock(), Err(Error::Closed { .. })));
    assert!(!locks.mutex("x").unwrap().is_locked().unwrap());
}

/// A program that is blocking in one part and async in another.
#[test]
fn the_async_client_ends_with_the_thread() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(LONG));
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

#[test]
fn a_thread_that_waits_for_itself_learns_it_from_the_error() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(Options::new().ttl(LONG));
    let mutex = locks.mutex("x").unwrap();
    let _guard = mutex.lock().unwrap();
    let outcome = mutex.lock_timeout(Duration::from_millis(1));
    assert!(matches!(outcome, Err(Error::TimedOut { holds_itself: true, .. })), "{outcome:?}");
}

/// Neither a lazy client nor one with other options has a thread more.
#[test]
fn a_lazy_client_connects_with_its_first_call() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = Locks::connect_lazily(fixture.builder().client_name("blocked")).unwrap();
    let clients: String = fixture.runtime.block_on(fixture.deployment.masters()[0].run(&["CLIENT", "LIST"]));
    assert!(!clients.contains(" name=blocked"), "{clients}");
    let short = locks.with_options(Options::new().ttl(Duration::from_secs(7))).unwrap();
    drop(locks);
    let guard = short.mutex("x").unwrap().lock().unwrap();
    let server = &fixture.deployment.masters()[0];
    let left: i64 = fixture.runtime.block_on(server.run(&["PTTL", "lock:x"]));
    assert!((1..=7_000).contains(&left), "{left}");
    assert!(matches!(
        short.with_options(Options::new().ttl(Duration::ZERO)),
        Err(Error::Config(ConfigError::Span { .. }))
    ));
    guard.release().unwrap();
    assert!(Handle::try_current().is_err(), "no call leaves its thread on a runtime");
}

/// A server that refuses connections: an error, and no thread that stays.
#[test]
fn a_client_that_cannot_connect_returns_the_error() {
    let outcome = Locks::open(&format!("redis://127.0.0.1:{}/", crate::support::free_port()));
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    assert!(matches!(Locks::open("not a url"), Err(Error::Config(ConfigError::Url { .. }))));
}
