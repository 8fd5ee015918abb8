//! Letting nodes vote again: tokens, interruptions, and several who do it at a time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlatch::{Error, NodeStatus, Options, Renewal, RestartGuard};

use super::{KINDS, Quorum, admitted, options};
use crate::support::{Kind, eventually, soon};

const TTL: Duration = Duration::from_millis(500);
const NODE: &str = "lock:{}node";

fn guarded() -> Options {
    options().ttl(TTL).restart_guard(RestartGuard::On)
}

async fn founded(nodes: usize, arguments: &[&str]) -> Quorum {
    let quorum = Quorum::start_with(nodes, arguments).await;
    quorum.client(guarded()).await.rejoin().await.unwrap();
    quorum
}

/// Whether a lock is granted by nodes of this set alone, of three.
async fn may_vote(quorum: &Quorum, set: u32) -> bool {
    quorum.hang(0b111 & !set);
    let client = quorum.client(guarded()).await;
    let trying = KINDS.map(|kind| {
        let lock = kind.lock(&client, &format!("vote-{}", kind.name()));
        // Nothing of an earlier one is in the way for long.
        tokio::spawn(async move { lock.lock_timeout(TTL * 4).await.is_ok() })
    });
    let mut granted = Vec::new();
    for trying in trying {
        granted.push(trying.await.unwrap());
    }
    quorum.resume(0b111 & !set);
    client.settled().await;
    assert!(granted.iter().all(|one| *one == granted[0]), "{granted:?}");
    granted[0]
}

/// Tokens that only a node knew that has forgotten them, and one who did not vote then.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_keeps_tokens_growing() {
    let mut quorum = founded(3, &[]).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    for (round, kind) in KINDS.into_iter().enumerate() {
        let name = format!("floor-{}", kind.name());
        // Ten minutes ahead of all clocks, so that what a new client proposes is too low.
        let far = (now + 600_000_000 * (round as u128 + 1)).to_string();
        let fence = format!("{{lock:{name}}}:fence");
        quorum.run::<String>(0b011, &["SET", &fence, &far, "PX", "86400000"]).await;
        // Node 2 does not vote for it, and hears nothing of it later.
        quorum.kill(0b100);
        let lock = quorum.lock(kind.rival(), &name, guarded()).await;
        let guard = lock.lock().await.unwrap();
        let mut token = guard.token();
        assert!(u128::from(token) > now + 600_000_000, "{token}");
        guard.release().await.unwrap();
        if kind == Kind::Write {
            // What was read after that must be smaller, too, than what is written then.
            let reader = quorum.client(guarded()).await.rwlock(&name).unwrap();
            let guard = reader.read().await.unwrap();
            token = token.max(guard.lease().fencing_token().unwrap().get());
            guard.release().await.unwrap();
        }
        drop(lock);
        quorum.restart(0b100).await;
        let client = quorum.client(guarded()).await;
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b100));
        // Now node 1 forgets it, and 0, which knows it, is away: what is left was told of it.
        quorum.kill(0b010);
        quorum.restart(0b010).await;
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b010));
        drop(client);
        let fences: Vec<u32> = quorum.run(0b110, &["EXISTS", &fence]).await;
        assert_eq!(fences, [0, 0], "its counters are lost");
        quorum.hang(0b001);
        let newcomer = quorum.lock(kind, &name, guarded()).await;
        let guard = soon("granted", newcomer.lock()).await.unwrap();
        let least = if kind == Kind::Read { token } else { token + 1 };
        assert!(guard.token() >= least, "{kind:?}: {} after {token}", guard.token());
        guard.release().await.unwrap();
        quorum.resume(0b001);
    }
}

