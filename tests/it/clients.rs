//! Clients: pools, rights, 10,000 leases, and what is public.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{
    Error, Locks, Mutex, MutexGuard, NodeState, NodeStatus, Options, Owner, ReentrantGuard, ReentrantLock,
};
use tokio::time::Instant;

use crate::support::{AnyGuard, Kind, Oracle, Proxy, Server, eventually, soon, ttl};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

const LEASES: usize = 10_000;

async fn ten_thousand_leases(kind: Kind, locks: &Locks) -> Vec<AnyGuard> {
    let mut guards = Vec::with_capacity(LEASES);
    for hundred in 0..LEASES / 100 {
        let mut round = tokio::task::JoinSet::new();
        for one in 0..100 {
            let lock = kind.lock(locks, &format!("many-{hundred}-{one}"));
            round.spawn(async move { lock.lock().await.unwrap() });
        }
        while let Some(guard) = round.join_next().await {
            guards.push(guard.unwrap());
        }
    }
    guards
}

async fn ten_thousand_leases_are_renewed(kind: Kind) {
    let server = Server::start().await;
    let locks = server.locks_with(ttl(4_000)).await;
    let guards = ten_thousand_leases(kind, &locks).await;
    let clients: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    assert!(clients.lines().count() <= 2, "one connection, and this one:\n{clients}");
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let lost = guards.iter().filter(|guard| guard.lease().is_lost()).count();
        assert_eq!(lost, 0, "{lost} of {LEASES} lost");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(guards);
    drop(locks);
    eventually("all are released in the background", || async {
        server.run::<Vec<String>>(&["KEYS", "lock:many-*"]).await.is_empty()
    })
    .await;
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Reentrant).await;
}

