//! Tokens that a grant reserves for the tasks of a client that pass the hold on.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::{Duration, Instant};

use redlatch::{Fencing, Locks, Options, Wakeups};

use super::revoked_turns::{queued, two_wait};
use crate::suite::local_turns::{contended, waiting};
use crate::support::{
    AnyGuard, AnyLock, Kind, LONGEST_WAIT, Proxy, Server, eventually, patient, renewed_by, soon, ttl,
};

/// A counter that is lost is rebuilt from the server's clock. So a client whose counter is ahead of
/// that clock reserves nothing, also if no task has waited for the lock for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn no_token_is_reserved_while_the_counter_is_ahead_of_the_clock() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().local_turn(Duration::from_millis(100))).await;
    let lock = locks.mutex("ahead").unwrap();
    let counter = || async { server.run::<u64>(&["GET", "{lock:ahead}:fence"]).await };
    let clock = server.run::<(u64, u64)>(&["TIME"]).await;
    let ahead = (clock.0 + 3_600) * 1_000_000;
    server.run::<()>(&["SET", "{lock:ahead}:fence", &ahead.to_string(), "EX", "3600"]).await;
    for round in 0..3 {
        let first = lock.lock().await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let lock = lock.clone();
            waiting.spawn(async move { lock.lock().await.unwrap() });
        }
        eventually("one of them queues", || async { server.waiters("{lock:ahead}:waiters").await == 1 })
            .await;
        first.release().await.unwrap();
        while let Some(guard) = soon("the next task has its turn", waiting.join_next()).await {
            let guard = guard.unwrap();
            let token: u64 = guard.lease().fencing_token().unwrap().to_string().parse().unwrap();
            let reserved = counter().await - token;
            // The first round tells the client where the counter is.
            assert!(round == 0 || reserved == 0, "round {round}: {reserved} tokens beside {token}");
            guard.release().await.unwrap();
        }
        eventually("no task is left", || async { locks.is_idle() }).await;
    }
    drop((lock, locks));
    server.assert_nothing_left().await;
}

/// On a new connection, a counter above the tokens of a lease shows that the lock was granted
/// since. It is above the token of the first task by all that the lease has reserved for others.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_has_reserved_tokens_outlives_its_connection() {
    let server = Server::start().await;
    let options = ttl(3_000).local_turn(Duration::from_millis(700));
    let (locks, others) = (server.locks_with(options.clone()).await, server.locks_with(options).await);
    let (lock, rival) = (Kind::Mutex.lock(&locks, "x"), Kind::Mutex.lock(&others, "x"));
    let (held, [first, second]) = two_wait(&server, &lock, &rival).await;
    held.release().await.unwrap();
    let first = soon("the first task is granted the lock", first).await.unwrap();
    let counter: u64 = server.run(&["GET", "{lock:x}:fence"]).await;
    assert!(counter > first.token(), "nothing is reserved");
    server.kill_connections().await;
    renewed_by(first.lease(), Duration::from_secs(3)).await;
    first.release().await.unwrap();
    soon("the second task acquires", second).await.unwrap().release().await.unwrap();
    drop((lock, rival, locks, others));
    server.assert_nothing_left().await;
}

/// A call is dropped before its task learns of the grant: its release gives back all that it has
/// reserved. Otherwise many such calls a second would make the counter outrun the clock.
#[tokio::test(flavor = "multi_thread")]
async fn grants_that_no_task_learns_of_keep_the_counter_behind_the_clock() {
    const CALLS: u64 = 100;
    let server = Server::start().await;
    let locks = server.locks_with(patient().local_turn(Duration::from_millis(100))).await;
    let lock = AnyLock::Mutex(locks.mutex("unseen").unwrap());
    contended(&lock).await.release().await.unwrap();
    // One connection and no pauses: the clock must have no time to catch up.
    let mut connection = server.connection().await;
    let mut look = async || -> (u64, bool) {
        let mut both = redis::pipe();
        both.get("{lock:unseen}:fence").exists("lock:unseen").query_async(&mut connection).await.unwrap()
    };
    let (mut counter, _) = look().await;
    let (first, start) = (counter, Instant::now());
    for _ in 0..CALLS {
        let mut front = Box::pin(lock.lock());
        // On a busy machine it may have its grant by then: its guard is dropped, too.
        let early = poll_fn(|context| Poll::Ready(front.as_mut().poll(context))).await;
        let behind = waiting(&lock).await;
        while look().await.0 == counter {
            assert!(start.elapsed() < LONGEST_WAIT, "the lock is granted");
        }
        drop((behind, early, front));
        while look().await.1 {
            assert!(start.elapsed() < LONGEST_WAIT, "it is released");
        }
        (counter, _) = look().await;
    }
    // A call that learns of its grant in its first poll uses a token.
    assert!(counter - first <= 2 * CALLS, "{} tokens for {CALLS} calls", counter - first);
    drop((lock, locks));
    server.assert_nothing_left().await;
}

