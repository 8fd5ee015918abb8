//! Several locks that are acquired together: all or none, in one order, under one limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{All, Error, Leases, Locks, Member, MembersError, Options, Owner};

use crate::support::{LONGEST_WAIT, Random, Setup, eventually, patient, soon, ttl};

/// One of each kind and side. Two of them are in one slot of a cluster.
fn one_of_each(locks: &Locks, owner: &Owner) -> All {
    let members = [
        Member::Write(locks.rwlock("{one}:write").unwrap()),
        locks.mutex("{one}:mutex").unwrap().into(),
        locks.mutex("{one}:another").unwrap().into(),
        locks.reentrant("reentrant", owner).unwrap().into(),
        Member::Read(locks.rwlock("read").unwrap()),
    ];
    locks.all(members).unwrap()
}

/// The keys of locks that a majority of the nodes has, without their companions.
async fn held(setup: &Setup) -> Vec<String> {
    let found = setup.deployment.keys("lock:*").await;
    let nodes_with = |key: &String| found.iter().filter(|other| *other == key).count();
    let mut keys = found.clone();
    keys.retain(|key| !key.ends_with(":fence") && !key.ends_with(":waiters"));
    keys.retain(|key| nodes_with(key) >= setup.topology().majority());
    keys.sort();
    keys.dedup();
    keys
}

pub async fn several_locks_are_held_and_released_together(setup: Setup) {
    let (locks, owner) = (setup.client().await, Owner::new());
    let all = one_of_each(&locks, &owner);
    let names: Vec<String> = all.names().map(ToString::to_string).collect();
    assert_eq!(names, ["read", "reentrant", "{one}:another", "{one}:mutex", "{one}:write"]);
    for _ in 0..2 {
        let guard = all.lock().await.unwrap();
        assert_eq!(held(&setup).await.len(), 5);
        let leases = guard.leases();
        assert!(leases.iter().all(|lease| lease.fencing_token().is_some()) && !leases.is_lost());
        assert_eq!(leases.get("{one}:mutex").unwrap().name().as_str(), "{one}:mutex");
        assert!(leases.get("other").is_none());
        guard.release().await.unwrap();
        assert_eq!(held(&setup).await, [""; 0], "released before it returned");
    }
    drop(all.try_lock().await.unwrap().expect("all are free"));
    eventually("they are free", || async { held(&setup).await.is_empty() }).await;
    drop((all, locks));
    setup.finish().await;
}

pub async fn one_busy_lock_keeps_all_from_being_tried(setup: Setup) {
    let (locks, owner) = (setup.client().await, Owner::new());
    let all = one_of_each(&locks, &owner);
    let other = setup.client().await;
    for name in ["read", "reentrant", "{one}:another", "{one}:mutex", "{one}:write"] {
        let busy: Member = match name {
            "read" | "{one}:write" => Member::Write(other.rwlock(name).unwrap()),
            "reentrant" => other.reentrant(name, &Owner::new()).unwrap().into(),
            _ => other.mutex(name).unwrap().into(),
        };
        let guard = other.all([busy]).unwrap().lock().await.unwrap();
        assert!(all.try_lock().await.unwrap().is_none(), "{name}");
        assert_eq!(held(&setup).await, [format!("lock:{name}")], "none of the others is held");
        let refused = all.lock_timeout(Duration::ZERO).await.unwrap_err();
        assert!(matches!(refused, Error::TimedOut { .. }), "{refused:?}");
        assert!(refused.to_string().ends_with("the lock was not free"), "{refused}");
        // On a busy machine it ends at a lock before it, unless the limit is longer.
        let (mut limit, mut named) = (Duration::from_millis(50), String::new());
        while named != name {
            assert!(limit < LONGEST_WAIT, "it names {named:?}, not {name:?}");
            let error = all.lock_timeout(limit).await.unwrap_err();
            assert!(matches!(&error, Error::TimedOut { limit: whole, .. } if *whole == limit), "{error:?}");
            named = error.context().unwrap().lock().unwrap().to_string();
            limit *= 2;
        }
        eventually("the others are free", || async { held(&setup).await.len() == 1 }).await;
        guard.release().await.unwrap();
    }
    all.try_lock().await.unwrap().expect("all are free").release().await.unwrap();
    drop((all, locks, other));
    setup.finish().await;
}

