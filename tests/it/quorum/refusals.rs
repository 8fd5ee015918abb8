//! What a majority refuses while some node grants it, and what the nodes do not agree on.

use redlatch::Error;

use super::{KINDS, Quorum, no_quorum, options};

/// More than half say that it is no lock; the one that says nothing of the kind keeps nothing.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_keeps_nothing_of_what_a_majority_refuses() {
    let quorum = Quorum::start(3).await;
    let (squatted, other) = (0b011, 0b100);
    for kind in KINDS {
        let client = quorum.client(options()).await;
        let lock = kind.lock(&client, kind.name());
        quorum.run::<u64>(squatted, &["SADD", lock.key(), "somebody else's"]).await;
        let refused = lock.try_lock().await.map(|guard| guard.is_some());
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: tried");
        let refused = lock.lock().await.map(drop);
        assert!(matches!(refused, Err(Error::WrongType { .. })), "{kind:?}: {refused:?}");
        client.settled().await;
        assert_eq!(quorum.having(other, lock.key()).await, 0, "{kind:?}: waited for");
        quorum.run::<u64>(squatted, &["DEL", lock.key()]).await;
    }
    quorum.finish().await;
}

/// All that is left of a quorum answers, one node in one way and another one in the other.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_says_that_those_who_answer_do_not_agree() {
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(options()).await;
    let lock = KINDS[0].lock(&client, "divided");
    let guard = quorum.take(&lock).await;
    quorum.run::<u64>(0b001, &["DEL", lock.key()]).await;
    quorum.kill(0b010);
    let error = guard.release().await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("2 of 3 nodes answered mutex/release, and did not agree"), "{text}");
    assert_eq!(no_quorum::<()>(Err(error)).0, 2);
    quorum.restart(0b010).await;
    client.settled().await;
    drop(client);
    quorum.finish().await;
}