/// A downgrade gives back what its hold has reserved and not used. Clients know only of their own
/// tokens: if each downgrades its first hold, the counter must not run ahead of the clock.
#[tokio::test(flavor = "multi_thread")]
async fn downgrades_of_several_clients_give_back_what_they_reserved() {
    let server = Server::start().await;
    let mut others = Vec::new();
    for _ in 0..10 {
        let locks = server.locks_with(patient().local_turn(Duration::from_millis(100))).await;
        let lock = AnyLock::Write(locks.rwlock("kept").unwrap());
        contended(&lock).await.release().await.unwrap();
        others.push(lock);
    }
    let counter = || async { server.run::<u64>(&["GET", "{lock:kept}:fence"]).await };
    let held = server.locks().await.rwlock("kept").unwrap().write().await.unwrap();
    let first = counter().await;
    let mut reserved = 0;
    let mut waiters = Vec::new();
    for lock in &others {
        waiters.push(waiting(lock).await);
        eventually("it queues", || async {
            server.waiters("{lock:kept}:waiters").await == waiters.len() as u64
        })
        .await;
    }
    held.release().await.unwrap();
    for waiter in waiters {
        let before = counter().await;
        let guard = soon("the next client acquires", waiter).await.unwrap();
        reserved = reserved.max(counter().await - guard.token());
        let AnyGuard::Write(guard) = guard else { panic!("{guard:?}") };
        assert!(before >= guard.lease().fencing_token().unwrap().get());
        guard.downgrade().await.unwrap().release().await.unwrap();
    }
    assert!(reserved > 100, "at most {reserved} tokens were reserved: nothing is shown");
    let used = counter().await - first;
    assert!(used <= 10, "the counter has grown by {used}");
    drop(others);
    server.assert_nothing_left().await;
}

/// The same for calls that are dropped while they wait in Redis.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_waiters_give_back_what_their_grants_reserved() {
    const CALLS: u64 = 20;
    let server = Server::start().await;
    let options = || patient().local_turn(Duration::from_millis(100)).wakeups(Wakeups::Poll);
    let holder = server.locks_with(options()).await.mutex("unseen").unwrap();
    let mut others = Vec::new();
    for _ in 0..3 {
        let lock = AnyLock::Mutex(server.locks_with(options()).await.mutex("unseen").unwrap());
        contended(&lock).await.release().await.unwrap();
        others.push(lock);
    }
    let counter = || async { server.run::<u64>(&["GET", "{lock:unseen}:fence"]).await };
    let (first, mut reserved) = (counter().await, 0);
    for lock in (0..CALLS).flat_map(|_| &others) {
        let guard = holder.lock().await.unwrap();
        let (mut front, behind) = (waiting(lock).await, waiting(lock).await);
        // Polled only until it has queued: from then on, it learns of nothing.
        queued(&server, "lock:unseen", &mut front).await;
        let before = counter().await;
        guard.release().await.unwrap(); // grants the lock to the call at the front
        reserved += counter().await - before;
        drop((behind, front));
        eventually("it is free", || async { !server.run::<bool>(&["EXISTS", "lock:unseen"]).await }).await;
    }
    let (used, calls) = (counter().await - first, CALLS * 3);
    assert!(reserved > 500 * calls, "only {reserved} tokens were reserved for {calls} calls");
    assert!(used <= 2 * calls, "{used} tokens are gone after {calls} calls");
    drop((holder, others));
    server.assert_nothing_left().await;
}

