//! Renewals: 10,000 leases at a time, short leases, and the minimum token of a client that only
//! renews.

use std::time::{Duration, Instant};

use redlatch::Locks;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::{
    AnyGuard, Deployment, KINDS, Kind, LONGEST_WAIT, Latency, Proxy, Server, Stopwatch, Topology, eventually,
    patient, renewed_by, soon, ttl,
};

const LEASES: usize = 10_000;

async fn ten_thousand_leases(kind: Kind, locks: &Locks, prefix: &str) -> Vec<AnyGuard> {
    let mut guards = Vec::with_capacity(LEASES);
    for hundred in 0..LEASES / 100 {
        let mut round = tokio::task::JoinSet::new();
        for one in 0..100 {
            let lock = kind.lock(locks, &format!("{prefix}-{hundred}-{one}"));
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
    // On a busy machine, renewing all of them takes seconds.
    let locks = server.locks_with(ttl(9_000)).await;
    let guards = ten_thousand_leases(kind, &locks, "many").await;
    let clients: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]).await;
    assert!(clients.lines().count() <= 2, "the client's connection and the test's:\n{clients}");
    let granted: Vec<_> = guards.iter().map(|guard| guard.lease().valid_until()).collect();
    eventually("all leases are renewed", || async {
        let lost = guards.iter().filter(|guard| guard.lease().is_lost()).count();
        assert_eq!(lost, 0, "{lost} of {LEASES} lost");
        let renewed = Duration::from_secs(9);
        guards.iter().zip(&granted).all(|(guard, until)| guard.lease().valid_until() >= *until + renewed)
    })
    .await;
    drop(guards);
    drop(locks);
    eventually("all locks are released in the background", || async {
        server.run::<Vec<String>>(&["KEYS", "lock:many-*"]).await.is_empty()
    })
    .await;
    server.assert_nothing_left().await;
}

