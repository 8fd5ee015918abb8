//! `Locks::rejoin`: tokens after it, interruptions, and concurrent calls.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlatch::{Error, Locks, NodeStatus, Options, Renewal, RestartGuard};
use tokio::task::JoinHandle;

use super::{KINDS, Quorum, admitted, options};
use crate::support::{Kind, eventually, soon};

pub(super) const TTL: Duration = Duration::from_millis(800);
pub(super) const NODE: &str = "lock:{}node";

/// A node timeout that no request reaches: killed nodes refuse connections at once.
const PATIENT: Duration = Duration::from_secs(10);

pub(super) fn guarded() -> Options {
    options().ttl(TTL).restart_guard(RestartGuard::On)
}

async fn founded(nodes: usize, arguments: &[&str]) -> Quorum {
    let quorum = Quorum::start_with(nodes, arguments).await;
    quorum.client(guarded()).await.rejoin().await.unwrap();
    quorum
}

/// Whether an admission of each of these nodes was begun.
async fn is_rejoining(quorum: &Quorum, set: u32) -> bool {
    let tickets: Vec<u32> = quorum.run(set, &["HSTRLEN", NODE, "ticket"]).await;
    tickets.iter().all(|length| *length > 0)
}

async fn rejoin(client: Locks) -> Result<Vec<NodeStatus>, Error> {
    client.rejoin().await
}

/// Starts `rejoin`, and returns once it waits.
pub(super) async fn start_rejoin(
    quorum: &Quorum,
    set: u32,
    client: &Locks,
) -> JoinHandle<Result<Vec<NodeStatus>, Error>> {
    let rejoining = tokio::spawn(rejoin(client.clone()));
    eventually("rejoin has started", || is_rejoining(quorum, set)).await;
    rejoining
}

/// Whether these nodes, of three, grant locks without the others.
async fn may_vote(quorum: &Quorum, set: u32) -> bool {
    quorum.hang(0b111 & !set);
    let client = quorum.client(guarded()).await;
    let trying = KINDS.map(|kind| {
        let lock = kind.lock(&client, &format!("vote-{}", kind.name()));
        // The limit outlasts a hold that an earlier try has left.
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

/// Node 2 does not know a token, node 1 knew it and loses its data, and node 0, which knows it,
/// hangs. The token that nodes 1 and 2 grant must still be larger.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_after_rejoin() {
    let mut quorum = founded(3, &[]).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    for (round, kind) in KINDS.into_iter().enumerate() {
        let name = format!("min-token-{}", kind.name());
        // Ten minutes ahead of all clocks, so that the first proposal of a new client is too small.
        let far = (now + 600_000_000 * (round as u128 + 1)).to_string();
        let fence = format!("{{lock:{name}}}:fence");
        quorum.run::<String>(0b011, &["SET", &fence, &far, "PX", "86400000"]).await;
        // Node 2 is down while the token is granted, and does not learn of it.
        quorum.kill(0b100);
        let lock = quorum.lock(kind.rival(), &name, guarded()).await;
        let guard = lock.lock().await.unwrap();
        let mut token = guard.token();
        assert!(u128::from(token) > now + 600_000_000, "{token}");
        guard.release().await.unwrap();
        if kind == Kind::Write {
            // A reader's token, granted after it, must also be smaller than the next writer's.
            let reader = quorum.client(guarded()).await.rwlock(&name).unwrap();
            let guard = reader.read().await.unwrap();
            token = token.max(guard.lease().fencing_token().unwrap().get());
            guard.release().await.unwrap();
        }
        drop(lock);
        quorum.restart(0b100).await;
        let client = quorum.client(guarded()).await;
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b100));
        // Node 1 loses the token, and node 0, which knows it, hangs. Nodes 1 and 2 must have
        // learned of it from `rejoin`.
        quorum.kill(0b010);
        quorum.restart(0b010).await;
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b010));
        drop(client);
        let fences: Vec<u32> = quorum.run(0b110, &["EXISTS", &fence]).await;
        assert_eq!(fences, [0, 0], "the token counters are lost");
        quorum.hang(0b001);
        let later = quorum.lock(kind, &name, guarded()).await;
        let guard = soon("the lock is granted", later.lock()).await.unwrap();
        let least = if kind == Kind::Read { token } else { token + 1 };
        assert!(guard.token() >= least, "{kind:?}: {} after {token}", guard.token());
        guard.release().await.unwrap();
        quorum.resume(0b001);
    }
}

/// Nodes that have lost all data vote again once every lease that they may have granted has
/// expired. Either the read TTL or the write TTL may be the longest.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_founding_waits_for_leases_of_either_side() {
    const LONG: Duration = Duration::from_millis(1_500);
    let quorum = founded(3, &[]).await;
    for (kind, options) in [(Kind::Write, guarded().write_ttl(LONG)), (Kind::Read, guarded().read_ttl(LONG))]
    {
        let client = quorum.client(options.renewal(Renewal::Never)).await;
        let guard = kind.lock(&client, kind.name()).lock().await.unwrap();
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
        assert!(!guard.lease().is_lost(), "{kind:?}");
        client.rejoin().await.unwrap();
        assert!(guard.lease().is_lost(), "{kind:?}: the nodes vote while the lease is valid");
        assert!(guard.release().await.is_err());
        client.settled().await;
    }
}

