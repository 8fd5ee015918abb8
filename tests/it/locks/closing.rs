//! `Locks::close`: what it releases, and what it reports. The tests read the servers' keys.

use std::time::Duration;

use redlatch::{Error, LeaseEnd, Locks, Nesting, Options, Owner, Renewal};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::support::{
    AnyGuard, Deployment, KINDS, Kind, LONGEST_WAIT, Proxy, Server, Stopwatch, Topology, count_waiters,
    eventually, soon, ttl,
};

/// How many nodes do not hold the lock.
async fn free_on(deployment: &Deployment, name: &str) -> usize {
    let key = format!("lock:{name}");
    let exists: Vec<i64> = deployment.run_at(&key, &["EXISTS", &key]).await;
    exists.iter().filter(|exists| **exists == 0).count()
}

/// How many nodes have no waiter for the lock.
async fn unqueued_on(deployment: &Deployment, name: &str) -> usize {
    let queue = format!("{{lock:{name}}}:waiters");
    let waiters: Vec<u64> = deployment.run_at(&queue, &count_waiters(&queue)).await;
    waiters.iter().filter(|waiters| **waiters == 0).count()
}

/// Starts `tasks` calls for the lock, and waits until one of them is queued on all nodes.
async fn waiting(
    deployment: &Deployment,
    locks: &Locks,
    kind: Kind,
    name: &str,
    tasks: usize,
) -> Vec<JoinHandle<Result<AnyGuard, Error>>> {
    let calls = (0..tasks).map(|_| {
        let lock = kind.lock(locks, name);
        tokio::spawn(async move { lock.lock().await })
    });
    let calls = calls.collect();
    eventually("a call queues", || async { unqueued_on(deployment, name).await == 0 }).await;
    calls
}

fn is_closed<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::Closed { .. }))
}

