//! Fencing tokens through random majorities: nodes that hang, die and come back, clocks that disagree.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use redlatch::{Error, Fencing, Locks, Options, Owner, Renewal};

use super::{ALONE, KINDS, Quorum, options};
use crate::support::{AnyLock, Kind, Random, eventually, soon};

/// A minority that fails, and what it does.
struct Trouble {
    quorum: Quorum,
    random: Random,
    hanging: u32,
    dead: u32,
    restarts: u32,
}

impl Trouble {
    fn new(quorum: Quorum) -> Trouble {
        Trouble { quorum, random: Random::new(), hanging: 0, dead: 0, restarts: 0 }
    }

    fn below(&mut self, bound: u64) -> usize {
        usize::try_from(self.random.below(bound)).unwrap()
    }

    async fn ends(&mut self) {
        self.quorum.resume(std::mem::take(&mut self.hanging));
        self.restarts += self.dead.count_ones();
        self.quorum.restart(std::mem::take(&mut self.dead)).await;
    }

    /// Those that failed are back, and others fail: as many as may.
    async fn moves(&mut self, kills: bool) {
        self.ends().await;
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

    /// As if somebody whose clocks are ahead had been granted the lock by a majority, had given it back and gone: its
    /// nodes have accepted his token, and nobody else knows of it. All who come later propose less at first.
    async fn runs_ahead(&mut self, fence: &str, last: u64) -> u64 {
        let token = last + 1 + self.random.below(LEAD);
        let mut accepting = self.quorum.all() & !self.hanging & !self.dead;
        while accepting.count_ones() as usize > self.quorum.majority() {
            accepting &= !(1 << self.below(self.quorum.count() as u64));
        }
        self.quorum.run::<String>(accepting, &["SET", fence, &token.to_string(), "PX", "86400000"]).await;
        token
    }

    async fn finish(mut self) {
        self.ends().await;
        self.quorum.finish().await;
    }
}

/// By how much a token may be ahead of the one before, in microseconds.
const LEAD: u64 = 5_000_000;

/// How many tokens one majority grants.
const EACH: usize = 8;

/// Tokens of one lock after the other, for three clients by turns, one of which is replaced now and then. The clocks of all
/// of them would put tokens in order, whatever the nodes accept: so each majority has accepted one that is ahead.
async fn grow(trouble: &mut Trouble, kind: Kind, tokens: usize) {
    let name = format!("tokens-{}", kind.name());
    let mut locks: Vec<AnyLock> = Vec::new();
    for _ in 0..3 {
        locks.push(trouble.quorum.lock(kind, &name, options()).await);
    }
    let fence = format!("{{{}}}:fence", locks[0].key());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let mut last = u64::try_from(now).unwrap() + LEAD;
    for number in 0..tokens {
        if number % EACH == 0 {
            let restarts = (number / EACH).is_multiple_of(4);
            trouble.moves(restarts).await;
            if restarts {
                let place = trouble.below(3);
                locks[place] = trouble.quorum.lock(kind, &name, options()).await;
            }
            last = trouble.runs_ahead(&fence, last).await;
        }
        let place = trouble.below(3);
        let guard = soon("a token", locks[place].lock()).await.unwrap();
        assert!(guard.token() > last, "{kind:?}: {} after {last}, number {number}", guard.token());
        last = guard.token();
        let released = guard.release().await;
        assert!(released.is_ok(), "{released:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_through_random_majorities() {
    let mut trouble = Trouble::new(Quorum::durable(5).await);
    let start = Instant::now();
    for (kind, tokens) in [(Kind::Mutex, 1_000), (Kind::Reentrant, 75), (Kind::Write, 75)] {
        grow(&mut trouble, kind, tokens).await;
        println!("FIG {kind:?}: {tokens} tokens, {} restarts, {:?}", trouble.restarts, start.elapsed());
    }
    assert!(trouble.restarts > 5, "{} restarts", trouble.restarts);
    trouble.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn quorum_tokens_grow_through_many_random_majorities() {
    let mut trouble = Trouble::new(Quorum::durable(5).await);
    for kind in ALONE {
        grow(&mut trouble, kind, 3_000).await;
        println!("FIG {kind:?}: 3000 tokens, {} restarts", trouble.restarts);
    }
    trouble.finish().await;
}

/// Larger than those of all who wrote before, smaller than those of all who write after.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_read_tokens_lie_between_those_of_writers() {
    let mut trouble = Trouble::new(Quorum::durable(5).await);
    let mut clients: Vec<Locks> = Vec::new();
    for _ in 0..3 {
        clients.push(trouble.quorum.client(options()).await);
    }
    let mut last = 0;
    let mut distinct = 0;
    for round in 0..60 {
        let place = trouble.below(3);
        let writer = clients[place].rwlock("between").unwrap();
        let written = soon("a turn", writer.write()).await.unwrap();
        let token = written.lease().fencing_token().unwrap().get();
        assert!(token > last, "round {round}: wrote with {token} after {last}");
        last = token;
        written.release().await.unwrap();
        if round % 3 == 0 {
            // Between the writer and the readers, so that they meet other nodes than he did.
            trouble.moves(true).await;
        }
        let mut readers = Vec::new();
        for client in &clients {
            let lock = client.rwlock("between").unwrap();
            readers.push(tokio::spawn(async move { soon("let in", lock.read()).await.unwrap() }));
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
    println!("FIG {} restarts, {distinct} of 180 reads with a token of their own", trouble.restarts);
    drop(clients);
    trouble.finish().await;
}

/// Who holds it already has the token that he has, whichever nodes are there.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_nested_holds_keep_the_outer_token() {
    let mut quorum = Quorum::durable(5).await;
    for (outer_down, inner_down) in [(0b00011, 0), (0b11000, 0), (0, 0b10001), (0, 0b01100)] {
        let client = quorum.client(options()).await;
        let (one, two) = (client.reentrant("nested").unwrap(), client.rwlock("nested-rw").unwrap());
        let (owner, reader, writer) = (Owner::new(), Owner::new(), Owner::new());
        quorum.kill(outer_down);
        let outer = soon("outer", one.with_owner(&owner).lock()).await.unwrap();
        let read = soon("outer", two.with_owner(&reader).read()).await.unwrap();
        let write_too = client.rwlock("nested-write").unwrap();
        let write = soon("outer", write_too.with_owner(&writer).write()).await.unwrap();
        quorum.restart(outer_down).await;
        quorum.kill(inner_down);
        // Through another client, so that the owner is known to Redis only.
        let other = quorum.client(options()).await;
        let (lock, rw) = (other.reentrant("nested").unwrap(), other.rwlock("nested-rw").unwrap());
        let rw_too = other.rwlock("nested-write").unwrap();
        let inner = soon("inner", lock.with_owner(&owner).lock()).await.unwrap();
        let read_inner = soon("inner", rw.with_owner(&reader).read()).await.unwrap();
        let write_inner = soon("inner", rw_too.with_owner(&writer).write()).await.unwrap();
        // Where no majority remembers the outer hold, the inner one cannot know whether it still stands.
        let remembered = (0b11111_u32 & !outer_down & !inner_down).count_ones() >= 3;
        let (within, around) = (inner.lease().fencing_token(), outer.lease().fencing_token());
        assert!(if remembered { within == around } else { within > around }, "{within:?} in {around:?}");
        let (within, around) = (write_inner.lease().fencing_token(), write.lease().fencing_token());
        assert!(if remembered { within == around } else { within > around }, "{within:?} in {around:?}");
        assert!(read_inner.lease().fencing_token() >= read.lease().fencing_token());
        let (before, read_before) = (inner.lease().fencing_token(), read_inner.lease().fencing_token());
        assert!(lock.with_owner(&Owner::new()).try_lock().await.unwrap().is_none(), "held twice, by one");
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
        let next = soon("free", lock.with_owner(&Owner::new()).lock()).await.unwrap();
        assert!(next.lease().fencing_token() > before);
        let next_writer = soon("free", rw.write()).await.unwrap();
        assert!(next_writer.lease().fencing_token() > read_before);
        drop((next, next_writer));
        other.settled().await;
    }
    quorum.finish().await;
}

/// A majority has accepted a token that is ahead of all clocks: what the client proposes next is
/// larger, and takes one request. By its clock alone, each grant would take two.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_first_proposals_are_larger_than_what_was_accepted() {
    let quorum = Quorum::start(3).await;
    // Renewals would be counted.
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
        eventually("free", || async { quorum.having(0b111, lock.key()).await == 0 }).await;
        let before = scripts_run(&quorum).await;
        let second = quorum.take(&lock).await;
        assert!(second.token() > token, "{kind:?}: {} after {token}", second.token());
        let requests: Vec<u64> =
            scripts_run(&quorum).await.iter().zip(before).map(|(now, before)| now - before).collect();
        assert_eq!(requests, [1, 1, 1], "{kind:?}");
        second.release().await.unwrap();
    }
    drop(client);
    quorum.finish().await;
}

async fn scripts_run(quorum: &Quorum) -> Vec<u64> {
    let mut counts = Vec::new();
    for server in &quorum.servers {
        counts.push(server.scripts_run().await);
    }
    counts
}

/// Some nodes have accepted what is ten minutes ahead of the others' clocks. New clients know nothing of it.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_although_clocks_disagree() {
    const AHEAD: u64 = 600_000_000;
    for (nodes, ahead) in [(3, 0b001), (5, 0b00011)] {
        let mut trouble = Trouble::new(Quorum::durable(nodes).await);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
        let far = u64::try_from(now).unwrap() + AHEAD;
        for kind in KINDS {
            let fence = format!("{{lock:{}}}:fence", kind.name());
            trouble.quorum.run::<String>(ahead, &["SET", &fence, &far.to_string(), "PX", "86400000"]).await;
        }
        let (mut last, mut beyond) = ([0; 4], 0);
        for number in 0..8 {
            // First without one that is right: what is ahead is needed.
            let down = match number {
                0 => trouble.quorum.all() & !ahead & !(trouble.quorum.all() >> 1),
                _ => 1 << trouble.below(nodes as u64) | 1 << trouble.below(if nodes == 5 { 5 } else { 1 }),
            };
            let down = if nodes == 3 { down & down.wrapping_neg() } else { down };
            trouble.quorum.hang(down);
            trouble.hanging = down;
            let client = trouble.quorum.client(options()).await;
            for (kind, last) in KINDS.into_iter().zip(&mut last) {
                let guard = soon("a token", kind.lock(&client, kind.name()).lock()).await.unwrap();
                let token = guard.token();
                // Of two readers, none excludes the other: they may have one token.
                let grows = if kind == Kind::Read { token >= *last } else { token > *last };
                assert!(grows, "{kind:?} on {nodes}, {down:b} down: {token} after {last}");
                beyond += usize::from(token > far);
                *last = token;
                guard.release().await.unwrap();
            }
            trouble.ends().await;
        }
        println!("FIG on {nodes}: {beyond} of 32 beyond what was ahead");
        assert!(beyond > 0, "the nodes ahead were needed, and asked for more");
        trouble.finish().await;
    }
}

/// Several who race for a lock of which some nodes are far ahead: each is outbid by others, and still served.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_serves_many_although_clocks_disagree() {
    let quorum = Quorum::start(5).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    for (place, minutes) in [(0, 3), (1, 30), (3, 300)] {
        let far = (now + minutes * 60_000_000).to_string();
        quorum.run::<String>(1 << place, &["SET", "{lock:far}:fence", &far, "PX", "86400000"]).await;
    }
    let last = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    let start = Instant::now();
    for _ in 0..4 {
        let lock = quorum.lock(Kind::Mutex, "far", options()).await;
        let last = std::sync::Arc::clone(&last);
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = soon("a turn", lock.lock()).await.unwrap();
                let before = last.swap(guard.token(), std::sync::atomic::Ordering::SeqCst);
                assert!(guard.token() > before, "{} after {before}", guard.token());
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome.unwrap();
    }
    println!("FIG 80 turns in {:?}", start.elapsed());
    assert!(start.elapsed() < std::time::Duration::from_secs(10), "{:?}", start.elapsed());
    quorum.finish().await;
}

