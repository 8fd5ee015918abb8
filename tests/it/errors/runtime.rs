//! Calls on other runtimes than the client's, on none, and of a client whose runtime has ended.

use std::hint::black_box;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use redlatch::{Error, Locks, Operation};
use tokio::runtime::{Builder, Runtime};

use super::{KINDS, options};
use crate::support::{AnyGuard, LONGEST_WAIT, Server, Stopwatch, patient, soon};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

#[track_caller]
fn assert_ended(outcome: Result<(), Error>, operation: Operation) {
    let error = outcome.unwrap_err();
    let Error::RuntimeEnded { context } = &error else { panic!("{error:?}") };
    assert_eq!(context.operation(), operation);
    assert!(!error.is_transient(), "{error:?}");
}

/// All calls return `RuntimeEnded` at once, on one server and on a quorum: as with a client in a
/// static, and one runtime for each test.
#[test]
fn every_call_fails_after_the_clients_runtime_ended() {
    let second = runtime();
    let servers =
        second.block_on(async { [Server::start().await, Server::start().await, Server::start().await] });
    for is_quorum in [false, true] {
        for kind in KINDS {
            let first = runtime();
            let name = format!("{}{is_quorum}", kind.name());
            let builder = if is_quorum {
                Locks::builder().quorum(servers.iter().map(Server::url))
            } else {
                Locks::builder().server(servers[0].url())
            };
            let locks = first.block_on(builder.options(options()).connect()).unwrap();
            let lock = kind.lock(&locks, &name);
            let guard = first.block_on(lock.lock()).unwrap();
            let downgraded = first.block_on(kind.lock(&locks, &format!("{name}2")).lock()).unwrap();
            let dropped = first.block_on(kind.lock(&locks, &format!("{name}3")).lock()).unwrap();
            drop(first);
            drop(dropped);
            second.block_on(soon("no call waits", async {
                let (free, start) = (kind.lock(&locks, "free"), Stopwatch::start());
                assert_ended(free.try_lock().await.map(drop), Operation::Acquire);
                assert_ended(free.lock().await.map(drop), Operation::Acquire);
                assert!(start.undisturbed() < Duration::from_millis(500), "{start:?}");
                assert_ended(lock.try_lock().await.map(drop), Operation::Acquire);
                assert_ended(lock.lock().await.map(drop), Operation::Acquire);
                let all = locks.all([locks.mutex("set").unwrap()]).unwrap();
                assert_ended(all.lock().await.map(drop), Operation::Acquire);
                assert_ended(all.lock_timeout(Duration::from_secs(9)).await.map(drop), Operation::Acquire);
                assert_ended(lock.inspect().await.map(drop), Operation::Inspect);
                assert_ended(lock.force_release().await.map(drop), Operation::ForceRelease);
                if let AnyGuard::Write(guard) = downgraded {
                    assert_ended(guard.downgrade().await.map(drop), Operation::Downgrade);
                }
                assert_ended(guard.release().await, Operation::Release);
                locks.settled().await;
            }));
        }
    }
}

/// Requests that wait for a place on the connection do not wait for ever.
#[test]
fn queued_calls_fail_once_the_clients_runtime_ended() {
    let second = runtime();
    let server = second.block_on(Server::start());
    let first = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = options().node_timeout(Duration::from_secs(60)).ttl(Duration::from_secs(600));
    let locks = first.block_on(server.locks_with(options));
    server.pause();
    second.block_on(async {
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..200 {
            let lock = locks.mutex(format!("queued-{number}")).unwrap();
            calls.spawn(async move { lock.try_lock().await.map(drop) });
        }
        // On this runtime with one thread, all of them have sent or queued their requests by then.
        for _ in 0..3 {
            tokio::spawn(async {}).await.unwrap();
        }
        first.shutdown_background();
        let outcomes = soon("no call waits", calls.join_all()).await;
        for outcome in outcomes {
            assert_ended(outcome, Operation::Acquire);
        }
    });
    server.resume();
}

/// Runs a future on this thread, which has no runtime: no timer, and nothing to spawn tasks on.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

