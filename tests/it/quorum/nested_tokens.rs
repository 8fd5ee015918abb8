//! Tokens of nested holds. When a node grants the lock to the next waiter, it first makes a token
//! of its own; the nodes then agree on one.

use std::time::{SystemTime, UNIX_EPOCH};

use redlatch::{Fencing, Locks, Owner};

use super::{Quorum, options};
use crate::support::{AnyGuard, Kind, soon};

/// The exclusive kinds that one owner may hold twice.
const NESTED: [Kind; 2] = [Kind::Reentrant, Kind::Write];

async fn take(client: &Locks, kind: Kind, name: &str, owner: &Owner) -> AnyGuard {
    let granted = async {
        match kind {
            Kind::Reentrant => {
                AnyGuard::Reentrant(client.reentrant(name, owner).unwrap().lock().await.unwrap())
            }
            _ => AnyGuard::Write(client.rwlock(name).unwrap().with_owner(owner).write().await.unwrap()),
        }
    };
    soon("the hold is granted", granted).await
}

fn waits(client: &Locks, kind: Kind, name: &str, owner: &Owner) -> tokio::task::JoinHandle<AnyGuard> {
    let (client, name, owner) = (client.clone(), name.to_owned(), owner.clone());
    tokio::spawn(async move { take(&client, kind, &name, &owner).await })
}

/// Whether a majority knows this token or a larger one, so that every later holder gets a larger
/// one.
async fn is_known(quorum: &Quorum, among: u32, key: &str, token: u64) -> bool {
    let fence = format!("{{{key}}}:fence");
    let known: Vec<u64> = quorum.run(among, &["GET", &fence]).await;
    known.iter().filter(|known| **known >= token).count() >= quorum.majority()
}

/// One node receives the release late and makes a token by its clock, which no other node knows. A
/// nested hold must not get that token.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_hold_ignores_the_token_of_a_single_node() {
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
        proxies[2].set_drops_requests(true);
        proxies[2].hold_requests(true);
        let earlier = first.token();
        first.release().await.unwrap();
        let outer = waiting.await.unwrap();
        // Through a new connection, which knows the node's clock: the node's token is larger than
        // the one that was agreed on.
        proxies[2].cut();
        proxies[2].set_drops_requests(false);
        proxies[2].hold_requests(false);
        releasing.settled().await;
        quorum.queued(0b111, &lock, 0).await;
        quorum.hang(0b010);
        // Through another client, so that the first hold is known only to Redis.
        let other = quorum.client(options()).await;
        let inner = take(&other, kind, &name, &owner).await;
        println!("FIG {kind:?}: {earlier}, then {} and in it {}", outer.token(), inner.token());
        assert!(inner.token() >= outer.token() && outer.token() > earlier);
        assert!(is_known(&quorum, 0b101, lock.key(), inner.token()).await, "{kind:?}: {}", inner.token());
        let last = inner.token();
        inner.release().await.unwrap();
        outer.release().await.unwrap();
        quorum.resume(0b010);
        let next = soon("the lock is granted", lock.lock()).await.unwrap();
        assert!(next.token() > last, "{} after {last}", next.token());
        next.release().await.unwrap();
        for client in [releasing, client, other] {
            client.settled().await;
        }
    }
    quorum.finish_behind(proxies).await;
}

