//! Owners: who holds a lock, wherever he is.

use std::time::{Duration, Instant};

use redlatch::{Options, Owner};

use crate::support::{Server, eventually, soon};

#[test]
fn reentrant_owners_travel_as_text_and_through_serde() {
    let owner = Owner::new();
    assert_ne!(owner, Owner::new());
    assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
    let json = serde_json::to_string(&owner).unwrap();
    assert_eq!(json, format!("\"{owner}\""));
    assert_eq!(serde_json::from_str::<Owner>(&json).unwrap(), owner);
    let plain = owner.to_string().replace('-', "");
    let capital = "0000000A-0000-0000-0000-000000000000";
    let (long, longer) = ("o".repeat(256), "o".repeat(257));
    for hostile in ["", "a b", ":fence", "mode", &longer] {
        assert!(hostile.parse::<Owner>().is_err(), "{hostile:?}");
        assert!(serde_json::from_str::<Owner>(&format!("{hostile:?}")).is_err());
    }
    // Words of other libraries. The same UUID in another form is another owner, as it is to the
    // server.
    for word in ["me", "8743c9c0-0795-4907-87fd-6c719a6b4586:61", "00000000-0000", &plain, capital, &long] {
        let other = word.parse::<Owner>().unwrap();
        assert_ne!(other, owner);
        assert_eq!(other.to_string(), word);
        assert_eq!(serde_json::from_str::<Owner>(&format!("{word:?}")).unwrap(), other);
    }
}

/// Tasks of two owners wait in one client. Once a task of one owner gets the lock, the others of
/// that owner enter with it, and wait neither for the task between them, which would be for ever,
/// nor for a poll.
#[tokio::test]
async fn reentrant_tasks_enter_as_soon_as_their_owner_holds_the_lock_in_their_client() {
    let server = Server::start().await;
    let patient = Options::new().poll_cap(Duration::from_secs(10));
    let (locks, elsewhere) = (server.locks_with(patient).await, server.locks().await);
    let (lock, holder) = (locks.reentrant("entered").unwrap(), elsewhere.reentrant("entered").unwrap());
    let (owner, between) = (Owner::new(), Owner::new());
    let held = holder.lock().await.unwrap();
    let waits = |owner: &Owner| {
        let (lock, owner) = (lock.clone(), owner.clone());
        tokio::spawn(async move { lock.with_owner(&owner).lock().await })
    };
    let first = waits(&owner);
    let in_redis = || async { server.run::<u64>(&["ZCARD", "{lock:entered}:waiters"]).await == 1 };
    eventually("the first one waits in Redis", in_redis).await;
    let mut tried = server.scripts_run().await;
    let mut tasks = Vec::new();
    for owner in [&between, &owner, &owner] {
        tasks.push(waits(owner));
        tried += 1;
        eventually("it has tried", || async { server.scripts_run().await >= tried }).await;
    }
    held.release().await.unwrap();
    let start = Instant::now();
    let outer = soon("handed over", first).await.unwrap().unwrap();
    for task in tasks.drain(1..) {
        soon("entered", task).await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    outer.release().await.unwrap();
    soon("a turn", tasks.remove(0)).await.unwrap().unwrap().release().await.unwrap();
    drop((lock, locks, holder, elsewhere));
    server.assert_nothing_left().await;
}
