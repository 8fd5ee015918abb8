//! `redlatch::blocking`: the same locks from threads without a runtime. The servers are asked with
//! raw commands, on a runtime of the test's own.

mod client_end;
mod every_kind;
mod inside_runtime;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use redlatch::blocking::Locks;
use redlatch::{ConfigError, Error, Lease, LeaseEnd, LocksBuilder, Options, Renewal};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::support::{Deployment, LONGEST_WAIT, MASTER, Server, Topology, eventually, patient, ttl};

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
            Topology::Sentinel => builder.sentinel(urls, format!("redis://{MASTER}/")),
            Topology::Quorum3 | Topology::Quorum5 => builder.quorum(urls),
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

/// A program with one thread blocks for longer than a TTL, and keeps its lease.
#[test]
fn a_lease_is_renewed_while_the_only_thread_of_the_program_blocks() {
    const TTL_MS: i64 = 6_000;
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(ttl(6_000));
    let guard = locks.mutex("long").unwrap().lock().unwrap();
    let token = guard.check().unwrap();
    assert!(token.is_some());
    let (done, is_done) = mpsc::channel();
    let deployment = Arc::clone(&fixture.deployment);
    fixture.runtime.spawn(async move {
        let server = &deployment.masters()[0];
        let holder: String = server.run(&["GET", "lock:long"]).await;
        let (start, mut renewals, mut last) = (server.time().await, 0, TTL_MS);
        while renewals < 3 || server.time().await - start < 1_200 * TTL_MS {
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

/// Nothing else renews the lease.
#[test]
fn renew_extends_a_lease_that_is_renewed_by_hand() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(patient().ttl(LONG).renewal(Renewal::Never));
    let guard = locks.mutex("x").unwrap().lock().unwrap();
    let server = &fixture.deployment.masters()[0];
    let before = guard.lease().valid_until();
    assert!(fixture.runtime.block_on(server.run::<bool>(&["PEXPIRE", "lock:x", "20000"])));
    assert!(guard.renew().unwrap() > before);
    assert!(guard.lease().valid_until() > before);
    let left: i64 = fixture.runtime.block_on(server.run(&["PTTL", "lock:x"]));
    assert!(left > 20_000, "{left}");
    guard.release().unwrap();
}

/// A thread waits, and another one releases.
#[test]
fn a_waiting_thread_acquires_after_a_release() {
    let fixture = Fixture::start(Topology::Standalone);
    let options = patient().ttl(LONG);
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

#[test]
fn panicking_work_and_failing_work_release_the_lock() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(patient().ttl(LONG));
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
    let locks = fixture.locks(ttl(6_000));
    let other = fixture.locks(patient());
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
fn a_thread_that_waits_for_itself_learns_it_from_the_error() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(patient().ttl(LONG));
    let mutex = locks.mutex("x").unwrap();
    let _guard = mutex.lock().unwrap();
    let outcome = mutex.lock_timeout(Duration::from_millis(1));
    assert!(matches!(outcome, Err(Error::TimedOut { holds_itself: true, .. })), "{outcome:?}");
}

/// Neither a lazy client nor one with other options has a thread more.
#[test]
fn a_lazy_client_connects_with_its_first_call() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = Locks::connect_lazily(fixture.builder().options(patient()).client_name("blocked")).unwrap();
    let clients: String = fixture.runtime.block_on(fixture.deployment.masters()[0].run(&["CLIENT", "LIST"]));
    assert!(!clients.contains(" name=blocked"), "{clients}");
    let short = locks.with_options(ttl(7_000)).unwrap();
    drop(locks);
    let guard = short.mutex("x").unwrap().lock().unwrap();
    let server = &fixture.deployment.masters()[0];
    let left: i64 = fixture.runtime.block_on(server.run(&["PTTL", "lock:x"]));
    assert!((1..=7_000).contains(&left), "{left}");
    assert!(matches!(
        short.with_options(patient().ttl(Duration::ZERO)),
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
