//! A master that dies, hangs, or is demoted, and the sentinels that tell of the next one.

use std::error::Error as _;
use std::time::Duration;

use redis::{FromRedisValue, RedisResult};
use redlatch::{Error, Locks, Name, Options};
use tokio::time::{Instant, sleep};

use crate::support::failover::{Contended, KINDS, NODE_TIMEOUT, SLACK, caught_up, cut_off, fail, told, urls};
use crate::support::{AnyLock, Deployment, Kind, LockState, Oracle, Server, Topology, eventually, soon};

pub(super) const MASTER: &str = "mymaster";

/// How often a subscription is looked after.
const HEARTBEAT: Duration = Duration::from_secs(5);

pub(super) async fn open(deployment: &Deployment, options: Options) -> Locks {
    Locks::builder()
        .sentinel(urls("127.0.0.1", deployment.sentinels()), MASTER)
        .options(options)
        .connect()
        .await
        .unwrap()
}

/// The master is killed, and replaced by a replica that has missed the last writes.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_a_killed_master_is_replaced() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.allow_failover().await;
    let options = told().ttl(Duration::from_secs(10));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let survivors = Contended::of_each_kind(&deployment, "", &locks, &others).await;
    let later: Vec<AnyLock> =
        KINDS.iter().map(|kind| kind.lock(&locks, &format!("later-{}", kind.name()))).collect();
    for lock in &later {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let replicas: Vec<&Server> = deployment.replicas().iter().collect();
    cut_off(&deployment.masters()[0], &replicas).await;
    let mut lost = Vec::new();
    for lock in &later {
        for _ in 0..5 {
            lock.lock().await.unwrap().release().await.unwrap();
        }
        lost.push(lock.lock().await.unwrap());
    }
    let start = Instant::now();
    deployment.masters_mut()[0].kill();
    deployment.replicas().iter().for_each(Server::resume);
    let took = fail(later.iter().map(AnyLock::for_rival)).await;
    println!("requests to a dead master fail after {took:?}");
    assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
    deployment.has_failed_over(0).await;
    println!("replaced after {:?}", start.elapsed());
    let replaced = Instant::now();
    for (lock, old) in later.iter().zip(&lost) {
        // Patience may have been over already: it counts from when the master was gone.
        let rival = lock.for_rival();
        eventually("the same client goes on", || async { rival.try_lock().await.is_ok() }).await;
        let next = soon("taken again", rival.lock()).await.unwrap();
        assert!(next.token() > old.token(), "{next:?} after {old:?}");
        next.release().await.unwrap();
    }
    println!("goes on {:?} later", replaced.elapsed());
    assert!(replaced.elapsed() < 2 * NODE_TIMEOUT + SLACK, "{:?}", replaced.elapsed());
    for it in &survivors {
        eventually("the other as well", || async { it.rival.try_lock().await.is_ok() }).await;
        it.assert_held(&deployment).await;
    }
    for old in lost {
        soon("the holder learns", old.lease().lost()).await;
        println!("lost after {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(8), "told, before its deadline: {:?}", start.elapsed());
        assert!(matches!(old.release().await, Err(Error::Lost { .. })));
    }
    // Renewed by the new master: none would last for so long.
    sleep(Duration::from_millis(10_500).saturating_sub(start.elapsed())).await;
    for it in survivors {
        it.assert_held(&deployment).await;
        let took = it.hand_over(&deployment).await;
        println!("handed over after {took:?}");
        assert!(took < Duration::from_millis(500), "{took:?}");
    }
    drop((later, locks, others));
    deployment.masters()[0].assert_nothing_left().await;
}

/// The master is demoted and keeps all connections: it answers what it may not do with READONLY, and passes on the
/// messages of the new one.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_a_demoted_master_is_left() {
    a_demoted_master_is_left(told()).await;
}

/// The same where replicas are waited for, on connections that are made in pairs.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_a_demoted_master_is_left_by_who_waits_for_replicas() {
    a_demoted_master_is_left(told().replicas(1, Duration::from_millis(500))).await;
}

