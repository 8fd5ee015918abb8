//! The channels to which scripts publish, with the rights of the releasing user.

use super::client::{Acquire, Answer, Client, KEYS};
use super::subscriber::Subscriber;
use crate::support::Server;
use Answer::{Busy, Final};

const CHANNEL: &str = "app:commands";
const KINDS: [&str; 4] = ["mutex", "reentrant", "write", "read"];

#[tokio::test]
async fn waiter_is_refused_on_foreign_channel() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for acquire in Acquire::all(&KINDS) {
        let take = acquire.fenced("o", "a", 100).queued();
        for channel in [
            CHANNEL,
            "{\"cmd\":\"delete_all\"}",
            "app:wakeup",
            "a wake:1",
            "app:wake:commands",
            "wake:",
            "device:wake:42",
        ] {
            let answer = take.clone().with("channel", channel).send(&client).await;
            assert_eq!(answer, Final(-5), "{acquire:?} {channel}");
            assert_eq!(client.run::<u64>(&["DBSIZE"]).await, 0, "{acquire:?} {channel}");
        }
        for channel in
            ["", "lock:wake:0123456789abcdef0123456789abcdef", "wake:0123456789abcdef0123456789abcdef~"]
        {
            let answer = take.clone().with("channel", channel).send(&client).await;
            assert!(matches!(answer, Final(1..)), "{acquire:?} {channel}: {answer:?}");
            client.flush().await;
        }
    }
}

/// A user without the right to publish to a channel writes an entry with it into the queue. Other
/// users' releases must not publish there.
#[tokio::test]
async fn queued_entry_with_foreign_channel_receives_no_message() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut subscriber = Subscriber::of(&server, CHANNEL).await;
    for kind in KINDS {
        let holder = Acquire { kind: if kind == "read" { "write" } else { kind }, is_for_quorum: false };
        for by_force in [false, true] {
            assert!(matches!(holder.fenced("o", "a", 0).send(&client).await, Final(1..)));
            let now = client.time().await;
            let place = if kind == "read" { format!("-{}", (1_u64 << 52) - now) } else { now.to_string() };
            for entry in [
                format!("x {kind} 3000 {CHANNEL} o 255"),
                format!("x {kind} 3000 {CHANNEL} "),
                format!("{{\"cmd\":\"delete_all\"}} {kind} 3000 {CHANNEL}  255"),
                format!("{{\"cmd\":\"delete_all\"}} 3000 x {CHANNEL}"),
            ] {
                let _: i64 = client.run(&["ZADD", KEYS[2], &place, &entry]).await;
            }
            let _: i64 = client.run(&["PEXPIRE", KEYS[2], "60000"]).await;
            let waiting = holder.fenced("p", "b", 0).queued();
            assert_eq!(waiting.send(&client).await, Busy);
            let release = if by_force { holder.force("f") } else { holder.release("o", "a") };
            assert_eq!(release.send(&client).await, Final(1));
            let found = waiting.send(&client).await;
            assert!(matches!(found, Final(1..)), "{kind}: the lock is granted to the waiter: {found:?}");
            client.flush().await;
        }
    }
    assert_eq!(subscriber.published(CHANNEL).await, [""; 0], "no message came");
}