/// Nodes that have forgotten everything vote again once no lease is valid that they may have
/// granted: the TTL of either side may be the longest one.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_founding_outlasts_the_leases_of_either_side() {
    const LONG: Duration = Duration::from_millis(1_500);
    let quorum = founded(3, &[]).await;
    for (kind, options) in [(Kind::Write, guarded().write_ttl(LONG)), (Kind::Read, guarded().read_ttl(LONG))]
    {
        let client = quorum.client(options.renewal(Renewal::Never)).await;
        let guard = kind.lock(&client, kind.name()).lock().await.unwrap();
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
        assert!(!guard.lease().is_lost(), "{kind:?}");
        client.rejoin().await.unwrap();
        assert!(guard.lease().is_lost(), "{kind:?}: others may get it from now on");
        assert!(guard.release().await.is_err());
        client.settled().await;
    }
}

/// A request that was under way is granted a longer lease than any before, while a node waits to be
/// admitted: the node waits for that one as well.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_outlasts_a_longer_lease_that_is_granted_meanwhile() {
    let ttl = Duration::from_millis(1_500);
    let mut quorum = founded(3, &[]).await;
    let other = quorum.client(guarded().ttl(ttl * 2).renewal(Renewal::Never)).await;
    quorum.kill(0b100);
    quorum.restart(0b100).await;
    let rejoining = tokio::spawn(rejoin(quorum.client(guarded().ttl(ttl)).await));
    eventually("begun", || async { quorum.run::<u32>(0b100, &["HEXISTS", NODE, "ticket"]).await == [1] })
        .await;
    let guard = Kind::Mutex.lock(&other, "longer").lock().await.unwrap();
    assert!(!rejoining.is_finished());
    let rejoined = soon("an end", rejoining).await.unwrap();
    assert!(guard.lease().is_lost(), "the node votes, and the lease is valid");
    assert_eq!(admitted(rejoined), quorum.labels(0b100));
}

/// Whoever loses says so, and afterwards all vote.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_is_done_by_one_of_two() {
    let mut quorum = founded(3, &[]).await;
    for round in 0..4 {
        let gone = 1 << (round % 3);
        quorum.kill(gone);
        quorum.restart(gone).await;
        let mut tasks = Vec::new();
        for _ in 0..2 {
            let client = quorum.client(guarded()).await;
            tasks.push(tokio::spawn(async move { client.rejoin().await }));
        }
        let mut done = 0;
        for task in tasks {
            match soon("an end", task).await.unwrap() {
                Ok(rejoined) => done += usize::from(admitted(Ok(rejoined)) == quorum.labels(gone)),
                Err(Error::NotAdmitted { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(done > 0, "one of them at least");
        assert!(may_vote(&quorum, gone | 1 << ((round + 1) % 3)).await);
    }
}

/// Two who found a quorum at a time: it is founded, at the latest by trying again.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_is_founded_by_two_at_a_time() {
    let quorum = Quorum::start(3).await;
    let options = guarded().ttl(Duration::from_millis(100));
    let (one, two) = (quorum.client(options.clone()).await, quorum.client(options).await);
    for round in 0..10 {
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
        let outcomes = tokio::join!(tokio::spawn(rejoin(one.clone())), tokio::spawn(rejoin(two.clone())));
        let text = format!("{outcomes:?}");
        for outcome in [outcomes.0.unwrap(), outcomes.1.unwrap()] {
            assert!(matches!(outcome, Ok(_) | Err(Error::NotAdmitted { .. })), "round {round}: {text}");
        }
        let again = one.rejoin().await;
        assert!(again.is_ok(), "round {round}: {again:?} after {text}");
        assert_eq!(quorum.run::<u32>(0b111, &["HEXISTS", NODE, "run"]).await, [1, 1, 1]);
    }
}

async fn rejoin(client: redlatch::Locks) -> Result<Vec<NodeStatus>, Error> {
    client.rejoin().await
}

/// One of them hangs when the others are let in: they are few, and may be no quorum for good.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_founding_goes_on_where_it_was_left() {
    let mut quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    for lost in [0b001, 0b010, 0b100] {
        let rejoining = tokio::spawn(rejoin(client.clone()));
        eventually("begun", || async {
            quorum.run::<u32>(0b111, &["HEXISTS", NODE, "ticket"]).await == [1, 1, 1]
        })
        .await;
        quorum.kill(lost);
        let outcome = soon("told", rejoining).await.unwrap();
        assert!(matches!(outcome, Err(Error::NoQuorum { .. })), "{outcome:?}");
        quorum.restart(lost).await;
    }
    // As it is left if the founder ends between two of them.
    client.rejoin().await.unwrap();
    for left in [0b010, 0b110] {
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
        let rejoining = tokio::spawn(rejoin(client.clone()));
        eventually("begun", || async {
            quorum.run::<u32>(0b111, &["HEXISTS", NODE, "ticket"]).await == [1, 1, 1]
        })
        .await;
        // Another one takes over in the middle.
        quorum.run::<u32>(left, &["HSET", NODE, "ticket", "another"]).await;
        let outcome = soon("told", rejoining).await.unwrap();
        assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{outcome:?}");
        assert_eq!(quorum.run::<u32>(0b111, &["HEXISTS", NODE, "run"]).await, [1, 0, 0]);
        let admitted = admitted(client.rejoin().await);
        // Those behind the first that was refused had to wait as well.
        assert_eq!(admitted, quorum.labels(0b110));
        assert!(may_vote(&quorum, 0b011).await && may_vote(&quorum, 0b110).await);
    }
}

/// What a node forgets while it waits to be let in.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_notices_what_is_forgotten_meanwhile() {
    tokio::join!(forgets(false), forgets(true));
}