/// The server grants all or none in one request, and releases all in one; of other slots, those
/// that were granted are given back.
pub async fn locks_of_one_slot_are_one_request(setup: Setup) {
    let locks = setup.client().await;
    let names = ["{a}:1", "{a}:2", "{a}:3", "{b}:1", "{b}:2"];
    let all = locks.all(names.map(|name| locks.mutex(name).unwrap())).unwrap();
    all.lock().await.unwrap().release().await.unwrap(); // the servers know the script
    let before = setup.deployment.scripts_run().await;
    let guard = all.try_lock().await.unwrap().unwrap();
    let calls = setup.deployment.scripts_run().await - before;
    let slots = if setup.deployment.owner("lock:{a}:1").await == setup.deployment.owner("lock:{b}:1").await {
        1..=2
    } else {
        2..=2
    };
    match setup.nodes() {
        1 => assert!(slots.contains(&calls), "{calls} calls"),
        // Each lock has a token that the nodes agree on.
        nodes => assert!(calls >= (names.len() * nodes.div_ceil(2)) as u64, "{calls} calls"),
    }
    let before = setup.deployment.scripts_run().await;
    guard.release().await.unwrap();
    let calls = setup.deployment.scripts_run().await - before;
    if setup.nodes() == 1 {
        assert!(slots.contains(&calls), "{calls} calls to release");
    }
    drop((all, locks));
    setup.finish().await;
}

pub async fn a_name_twice_is_an_error_before_any_request(setup: Setup) {
    let (locks, other) = (setup.client().await, setup.client().await);
    let before = setup.deployment.scripts_run().await;
    let name = |name: &str| locks.mutex(name).unwrap();
    let twice = locks.all([name("a"), name("b"), name("a")]).unwrap_err();
    assert!(matches!(&twice, Error::Members(MembersError::Twice(name)) if name.as_str() == "a"), "{twice:?}");
    let elsewhere = locks.with_options(patient().prefix("elsewhere:")).unwrap();
    let same_name = locks.all([name("a"), elsewhere.mutex("a").unwrap()]).unwrap_err();
    let is_twice = |error: &Error| matches!(error, Error::Members(MembersError::Twice(_)));
    assert!(is_twice(&same_name), "leases are found by name: {same_name:?}");
    drop(elsewhere);
    let both = [Member::Read(locks.rwlock("c").unwrap()), Member::Write(locks.rwlock("c").unwrap())];
    assert!(
        matches!(locks.all(both), Err(Error::Members(MembersError::Twice(_)))),
        "also both sides of a lock"
    );
    let none = locks.all(Vec::<Member>::new()).unwrap_err();
    assert!(matches!(none, Error::Members(MembersError::None)), "{none:?}");
    let many = (0..129).map(|number| name(&number.to_string()));
    let many = locks.all(many).unwrap_err();
    assert!(matches!(many, Error::Members(MembersError::TooMany(129))), "{many:?}");
    let foreign = locks.all([other.mutex("d").unwrap()]).unwrap_err();
    assert!(matches!(&foreign, Error::Members(MembersError::OtherClient(name)) if name.as_str() == "d"));
    assert!(foreign.to_string().starts_with("\"d\" is a lock of another client"));
    let minimum = patient().hold_at_least(Duration::from_secs(1));
    let kept = locks.with_options(minimum).unwrap().mutex("kept").unwrap();
    let kept = locks.all([kept]).unwrap_err();
    assert!(matches!(&kept, Error::Members(MembersError::HoldAtLeast(name)) if name.as_str() == "kept"));
    assert_eq!(setup.deployment.scripts_run().await, before);
    drop((locks, other));
    setup.finish().await;
}

pub async fn work_under_several_locks_ends_with_the_first_loss(setup: Setup) {
    let locks = setup.client().await;
    let all = locks.all(["x", "y", "z"].map(|name| locks.mutex(name).unwrap())).unwrap();
    let other = setup.client().await.mutex("y").unwrap();
    let outcome = all.run(async |leases: Leases| {
        assert!(other.force_release().await?);
        // It may see that, and is dropped at its next await.
        assert!(leases.get("y").unwrap().renew().await.is_err());
        std::future::pending::<Result<(), Error>>().await
    });
    let error = soon("the work is dropped", outcome).await.unwrap_err();
    assert!(matches!(&error, Error::Lost { .. }), "{error:?}");
    assert_eq!(error.context().unwrap().lock().unwrap().as_str(), "y");
    eventually("the others are released", || async { held(&setup).await.is_empty() }).await;
    let value = all.run_timeout(Duration::from_secs(20), async |_| Ok::<_, Error>(7)).await.unwrap();
    assert_eq!(value, 7);
    assert!(held(&setup).await.is_empty());
    drop((all, locks, other));
    setup.finish().await;
}

