//! EVAL after EVALSHA: how often a script's source is sent to a server that does not have it.

use std::time::Duration;

use redlatch::Options;

use crate::support::Server;

/// How many EVAL requests the server has run.
async fn sources(server: &Server) -> u64 {
    server.calls("cmdstat_eval:").await
}

#[tokio::test]
async fn concurrent_requests_send_the_source_once_after_script_flush() {
    let server = Server::start().await;
    // On a busy machine, 10,000 concurrent requests take longer than a second.
    let locks = server.locks_with(Options::new().node_timeout(Duration::from_secs(20))).await;
    for _ in 0..3 {
        server.run::<()>(&["SCRIPT", "FLUSH"]).await;
        let before = sources(&server).await;
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..5_000 {
            let mutex = locks.mutex(format!("flushed-{number}")).unwrap();
            tasks.spawn(async move {
                let guard = mutex.try_lock().await.unwrap().expect("the lock is free");
                guard.release().await.unwrap();
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        // One for each of the two scripts. A busy machine may need more, since a request waits for
        // another one's EVAL only for a while.
        let sent = sources(&server).await - before;
        assert!((2..=100).contains(&sent), "{sent} sources for 10,000 requests");
    }
}

/// The keeper sends renewals and releases in pipelines.
#[tokio::test]
async fn pipeline_sends_the_source_once_after_script_flush() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut guards = Vec::new();
    for number in 0..200 {
        let mutex = locks.mutex(format!("flushed-{number}")).unwrap();
        guards.push(mutex.try_lock().await.unwrap().expect("the lock is free"));
    }
    server.run::<()>(&["SCRIPT", "FLUSH"]).await;
    let before = sources(&server).await;
    drop(guards);
    locks.settled().await;
    let sent = sources(&server).await - before;
    assert!((1..=8).contains(&sent), "{sent} sources for 200 releases");
    assert_eq!(server.run::<u64>(&["EXISTS", "lock:flushed-0", "lock:flushed-199"]).await, 0);
}