/// While a node waits to be admitted, another client is granted a longer lease than any before: the
/// node waits for that one, too.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_waits_for_a_longer_lease_granted_meanwhile() {
    let ttl = Duration::from_millis(1_500);
    let mut quorum = founded(3, &[]).await;
    let other = quorum.client(guarded().ttl(ttl * 2).renewal(Renewal::Never)).await;
    quorum.kill(0b100);
    quorum.restart(0b100).await;
    let rejoining = start_rejoin(&quorum, 0b100, &quorum.client(guarded().ttl(ttl)).await).await;
    let guard = Kind::Mutex.lock(&other, "longer").lock().await.unwrap();
    assert!(!rejoining.is_finished());
    let rejoined = soon("rejoin returns", rejoining).await.unwrap();
    assert!(guard.lease().is_lost(), "the node votes while the lease is valid");
    assert_eq!(admitted(rejoined), quorum.labels(0b100));
}

/// Two clients call `rejoin` at the same time: at least one succeeds, the other may get
/// `NotAdmitted`, and afterwards all nodes vote.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_succeeds_for_one_of_two_clients() {
    let mut quorum = founded(3, &[]).await;
    for round in 0..4 {
        let gone = 1 << (round % 3);
        quorum.kill(gone);
        quorum.restart(gone).await;
        let mut tasks = Vec::new();
        for _ in 0..2 {
            let client = quorum.client(guarded()).await;
            tasks.push(tokio::spawn(rejoin(client)));
        }
        let mut done = 0;
        for task in tasks {
            match soon("rejoin returns", task).await.unwrap() {
                Ok(rejoined) => done += usize::from(admitted(Ok(rejoined)) == quorum.labels(gone)),
                Err(Error::NotAdmitted { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(done > 0, "neither client has admitted the node");
        assert!(may_vote(&quorum, gone | 1 << ((round + 1) % 3)).await);
    }
}

/// Two clients found a quorum at the same time: it is founded then, or by the next call.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_founding_succeeds_despite_a_concurrent_one() {
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

/// A founding is interrupted: by a node that dies, and by another client after it has admitted one
/// node. The next call completes it, else the quorum would never have a majority of voters.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_founding_resumes_after_an_interruption() {
    let mut quorum = Quorum::start(3).await;
    // `rejoin` waits for as long: each interruption comes before it admits the nodes.
    let client = quorum.client(guarded().ttl(TTL * 5).node_timeout(PATIENT)).await;
    for lost in [0b001, 0b010, 0b100] {
        let rejoining = start_rejoin(&quorum, 0b111, &client).await;
        quorum.kill(lost);
        let outcome = soon("rejoin returns", rejoining).await.unwrap();
        assert!(matches!(outcome, Err(Error::NoQuorum { .. })), "{outcome:?}");
        quorum.restart(lost).await;
    }
    // The state that a founding client leaves if it ends between two nodes.
    client.rejoin().await.unwrap();
    for left in [0b010, 0b110] {
        quorum.run::<String>(0b111, &["FLUSHALL"]).await;
        let rejoining = start_rejoin(&quorum, 0b111, &client).await;
        // Another client takes over in the middle.
        quorum.run::<u32>(left, &["HSET", NODE, "ticket", "another"]).await;
        let outcome = soon("rejoin returns", rejoining).await.unwrap();
        assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{outcome:?}");
        assert_eq!(quorum.run::<u32>(0b111, &["HEXISTS", NODE, "run"]).await, [1, 0, 0]);
        let admitted = admitted(client.rejoin().await);
        // The nodes after the first refused one were not admitted either.
        assert_eq!(admitted, quorum.labels(0b110));
        assert!(may_vote(&quorum, 0b011).await && may_vote(&quorum, 0b110).await);
    }
}

/// A node loses its data while it waits to be admitted: it gets no vote.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_fails_if_the_node_loses_data_meanwhile() {
    tokio::join!(loses_data_meanwhile(false), loses_data_meanwhile(true));
}

async fn loses_data_meanwhile(keeps: bool) {
    let arguments: &[&str] = if keeps { &["--appendonly", "yes", "--appendfsync", "always"] } else { &[] };
    let mut quorum = founded(3, arguments).await;
    // The node restarts while `rejoin` waits for its TTL.
    let client = quorum.client(guarded().ttl(TTL * 8).node_timeout(PATIENT)).await;
    for flushes in [false, true] {
        quorum.kill(0b010);
        quorum.restart(0b010).await;
        let rejoining = start_rejoin(&quorum, 0b010, &client).await;
        if flushes {
            quorum.run::<String>(0b010, &["FLUSHALL"]).await;
        } else {
            quorum.kill(0b010);
            quorum.restart(0b010).await;
        }
        let outcome = soon("rejoin returns", rejoining).await.unwrap();
        let why = format!("keeps: {keeps}, flushes: {flushes}: {outcome:?}");
        assert!(matches!(outcome, Err(Error::NotAdmitted { .. })), "{why}");
        assert!(!may_vote(&quorum, 0b011).await, "{why}");
        assert_eq!(admitted(client.rejoin().await), quorum.labels(0b010));
        assert!(may_vote(&quorum, 0b011).await);
    }
}

/// A `rejoin` future that is dropped half-way gives no node a vote, and the next call succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_rejoin_can_be_repeated_after_cancellation() {
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
    // Of five nodes, two are admitted together; of three, two are a majority and it would be a
    // founding.
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