async fn a_demoted_master_is_left(options: Options) {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let options = options.ttl(Duration::from_secs(6));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let mut contended = Contended::of_each_kind(&deployment, "", &locks, &others).await;
    let told_later = contended.split_off(2);
    demote(&deployment).await;
    deployment.has_failed_over(0).await;
    let start = Instant::now();
    let next: Vec<AnyLock> =
        KINDS.iter().map(|kind| kind.lock(&locks, &format!("next-{}", kind.name()))).collect();
    for lock in &next {
        soon("the same client goes on", lock.lock()).await.unwrap().release().await.unwrap();
    }
    println!("goes on after {:?}", start.elapsed());
    assert!(start.elapsed() < NODE_TIMEOUT, "{:?}", start.elapsed());
    // The subscription follows the first request that finds out, long before anybody looks after it.
    let found = KINDS[0].lock(&others, "found");
    soon("the other client goes on", found.lock()).await.unwrap().release().await.unwrap();
    let (heir, since) = (&deployment.masters()[0], Instant::now());
    eventually("the subscription has moved", || async { heir.subscribers().await.len() == 1 }).await;
    println!("listens there after {:?}", since.elapsed());
    assert!(since.elapsed() < HEARTBEAT / 5, "{:?}", since.elapsed());
    // Whoever waits looks now and then, and after that is told.
    for it in contended {
        eventually("it goes on as well", || async { it.rival.try_lock().await.is_ok() }).await;
        it.assert_held(&deployment).await;
        println!("handed over at once after {:?}", it.hand_over(&deployment).await);
    }
    eventually("and not here", || async { deployment.subscriptions().await == 1 }).await;
    sleep(Duration::from_millis(6_500).saturating_sub(start.elapsed())).await;
    for it in told_later {
        it.assert_held(&deployment).await;
        eventually("it is queued", || async { deployment.waiters(&it.lock).await == 1 }).await;
        let took = it.hand_over(&deployment).await;
        println!("told after {took:?}");
        assert!(took < Duration::from_millis(500), "{took:?}");
    }
    drop((next, found, locks, others));
    deployment.assert_nothing_left().await;
}

/// Requests lead to the new master already, and the subscription still to the old one, which is cut off and goes on
/// granting: what it says is not believed.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_messages_of_an_old_master_are_not_trusted() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    // Connections in pairs take longest to be told of the new master; what is granted waits for no replica.
    let pairs = open(&deployment, told().replicas(1, Duration::from_millis(500))).await;
    let locks = pairs.with_options(told().replicas(0, Duration::from_millis(500))).unwrap();
    let [old, new, _] = [&deployment.masters()[0], &deployment.replicas()[0], &deployment.replicas()[1]];
    let cut_off = old.locks().await;
    let held = cut_off.mutex("a").unwrap().lock().await.unwrap();
    let lock = locks.mutex("a").unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await });
    let queued = async |server: &Server| server.waiters("{lock:a}:waiters").await == 1;
    eventually("it queues", || queued(old)).await;
    new.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    new.run::<i64>(&["DEL", "lock:a", "{lock:a}:waiters"]).await;
    let other = new.locks().await;
    let theirs = other.mutex("a").unwrap().lock().await.unwrap();
    let port = new.port().to_string();
    for sentinel in deployment.sentinels() {
        sentinel.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
        sentinel.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
    }
    old.kill_connections().await; // but for the subscription
    eventually("it queues at the new master", || queued(new)).await;
    held.release().await.unwrap();
    let granted = tokio::time::timeout(Duration::from_secs(1), waiting).await;
    assert!(granted.is_err(), "{granted:?} beside {theirs:?}");
}

/// As an operator does it, without any connection being cut, as sentinels do.
async fn demote(deployment: &Deployment) {
    let (master, heir) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let port = heir.port().to_string();
    let replicas: Vec<&Server> = deployment.replicas().iter().collect();
    cut_off(master, &replicas).await;
    replicas.iter().for_each(|replica| replica.resume());
    heir.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    for server in [master, &deployment.replicas()[1]] {
        server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    }
    tell_sentinels_of(heir, deployment).await;
}