/// An owner waits for one hold, which is granted on release. Before its waiter asks for it, another
/// client acquires a nested hold: no node has accepted a token by then.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_agree_on_a_token_before_the_outer_has_one() {
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
            proxy.set_drops_requests(true);
            proxy.hold_requests(true);
        }
        // Through a client that has just read the clocks: each node makes a token by its own clock.
        let late = quorum.client(options()).await;
        assert!(kind.lock(&late, &name).force_release().await.unwrap());
        quorum.queued(0b111, &lock, 0).await;
        let inner = take(&other, kind, &name, &owner).await;
        assert!(is_known(&quorum, 0b111, lock.key(), inner.token()).await, "{kind:?}: {}", inner.token());
        for proxy in &proxies {
            proxy.set_drops_requests(false);
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

/// An owner writes on two nodes, reads inside it on one of them and the third, and writes again
/// inside it on all three. No token is smaller than the one before.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_write_token_is_not_smaller_than_a_read_before_it() {
    let mut quorum = Quorum::durable(3).await;
    let client = quorum.client(options().ttl(std::time::Duration::from_secs(60))).await;
    let (owner, lock) = (Owner::new(), client.rwlock("order").unwrap());
    quorum.kill(0b100);
    let outer = lock.with_owner(&owner).write().await.unwrap();
    quorum.restart(0b100).await;
    quorum.hang(0b010);
    let between = soon("the client is connected to the third node", async {
        loop {
            match lock.with_owner(&owner).read().await {
                Ok(guard) => break guard,
                Err(error) => assert!(matches!(error, redlatch::Error::NoQuorum { .. }), "{error}"),
            }
        }
    })
    .await;
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

/// A nested hold has the outer hold's token, if a majority that remembers the outer hold is up;
/// else it has a larger one.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_keep_the_outer_token() {
    let mut quorum = Quorum::durable(5).await;
    for (outer_down, inner_down) in [(0b00011, 0), (0b11000, 0), (0, 0b10001), (0, 0b01100)] {
        let client = quorum.client(options()).await;
        let (one, two) =
            (client.reentrant("nested", &Owner::new()).unwrap(), client.rwlock("nested-rw").unwrap());
        let (owner, reader, writer) = (Owner::new(), Owner::new(), Owner::new());
        quorum.kill(outer_down);
        let outer = soon("outer hold", one.with_owner(&owner).lock()).await.unwrap();
        let read = soon("outer hold", two.with_owner(&reader).read()).await.unwrap();
        let write_too = client.rwlock("nested-write").unwrap();
        let write = soon("outer hold", write_too.with_owner(&writer).write()).await.unwrap();
        quorum.restart(outer_down).await;
        quorum.kill(inner_down);
        // Through another client, so that the outer hold is known only to Redis.
        let other = quorum.client(options()).await;
        let (lock, rw) =
            (other.reentrant("nested", &Owner::new()).unwrap(), other.rwlock("nested-rw").unwrap());
        let rw_too = other.rwlock("nested-write").unwrap();
        let inner = soon("nested hold", lock.with_owner(&owner).lock()).await.unwrap();
        let read_inner = soon("nested hold", rw.with_owner(&reader).read()).await.unwrap();
        let write_inner = soon("nested hold", rw_too.with_owner(&writer).write()).await.unwrap();
        // If no majority remembers the outer hold, the client cannot know whether it is valid.
        let remembered = (0b11111_u32 & !outer_down & !inner_down).count_ones() >= 3;
        let (within, around) = (inner.lease().fencing_token(), outer.lease().fencing_token());
        assert!(if remembered { within == around } else { within > around }, "{within:?} in {around:?}");
        let (within, around) = (write_inner.lease().fencing_token(), write.lease().fencing_token());
        assert!(if remembered { within == around } else { within > around }, "{within:?} in {around:?}");
        assert!(read_inner.lease().fencing_token() >= read.lease().fencing_token());
        let (before, read_before) = (inner.lease().fencing_token(), read_inner.lease().fencing_token());
        assert!(
            lock.with_owner(&Owner::new()).try_lock().await.unwrap().is_none(),
            "another owner acquired the lock"
        );
        quorum.restart(inner_down).await;
        for guard in [inner, outer] {
            guard.release().await.unwrap();
        }
        for guard in [read_inner, read] {
            guard.release().await.unwrap();
        }
        for guard in [write_inner, write] {
            guard.release().await.unwrap();
        }
        let next = soon("the lock is granted", lock.with_owner(&Owner::new()).lock()).await.unwrap();
        assert!(next.lease().fencing_token() > before);
        let next_writer = soon("the lock is granted", rw.write()).await.unwrap();
        assert!(next_writer.lease().fencing_token() > read_before);
        drop((next, next_writer));
        other.settled().await;
    }
    quorum.finish().await;
}

/// A fenced hold inside an unfenced one gets a new token. Its client knows no token and first
/// proposes too small a one: no node may accept less than it has accepted before.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_past_tokens_nested_in_an_unfenced_hold() {
    let quorum = Quorum::start(3).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let far = u64::try_from(now).unwrap() + 600_000_000;
    quorum.run::<String>(0b111, &["SET", "{lock:within}:fence", &far.to_string(), "PX", "86400000"]).await;
    let owner = Owner::new();
    let mut last = far;
    for round in 0..3 {
        let without = quorum.client(options().fencing(Fencing::Off)).await.rwlock("within").unwrap();
        let outer = soon("outer hold", without.with_owner(&owner).write()).await.unwrap();
        assert_eq!(outer.lease().fencing_token(), None);
        let lock = quorum.client(options()).await.rwlock("within").unwrap();
        let inner = soon("nested hold", lock.with_owner(&owner).write()).await.unwrap();
        let token = inner.lease().fencing_token().unwrap().get();
        assert!(token > last, "nested: {token} after {last}, round {round}");
        inner.release().await.unwrap();
        outer.release().await.unwrap();
        let next = quorum.lock(Kind::Write, "within", options()).await;
        let next = soon("the lock is granted", next.lock()).await.unwrap();
        assert!(next.token() > token, "next writer: {} after {token}, round {round}", next.token());
        last = next.token();
        next.release().await.unwrap();
    }
    quorum.finish().await;
}
