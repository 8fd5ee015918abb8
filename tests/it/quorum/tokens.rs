//! Fencing tokens of random majorities: nodes that hang, die and return, and clocks that disagree.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlatch::{Error, Locks, Options, Owner, Renewal};

use super::contention::is_released;
use super::{ALONE, KINDS, Quorum, options};
use crate::support::{AnyLock, Kind, LONGEST_WAIT, Random, Stopwatch, eventually, soon};

/// Fails random minorities of a quorum.
struct Faults {
    quorum: Quorum,
    random: Random,
    hanging: u32,
    dead: u32,
    restarts: u32,
}

impl Faults {
    fn new(quorum: Quorum) -> Faults {
        Faults { quorum, random: Random::new(), hanging: 0, dead: 0, restarts: 0 }
    }

    fn below(&mut self, bound: u64) -> usize {
        usize::try_from(self.random.below(bound)).unwrap()
    }

    async fn heal(&mut self) {
        self.quorum.resume(std::mem::take(&mut self.hanging));
        self.restarts += self.dead.count_ones();
        self.quorum.restart(std::mem::take(&mut self.dead)).await;
    }

    /// Heals the failed nodes, and fails up to `max_failures` random others.
    async fn fail_others(&mut self, kills: bool) {
        self.heal().await;
        let nodes = self.quorum.count();
        for _ in 0..nodes - self.quorum.majority() {
            let node = 1 << self.below(nodes as u64);
            match self.below(if kills { 3 } else { 2 }) {
                _ if node & (self.hanging | self.dead) != 0 => {}
                0 => {}
                1 => {
                    self.quorum.hang(node);
                    self.hanging |= node;
                }
                _ => {
                    self.quorum.kill(node);
                    self.dead |= node;
                }
            }
        }
    }

    /// Makes a majority accept a token that is ahead, as if a client with a fast clock had acquired
    /// and released the lock. Every later client first proposes a smaller token.
    async fn accept_larger_token(&mut self, fence: &str, last: u64) -> u64 {
        let token = last + 1 + self.random.below(LEAD);
        let mut accepting = self.quorum.all() & !self.hanging & !self.dead;
        while accepting.count_ones() as usize > self.quorum.majority() {
            accepting &= !(1 << self.below(self.quorum.count() as u64));
        }
        self.quorum.run::<String>(accepting, &["SET", fence, &token.to_string(), "PX", "86400000"]).await;
        token
    }

    async fn finish(mut self) {
        self.heal().await;
        self.quorum.finish().await;
    }
}

/// By how much a token may exceed the one before, in microseconds.
const LEAD: u64 = 5_000_000;

/// How many tokens each majority grants.
const EACH: usize = 8;