async fn releases_holds_and_waiters(topology: Topology) {
    let deployment = Deployment::start(topology).await;
    // No lease is renewed during the test.
    let (locks, others) = (deployment.client(ttl(300_000)).await, deployment.client(ttl(300_000)).await);
    let never = locks.with_options(ttl(300_000).renewal(Renewal::Never)).unwrap();
    let local = locks.with_options(ttl(300_000).nesting(Nesting::Local)).unwrap();
    let owner = Owner::new();
    let (mut guards, mut names, mut theirs, mut calls) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for kind in KINDS {
        for (what, client) in [("held", &locks), ("never", &never)] {
            let name = format!("{what}-{}", kind.name());
            guards.push(kind.lock(client, &name).lock().await.unwrap());
            names.push(name);
        }
        let dropped = format!("dropped-{}", kind.name());
        drop(kind.lock(&locks, &dropped).lock().await.unwrap());
        names.push(dropped);
        // One task queues in Redis, and two queue locally behind it.
        let name = format!("theirs-{}", kind.name());
        theirs.push(kind.rival().lock(&others, &name).lock().await.unwrap());
        calls.extend(waiting(&deployment, &locks, kind, &name, 3).await);
    }
    let shared = local.reentrant("shared", &owner).unwrap();
    let shared = [shared.lock().await.unwrap(), shared.lock().await.unwrap()];
    let nested = locks.reentrant("nested", &owner).unwrap();
    let nested = [nested.lock().await.unwrap(), nested.lock().await.unwrap()];
    names.extend(["shared", "nested"].map(str::to_owned));
    // A guard that is never dropped: its lease is renewed until the client is closed.
    std::mem::forget(locks.mutex("forgotten").unwrap().lock().await.unwrap());
    names.push("forgotten".to_owned());

    let clone = locks.clone();
    locks.close(LONGEST_WAIT).await.unwrap();
    for name in &names {
        assert!(free_on(&deployment, name).await >= topology.majority(), "{name}");
    }
    for kind in KINDS {
        let name = format!("theirs-{}", kind.name());
        assert!(unqueued_on(&deployment, &name).await >= topology.majority(), "{name}");
        assert_eq!(free_on(&deployment, &name).await, 0, "another client has it");
    }
    for call in calls {
        let outcome = soon("the call returns", call).await.unwrap();
        assert!(is_closed(&outcome), "{outcome:?}");
    }
    let scripts_run = deployment.scripts_run().await;
    for guard in guards {
        let lease = guard.lease().clone();
        assert_eq!((lease.end(), lease.lost().await), (Some(LeaseEnd::Closed), LeaseEnd::Closed));
        assert!(is_closed(&lease.while_held(std::future::pending::<()>()).await));
        match guard {
            AnyGuard::Write(writing) if lease.name().as_str() == "held-write" => {
                assert!(is_closed(&writing.downgrade().await));
            }
            AnyGuard::Mutex(_) if lease.name().as_str() == "held-mutex" => drop(guard),
            guard => guard.release().await.unwrap(),
        }
    }
    for guard in shared.into_iter().chain(nested) {
        assert_eq!(guard.lease().end(), Some(LeaseEnd::Closed));
        guard.release().await.unwrap();
    }
    for client in [&locks, &clone, &local] {
        for kind in KINDS {
            let lock = kind.lock(client, "new");
            assert!(is_closed(&lock.lock().await) && is_closed(&lock.try_lock().await), "{lock:?}");
            assert!(is_closed(&lock.lock_timeout(Duration::from_secs(1)).await), "{lock:?}");
        }
    }
    clone.close(Duration::ZERO).await.unwrap();
    if topology == Topology::Standalone {
        // In other topologies, requests to a minority may still be in flight.
        assert_eq!(deployment.scripts_run().await, scripts_run, "the second close sends nothing");
    }
    assert!(
        clone.mutex("theirs-mutex").unwrap().is_locked().await.unwrap(),
        "a closed client can still inspect"
    );
    for guard in theirs {
        guard.release().await.unwrap();
    }
    for name in names {
        eventually("all nodes have released it", || async {
            free_on(&deployment, &name).await == topology.nodes()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn close_releases_holds_and_waiters_on_one_server() {
    releases_holds_and_waiters(Topology::Standalone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn close_releases_holds_and_waiters_on_a_cluster() {
    releases_holds_and_waiters(Topology::Cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn close_releases_holds_and_waiters_on_a_quorum() {
    releases_holds_and_waiters(Topology::Quorum3).await;
}

/// Tasks acquire, release, drop and downgrade while the client is closed. Once `close` returns, the
/// server has no lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn close_leaves_nothing_of_concurrent_calls() {
    let server = Server::start().await;
    for round in 0..30 {
        let locks = server.locks().await;
        let mut tasks = JoinSet::new();
        for number in 0..24 {
            let lock = KINDS[number % 4].lock(&locks, &format!("busy-{}-{}", number % 4, number % 12));
            tasks.spawn(async move {
                for turn in 0.. {
                    let guard = match lock.lock().await {
                        Ok(guard) => guard,
                        Err(error) => return error,
                    };
                    match (turn + number) % 3 {
                        0 => drop(guard),
                        1 => guard.release().await.unwrap(),
                        _ => match guard {
                            AnyGuard::Write(guard) => match guard.downgrade().await {
                                Ok(guard) => guard.release().await.unwrap(),
                                Err(error) => return error,
                            },
                            guard => guard.release().await.unwrap(),
                        },
                    }
                }
                unreachable!("it repeats until the client is closed")
            });
        }
        sleep(Duration::from_millis(round)).await;
        locks.close(LONGEST_WAIT).await.unwrap();
        let keys: Vec<String> = server.run(&["KEYS", "lock:*"]).await;
        assert_eq!(keys, [""; 0], "round {round}");
        while let Some(error) = tasks.join_next().await {
            assert!(matches!(error.unwrap(), Error::Closed { .. }));
        }
        let queues: Vec<String> = server.run(&["KEYS", "*:waiters"]).await;
        for queue in queues {
            assert_eq!(server.run::<u64>(&count_waiters(&queue)).await, 0, "{queue}");
        }
    }
}

/// A guard that is dropped after its client was closed has nothing to release, so no close reports
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn close_does_not_report_guards_dropped_after_a_close() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut guards = Vec::new();
    for number in 0..500 {
        guards.push(locks.mutex(number.to_string()).unwrap().lock().await.unwrap());
    }
    locks.close(LONGEST_WAIT).await.unwrap();
    let dropping = std::thread::spawn(move || drop(guards));
    let mut closes = 0;
    while closes == 0 || !dropping.is_finished() {
        locks.close(LONGEST_WAIT).await.unwrap();
        closes += 1;
    }
    dropping.join().unwrap();
}

/// A request is in flight while the client is closed, so the server may hold the lock until the
/// request arrives.
#[tokio::test(flavor = "multi_thread")]
async fn close_waits_for_calls_in_flight() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    // Longer than the test: no request times out.
    let options = ttl(120_000).node_timeout(Duration::from_secs(15));
    for what in ["acquired", "released", "downgraded"] {
        let locks = Locks::builder().server(proxy.url()).options(options.clone()).connect().await.unwrap();
        let lock = locks.rwlock(what).unwrap();
        let guard = if what == "acquired" { None } else { Some(lock.write().await.unwrap()) };
        proxy.hold_requests(true);
        let held = proxy.held();
        let call = tokio::spawn(async move {
            match (what, guard) {
                ("released", Some(guard)) => guard.release().await,
                ("downgraded", Some(guard)) => guard.downgrade().await.map(drop),
                _ => lock.write().await.map(drop),
            }
        });
        // A script call is longer than the handshake of a new connection.
        eventually("the request is in flight", || async { proxy.held() > held + 100 }).await;
        let outcome = locks.close(Duration::from_millis(300)).await;
        assert!(matches!(outcome, Err(Error::Unreleased { count: 1, .. })), "{what}: {outcome:?}");
        proxy.hold_requests(false);
        locks.close(LONGEST_WAIT).await.unwrap();
        let exists: i64 = server.run(&["EXISTS", &format!("lock:{what}")]).await;
        assert_eq!(exists, 0, "{what}");
        let outcome = soon("the call returns", call).await.unwrap();
        assert!(
            if what == "released" { outcome.is_ok() } else { is_closed(&outcome) },
            "{what}: {outcome:?}"
        );
    }
}

/// All servers hang: `close` returns at its limit, and names the locks that are left. Once the
/// servers respond, a second `close` succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn close_returns_at_its_limit_if_no_server_responds() {
    for topology in [Topology::Standalone, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        // Longer than the limit, so that no request fails before it.
        let options = ttl(120_000).node_timeout(Duration::from_secs(15));
        let (locks, others) = (deployment.client(options).await, deployment.client(Options::new()).await);
        let mut guards = Vec::new();
        for kind in KINDS {
            guards.push(kind.lock(&locks, &format!("held-{}", kind.name())).lock().await.unwrap());
        }
        let theirs = others.mutex("queued").unwrap().lock().await.unwrap();
        let calls = waiting(&deployment, &locks, Kind::Mutex, "queued", 2).await;
        deployment.pause();
        let start = Stopwatch::start();
        let limit = Duration::from_secs(1);
        let outcome = locks.close(limit).await;
        let took = start.stop();
        assert!(took.elapsed() >= limit && took.undisturbed() < Duration::from_secs(8), "{took:?}");
        let Err(Error::Unreleased { count, names, limit: reported }) = outcome else { panic!("{outcome:?}") };
        assert!(count >= 5 && reported == limit, "{count} {names:?}");
        let mut names: Vec<&str> = names.iter().map(redlatch::Name::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["held-mutex", "held-read", "held-reentrant", "held-write", "queued"]);
        for call in calls {
            assert!(is_closed(&soon("the call returns", call).await.unwrap()));
        }
        for guard in guards {
            assert_eq!(guard.lease().end(), Some(LeaseEnd::Closed));
            soon("release() waits for no server", guard.release()).await.unwrap();
        }
        assert!(locks.close(Duration::ZERO).await.is_err(), "the locks are still left");
        deployment.resume();
        locks.close(LONGEST_WAIT).await.unwrap();
        for kind in KINDS {
            assert!(free_on(&deployment, &format!("held-{}", kind.name())).await >= topology.majority());
        }
        assert!(unqueued_on(&deployment, "queued").await >= topology.majority());
        theirs.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn close_of_a_quorum_needs_only_a_majority() {
    let mut deployment = Deployment::start(Topology::Quorum3).await;
    let locks = deployment.client(Options::new().node_timeout(Duration::from_secs(1))).await;
    let mut guards = Vec::new();
    for kind in KINDS {
        guards.push(kind.lock(&locks, kind.name()).lock().await.unwrap());
    }
    deployment.masters_mut()[0].kill();
    locks.close(LONGEST_WAIT).await.unwrap();
    for server in &deployment.masters()[1..] {
        assert_eq!(server.run::<Vec<String>>(&["KEYS", "lock:*"]).await, [""; 0]);
    }
}

/// A call whose future is neither polled nor dropped stays queued.
#[tokio::test(flavor = "multi_thread")]
async fn close_reports_a_call_that_is_not_polled() {
    let server = Server::start().await;
    let (locks, others) = (server.locks().await, server.locks().await);
    let held = others.mutex("stuck").unwrap().lock().await.unwrap();
    let lock = locks.mutex("stuck").unwrap();
    let mut call = Box::pin(lock.lock());
    let queue = "{lock:stuck}:waiters";
    tokio::select! {
        outcome = &mut call => panic!("{outcome:?}"),
        () = eventually("a call queues", || async { server.run::<u64>(&count_waiters(queue)).await == 1 }) => {}
    }
    let outcome = locks.close(Duration::from_millis(300)).await;
    let Err(Error::Unreleased { count: 1, names, .. }) = &outcome else { panic!("{outcome:?}") };
    assert_eq!(names[0].as_str(), "stuck");
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("\"stuck\"") && text.contains("300ms"), "{text}");
    drop(call);
    locks.close(LONGEST_WAIT).await.unwrap();
    assert_eq!(server.run::<u64>(&count_waiters(queue)).await, 0);
    held.release().await.unwrap();
}

/// A release that the server refuses is not waited for, and is reported.
#[tokio::test(flavor = "multi_thread")]
async fn close_reports_refused_releases() {
    let server = Server::start().await;
    let user = ["ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all"];
    server.run::<()>(&user).await;
    let url = server.url().replace("redis://", "redis://app:secret@");
    let locks = Locks::open(&url).await.unwrap();
    let guards =
        [locks.mutex("a").unwrap().lock().await.unwrap(), locks.mutex("b").unwrap().lock().await.unwrap()];
    server.run::<()>(&["ACL", "SETUSER", "app", "-evalsha", "-eval"]).await;
    let outcome = soon("close() returns before its limit", locks.close(10 * LONGEST_WAIT)).await;
    let Err(Error::Unreleased { count: 2, names, .. }) = &outcome else { panic!("{outcome:?}") };
    assert_eq!(names.len(), 2);
    let kept: i64 = server.run(&["EXISTS", "lock:a", "lock:b"]).await;
    assert_eq!(kept, 2);
    drop(guards);
}

/// The client's tasks have ended with its runtime, so nothing can be released.
#[test]
fn close_fails_after_the_clients_runtime_ended() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let server = second.block_on(Server::start());
    let locks = first.block_on(server.locks());
    let guard = first.block_on(locks.mutex("held").unwrap().lock()).unwrap();
    drop(first);
    let outcome = second.block_on(soon("close() does not wait", locks.close(10 * LONGEST_WAIT)));
    assert!(matches!(outcome, Err(Error::RuntimeEnded { .. })), "{outcome:?}");
    drop(guard);
}
