//! Tokens that a grant reserves for the tasks of a client that pass the hold on.

use std::time::Duration;

use crate::support::{Server, eventually, patient, soon};

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