/// While a task waits for one lock, it holds only those before it in the order.
pub async fn a_task_that_waits_holds_no_later_lock(setup: Setup) {
    let (locks, other) = (setup.client().await, setup.client().await);
    let busy = other.mutex("m").unwrap().lock().await.unwrap();
    let all = locks.all(["z", "m", "a"].map(|name| locks.mutex(name).unwrap())).unwrap();
    let waiting = setup.queued("lock:m", async move { all.lock().await }).await;
    assert_eq!(held(&setup).await, ["lock:a", "lock:m"]);
    busy.release().await.unwrap();
    let guard = soon("all are granted", waiting).await.unwrap().unwrap();
    assert_eq!(held(&setup).await, ["lock:a", "lock:m", "lock:z"]);
    drop(guard);
    eventually("they are free", || async { held(&setup).await.is_empty() }).await;
    drop((locks, other));
    setup.finish().await;
}

pub async fn a_lease_that_ends_while_another_lock_is_waited_for_is_an_error(setup: Setup) {
    let (locks, other) = (setup.client_with(ttl(9_000)).await, setup.client().await);
    let busy = other.mutex("m").unwrap().lock().await.unwrap();
    let all = locks.all(["z", "m", "a"].map(|name| locks.mutex(name).unwrap())).unwrap();
    let waiting = setup.queued("lock:m", async move { all.lock().await.map(drop) }).await;
    assert!(other.mutex("a").unwrap().force_release().await.unwrap());
    let error = soon("the loss ends the call", waiting).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::Lost { .. }) && error.is_transient(), "{error:?}");
    assert_eq!(error.context().unwrap().lock().unwrap().as_str(), "a");
    busy.release().await.unwrap();
    eventually("nothing is left", || async { held(&setup).await.is_empty() }).await;
    drop((locks, other));
    setup.finish().await;
}

/// A server that does not answer does not make a call outlast its limit: not once for each lock.
pub async fn one_limit_covers_a_silent_server(setup: Setup) {
    // Longer than this test waits: only the limit ends the call.
    let locks = setup.client_with(Options::new().node_timeout(Duration::from_secs(60))).await;
    let all = locks.all((0..8).map(|name| locks.mutex(name.to_string()).unwrap())).unwrap();
    all.lock().await.unwrap().release().await.unwrap();
    setup.deployment.pause();
    let outcome = soon("the limit ends the call", all.lock_timeout(Duration::from_millis(100))).await;
    let is_expected = matches!(outcome, Err(Error::TimedOut { .. })) || setup.failed(&outcome);
    assert!(is_expected, "{outcome:?}");
    setup.deployment.resume();
    eventually("nothing is left", || async { held(&setup).await.is_empty() }).await;
    drop((all, locks));
    setup.finish().await;
}

/// Clients take random sets of two to eight of sixteen names, in any order. None waits for ever.
pub async fn random_sets_of_names_do_not_deadlock(setup: Setup) {
    const CLIENTS: usize = 4;
    const TASKS: usize = 4;
    const ROUNDS: usize = 12;
    let held: Arc<Vec<AtomicBool>> = Arc::new((0..16).map(|_| AtomicBool::new(false)).collect());
    let overlaps = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for client in 0..CLIENTS {
        let locks = setup.client().await;
        for task in 0..TASKS {
            let (locks, held, overlaps) = (locks.clone(), Arc::clone(&held), Arc::clone(&overlaps));
            tasks.push(tokio::spawn(async move {
                let mut random = Random::seeded((client * TASKS + task) as u64);
                for _ in 0..ROUNDS {
                    let mut names: Vec<usize> = (0..16).collect();
                    let count = 2 + random.below(7) as usize;
                    for place in 0..count {
                        names.swap(place, place + random.below((16 - place) as u64) as usize);
                    }
                    names.truncate(count);
                    let members = names.iter().map(|name| locks.mutex(format!("set:{name}")).unwrap());
                    let guard = locks.all(members).unwrap().lock().await.unwrap();
                    for name in &names {
                        overlaps
                            .fetch_add(u64::from(held[*name].swap(true, Ordering::SeqCst)), Ordering::SeqCst);
                    }
                    tokio::task::yield_now().await;
                    names.iter().for_each(|name| held[*name].store(false, Ordering::SeqCst));
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        soon("every task gets its sets", task).await.unwrap();
    }
    assert_eq!(overlaps.load(Ordering::SeqCst), 0);
    setup.finish().await;
}
