//! Requests of many tasks travel as one script call over many locks.

use std::time::{Duration, Instant};

use redlatch::{Error, Locks, Options};
use tokio::task::JoinSet;

use crate::support::{AnyGuard, KINDS, Kind, Server, eventually, soon};

/// Eight requests are sent alone, and the others gather.
const TASKS: u64 = 200;
const CALLS: u64 = 32 + TASKS / 10;

async fn long_limits(server: &Server) -> Locks {
    server.locks_with(Options::new().node_timeout(Duration::from_secs(20))).await
}

/// Acquires a lock for each name while the server is paused, so that the requests gather.
async fn acquire_together(
    server: &Server,
    locks: &Locks,
    kind: Kind,
    names: impl IntoIterator<Item = String>,
) -> Vec<(String, Result<Option<AnyGuard>, Error>)> {
    server.pause();
    let mut tasks = JoinSet::new();
    for name in names {
        let lock = kind.lock(locks, &name);
        tasks.spawn(async move { (name, lock.try_lock().await) });
    }
    all_tasks_have_run().await;
    server.resume();
    let mut outcomes = tasks.join_all().await;
    outcomes.sort_by(|one, other| one.0.cmp(&other.0));
    outcomes
}

/// On a runtime with one thread, tasks run in the order in which they were woken.
async fn all_tasks_have_run() {
    for _ in 0..3 {
        tokio::spawn(async {}).await.unwrap();
    }
}

fn names(prefix: &str) -> impl Iterator<Item = String> {
    (0..TASKS).map(move |number| format!("{prefix}-{number:03}"))
}