/// What a node still has of an earlier hold is not taken for an outer one.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_past_a_stale_hold_of_the_same_owner() {
    let mut quorum = Quorum::durable(5).await;
    for round in 0..6 {
        let name = format!("stale-{round}");
        let (client, other) = (quorum.client(options()).await, quorum.client(options()).await);
        let owner = Owner::new();
        let first = client.reentrant(&name).unwrap().with_owner(&owner).lock().await.unwrap();
        let key = format!("lock:{name}");
        eventually("all have it", || async { quorum.having(0b11111, &key).await == 0b11111 }).await;
        quorum.kill(0b00001);
        first.release().await.unwrap();
        let lock = other.reentrant(&name).unwrap();
        let next = lock.with_owner(&Owner::new()).lock().await.unwrap();
        let token = next.lease().fencing_token();
        next.release().await.unwrap();
        quorum.kill(0b00110);
        quorum.restart(0b00001).await;
        let third = soon("granted", lock.with_owner(&owner).lock()).await.unwrap();
        assert!(
            third.lease().fencing_token() > token,
            "{:?} after {token:?}, round {round}",
            third.lease().fencing_token()
        );
        third.release().await.unwrap();
        quorum.restart(0b00110).await;
    }
}

/// Within a hold without a token, one with a token gets a new one: no node goes back behind what it has accepted, however
/// low the first proposal of a client is that knows nothing.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_tokens_grow_past_those_nested_in_a_hold_without_one() {
    let quorum = Quorum::start(3).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let far = u64::try_from(now).unwrap() + 600_000_000;
    quorum.run::<String>(0b111, &["SET", "{lock:within}:fence", &far.to_string(), "PX", "86400000"]).await;
    let owner = Owner::new();
    let mut last = far;
    for round in 0..3 {
        let without = quorum.client(options().fencing(Fencing::Off)).await.rwlock("within").unwrap();
        let outer = soon("outer", without.with_owner(&owner).write()).await.unwrap();
        assert_eq!(outer.lease().fencing_token(), None);
        let lock = quorum.client(options()).await.rwlock("within").unwrap();
        let inner = soon("inner", lock.with_owner(&owner).write()).await.unwrap();
        let token = inner.lease().fencing_token().unwrap().get();
        assert!(token > last, "within: {token} after {last}, round {round}");
        inner.release().await.unwrap();
        outer.release().await.unwrap();
        let next = quorum.lock(Kind::Write, "within", options()).await;
        let next = soon("free", next.lock()).await.unwrap();
        assert!(next.token() > token, "after it: {} after {token}, round {round}", next.token());
        last = next.token();
        next.release().await.unwrap();
    }
    quorum.finish().await;
}