async fn forgets(keeps: bool) {
    let arguments: &[&str] = if keeps { &["--appendonly", "yes", "--appendfsync", "always"] } else { &[] };
    let mut quorum = founded(3, arguments).await;
    let client = quorum.client(guarded()).await;
    for flushes in [false, true] {
        quorum.kill(0b010);
        quorum.restart(0b010).await;
        let rejoining = {
            let client = client.clone();
            tokio::spawn(async move { client.rejoin().await })
        };
        eventually("begun", || async { quorum.run::<u32>(0b010, &["HEXISTS", NODE, "ticket"]).await == [1] })
            .await;
        if flushes {
            quorum.run::<String>(0b010, &["FLUSHALL"]).await;
        } else {
            quorum.kill(0b010);
            quorum.restart(0b010).await;
        }
        let outcome = soon("told", rejoining).await.unwrap();
        let why = format!("keeps: {keeps}, flushes: {flushes}: {outcome:?}");
        assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{why}");
        assert!(!may_vote(&quorum, 0b011).await, "{why}");
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b010));
        assert!(may_vote(&quorum, 0b011).await);
    }
}

/// Dropped half-way, it changes nothing, and can be begun anew.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_can_be_begun_anew() {
    let quorum = Quorum::start(3).await;
    let client = quorum.client(guarded()).await;
    for wait in [0, 1, 3, 50, 300] {
        let half = tokio::time::timeout(Duration::from_millis(wait), client.rejoin()).await;
        assert!(half.is_err());
        assert!(client.mutex("half").unwrap().try_lock().await.is_err());
    }
    assert_eq!(client.rejoin().await.unwrap().len(), 3);
    let mut quorum = quorum;
    quorum.kill(0b100);
    quorum.restart(0b100).await;
    for wait in [0, 1, 3, 50, 300] {
        let half = tokio::time::timeout(Duration::from_millis(wait), client.rejoin()).await;
        assert!(half.is_err());
    }
    assert!(!may_vote(&quorum, 0b101).await);
    assert_eq!(admitted(client.rejoin().await), quorum.labels(0b100));
    assert!(may_vote(&quorum, 0b101).await);
    // Two at a time are too many of three; of five they are let in together.
    let mut quorum = founded(5, &[]).await;
    quorum.kill(0b10010);
    quorum.restart(0b10010).await;
    let client = quorum.client(guarded()).await;
    let admitted = admitted(client.rejoin().await);
    assert_eq!(admitted, quorum.labels(0b10010));
    quorum.hang(0b01100);
    let lock = Kind::Mutex.lock(&client, "five");
    lock.lock().await.unwrap().release().await.unwrap();
    quorum.resume(0b01100);
    client.settled().await;
}