#[tokio::test]
async fn many_tasks_share_script_calls() {
    let server = Server::start().await;
    let locks = long_limits(&server).await;
    for kind in KINDS {
        let prefix = kind.name();
        let mut last = Vec::new();
        for round in 0..3 {
            let before = server.scripts_run().await;
            let outcomes = acquire_together(&server, &locks, kind, names(prefix)).await;
            let acquired = server.scripts_run().await - before;
            let guards: Vec<AnyGuard> = outcomes
                .into_iter()
                .map(|(_, outcome)| outcome.unwrap().expect("the lock is free"))
                .collect();
            assert!(acquired <= CALLS, "{prefix}: {acquired} calls for {TASKS} requests");
            let held: u64 = server.run(&["DBSIZE"]).await;
            assert!(held >= TASKS, "{prefix}: {held} keys");
            let tokens: Vec<u64> = guards.iter().map(AnyGuard::token).collect();
            for (before, token) in last.iter().zip(&tokens) {
                assert!(kind == Kind::Read || token > before, "{prefix}: {token} after {before}");
            }
            last = tokens;
            let before = server.scripts_run().await;
            server.pause();
            let mut tasks = JoinSet::new();
            for guard in guards {
                tasks.spawn(guard.release());
            }
            all_tasks_have_run().await;
            server.resume();
            for outcome in tasks.join_all().await {
                outcome.unwrap();
            }
            let released = server.scripts_run().await - before;
            assert!(released <= CALLS, "{prefix}, round {round}: {released} calls");
        }
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// Locks in use: a call queues for many of them, and a call releases many to their waiters.
#[tokio::test]
async fn contended_locks_share_script_calls() {
    let server = Server::start().await;
    let (holder, waiter) = (long_limits(&server).await, long_limits(&server).await);
    // Each poll of a client's readers is for one lock.
    for kind in KINDS.into_iter().filter(|kind| *kind != Kind::Read) {
        let prefix = kind.name();
        let held = acquire_together(&server, &holder, kind, names(prefix)).await;
        let guards: Vec<AnyGuard> =
            held.into_iter().map(|(_, outcome)| outcome.unwrap().expect("the lock is free")).collect();
        let before = server.scripts_run().await;
        server.pause();
        let mut waiters = JoinSet::new();
        for name in names(prefix) {
            let lock = kind.lock(&waiter, &name);
            waiters.spawn(async move { lock.lock().await.unwrap() });
        }
        all_tasks_have_run().await;
        server.resume();
        eventually("all tasks are queued", || async { server.queues().await.len() as u64 == TASKS }).await;
        let queued = server.scripts_run().await - before;
        // Each task asks before it subscribes, then once more, and polls if this takes long.
        assert!(queued < TASKS, "{prefix}: {queued} calls until {TASKS} tasks are queued");
        let before = server.scripts_run().await;
        server.pause();
        let mut releases = JoinSet::new();
        for guard in guards {
            releases.spawn(guard.release());
        }
        all_tasks_have_run().await;
        server.resume();
        while let Some(outcome) = releases.join_next().await {
            outcome.unwrap().unwrap();
        }
        let granted = waiters.join_all().await;
        let released = server.scripts_run().await - before;
        assert!(released < TASKS, "{prefix}: {released} calls until {TASKS} locks are handed over");
        println!("{prefix}: {queued} calls to queue, {released} to hand over");
        drop(granted);
        soon("settled() returns", waiter.settled()).await;
    }
    drop((holder, waiter));
    server.assert_nothing_left().await;
}

/// The number of script calls until each lease has been renewed.
async fn calls_until_renewed(server: &Server, guards: &[AnyGuard]) -> u64 {
    let granted: Vec<_> = guards.iter().map(|guard| guard.lease().valid_until()).collect();
    let before = server.scripts_run().await;
    eventually("all leases are renewed", || async {
        guards.iter().zip(&granted).all(|(guard, until)| guard.lease().valid_until() > *until)
    })
    .await;
    server.scripts_run().await - before
}

/// The renewals of many leases share script calls, and none is missing.
#[tokio::test]
async fn renewals_of_many_leases_share_script_calls() {
    let server = Server::start().await;
    let options = Options::new().node_timeout(Duration::from_secs(20)).ttl(Duration::from_secs(6));
    let locks = server.locks_with(options.read_ttl(Duration::from_secs(6))).await;
    for kind in KINDS {
        let outcomes = acquire_together(&server, &locks, kind, names(kind.name())).await;
        let guards: Vec<AnyGuard> =
            outcomes.into_iter().map(|(_, outcome)| outcome.unwrap().expect("the lock is free")).collect();
        let renewals = calls_until_renewed(&server, &guards).await;
        assert!(renewals <= TASKS / 10, "{}: {renewals} calls for {TASKS} leases", kind.name());
        drop(guards);
        soon("settled() returns", locks.settled()).await;
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// The same for leases that were acquired one after the other: one that is due soon is renewed with
/// one that is due.
#[tokio::test]
async fn renewals_of_leases_from_different_times_share_script_calls() {
    const LEASES: usize = 30;
    let server = Server::start().await;
    let (ttl, earliest) = (Duration::from_secs(6), Duration::from_millis(200));
    let options = Options::new().node_timeout(Duration::from_secs(20)).ttl(ttl).read_ttl(ttl);
    let locks = server.locks_with(options).await;
    for kind in KINDS {
        let (start, mut guards) = (Instant::now(), Vec::new());
        for number in 0..LEASES {
            let lock = kind.lock(&locks, &format!("{}-{number}", kind.name()));
            guards.push(lock.try_lock().await.unwrap().expect("the lock is free"));
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        // One call for each span in which leases are renewed early, and one more for a server that
        // does not know the script.
        let most = 2 + start.elapsed().as_millis() / earliest.as_millis();
        let renewals = calls_until_renewed(&server, &guards).await;
        assert!(u128::from(renewals) <= most, "{}: {renewals} calls, at most {most}", kind.name());
        drop(guards);
        soon("settled() returns", locks.settled()).await;
    }
    drop(locks);
    server.assert_nothing_left().await;
}

/// A lock that another client holds, or that is not a lock, does not affect the others of its call.
#[tokio::test]
async fn one_locks_outcome_is_not_anothers() {
    let server = Server::start().await;
    let locks = long_limits(&server).await;
    for kind in KINDS {
        let prefix = kind.name();
        let holder = server.locks().await;
        let busy = kind.rival().lock(&holder, &format!("{prefix}-100")).lock().await.unwrap();
        server.run::<()>(&["SET", &format!("lock:{prefix}-150"), "foreign"]).await;
        server.run::<()>(&["SET", &format!("{{lock:{prefix}-151}}:fence"), "abc"]).await;
        server.run::<()>(&["SET", &format!("{{lock:{prefix}-152}}:waiters"), "abc"]).await;
        for (name, outcome) in acquire_together(&server, &locks, kind, names(prefix)).await {
            match &name[name.len() - 3..] {
                "100" => assert!(outcome.unwrap().is_none(), "{name}"),
                "150" => assert!(matches!(outcome, Err(Error::WrongType { .. })), "{name}: {outcome:?}"),
                "151" | "152" => {
                    let Err(Error::Corrupt { key, .. }) = outcome else { panic!("{name}: {outcome:?}") };
                    assert!(key.contains(&name), "{key}");
                }
                _ => outcome.unwrap().expect("the lock is free").release().await.unwrap(),
            }
        }
        busy.release().await.unwrap();
        server.run::<()>(&["FLUSHALL"]).await;
    }
}

/// A user without the right to one key is refused that lock only.
#[tokio::test]
async fn lack_of_rights_for_one_lock_is_not_anothers() {
    let server = Server::start().await;
    let words = "ACL SETUSER some on >secret ~lock:mutex* ~{lock:mutex* &* +@all";
    server.run::<()>(&words.split(' ').collect::<Vec<_>>()).await;
    let url = server.url().replace("redis://", "redis://some:secret@");
    let options = Options::new().node_timeout(Duration::from_secs(20));
    let locks = Locks::builder().server(url).options(options).connect().await.unwrap();
    // Among those that are combined, not among the first.
    let other = |number: u64| (number % 40 == 39).then(|| format!("other-{number}"));
    let names = names("mutex").zip(0..).flat_map(|(name, number)| std::iter::once(name).chain(other(number)));
    let outcomes = acquire_together(&server, &locks, Kind::Mutex, names).await;
    assert_eq!(outcomes.len() as u64, TASKS + 5);
    for (name, outcome) in outcomes {
        if name.starts_with("other") {
            assert!(matches!(outcome, Err(Error::Redis { .. })), "{name}: {outcome:?}");
        } else {
            outcome.unwrap().expect("the lock is free").release().await.unwrap();
        }
    }
}

/// The reply to a call over many locks is lost: each of them was acquired, or is released.
#[tokio::test]
async fn lost_reply_leaves_no_lock_behind() {
    let server = Server::start().await;
    let locks = long_limits(&server).await;
    for kind in KINDS {
        let prefix = kind.name();
        server.pause();
        let mut calls = Vec::new();
        for name in names(prefix) {
            let lock = kind.lock(&locks, &name);
            calls.push(tokio::spawn(async move { lock.lock().await.map(drop) }));
        }
        all_tasks_have_run().await;
        // Half of the callers give up while their requests are under way.
        calls.iter().step_by(2).for_each(|call| call.abort());
        all_tasks_have_run().await;
        // The server runs the requests after it has closed the connection, or not at all.
        server.resume();
        server.kill_connections().await;
        for call in calls {
            let _either = soon("the call ends", call).await;
        }
        soon("settled() returns", locks.settled()).await;
        let left: Vec<String> = server.run(&["KEYS", "lock:*"]).await;
        assert!(left.is_empty(), "{left:?}");
    }
    drop(locks);
    server.assert_nothing_left().await;
}