/// The reply to a release is lost, of a hold that has become one to read, or another attempt's. The
/// server has released it: the counter shows that no other client was granted the lock since.
#[tokio::test(flavor = "multi_thread")]
async fn the_lost_release_of_a_converted_hold_has_released_it() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = patient().local_turn(Duration::from_secs(7));
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    for (lost, name) in ["read", "adopted", "read-adopted"].into_iter().enumerate() {
        let write = locks.rwlock(name).unwrap();
        let guard = contended(&AnyLock::Write(write.clone())).await;
        let counter: u64 = server.run(&["GET", &format!("{{lock:{name}}}:fence")]).await;
        assert!(counter > guard.token(), "{name}: tokens were reserved");
        let AnyGuard::Write(guard) = guard else { panic!("{guard:?}") };
        let released = match name {
            "read" => {
                let guard = guard.downgrade().await.unwrap();
                proxy.lose_next_reply();
                guard.release().await
            }
            "adopted" => {
                let guard = write.adopt_write(&guard.into_ticket().unwrap()).await.unwrap();
                proxy.lose_next_reply();
                guard.release().await
            }
            _ => {
                let ticket = guard.downgrade().await.unwrap().into_ticket().unwrap();
                let guard = write.adopt_read(&ticket).await.unwrap();
                proxy.lose_next_reply();
                guard.release().await
            }
        };
        assert_eq!(proxy.lost(), lost + 1, "{name}");
        released.unwrap();
    }
    drop(locks);
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// The attempt that adopts a hold gives back what the former one has reserved, but not the token
/// that it has used.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_attempt_gives_back_what_the_former_has_reserved() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().local_turn(Duration::from_secs(7))).await;
    for kind in [Kind::Mutex, Kind::Write] {
        let lock = kind.lock(&locks, kind.name());
        let guard = contended(&lock).await;
        let token = guard.token();
        let guard = lock.adopt(&guard.into_ticket().unwrap()).await.unwrap();
        assert_eq!(guard.token(), token, "{kind:?}");
        guard.release().await.unwrap();
        let counter: u64 = server.run(&["GET", &format!("{{{}}}:fence", lock.key())]).await;
        assert_eq!(counter, token, "{kind:?}");
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// A call that adopts a hold is dropped while its reply is on the way: its release does not know of
/// the hold, and must not take back the token that the former attempt has used.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_adoption_takes_no_used_token_back() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = patient().local_turn(Duration::from_secs(7));
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    for kind in [Kind::Mutex, Kind::Write] {
        let lock = kind.lock(&locks, kind.name());
        let guard = contended(&lock).await;
        let token = guard.token();
        let ticket = guard.into_ticket().unwrap();
        proxy.hold_replies(true);
        let before = server.scripts_run().await;
        let adopting = lock.clone();
        let call = tokio::spawn(async move { adopting.adopt(&ticket).await.map(drop) });
        eventually("the request arrives", || async { server.scripts_run().await > before }).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        proxy.hold_replies(false);
        eventually("it is released", || async { !server.run::<bool>(&["EXISTS", lock.key()]).await }).await;
        let counter: u64 = server.run(&["GET", &format!("{{{}}}:fence", lock.key())]).await;
        assert!(counter >= token, "{kind:?}: {counter} after {token}");
    }
    drop(locks);
    proxy.outlive_clients().await;
    server.assert_nothing_left().await;
}

/// Without fencing a hold reserves passes, but no tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_without_a_token_crosses_processes() {
    let server = Server::start().await;
    let options = patient().local_turn(Duration::from_secs(7)).fencing(Fencing::Off);
    let locks = server.locks_with(options).await;
    let fenced = locks.with_options(Options::new().fencing(Fencing::On)).unwrap();
    for kind in [Kind::Mutex, Kind::Write] {
        let lock = kind.lock(&locks, kind.name());
        let ticket = contended(&lock).await.into_ticket().unwrap();
        let text = serde_json::to_string(&ticket).unwrap();
        let read = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        lock.adopt(&read).await.unwrap().release().await.unwrap();
        // Also by a client that would give tokens back.
        let first = kind.lock(&fenced, kind.name()).lock().await.unwrap();
        let token = first.token();
        first.release().await.unwrap();
        let ticket = contended(&lock).await.into_ticket().unwrap();
        kind.lock(&fenced, kind.name()).adopt(&ticket).await.unwrap().release().await.unwrap();
        let counter: u64 = server.run(&["GET", &format!("{{{}}}:fence", lock.key())]).await;
        assert!(counter >= token, "{kind:?}: {counter} after {token}");
    }
    drop((locks, fenced));
    server.assert_nothing_left().await;
}