/// Takes tokens of one lock through three clients, one of which is replaced now and then. By the
/// clocks alone, the tokens would grow whatever the nodes accept; so each majority has accepted one
/// that is ahead of the clocks.
async fn grow(faults: &mut Faults, kind: Kind, tokens: usize) {
    let name = format!("tokens-{}", kind.name());
    // A busy disk may silence nodes beside those that are stopped.
    let patient = options().outage_limit(LONGEST_WAIT);
    let mut locks: Vec<AnyLock> = Vec::new();
    for _ in 0..3 {
        locks.push(faults.quorum.lock(kind, &name, patient.clone()).await);
    }
    let fence = format!("{{{}}}:fence", locks[0].key());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let mut last = u64::try_from(now).unwrap() + LEAD;
    for number in 0..tokens {
        if number % EACH == 0 {
            let restarts = (number / EACH).is_multiple_of(4);
            faults.heal().await;
            if restarts {
                // Before nodes fail: on a busy machine, one more may miss the node timeout, and
                // connecting takes a majority at the first try.
                let place = faults.below(3);
                locks[place] = faults.quorum.lock(kind, &name, patient.clone()).await;
            }
            faults.fail_others(restarts).await;
            last = faults.accept_larger_token(&fence, last).await;
        }
        let place = faults.below(3);
        let guard = soon("the lock is granted", locks[place].lock()).await.unwrap();
        assert!(guard.token() > last, "{kind:?}: {} after {last}, number {number}", guard.token());
        last = guard.token();
        let released = guard.release().await;
        assert!(released.is_ok(), "{released:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_through_random_majorities() {
    let mut faults = Faults::new(Quorum::durable(5).await);
    let start = Stopwatch::start();
    for (kind, tokens) in [(Kind::Mutex, 1_000), (Kind::Reentrant, 75), (Kind::Write, 75)] {
        grow(&mut faults, kind, tokens).await;
        println!("FIG {kind:?}: {tokens} tokens, {} restarts, {:?}", faults.restarts, start.elapsed());
    }
    assert!(faults.restarts > 5, "{} restarts", faults.restarts);
    faults.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn quorum_tokens_grow_through_many_random_majorities() {
    let mut faults = Faults::new(Quorum::durable(5).await);
    for kind in ALONE {
        grow(&mut faults, kind, 3_000).await;
        println!("FIG {kind:?}: 3000 tokens, {} restarts", faults.restarts);
    }
    faults.finish().await;
}

/// A reader's token is no smaller than any earlier writer's, and smaller than any later writer's.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_read_tokens_lie_between_write_tokens() {
    let mut faults = Faults::new(Quorum::durable(5).await);
    let mut clients: Vec<Locks> = Vec::new();
    for _ in 0..3 {
        clients.push(faults.quorum.client(options()).await);
    }
    let mut last = 0;
    let mut distinct = 0;
    for round in 0..60 {
        let place = faults.below(3);
        let writer = clients[place].rwlock("between").unwrap();
        let written = soon("the lock is granted", writer.write()).await.unwrap();
        let token = written.lease().fencing_token().unwrap().get();
        assert!(token > last, "round {round}: wrote with {token} after {last}");
        last = token;
        written.release().await.unwrap();
        if round % 3 == 0 {
            // Other nodes fail now, so that the readers use another majority than the writer.
            faults.fail_others(true).await;
        }
        let mut readers = Vec::new();
        for client in &clients {
            let lock = client.rwlock("between").unwrap();
            readers.push(tokio::spawn(
                async move { soon("the reader is admitted", lock.read()).await.unwrap() },
            ));
        }
        let mut largest = last;
        for reader in readers {
            let guard = reader.await.unwrap();
            let token = guard.lease().fencing_token().unwrap().get();
            assert!(token >= last, "round {round}: read with {token} after {last}");
            distinct += usize::from(token > last);
            largest = largest.max(token);
            guard.release().await.unwrap();
        }
        last = largest;
    }
    println!("FIG {} restarts, {distinct} of 180 reads with a token of their own", faults.restarts);
    drop(clients);
    faults.finish().await;
}

/// A majority has accepted a token that is ahead of all clocks. The client's next proposal is
/// larger, so the grant takes one request; by the clock alone, each grant would take two.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_first_proposal_exceeds_the_accepted_token() {
    let quorum = Quorum::start(3).await;
    // Renewals would be counted as well.
    let client = quorum.client(Options::new().renewal(Renewal::Never)).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    for (number, kind) in KINDS.into_iter().enumerate() {
        let lock = kind.lock(&client, kind.name());
        let (fence, far) = (format!("{{{}}}:fence", lock.key()), now + 600_000_000 * (number as u128 + 1));
        quorum.run::<String>(0b111, &["SET", &fence, &far.to_string(), "PX", "86400000"]).await;
        let first = quorum.take(&lock).await;
        assert!(u128::from(first.token()) >= far, "{kind:?}: {} after {far}", first.token());
        let token = first.token();
        first.release().await.unwrap();
        quorum.wait_for(0b111, 0, &lock).await;
        let before = quorum.scripts_run().await;
        let second = quorum.take(&lock).await;
        assert!(second.token() > token, "{kind:?}: {} after {token}", second.token());
        let requests: Vec<u64> =
            quorum.scripts_run().await.iter().zip(before).map(|(now, before)| now - before).collect();
        assert_eq!(requests, [1, 1, 1], "{kind:?}");
        second.release().await.unwrap();
    }
    drop(client);
    quorum.finish().await;
}

/// Some nodes have accepted a token that is ten minutes ahead of all clocks. New clients do not
/// know it.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_although_clocks_disagree() {
    const AHEAD: u64 = 600_000_000;
    for (nodes, ahead) in [(3, 0b001), (5, 0b00011)] {
        let mut faults = Faults::new(Quorum::durable(nodes).await);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
        let far = u64::try_from(now).unwrap() + AHEAD;
        for kind in KINDS {
            let fence = format!("{{lock:{}}}:fence", kind.name());
            faults.quorum.run::<String>(ahead, &["SET", &fence, &far.to_string(), "PX", "86400000"]).await;
        }
        let (mut last, mut beyond) = ([0; 4], 0);
        for number in 0..8 {
            // First a node with the right time is down, so that a node that is ahead is needed.
            let down = match number {
                0 => faults.quorum.all() & !ahead & !(faults.quorum.all() >> 1),
                _ => 1 << faults.below(nodes as u64) | 1 << faults.below(if nodes == 5 { 5 } else { 1 }),
            };
            let down = if nodes == 3 { down & down.wrapping_neg() } else { down };
            faults.quorum.hang(down);
            faults.hanging = down;
            let client = faults.quorum.client(options()).await;
            for (kind, last) in KINDS.into_iter().zip(&mut last) {
                let guard =
                    soon("the lock is granted", kind.lock(&client, kind.name()).lock()).await.unwrap();
                let token = guard.token();
                // Two readers may have the same token, since they do not exclude each other.
                let grows = if kind == Kind::Read { token >= *last } else { token > *last };
                assert!(grows, "{kind:?} on {nodes}, {down:b} down: {token} after {last}");
                beyond += usize::from(token > far);
                *last = token;
                guard.release().await.unwrap();
            }
            faults.heal().await;
        }
        println!("FIG on {nodes}: {beyond} of 32 tokens are larger than the one ahead");
        assert!(beyond > 0, "no token is larger than the one ahead");
        faults.finish().await;
    }
}