pub(super) async fn tell_sentinels_of(heir: &Server, deployment: &Deployment) {
    let port = heir.port().to_string();
    for sentinel in deployment.sentinels() {
        sentinel.run::<()>(&["SENTINEL", "REMOVE", MASTER]).await;
        sentinel.run::<()>(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await;
    }
}

/// The master is cut off from its replicas, but not from the clients, and takes itself for the master: it answers what it
/// may not do with NOREPLICAS.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_a_master_without_replicas_is_left() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let options = told().ttl(Duration::from_secs(10));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contended::of_each_kind(&deployment, "", &locks, &others).await;
    let (master, heir) = (&deployment.masters()[0], &deployment.replicas()[0]);
    caught_up(master, deployment.replicas().len()).await;
    heir.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    let port = heir.port().to_string();
    deployment.replicas()[1].run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    master.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    eventually("it refuses to write", || async {
        let outcome = master.try_run::<()>(&["SET", "written", "1", "PX", "1"]).await;
        outcome.is_err_and(|error| error.code() == Some("NOREPLICAS"))
    })
    .await;
    tell_sentinels_of(heir, &deployment).await;
    let start = Instant::now();
    for locks in [&locks, &others] {
        for kind in KINDS {
            let lock = kind.lock(locks, &format!("next-{}", kind.name()));
            soon("the same client goes on", lock.lock()).await.unwrap().release().await.unwrap();
        }
    }
    println!("goes on after {:?}", start.elapsed());
    assert!(start.elapsed() < 2 * NODE_TIMEOUT, "{:?}", start.elapsed());
    for it in contended {
        it.assert_held(heir).await;
        eventually("it is queued", || async { heir.queued_for(&it.lock).await == 1 }).await;
        println!("handed over after {:?}", it.hand_over(heir).await);
    }
    drop((locks, others));
    heir.assert_nothing_left().await;
}

/// The master hangs, with all connections to it; once it goes on, it takes itself for the master for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_a_hung_master_is_replaced() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    deployment.allow_failover().await;
    let options = told().ttl(Duration::from_secs(10));
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contended::of_each_kind(&deployment, "", &locks, &others).await;
    caught_up(&deployment.masters()[0], deployment.replicas().len()).await;
    let start = Instant::now();
    deployment.masters()[0].pause();
    let took = fail(KINDS.map(|kind| kind.lock(&locks, &format!("hung-{}", kind.name())))).await;
    println!("requests to a hung master fail after {took:?}");
    assert!(took < 2 * NODE_TIMEOUT + SLACK, "{took:?}");
    deployment.has_failed_over(0).await;
    println!("replaced after {:?}", start.elapsed());
    let replaced = Instant::now();
    for it in &contended {
        eventually("both go on", || async {
            it.lock.for_rival().try_lock().await.is_ok() && it.rival.try_lock().await.is_ok()
        })
        .await;
    }
    println!("goes on {:?} later", replaced.elapsed());
    assert!(replaced.elapsed() < 4 * NODE_TIMEOUT + SLACK, "{:?}", replaced.elapsed());
    deployment.replicas().iter().for_each(Server::resume);
    sleep(Duration::from_millis(10_500).saturating_sub(start.elapsed())).await;
    for it in contended {
        it.assert_held(&deployment).await;
        println!("handed over after {:?}", it.hand_over(&deployment).await);
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}

/// Sentinels that hang or are dead, and a name that none of them knows.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_opens_or_fails_in_time() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let sentinels = urls("127.0.0.1", deployment.sentinels());
    let opens = async |name: &str| {
        let start = Instant::now();
        let opened = Locks::builder().sentinel(&sentinels, name).connect().await;
        let took = start.elapsed();
        println!("{:?} after {took:?}", opened.as_ref().map(drop));
        assert!(took < NODE_TIMEOUT + SLACK, "{took:?}");
        opened
    };
    let outcome = opens("nobody").await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    for hung in 0..3 {
        deployment.sentinels()[hung].pause();
        let locks = opens(MASTER).await.unwrap();
        // Nor does it keep a connection from being made again.
        deployment.kill_connections().await;
        let start = Instant::now();
        for kind in KINDS {
            kind.lock(&locks, kind.name()).lock().await.unwrap().release().await.unwrap();
        }
        println!("goes on after {:?}", start.elapsed());
        assert!(start.elapsed() < NODE_TIMEOUT, "{:?}", start.elapsed());
        deployment.sentinels()[hung].resume();
    }
    deployment.sentinels().iter().for_each(Server::pause);
    let error = opens(MASTER).await.unwrap_err();
    assert!(error.source().unwrap().to_string().ends_with("timed out"), "{error:?}");
    deployment.sentinels().iter().for_each(Server::resume);
    deployment.sentinels_mut()[0].kill();
    deployment.sentinels()[1].pause();
    opens(MASTER).await.unwrap();
    deployment.sentinels_mut()[2].kill();
    let outcome = opens(MASTER).await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    deployment.sentinels_mut()[1].kill();
    let outcome = opens(MASTER).await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
}