/// Where a hold is lost, the other holds of its owner are asked about at once: to find them costs
/// no look at all leases.
#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_ten_thousand_leases_are_lost_as_fast_as_mutexes() {
    let server = Server::start().await;
    let mut times = Vec::new();
    for kind in [Kind::Mutex, Kind::Reentrant] {
        let locks = server.locks_with(ttl(6_000)).await;
        let guards = ten_thousand_leases(kind, &locks).await;
        let start = Instant::now();
        server.run::<()>(&["FLUSHALL"]).await;
        for guard in &guards {
            soon("lost", guard.lease().lost()).await;
        }
        times.push(start.elapsed());
    }
    // Either takes a third of a TTL, since no renewal comes before.
    println!("lost within {times:?}");
    assert!(times[1] < times[0] * 2, "{times:?}");
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_an_exhausted_one_starves_no_lease() {
    let server = Server::start().await;
    let mut config = Config::from_url(server.url());
    config.pool = Some(redlatch::deadpool_redis::PoolConfig::new(1));
    let pool = config.create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder()
        .pool(pool.clone())
        .subscriber(server.url())
        .options(ttl(600))
        .connect()
        .await
        .unwrap();
    let _the_only_place = pool.get().await.unwrap();
    let mutex = locks.mutex("pooled").unwrap();
    let guard = mutex.lock().await.unwrap();
    tokio::time::sleep(Duration::from_millis(900)).await;
    // Its connection breaks as well: it makes a new one beside the pool.
    let _: i64 = server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(!guard.lease().is_lost() && server.lock_state(mutex.name()).await.is_held());
    guard.release().await.unwrap();
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_a_client_of_one_is_told_once_it_has_a_subscriber() {
    let server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let locks = Locks::builder().pool(pool).subscriber(server.url()).connect().await.unwrap();
    let mutex = locks.mutex("told").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    eventually("it subscribes", || async {
        !server.run::<Vec<String>>(&["PUBSUB", "CHANNELS"]).await.is_empty()
    })
    .await;
    eventually("it queues", || async { server.lock_state(mutex.name()).await.waiters() == 1 }).await;
    let before = server.published().await;
    guard.release().await.unwrap();
    soon("notified", waiting).await.unwrap().unwrap().release().await.unwrap();
    assert!(server.published().await > before, "it is notified");
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_one_server_are_one() {
    let mut server = Server::start().await;
    let pool = Config::from_url(server.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let (locks, pooled) =
        (server.locks().await, Locks::builder().pool(pool).subscriber(server.url()).connect().await.unwrap());
    let address = format!("127.0.0.1:{}", server.port());
    for (locks, name) in [(&locks, address.as_str()), (&pooled, "pool")] {
        assert_eq!(locks.nodes().await[0].to_string(), format!("{name}: votes"));
        assert_eq!(locks.nodes().await.len(), 1);
        assert!(locks.rejoin().await.unwrap().is_empty());
    }
    server.kill();
    for locks in [locks, pooled] {
        let [node] = locks.nodes().await.try_into().unwrap();
        assert!(matches!(node.state, NodeState::Failed(Error::Redis { .. })), "{node}");
    }
}

/// The rights that the guide documents, and no more.
#[tokio::test(flavor = "multi_thread")]
async fn acl_the_documented_rights_are_enough() {
    let server = Server::start().await;
    let readme = include_str!("../../docs/rights.md");
    let rights =
        readme.lines().find_map(|line| line.trim().strip_prefix("ACL SETUSER locks on >secret ")).unwrap();
    let mut words = vec!["ACL", "SETUSER", "locks", "on", ">secret"];
    words.extend(rights.split_whitespace());
    server.run::<()>(&words).await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    for protocol in ["resp2", "resp3"] {
        let locks = Locks::builder()
            .server(format!("{url}?protocol={protocol}"))
            .options(ttl(600))
            .connect()
            .await
            .unwrap();
        for kind in [Kind::Mutex, Kind::Reentrant] {
            let lock = kind.lock(&locks, &format!("limited-{}-{protocol}", kind.name()));
            let guard = lock.lock().await.unwrap();
            let waiting = tokio::spawn({
                let other = lock.for_another();
                async move { other.lock().await }
            });
            eventually("it queues", || async { server.queued_for(&lock).await == 1 }).await;
            let told: Vec<String> = server.run(&["PUBSUB", "CHANNELS", "lock:wake:*"]).await;
            assert_eq!(told.len(), 1, "it is subscribed");
            tokio::time::sleep(Duration::from_millis(900)).await;
            assert!(!guard.lease().is_lost(), "renewed");
            let before = server.published().await;
            guard.release().await.unwrap();
            drop(soon("handed over", waiting).await.unwrap().unwrap());
            assert!(server.published().await > before, "it is notified");
            eventually("free", || async { !server.is_locked(&lock).await }).await;
            assert!(!lock.force_release().await.unwrap());
        }
    }
    // Without the right to publish nothing fails: the waiter looks.
    server.run::<()>(&["ACL", "SETUSER", "locks", "-publish"]).await;
    let locks = Locks::open(&url).await.unwrap();
    let lock = Kind::Mutex.lock(&locks, "unpublished");
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let other = lock.for_another();
        async move { other.lock().await }
    });
    eventually("it queues", || async { server.queued_for(&lock).await == 1 }).await;
    guard.release().await.unwrap();
    soon("found", waiting).await.unwrap().unwrap().release().await.unwrap();
    // Another application's locks are out of reach.
    let foreign = locks.with_options(Options::new().prefix("other:")).unwrap();
    assert!(matches!(foreign.mutex("x").unwrap().try_lock().await, Err(Error::Redis { .. })));
}

#[test]
fn public_types_may_cross_threads() {
    fn send_sync<T: Send + Sync + Unpin + 'static>() {}
    send_sync::<Locks>();
    send_sync::<Mutex>();
    send_sync::<MutexGuard>();
    send_sync::<ReentrantLock>();
    send_sync::<ReentrantGuard>();
    send_sync::<Owner>();
    send_sync::<Error>();
    send_sync::<NodeStatus>();
}

/// A client in a static, and a runtime for each test: the second one is told at once what is wrong.
#[test]
fn clients_end_with_their_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (outer, second) = (runtime(), runtime());
    let server = outer.block_on(Server::start());
    for kind in [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write] {
        let first = runtime();
        let locks = first.block_on(server.locks());
        let held = first.block_on(kind.lock(&locks, kind.name()).lock()).unwrap();
        drop(first);
        drop(held);
        second.block_on(async {
            let lock = kind.lock(&locks, "after");
            let start = Instant::now();
            for outcome in [lock.try_lock().await.map(drop), lock.lock().await.map(drop)] {
                assert!(matches!(outcome, Err(Error::RuntimeEnded { .. })), "{kind:?}: {outcome:?}");
            }
            assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
            soon("nothing is given back any more", locks.settled()).await;
        });
    }
    drop((second, server, outer));
}

