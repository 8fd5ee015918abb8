//! The server's memory for a lock.

use super::client::{Acquire, Answer, Client};
use crate::support::Server;
use Answer::{Busy, Final};

/// The name has an ordinary length; attempts and channels have the crate's formats.
#[tokio::test]
async fn lock_takes_little_memory() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let attempt = |number: u64| format!("{number:032x}");
    let channel = "lock:wake:0123456789abcdef0123456789abcdef";
    let mutex = Acquire { kind: "mutex", is_for_quorum: false };
    let take = |number| mutex.fenced("", &attempt(number), 0);
    let wait = |number| take(number).queued().with("channel", channel);
    let bytes = async |key: &str| -> u64 { client.run(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).await };

    assert!(matches!(take(0).send(&client).await, Final(1..)));
    let (lock, counter) = (bytes("k").await, bytes("{k}:fence").await);
    assert!(!client.exists("{k}:waiters").await);
    let mut queue = Vec::new();
    for number in 1..=1000 {
        assert_eq!(wait(number).send(&client).await, Busy);
        if [1, 100, 1000].contains(&number) {
            queue.push(bytes("{k}:waiters").await);
        }
    }
    let (first, hundred, thousand) = (queue[0], queue[1] / 100, queue[2] / 1000);
    let end = mutex.release("", &attempt(0)).with("remember", "1");
    client.run::<()>(&["DEL", "{k}:waiters"]).await;
    assert_eq!(end.send(&client).await, Final(1));
    let mark = bytes("{k}:waiters").await;
    println!(
        "bytes: a held mutex {lock}, its counter {counter}, one waiter {first}, each of 100 {hundred}, \
         each of 1000 {thousand}, an end mark {mark}"
    );
    assert!(lock <= 160, "a held mutex: {lock} bytes");
    assert!(counter <= 120, "a counter: {counter} bytes");
    // A queue of one entry is a table already, since the entry is longer than 64 bytes.
    assert!(first <= 1200, "a waiter: {first} bytes");
    assert!(hundred <= 320 && thousand <= 320, "waiters: {hundred}, {thousand} bytes each");
    assert!(mark <= 240, "an end mark: {mark} bytes");
}
