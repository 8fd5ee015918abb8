//! Guards that are dropped: each of them is released, however many there are.

use tokio::task::JoinSet;

use crate::support::{Server, soon};

/// More than the attempts without a lease that a client remembers, and those that it is releasing.
const GUARDS: usize = 80_000;

#[tokio::test(flavor = "multi_thread")]
async fn very_many_guards_dropped_at_once_are_all_released() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let (mut tasks, mut guards) = (JoinSet::new(), Vec::new());
    for task in 0..100 {
        let locks = locks.clone();
        tasks.spawn(async move {
            let mut guards = Vec::new();
            for number in 0..GUARDS / 100 {
                guards.push(locks.mutex(format!("{task}-{number}")).unwrap().lock().await.unwrap());
            }
            guards
        });
    }
    while let Some(some) = tasks.join_next().await {
        guards.extend(some.unwrap());
    }
    assert_eq!(guards.len(), GUARDS);
    // So that none is released before all are due.
    server.pause();
    drop(guards);
    server.resume();
    soon("all are released", locks.settled()).await;
    let held: Vec<String> = server.run(&["KEYS", "lock:*"]).await;
    assert!(held.is_empty(), "{} locks are still held", held.len());
}
