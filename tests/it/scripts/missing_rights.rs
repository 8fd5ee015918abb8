//! Users without one of the rights that the scripts need: a request that is refused half-way must
//! grant nothing, and must not leave a key without a TTL.

use std::collections::BTreeSet;

use super::client::{Acquire, Answer, Client, KEYS, Request};
use super::commands;
use crate::support::Server;
use Answer::{Busy, Final};

const KINDS: [&str; 4] = ["mutex", "reentrant", "write", "read"];

/// The state of the lock when the request arrives.
#[derive(Clone, Copy, Debug)]
enum Lock {
    Free,
    /// The attempt `a` holds it.
    Held,
    /// The same, and `w` waits.
    HeldWithWaiter,
    /// The attempt `h` holds it, and `a` waits.
    Queued,
    /// Its holder is gone, and `w` waits.
    FreeWithWaiter,
}

const LOCKS: [Lock; 5] = [Lock::Free, Lock::Held, Lock::HeldWithWaiter, Lock::Queued, Lock::FreeWithWaiter];

impl Lock {
    async fn prepare(self, client: &Client, acquire: Acquire) {
        client.flush().await;
        let rival = Acquire { kind: if acquire.kind == "read" { "write" } else { acquire.kind }, ..acquire };
        let take = async |acquire: Acquire, attempt: &str| {
            acquire.fenced(attempt, attempt, 7).with("claim_ms", "60000").send(client).await
        };
        match self {
            Lock::Free => {}
            Lock::Held => assert!(matches!(take(acquire, "a").await, Final(1..))),
            Lock::HeldWithWaiter => {
                assert!(matches!(take(acquire, "a").await, Final(1..)));
                let waiter =
                    Acquire { kind: if acquire.kind == "read" { "write" } else { acquire.kind }, ..acquire };
                assert_eq!(take(waiter, "w").await, Busy);
            }
            Lock::Queued => {
                assert!(matches!(take(rival, "h").await, Final(1..)));
                assert_eq!(take(acquire, "a").await, Busy);
            }
            Lock::FreeWithWaiter => {
                assert!(matches!(take(rival, "h").await, Final(1..)));
                assert_eq!(take(acquire, "w").await, Busy);
                let _: i64 = client.run(&["DEL", KEYS[0]]).await;
            }
        }
    }
}

/// Every verb of a kind, with the words of a usual client.
fn requests(acquire: Acquire) -> Vec<Request> {
    let mut requests = vec![
        acquire.fenced("a", "a", 9_000),
        acquire.fenced("a", "a", 9_000).with("claim_ms", "60000"),
        acquire.renew("a", "a").with("ttl_ms", "90000"),
        acquire.release("a", "a"),
        acquire.release("a", "a").with("claim_ms", "60000").with("remember", "1"),
        acquire.force("f"),
        acquire.inspect(),
    ];
    if acquire.kind == "write" {
        requests.push(acquire.downgrade("a", "a"));
    }
    requests
}

/// Without one command after the other: every key has a TTL, no refusal stands for the missing
/// right, and an acquire that fails leaves no hold of its attempt.
#[tokio::test]
async fn refused_command_leaves_no_key_without_ttl_and_no_grant() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let commands: BTreeSet<String> = commands();
    let mut wrong = Vec::new();
    let mut refused = 0;
    for command in &commands {
        let without = format!("-{command}");
        let words = ["ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", &without];
        client.run::<()>(&words).await;
        let url = server.url().replace("redis://", "redis://limited:secret@");
        let limited = Client::at(&url).await;
        for acquire in Acquire::all(&KINDS) {
            for lock in LOCKS {
                for request in requests(acquire) {
                    lock.prepare(&client, acquire).await;
                    let held = async || acquire.renew("a", "a").send(&client).await != Final(0);
                    let before = held().await;
                    let answer = request.try_send(&limited).await;
                    let what =
                        format!("without {command}: {acquire:?}, {lock:?}, {}: {answer:?}", request.title());
                    refused += usize::from(answer.is_err());
                    if matches!(answer, Ok(Final(-3 | -2))) {
                        wrong.push(format!("{what}: a refusal of another cause"));
                    }
                    if answer.is_err() && held().await && !before {
                        wrong.push(format!("{what}: a grant without an answer"));
                    }
                    for key in KEYS {
                        if client.run::<i64>(&["PTTL", key]).await == -1 {
                            wrong.push(format!("{what}: {key} has no TTL"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {refused} refusals:\n{}", wrong.len(), wrong.join("\n"));
    assert!(refused > 500, "only {refused} requests were refused");
}