/// A client that only renews for long learns the time from renewals: its tokens are larger than
/// those that others took meanwhile, even if the server has forgotten them.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_raise_the_least_token_of_a_client() {
    /// By how much the time that a client has seen may be behind the server's clock.
    const STEP: i64 = 10_000_000;
    let server = Server::start().await;
    let locks = server.locks_with(ttl(1_500)).await;
    let connected = server.time().await;
    let guard = locks.mutex("renewed").unwrap().lock().await.unwrap();
    eventually("a step has passed", || async { server.time().await > connected + STEP }).await;
    let before = server.scripts_run().await;
    eventually("two renewals", || async { server.scripts_run().await >= before + 2 }).await;
    for kind in KINDS {
        // Counters are back where they were half a step after the client connected.
        let lock = kind.lock(&locks, kind.name());
        let counter = format!("{{{}}}:fence", lock.key());
        server.run::<()>(&["SET", &counter, &(connected + STEP / 2).to_string(), "PX", "60000"]).await;
        let next = lock.lock().await.unwrap();
        assert!(next.token() >= (connected + STEP).unsigned_abs(), "{kind:?}: {}", next.token());
        next.release().await.unwrap();
    }
    assert!(!guard.lease().is_lost());
    guard.release().await.unwrap();
    drop(locks);
    server.assert_nothing_left().await;
}

/// The shortest leases that are allowed, each with one renewal that is answered about 30 ms late.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_100_ms_outlast_one_slow_renewal() {
    const ROUNDS: u32 = 20;
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(ttl(100)).connect().await.unwrap();
    let lock = locks.mutex("short").unwrap();
    let mut lost = 0;
    for _ in 0..ROUNDS {
        let guard = lock.lock().await.unwrap();
        let renewals = async |more: u64| {
            let end = server.scripts_run().await + more;
            let renewed = || async { guard.lease().is_lost() || server.scripts_run().await >= end };
            eventually("it is renewed or lost", renewed).await;
        };
        renewals(1).await;
        proxy.hold_replies(true); // over the next renewal, which leaves after 33 ms
        tokio::time::sleep(Duration::from_millis(63)).await;
        proxy.hold_replies(false);
        renewals(3).await;
        lost += u32::from(guard.lease().is_lost());
        let _lost_or_not = guard.release().await;
    }
    println!("FIG {lost} of {ROUNDS} leases of 100 ms were lost");
    assert!(lost <= ROUNDS / 2, "{lost} of {ROUNDS} were lost");
    drop((lock, locks));
    proxy.outlive_clients().await;
}

/// Without any time to wait, there is one try.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_zero_is_one_try() {
    let server = Server::start().await;
    let (locks, others) = (server.locks().await, server.locks().await);
    for kind in KINDS {
        let lock = kind.lock(&locks, &format!("zero-{}", kind.name()));
        for _ in 0..80 {
            let guard = lock.lock_timeout(Duration::ZERO).await.unwrap();
            guard.release().await.unwrap();
        }
        let busy = kind.rival().lock(&others, &format!("zero-{}", kind.name()));
        let guard = busy.lock().await.unwrap();
        let outcome = lock.lock_timeout(Duration::ZERO).await;
        assert!(matches!(outcome, Err(Error::TimedOut { limit: Duration::ZERO, .. })), "{outcome:?}");
        guard.release().await.unwrap();
    }
}