/// What is more than a day ahead of a node's clock is a mistake, which it does not take over. One node that has made it
/// is outvoted; if it takes more than that node, the caller is told.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_tokens_of_another_day() {
    let quorum = Quorum::start(3).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let far = (now + 2 * 86_400_000_000).to_string();
    let client = quorum.client(options()).await;
    for kind in KINDS {
        let (lock, fence) = (kind.lock(&client, kind.name()), format!("{{lock:{}}}:fence", kind.name()));
        let mistakes = if kind == Kind::Read { 0b000 } else { 0b001 };
        quorum.run::<String>(mistakes, &["SET", &fence, &far, "PX", "86400000"]).await;
        let guard = soon("granted by two", lock.lock()).await.unwrap();
        assert!(u128::from(guard.token()) < now + 86_400_000_000, "{kind:?}: {}", guard.token());
        guard.release().await.unwrap();
        quorum.run::<String>(0b011, &["SET", &fence, &far, "PX", "86400000"]).await;
        for outcome in [lock.try_lock().await.map(drop), soon("told", lock.lock()).await.map(drop)] {
            let Err(Error::Reply { reply, .. }) = &outcome else { panic!("{kind:?}: {outcome:?}") };
            assert!(reply.contains("-5"), "{kind:?}: {reply}");
        }
    }
    drop(client);
    quorum.finish().await;
}
