//! Holds of one owner after a handover, for which each node has made a number of its own at first.

use redlatch::{Locks, Owner};

use super::{Quorum, options};
use crate::support::{AnyGuard, Kind, soon};

/// The kinds that one owner may hold twice, while nobody else does.
const NESTED: [Kind; 2] = [Kind::Reentrant, Kind::Write];

async fn take(client: &Locks, kind: Kind, name: &str, owner: &Owner) -> AnyGuard {
    let granted = async {
        match kind {
            Kind::Reentrant => {
                AnyGuard::Reentrant(client.reentrant(name).unwrap().with_owner(owner).lock().await.unwrap())
            }
            _ => AnyGuard::Write(client.rwlock(name).unwrap().with_owner(owner).write().await.unwrap()),
        }
    };
    soon("granted", granted).await
}

fn waits(client: &Locks, kind: Kind, name: &str, owner: &Owner) -> tokio::task::JoinHandle<AnyGuard> {
    let (client, name, owner) = (client.clone(), name.to_owned(), owner.clone());
    tokio::spawn(async move { take(&client, kind, &name, &owner).await })
}

/// Whether so many nodes know of this token that whoever comes later has a larger one.
async fn is_known(quorum: &Quorum, among: u32, key: &str, token: u64) -> bool {
    let fence = format!("{{{key}}}:fence");
    let known: Vec<u64> = quorum.run(among, &["GET", &fence]).await;
    known.iter().filter(|known| **known >= token).count() >= quorum.majority()
}

/// A node that was told of the release late has chosen a number by its clock, which nobody else knows.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_have_no_token_of_one_node() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    for kind in NESTED {
        let (name, owner) = (format!("alone-{}", kind.name()), Owner::new());
        let releasing = quorum.client_behind(&proxies, options()).await;
        let lock = kind.lock(&releasing, &name);
        let first = quorum.take(&lock).await;
        let client = quorum.client(options()).await;
        let waiting = waits(&client, kind, &name, &owner);
        quorum.queued(0b111, &lock, 1).await;
        proxies[2].be_deaf(true);
        proxies[2].hold_requests(true);
        let earlier = first.token();
        first.release().await.unwrap();
        let outer = waiting.await.unwrap();
        // Through a new connection, which knows the node's clock: its number is larger than what was agreed upon.
        proxies[2].cut();
        proxies[2].be_deaf(false);
        proxies[2].hold_requests(false);
        releasing.settled().await;
        quorum.queued(0b111, &lock, 0).await;
        quorum.hang(0b010);
        // Through another client, so that the owner is known to Redis only.
        let other = quorum.client(options()).await;
        let inner = take(&other, kind, &name, &owner).await;
        println!("FIG {kind:?}: {earlier}, then {} and in it {}", outer.token(), inner.token());
        assert!(inner.token() >= outer.token() && outer.token() > earlier);
        assert!(is_known(&quorum, 0b101, lock.key(), inner.token()).await, "{kind:?}: {}", inner.token());
        let last = inner.token();
        inner.release().await.unwrap();
        outer.release().await.unwrap();
        quorum.resume(0b010);
        let next = soon("granted", lock.lock()).await.unwrap();
        assert!(next.token() > last, "{} after {last}", next.token());
        next.release().await.unwrap();
        for client in [releasing, client, other] {
            client.settled().await;
        }
    }
    quorum.finish_behind(proxies).await;
}

/// One of two that an owner wants is handed over, and the other one is granted before the first has asked: no node has been
/// told of a token then.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_agree_before_the_outer_one_has_a_token() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    let (mut last, mut differ) = ([0; 2], 0);
    for round in 0..10 {
        let (kind, last) = (NESTED[round % 2], &mut last[round % 2]);
        let (name, owner) = (format!("before-{}", kind.name()), Owner::new());
        let (client, other) = (quorum.client(options()).await, quorum.client(options()).await);
        let lock = kind.lock(&client, &name);
        let first = quorum.take(&lock).await;
        assert!(first.token() > *last, "{kind:?}: {} after {last}, round {round}", first.token());
        let silent = quorum.client_behind(&proxies, options()).await;
        let waiting = waits(&silent, kind, &name, &owner);
        quorum.queued(0b111, &lock, 1).await;
        for proxy in &proxies {
            proxy.be_deaf(true);
            proxy.hold_requests(true);
        }
        // Through a client that knows the clocks of now: each node chooses a number by its own.
        let late = quorum.client(options()).await;
        assert!(kind.lock(&late, &name).force_release().await.unwrap());
        quorum.queued(0b111, &lock, 0).await;
        let inner = take(&other, kind, &name, &owner).await;
        assert!(is_known(&quorum, 0b111, lock.key(), inner.token()).await, "{kind:?}: {}", inner.token());
        for proxy in &proxies {
            proxy.be_deaf(false);
            proxy.hold_requests(false);
        }
        let outer = waiting.await.unwrap();
        assert!(is_known(&quorum, 0b111, lock.key(), outer.token()).await, "{kind:?}: {}", outer.token());
        differ += usize::from(outer.token() != inner.token());
        let least = inner.token().min(outer.token());
        assert!(least > first.token(), "{kind:?}: {least} after {}, round {round}", first.token());
        *last = inner.token().max(outer.token());
        inner.release().await.unwrap();
        outer.release().await.unwrap();
        drop(first);
        for client in [client, other, silent, late] {
            client.settled().await;
        }
    }
    println!("{differ} of 10 pairs differ");
    assert_eq!(differ, 0);
    quorum.finish_behind(proxies).await;
}

/// Read inside a write hold that not all nodes know, and written again by those who do: tokens do not go back.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_have_no_smaller_token_than_a_read_between() {
    let mut quorum = Quorum::durable(3).await;
    let client = quorum.client(options().ttl(std::time::Duration::from_secs(60))).await;
    let (owner, lock) = (Owner::new(), client.rwlock("order").unwrap());
    quorum.kill(0b100);
    let outer = lock.with_owner(&owner).write().await.unwrap();
    quorum.restart(0b100).await;
    quorum.hang(0b010);
    let between = loop {
        // The third node is connected to anew.
        match lock.with_owner(&owner).read().await {
            Ok(guard) => break guard,
            Err(error) => assert!(matches!(error, redlatch::Error::NoQuorum { .. }), "{error}"),
        }
    };
    quorum.resume(0b010);
    let after = lock.with_owner(&owner).write().await.unwrap();
    let [first, second, third] =
        [outer.lease(), between.lease(), after.lease()].map(|lease| lease.fencing_token().unwrap());
    assert!(first <= second && second <= third, "{first} {second} {third}");
    for guard in [after, outer] {
        guard.release().await.unwrap();
    }
    between.release().await.unwrap();
    client.settled().await;
    quorum.finish().await;
}