/// They use the client's runtime while there is one, and are a typed error afterwards: never a
/// panic.
#[test]
fn every_call_works_on_a_thread_without_a_runtime() {
    let outer = runtime();
    let servers =
        outer.block_on(async { [Server::start().await, Server::start().await, Server::start().await] });
    for is_quorum in [false, true] {
        for kind in KINDS {
            let clients = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let builder = if is_quorum {
                Locks::builder().quorum(servers.iter().map(Server::url))
            } else {
                Locks::builder().server(servers[0].url())
            };
            let locks =
                clients.block_on(builder.options(options().ttl(Duration::from_secs(3))).connect()).unwrap();
            let held = block_on(async {
                let name = format!("{}{is_quorum}", kind.name());
                let (lock, rival) = (kind.lock(&locks, &name), kind.rival().lock(&locks, &name));
                let guard = lock.lock().await.unwrap();
                assert_eq!(guard.lease().while_held(async { 7 }).await.unwrap(), 7);
                let late = rival.lock_timeout(Duration::from_millis(300)).await;
                assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
                lock.inspect().await.unwrap();
                let set = ["set:a", "set:b"].map(|name| locks.mutex(name).unwrap());
                let all = locks.all(set).unwrap();
                let both = all.lock_timeout(Duration::from_secs(60)).await.unwrap();
                let late = all.lock_timeout(Duration::from_millis(300)).await.map(drop);
                assert!(matches!(late, Err(Error::TimedOut { .. })), "{late:?}");
                both.release().await.unwrap();
                let lease = guard.lease().clone();
                guard.release().await.unwrap();
                lease.lost().await;
                drop(lock.try_lock().await.unwrap().unwrap());
                locks.settled().await;
                let revoked = lock.lock_timeout(Duration::from_secs(60)).await.unwrap();
                assert!(lock.force_release().await.unwrap());
                revoked.lease().lost().await;
                if let AnyGuard::Write(guard) = lock.lock().await.unwrap() {
                    guard.downgrade().await.unwrap().release().await.unwrap();
                }
                assert!(locks.nodes().await.iter().all(redlatch::NodeStatus::is_voter));
                assert!(!locks.doctor().await.is_empty());
                locks.settled().await;
                lock.lock().await.unwrap()
            });
            drop(clients);
            block_on(async {
                let lock = kind.lock(&locks, "after");
                assert_ended(lock.try_lock().await.map(drop), Operation::Acquire);
                assert_ended(lock.lock().await.map(drop), Operation::Acquire);
                assert_ended(lock.lock_timeout(Duration::from_secs(9)).await.map(drop), Operation::Acquire);
                assert_ended(lock.inspect().await.map(drop), Operation::Inspect);
                assert_ended(lock.force_release().await.map(drop), Operation::ForceRelease);
                held.lease().lost().await;
                assert!(held.release().await.is_err());
                assert!(locks.nodes().await.iter().all(|node| !node.is_voter()));
                assert!(!locks.doctor().await.is_empty());
                assert_ended(locks.close(Duration::from_secs(9)).await, Operation::Close);
                locks.settled().await;
            });
        }
    }
}

/// The tasks of a runtime end before its timers do.
#[test]
fn calls_on_threads_without_a_runtime_meet_its_end_at_any_moment() {
    let outer = runtime();
    let server = outer.block_on(Server::start());
    for round in 0..400 {
        let clients = Builder::new_multi_thread().worker_threads(1 + round % 2).enable_all().build().unwrap();
        let locks =
            clients.block_on(Locks::builder().server(server.url()).options(patient()).connect()).unwrap();
        let calls = |number: usize| {
            let locks = locks.clone();
            thread::spawn(move || {
                for turn in number.. {
                    let lock = locks.mutex((turn % 3).to_string()).unwrap();
                    let outcome = block_on(async {
                        match turn % 4 {
                            0 => lock.lock_timeout(Duration::from_millis(20)).await.map(drop),
                            1 => lock.lock().await?.release().await,
                            2 => lock.try_lock().await.map(drop),
                            _ => lock.inspect().await.map(drop),
                        }
                    });
                    if matches!(outcome, Err(Error::RuntimeEnded { .. })) {
                        return;
                    }
                }
            })
        };
        let threads: Vec<_> = (0..4).map(calls).collect();
        thread::sleep(Duration::from_micros(500 + round as u64 * 37 % 4000));
        if round % 3 == 0 {
            clients.shutdown_background()
        } else {
            drop(clients)
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }
}

/// Releases of several locks leave together: none waits for a request that never left.
#[test]
fn releases_of_several_locks_meet_the_end_of_the_runtime_at_any_moment() {
    let outer = runtime();
    let server = outer.block_on(Server::start());
    for round in 0..100 {
        let clients = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let locks = clients.block_on(server.locks_with(patient()));
        let name = |number: u32| locks.mutex(format!("{round}-{number}")).unwrap();
        let guard = clients.block_on(locks.all((0..128).map(name)).unwrap().lock()).unwrap();
        let (begins, begun) = mpsc::channel();
        let (ends, ended) = mpsc::channel();
        let releasing = thread::spawn(move || {
            begins.send(()).unwrap();
            ends.send(block_on(guard.release())).unwrap();
        });
        begun.recv().unwrap();
        (0..round * 200).for_each(|turn| _ = black_box(turn));
        clients.shutdown_background();
        let outcome = ended.recv_timeout(LONGEST_WAIT).expect("the release ends");
        assert!(!matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
        releasing.join().unwrap();
    }
}