/// The master and the sentinel want to be shown different passwords, and the locks are in a database of their own.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_passwords_and_databases_are_kept() {
    let (mut master, replica) = (Server::start().await, Server::start().await);
    for server in [&master, &replica] {
        server.run::<()>(&["CONFIG", "SET", "masterauth", "secret"]).await;
    }
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    for server in [&replica, &master] {
        server.run::<()>(&["CONFIG", "SET", "requirepass", "secret"]).await;
    }
    let configuration = format!(
        "sentinel monitor {MASTER} 127.0.0.1 {} 1\nsentinel auth-pass {MASTER} secret\n\
         sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 3000\n",
        master.port(),
    );
    let sentinel = loop {
        // Unless somebody else was faster.
        if let Some(sentinel) = Server::start_sentinel(crate::support::free_port(), &configuration).await {
            break sentinel;
        }
    };
    sentinel.run::<()>(&["ACL", "SETUSER", "default", "resetpass", ">other"]).await;
    let by_sentinel = format!("redis://:other@127.0.0.1:{}/", sentinel.port());
    let by = |server: &Server| format!("redis://:secret@127.0.0.1:{}/3", server.port());
    eventually("the replica follows, and the sentinel sees it", || async {
        let info = ask::<String>(&by(&master), &["INFO", "replication"]).await.unwrap();
        let seen = ask::<Vec<std::collections::HashMap<String, String>>>(
            &by_sentinel,
            &["SENTINEL", "REPLICAS", MASTER],
        );
        let seen = seen.await.unwrap();
        info.contains("state=online")
            && seen.iter().any(|one| one["flags"] == "slave" && one["master-link-status"] == "ok")
    })
    .await;
    let start = Instant::now();
    let wrong = [
        (format!("redis://127.0.0.1:{}/", sentinel.port()), format!("redis://:secret@{MASTER}/3")),
        (by_sentinel.clone(), MASTER.to_owned()),
        (by_sentinel.clone(), format!("redis://:other@{MASTER}/3")),
    ];
    for (sentinel, master) in wrong {
        let outcome = Locks::builder().sentinel([sentinel], &master).connect().await;
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    }
    assert!(start.elapsed() < NODE_TIMEOUT, "{:?}", start.elapsed());
    let name = format!("redis://:secret@{MASTER}/3");
    let options = told().ttl(Duration::from_secs(10));
    let locks =
        Locks::builder().sentinel([&by_sentinel], &name).options(options.clone()).connect().await.unwrap();
    let others = Locks::builder().sentinel([&by_sentinel], &name).options(options).connect().await.unwrap();
    let contended = Contended::of_each_kind(&Database(by(&master)), "", &locks, &others).await;
    for it in &contended {
        assert_eq!(ask::<u64>(&by(&master), &["EXISTS", it.lock.key()]).await.unwrap(), 1, "in database 3");
        eventually("replicated", || async {
            ask::<u64>(&by(&replica), &["EXISTS", it.lock.key()]).await.unwrap() == 1
        })
        .await;
    }
    master.kill();
    eventually("the replica takes over", || async {
        // Whoever is promoted cuts all connections.
        let role = ask::<redis::Value>(&by(&replica), &["ROLE"]).await;
        role.is_ok_and(|role| format!("{role:?}").contains("master"))
    })
    .await;
    let promoted = Database(by(&replica));
    for it in contended {
        eventually("the same clients go on", || async {
            it.lock.for_rival().try_lock().await.is_ok() && it.rival.try_lock().await.is_ok()
        })
        .await;
        it.assert_held(&promoted).await;
        it.hand_over(&promoted).await;
    }
    assert_eq!(
        ask::<u64>(&by(&replica), &["EXISTS", "{lock:mutex}:fence"]).await.unwrap(),
        1,
        "in database 3"
    );
    let lock = Kind::Mutex.lock(&locks, "last");
    lock.lock().await.unwrap().release().await.unwrap();
}

/// A database that a URL leads to.
struct Database(String);

impl Oracle for Database {
    async fn lock_state(&self, name: &Name) -> LockState {
        let client = redis::Client::open(self.0.as_str()).unwrap();
        LockState::on(&mut client.get_multiplexed_async_connection().await.unwrap(), name.key()).await
    }
}

async fn ask<T: FromRedisValue>(url: &str, words: &[&str]) -> RedisResult<T> {
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await
}