/// A client has reached only one node so far, so it does not know the clocks of a majority: a
/// proposal made then would be far smaller than tokens that the nodes have forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_first_token_waits_for_the_clocks_of_a_majority() {
    let mut quorum = Quorum::durable(3).await;
    let (now, down) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros(), 0b110);
    quorum.kill(down);
    let client = Locks::builder().quorum(quorum.urls()).options(options()).connect_lazily().unwrap();
    let lock = Kind::Mutex.lock(&client, "lazy");
    assert!(matches!(lock.try_lock().await, Err(Error::NoQuorum { .. })));
    quorum.restart(down).await;
    let guard = soon("the lock is granted", lock.lock()).await.unwrap();
    assert!(u128::from(guard.token()) > now, "{} at {now}", guard.token());
    guard.release().await.unwrap();
    drop((lock, client));
    quorum.finish().await;
}

/// A node is back after the client has failed to connect to it, and before its request would be
/// sent, since another one hangs: the client does not know the clocks of a majority.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_first_token_is_none_of_a_client_that_knows_one_clock() {
    let mut quorum = Quorum::durable(3).await;
    let (now, down, hanging) =
        (SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros(), 0b010, 0b100);
    quorum.kill(down);
    quorum.hang(hanging);
    let options = options().node_timeout(Duration::from_secs(4));
    let client = Locks::builder().quorum(quorum.urls()).options(options).connect_lazily().unwrap();
    let lock = Kind::Mutex.lock(&client, "back");
    let call = tokio::spawn(async move { lock.lock().await });
    let connected =
        || async { quorum.run::<String>(0b001, &["CLIENT", "LIST"]).await[0].lines().count() > 1 };
    eventually("the client has tried all nodes", connected).await;
    quorum.restart(down).await;
    let guard = soon("the lock is granted", call).await.unwrap().unwrap();
    assert!(u128::from(guard.token()) > now, "{} at {now}", guard.token());
    guard.release().await.unwrap();
    quorum.resume(hanging);
    drop(client);
    quorum.finish().await;
}

