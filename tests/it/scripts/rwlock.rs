//! The queue of a read-write lock: the number of readers admitted at a time.

use super::client::{Acquire, Answer, Client, KEYS, Request};
use super::subscriber::Subscriber;
use crate::support::Server;
use Answer::{Busy, Final};

/// Both sides, for one server or for a node of a quorum.
fn sides(is_for_quorum: bool) -> [Acquire; 2] {
    ["read", "write"].map(|kind| Acquire { kind, is_for_quorum })
}

/// More than two batches of readers.
const READERS: usize = 300;

/// The events that admit waiting readers.
#[derive(Clone, Copy, Debug)]
enum Trigger {
    Release,
    Downgrade,
    ForceWrite,
    ForceRead,
    /// The holder's key has expired, and the first of the readers polls.
    ReaderPolls,
    /// The holder's key has expired, and a new writer's request arrives.
    WriterAsks,
}

impl Trigger {
    const ALL: [Trigger; 6] = [
        Trigger::Release,
        Trigger::Downgrade,
        Trigger::ForceWrite,
        Trigger::ForceRead,
        Trigger::ReaderPolls,
        Trigger::WriterAsks,
    ];

    /// Queues the readers behind a holder, and causes the event.
    async fn run(self, is_for_quorum: bool, client: &Client, waiting: &[Request]) {
        let [read, write] = sides(is_for_quorum);
        let holder = if matches!(self, Trigger::ForceRead) { read } else { write };
        assert!(matches!(holder.fenced("oh", "h", 10).send(client).await, Final(1..)));
        if matches!(self, Trigger::ForceRead) {
            // This writer keeps the readers out until its entry is removed below.
            assert_eq!(write.fenced("ow", "w", 500).queued().send(client).await, Busy);
        }
        for reader in waiting {
            assert_eq!(reader.send(client).await, Busy);
        }
        let answer = match self {
            Trigger::Release => write.release("oh", "h").send(client).await,
            Trigger::Downgrade => write.downgrade("oh", "h").send(client).await,
            Trigger::ForceWrite => write.force("f").send(client).await,
            Trigger::ForceRead => {
                let entry: Vec<String> =
                    client.run(&["ZRANGEBYSCORE", KEYS[1], "0", "+inf", "LIMIT", "0", "1"]).await;
                assert_eq!(client.run::<u64>(&["ZREM", KEYS[1], &entry[0]]).await, 1);
                read.force("f").send(client).await
            }
            Trigger::ReaderPolls => {
                assert_eq!(client.run::<u64>(&["DEL", KEYS[0]]).await, 1);
                waiting[0].send(client).await
            }
            Trigger::WriterAsks => {
                assert_eq!(client.run::<u64>(&["DEL", KEYS[0]]).await, 1);
                // Without queueing, so that this writer does not block the readers.
                write.fenced("ow", "w", 500).send(client).await
            }
        };
        let is_busy = matches!(self, Trigger::WriterAsks);
        assert!(if is_busy { answer == Busy } else { matches!(answer, Final(1..)) }, "{self:?}: {answer:?}");
    }
}

/// One script admits a batch of readers and notifies one of the others, whose request admits the
/// next batch. If none were notified, all others would wait until one of them polls.
#[tokio::test]
async fn readers_beyond_one_batch_are_admitted_batch_by_batch() {
    let server = Server::start().await;
    let client = Client::of(&server).await;
    let mut subscriber = Subscriber::of(&server, "lock:wake:*").await;
    for (is_for_quorum, trigger) in
        [false, true].into_iter().flat_map(|quorum| Trigger::ALL.map(|one| (quorum, one)))
    {
        let [read, _] = sides(is_for_quorum);
        let waiting: Vec<Request> = (0..READERS)
            .map(|number| {
                let (owner, attempt) = (format!("o{number}"), format!("a{number}"));
                let channel = format!("lock:wake:{number:032x}");
                read.fenced(&owner, &attempt, 100).with("claim_ms", "60000").with("channel", &channel)
            })
            .collect();
        trigger.run(is_for_quorum, &client, &waiting).await;
        loop {
            let texts = subscriber.published("lock:wake:end").await;
            let mut polls = 0;
            for notified in texts.iter().filter_map(|text| text.strip_suffix(" 0 0 k")) {
                let number: usize = notified.strip_prefix('a').unwrap().parse().unwrap();
                let answer = waiting[number].send(&client).await;
                assert!(matches!(answer, Final(1..)), "{trigger:?}: {notified} is admitted: {answer:?}");
                polls += 1;
            }
            if polls == 0 {
                break;
            }
        }
        let left = client.waiters().await;
        assert_eq!(left, 0, "quorum: {is_for_quorum}, {trigger:?}: waiters that no message reaches");
        client.flush().await;
    }
}