/// One of the servers hangs. Requests for other servers are sent in the same batches, and must not
/// wait for it.
async fn ten_thousand_leases_outlive_a_hung_server(topology: Topology, hang: Duration) {
    let deployment = Deployment::start(topology).await;
    let locks = deployment.client(ttl(9_000).node_timeout(Duration::from_secs(2))).await;
    let guards = ten_thousand_leases(Kind::Mutex, &locks, "many").await;
    let (hung, others) = deployment.masters().split_first().unwrap();
    let mut held = Vec::new();
    for server in others {
        held.push(server.run::<Vec<String>>(&["KEYS", "lock:many-*"]).await);
    }
    hung.pause();
    sleep(hang).await; // longer than the TTL: leases that are not renewed end meanwhile
    for (server, keys) in others.iter().zip(&held) {
        let left: Vec<String> = server.run(&["KEYS", "lock:many-*"]).await;
        // More: the slowest node of a quorum may have granted the last ones later.
        assert!(left.len() >= keys.len(), "leases that other servers were to renew have ended");
    }
    hung.resume();
    drop((guards, locks));
    deployment.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_ten_thousand_leases_outlive_a_hung_server() {
    ten_thousand_leases_outlive_a_hung_server(Topology::Quorum3, Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_ten_thousand_leases_outlive_a_hung_server() {
    // The cluster client of the redis crate stops to send any request after ten seconds.
    ten_thousand_leases_outlive_a_hung_server(Topology::Cluster, Duration::from_secs(25)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Mutex).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_ten_thousand_leases_are_renewed() {
    ten_thousand_leases_are_renewed(Kind::Reentrant).await;
}

/// When a hold is lost, the owner's other holds are renewed at once. Finding them must not take
/// time in proportion to all leases.
#[tokio::test(flavor = "multi_thread")]
async fn reentrant_standalone_ten_thousand_losses_are_noticed_as_fast_as_of_mutexes() {
    let server = Server::start().await;
    let mut times = Vec::new();
    for kind in [Kind::Mutex, Kind::Reentrant] {
        let locks = server.locks_with(ttl(6_000)).await;
        let guards = ten_thousand_leases(kind, &locks, "many").await;
        // Not due meanwhile: a search among all leases would look at each of them.
        let others = ten_thousand_leases(kind, &locks.with_options(ttl(600_000)).unwrap(), "others").await;
        // The first lease is renewed again after a third of a TTL, of either kind.
        renewed_by(guards[0].lease(), Duration::from_millis(1)).await;
        let start = Stopwatch::start();
        server.run::<()>(&["FLUSHALL"]).await;
        for guard in &guards {
            soon("the lease is lost", guard.lease().lost()).await;
        }
        times.push(start.stop());
        drop(others);
    }
    println!("lost within {times:?}");
    assert!(times[1].undisturbed() < times[0].elapsed() * 2, "{times:?}");
    server.assert_nothing_left().await;
}

/// A client that only renews for a long time samples the server's clock with its renewals. So its
/// next token is larger than those of other clients meanwhile, even if the server has lost its
/// counter.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_raise_the_minimum_token_of_a_client() {
    /// By how much a client's clock sample may lag behind the server's clock.
    const STEP: i64 = 10_000_000;
    let server = Server::start().await;
    let locks = server.locks_with(ttl(6_000)).await;
    let connected = server.time().await;
    let guard = locks.mutex("renewed").unwrap().lock().await.unwrap();
    eventually("a step has passed", || async { server.time().await > connected + STEP }).await;
    let before = server.scripts_run().await;
    eventually("two renewals", || async { server.scripts_run().await >= before + 2 }).await;
    for kind in KINDS {
        // The counter is set back to half a step after the client connected.
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

/// The last renewals are for what is left of the longest hold. One that is sent late must not be
/// trusted beyond it: the next one, which is shorter, makes the key expire there.
#[tokio::test]
async fn a_renewal_that_is_sent_late_does_not_exceed_max_hold() {
    let longest = Duration::from_millis(700);
    let server = Server::start().await;
    let locks = server.locks_with(ttl(600).max_hold(longest)).await;
    // Other tasks on the only thread of the runtime delay each request.
    let mut busy = JoinSet::new();
    for _ in 0..5 {
        busy.spawn(async {
            loop {
                std::thread::sleep(Duration::from_millis(12));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
    for round in 0..5 {
        let guard = locks.mutex(format!("late-{round}")).unwrap().lock().await.unwrap();
        let end = guard.lease().valid_until() + (longest - Duration::from_millis(600));
        while !guard.lease().is_lost() {
            let until = guard.lease().valid_until();
            assert!(until <= end || guard.lease().is_lost(), "{:?} too long", until - end);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The shortest TTL: each lease has one renewal whose reply is about 30 ms late.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_100_ms_survive_one_slow_renewal() {
    const ROUNDS: u32 = 20;
    /// A machine that stalls for longer may lose a lease of 100 ms: such rounds are not judged.
    const STALL: Duration = Duration::from_millis(15);
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(ttl(100)).connect().await.unwrap();
    let lock = locks.mutex("short").unwrap();
    let (start, mut judged, mut lost) = (Instant::now(), 0, 0);
    while judged < ROUNDS && start.elapsed() < LONGEST_WAIT {
        let round = Stopwatch::start();
        let guard = lock.lock().await.unwrap();
        let renewals = async |more: u64| {
            let end = server.scripts_run().await + more;
            let renewed = || async { guard.lease().is_lost() || server.scripts_run().await >= end };
            eventually("the lease is renewed or lost", renewed).await;
        };
        renewals(1).await;
        proxy.hold_replies(true); // until after the next renewal, which is due after 33 ms
        tokio::time::sleep(Duration::from_millis(63)).await;
        proxy.hold_replies(false);
        renewals(3).await;
        let round = round.stop();
        if round.elapsed() - round.undisturbed() <= STALL {
            judged += 1;
            lost += u32::from(guard.lease().is_lost());
        }
        let _lost_or_not = guard.release().await;
    }
    println!("FIG {lost} of {judged} leases of 100 ms were lost");
    // A machine that stalls all the time lets few rounds be judged.
    assert!(lost * 2 <= judged.max(8), "{lost} of {judged} were lost");
    drop((lock, locks));
    proxy.outlive_clients().await;
}

/// The connection of leases with two TTLs is silent: it must be given up in time for the shorter
/// one.
#[tokio::test(flavor = "multi_thread")]
async fn short_lease_outlives_a_silent_connection_beside_a_long_one() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let locks = Locks::builder().server(proxy.url()).options(ttl(21_600)).connect().await.unwrap();
    let brief = locks.with_options(ttl(7_200)).unwrap();
    let long = locks.mutex("long").unwrap().lock().await.unwrap();
    let short = brief.mutex("short").unwrap().lock().await.unwrap();
    proxy.hold_requests(true);
    renewed_by(short.lease(), Duration::from_secs(8)).await;
    renewed_by(long.lease(), Duration::from_secs(6)).await;
    proxy.hold_requests(false);
    short.release().await.unwrap();
    long.release().await.unwrap();
    drop((brief, locks));
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// Replies take longer than leases of half a second wait for them, and those of the longer lease
/// are due with theirs: only its own patience counts.
#[tokio::test(flavor = "multi_thread")]
async fn long_lease_outlives_slow_replies_beside_short_ones() {
    let server = Server::start().await;
    let way = Latency::start(server.port(), Duration::from_millis(150)).await;
    let locks = Locks::builder().server(way.url()).options(ttl(6_000)).connect().await.unwrap();
    let long = locks.mutex("long").unwrap().lock().await.unwrap();
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let short = locks.with_options(ttl(500)).unwrap().mutex(format!("short-{number}")).unwrap();
        tasks.spawn(async move {
            loop {
                // It needs a renewal, which may come too late.
                if let Ok(guard) = short.lock().await {
                    sleep(Duration::from_millis(250)).await;
                    drop(guard);
                }
            }
        });
    }
    for _ in 0..4 {
        renewed_by(long.lease(), Duration::from_millis(1_500)).await;
    }
    tasks.shutdown().await;
    long.release().await.unwrap();
    soon("settled() returns", locks.settled()).await;
    drop(locks);
    server.assert_nothing_left().await;
}

/// A hold that a message granted is valid for a claim: its renewals are repeated as often as those
/// of a lease of that length.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_outlives_a_stall_that_a_lease_of_its_length_does() {
    /// A machine that stalls for longer may lose a claim, or let a poll come first. Such a round is
    /// repeated.
    const STALL: Duration = Duration::from_millis(300);
    let server = Server::start().await;
    let until_renewed = async {
        loop {
            let (is_renewed, round) = renews_a_claim(&server).await;
            if is_renewed {
                return;
            }
            assert!(round.elapsed() - round.undisturbed() > STALL, "{round:?}");
        }
    };
    soon("a claim is renewed", until_renewed).await;
}

/// Whether a waiter is granted a claim, and keeps it although two renewals are refused.
async fn renews_a_claim(server: &Server) -> (bool, Stopwatch) {
    let locks = server.locks_with(patient()).await;
    let others = server.locks_with(patient()).await;
    let [held, waiting] = [&locks, &others].map(|locks| Kind::Mutex.lock(locks, "handed"));
    let guard = held.lock().await.unwrap();
    let waiting = tokio::spawn(async move { waiting.lock().await.unwrap() });
    eventually("it queues", || async { server.queued_for(&held).await == 1 }).await;
    server.all_notified("lock:handed").await;
    // A poll just after the release would be granted the whole TTL.
    let polled = server.scripts_run().await + 3;
    eventually("the waiter's pauses grow", || async { server.scripts_run().await >= polled }).await;
    let round = Stopwatch::start();
    guard.release().await.unwrap();
    let granted = soon("it is granted the lock", waiting).await.unwrap();
    let lease = granted.lease();
    // Claims are three seconds.
    let is_claim = lease.valid_until() < Instant::now() + Duration::from_secs(4);
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    let refused = server.scripts_run().await + 2;
    let are_refused = || async { lease.is_lost() || server.scripts_run().await >= refused };
    eventually("two renewals are refused", are_refused).await;
    server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    let until = lease.valid_until() + Duration::from_secs(5);
    eventually("it is renewed", || async { lease.is_lost() || lease.valid_until() >= until }).await;
    let (is_lost, round) = (lease.is_lost(), round.stop());
    let outcome = granted.release().await;
    assert!(is_lost || outcome.is_ok(), "{outcome:?}");
    (is_claim && !is_lost, round)
}