/// Four clients compete for a lock on nodes that are minutes to hours ahead. Each client's
/// proposals are exceeded by others', and each still acquires the lock.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_four_clients_progress_although_clocks_disagree() {
    let quorum = Quorum::start(5).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    for (place, minutes) in [(0, 3), (1, 30), (3, 300)] {
        let far = (now + minutes * 60_000_000).to_string();
        quorum.run::<String>(1 << place, &["SET", "{lock:far}:fence", &far, "PX", "86400000"]).await;
    }
    let last = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    let start = Stopwatch::start();
    for _ in 0..4 {
        let lock = quorum.lock(Kind::Mutex, "far", options()).await;
        let last = std::sync::Arc::clone(&last);
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = soon("the lock is granted", lock.lock()).await.unwrap();
                let before = last.swap(guard.token(), std::sync::atomic::Ordering::SeqCst);
                assert!(guard.token() > before, "{} after {before}", guard.token());
                is_released(guard.release().await);
            }
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    println!("FIG 80 acquires in {:?}", start.elapsed());
    assert!(start.undisturbed() < Duration::from_secs(10), "{start:?}");
    quorum.finish().await;
}

/// A node still has an earlier hold of the owner, which missed its release. It does not count as an
/// outer hold.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_past_a_stale_hold_of_the_same_owner() {
    let mut quorum = Quorum::durable(5).await;
    for round in 0..6 {
        let name = format!("stale-{round}");
        let (client, other) = (quorum.client(options()).await, quorum.client(options()).await);
        let owner = Owner::new();
        let first = client.reentrant(&name, &owner).unwrap().lock().await.unwrap();
        let key = format!("lock:{name}");
        eventually("all nodes have the lock", || async { quorum.having(0b11111, &key).await == 0b11111 })
            .await;
        quorum.kill(0b00001);
        first.release().await.unwrap();
        let lock = other.reentrant(&name, &Owner::new()).unwrap();
        let next = lock.with_owner(&Owner::new()).lock().await.unwrap();
        let token = next.lease().fencing_token();
        next.release().await.unwrap();
        quorum.kill(0b00110);
        quorum.restart(0b00001).await;
        let third = soon("the lock is granted", lock.with_owner(&owner).lock()).await.unwrap();
        assert!(
            third.lease().fencing_token() > token,
            "{:?} after {token:?}, round {round}",
            third.lease().fencing_token()
        );
        third.release().await.unwrap();
        quorum.restart(0b00110).await;
    }
}

/// A token more than a day ahead of a node's clock is taken for a mistake and refused. One node
/// with such a token is outvoted; with two of three, the calls return an error.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_tokens_more_than_a_day_ahead() {
    let quorum = Quorum::start(3).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let far = (now + 2 * 86_400_000_000).to_string();
    let client = quorum.client(options()).await;
    for kind in KINDS {
        let (lock, fence) = (kind.lock(&client, kind.name()), format!("{{lock:{}}}:fence", kind.name()));
        let mistakes = if kind == Kind::Read { 0b000 } else { 0b001 };
        quorum.run::<String>(mistakes, &["SET", &fence, &far, "PX", "86400000"]).await;
        let guard = soon("two nodes grant the lock", lock.lock()).await.unwrap();
        assert!(u128::from(guard.token()) < now + 86_400_000_000, "{kind:?}: {}", guard.token());
        guard.release().await.unwrap();
        quorum.run::<String>(0b011, &["SET", &fence, &far, "PX", "86400000"]).await;
        for outcome in [lock.try_lock().await.map(drop), soon("lock() returns", lock.lock()).await.map(drop)]
        {
            let Err(Error::Reply { reply, .. }) = &outcome else { panic!("{kind:?}: {outcome:?}") };
            assert!(reply.contains("-5"), "{kind:?}: {reply}");
        }
    }
    drop(client);
    quorum.finish().await;
}
