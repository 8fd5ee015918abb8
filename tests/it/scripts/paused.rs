//! A server that is stopped in the middle of a script, as a virtual machine is: the time that the
//! script has read is old when it writes.

use super::client::{Acquire, Client, KEYS, Request};
use super::work::observed;
use crate::support::Server;
use crate::support::raw::script;

/// The script reads the time of a minute ago, which is longer than each lease: as if the server had
/// been stopped for that long after `TIME`.
fn paused(source: &str) -> String {
    let ago = "if (...) == 'TIME' then reply[1] = tostring(reply[1] - 60) end";
    format!("{} return answer", observed(source, ago))
}

/// Each request, of which one after the other is stopped, in sequences that queue and hand over.
#[tokio::test]
async fn server_stopped_within_a_script_leaves_no_key_without_a_ttl() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    for kind in ["mutex", "reentrant", "read", "write"] {
        let (one, other) =
            (Acquire { kind, is_for_quorum: false }, Acquire { kind: "write", is_for_quorum: false });
        let other = if kind == "read" { other } else { one };
        let mut requests: Vec<Request> = vec![
            one.fenced("a", "a", 0),
            other.fenced("b", "b", 0).queued(),
            one.fenced("c", "c", 0).queued(),
            one.renew("a", "a"),
            one.release("a", "a"),
            other.fenced("b", "b", 0).queued(),
            other.release("b", "b"),
            one.fenced("c", "c", 0).queued(),
            one.fenced("d", "d", 0),
            one.release("c", "c").with("remember", "1"),
        ];
        if kind == "write" {
            requests.insert(1, one.downgrade("a", "a"));
            requests.push(one.fenced("e", "e", 0));
            requests.push(one.downgrade("e", "e"));
        }
        for stopped in 0..requests.len() {
            client.flush().await;
            for (number, request) in requests.iter().enumerate() {
                let source = script(&request.verb.script);
                let source = if number == stopped { paused(&source) } else { source };
                let sum: String = client.run(&["SCRIPT", "LOAD", &source]).await;
                let answer = request.send_sum(&client, &sum).await;
                for key in KEYS {
                    let pttl: i64 = client.run(&["PTTL", key]).await;
                    assert_ne!(
                        pttl, -1,
                        "{key}: {kind}, stopped at {stopped}, {number}: {request:?}: {answer:?}"
                    );
                }
            }
        }
    }
}
