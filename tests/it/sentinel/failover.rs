//! Sentinel failovers: masters that die, hang or are demoted, and sentinels that name the next one.

use std::error::Error as _;
use std::time::Duration;

use redis::{FromRedisValue, RedisResult};
use redlatch::{Error, LeaseEnd, Locks, Name, Options};

use super::{MASTER, monitor, open};
use crate::support::events::{TRACED, listen};
use crate::support::failover::{
    Contention, Ends, NODE_TIMEOUT, SLACK, caught_up, cut_off, fail_all, urls, was_one_notified,
};
use crate::support::{
    AnyLock, Deployment, KINDS, Kind, LockState, Oracle, Server, Stopwatch, Topology, connect, eventually,
    notified_only, soon,
};

/// How often a client checks its subscription.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The TTL of leases that must outlast an outage. If the sentinels do not agree, an election is
/// repeated after seconds, and then again.
const LONG: Duration = Duration::from_secs(600);

/// The master is killed, and replaced by a replica that missed its last writes.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_continue_after_the_master_was_killed() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    listen();
    let names = format!("{TRACED}survivor-");
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let survivors = Contention::of_each_kind(&deployment, &names, &locks, &others).await;
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
    let start = Stopwatch::start();
    deployment.masters_mut()[0].kill();
    let ends = Ends::of(survivors.iter().map(|held| &held.guard));
    deployment.replicas().iter().for_each(Server::resume);
    let took = fail_all(later.iter().map(AnyLock::for_rival)).await;
    println!("requests to a dead master fail after {took:?}");
    assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
    deployment.allow_failover().await;
    deployment.has_failed_over(0).await;
    println!("replaced after {:?}", start.elapsed());
    let replaced = Stopwatch::start();
    for (lock, old) in later.iter().zip(&lost) {
        // A first call may still fail: its outage limit counts from the death of the master.
        let rival = lock.for_rival();
        eventually("the same client is served again", || async { rival.try_lock().await.is_ok() }).await;
        let next = soon("the lock is acquired again", rival.lock()).await.unwrap();
        assert!(next.token() > old.token(), "{next:?} after {old:?}");
        next.release().await.unwrap();
    }
    println!("served again {:?} later", replaced.elapsed());
    assert!(replaced.undisturbed() < 2 * NODE_TIMEOUT + SLACK, "{replaced:?}");
    for held in &survivors {
        held.assert_held(&deployment).await;
    }
    for old in lost {
        let end = soon("the holder is notified of the loss", old.lease().lost()).await;
        println!("lost after {:?}", start.elapsed());
        assert_eq!(end, LeaseEnd::Revoked);
        assert!(matches!(old.release().await, Err(Error::Lost { .. })));
    }
    ends.are_extended().await; // by the new master
    deployment.find_master().await;
    let master = &deployment.masters()[0];
    for held in survivors {
        held.assert_held(&deployment).await;
        held.is_notified_at(master, &[master]).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    assert!(was_one_notified(&names), "all waiters have polled");
    drop((later, locks, others));
    deployment.masters()[0].assert_nothing_left().await;
}

/// The master is demoted and keeps all connections. It refuses writes with READONLY, and forwards
/// the messages of the new master.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_leave_a_demoted_master() {
    leave_a_demoted_master(notified_only(), "demoted-").await;
}

/// The same for a client that waits for replicas, and so makes its connections in pairs.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_with_replicas_leave_a_demoted_master() {
    leave_a_demoted_master(notified_only().replicas(1, Duration::from_millis(500)), "demoted-pairs-").await;
}

async fn leave_a_demoted_master(options: Options, names: &str) {
    listen();
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let options = options.ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, "", &locks, &others).await;
    let names = format!("{TRACED}{names}");
    let notified_later = Contention::of_each_kind(&deployment, &names, &locks, &others).await;
    let ends = Ends::of(notified_later.iter().map(|held| &held.guard));
    demote(&deployment).await;
    deployment.has_failed_over(0).await;
    let start = Stopwatch::start();
    let next: Vec<AnyLock> =
        KINDS.iter().map(|kind| kind.lock(&locks, &format!("next-{}", kind.name()))).collect();
    for lock in &next {
        soon("the same client is served again", lock.lock()).await.unwrap().release().await.unwrap();
    }
    println!("served again after {:?}", start.elapsed());
    assert!(start.undisturbed() < NODE_TIMEOUT, "{start:?}");
    // The subscription moves with the first request that is refused, long before its next check.
    let refused_first = KINDS[0].lock(&others, "refused-first");
    soon("the other client is served again", refused_first.lock()).await.unwrap().release().await.unwrap();
    let (promoted, since) = (&deployment.masters()[0], Stopwatch::start());
    let mut polls = 0;
    eventually("the subscription has moved", || {
        polls += 1;
        async { promoted.subscribers().await.len() == 1 }
    })
    .await;
    println!("subscribed there after {:?}", since.elapsed());
    // A poll takes 5 ms or more. While the server stands still, there is none.
    assert!(Duration::from_millis(5) * polls < HEARTBEAT / 5, "{polls} polls in {since:?}");
    // The waiters poll now and then; after that they are notified.
    for held in contended {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    eventually("the old subscription has ended", || async { deployment.subscriptions().await == 1 }).await;
    ends.are_extended().await; // by the new master
    for held in notified_later {
        held.assert_held(&deployment).await;
        held.is_notified_at(promoted, &[promoted]).await;
        println!("notified after {:?}", held.grant_to_waiter(&deployment).await);
    }
    assert!(was_one_notified(&names), "all waiters have polled");
    drop((next, refused_first, locks, others));
    deployment.assert_nothing_left().await;
}

/// A client sends requests to the new master and is still subscribed to the old one, which is cut
/// off and continues to grant locks. Its messages are not trusted.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_messages_of_an_old_master_are_not_trusted_by_waiters() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    // With replicas, connections are made in pairs, which takes longest to find the new master. The
    // grants themselves wait for no replica.
    let pairs = open(&deployment, notified_only().replicas(1, Duration::from_millis(500))).await;
    let locks = pairs.with_options(pairs.options().clone().replicas(0, Duration::from_millis(500))).unwrap();
    let [old, new, _] = [&deployment.masters()[0], &deployment.replicas()[0], &deployment.replicas()[1]];
    let cut_off = old.locks().await;
    let held = cut_off.mutex("a").unwrap().lock().await.unwrap();
    let lock = locks.mutex("a").unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await });
    let queued = async |server: &Server| server.waiters("{lock:a}:waiters").await == 1;
    eventually("the waiter queues", || queued(old)).await;
    new.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    new.run::<i64>(&["DEL", "lock:a", "{lock:a}:waiters"]).await;
    let other = new.locks().await;
    let theirs = other.mutex("a").unwrap().lock().await.unwrap();
    monitor(new, deployment.sentinels()).await;
    old.kill_connections().await; // all but the subscription
    eventually("the waiter queues at the new master", || queued(new)).await;
    held.release().await.unwrap();
    let granted = tokio::time::timeout(Duration::from_secs(1), waiting).await;
    assert!(granted.is_err(), "{granted:?} beside {theirs:?}");
}

/// Promotes a replica as an operator does: unlike a sentinel, without cutting connections.
async fn demote(deployment: &Deployment) {
    let (master, promoted) = (&deployment.masters()[0], &deployment.replicas()[0]);
    let port = promoted.port().to_string();
    let replicas: Vec<&Server> = deployment.replicas().iter().collect();
    cut_off(master, &replicas).await;
    replicas.iter().for_each(|replica| replica.resume());
    promoted.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    for server in [master, &deployment.replicas()[1]] {
        server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    }
    monitor(promoted, deployment.sentinels()).await;
}

/// The master is cut off from its replicas but not from its clients, and does not know that it was
/// replaced. It refuses writes with NOREPLICAS.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_leave_a_master_without_replicas() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, "", &locks, &others).await;
    let (master, promoted) = (&deployment.masters()[0], &deployment.replicas()[0]);
    caught_up(master, deployment.replicas().len()).await;
    promoted.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    let port = promoted.port().to_string();
    deployment.replicas()[1].run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    master.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    eventually("the old master refuses writes", || async {
        let outcome = master.try_run::<()>(&["SET", "written", "1", "PX", "1"]).await;
        outcome.is_err_and(|error| error.code() == Some("NOREPLICAS"))
    })
    .await;
    monitor(promoted, deployment.sentinels()).await;
    let start = Stopwatch::start();
    for locks in [&locks, &others] {
        for kind in KINDS {
            let lock = kind.lock(locks, &format!("next-{}", kind.name()));
            soon("the same client is served again", lock.lock()).await.unwrap().release().await.unwrap();
        }
    }
    println!("served again after {:?}", start.elapsed());
    assert!(start.undisturbed() < 2 * NODE_TIMEOUT, "{start:?}");
    for held in contended {
        held.assert_held(promoted).await;
        eventually("the rival is queued", || async { promoted.queued_for(&held.lock).await == 1 }).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(promoted).await);
    }
    drop((locks, others));
    promoted.assert_nothing_left().await;
}

/// The master hangs with all its connections. Once resumed, it acts as a master for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_clients_continue_after_a_hung_master_was_replaced() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let options = notified_only().ttl(LONG);
    let (locks, others) = (open(&deployment, options.clone()).await, open(&deployment, options).await);
    let contended = Contention::of_each_kind(&deployment, "", &locks, &others).await;
    caught_up(&deployment.masters()[0], deployment.replicas().len()).await;
    let start = Stopwatch::start();
    deployment.masters()[0].pause();
    let ends = Ends::of(contended.iter().map(|held| &held.guard));
    let took = fail_all(KINDS.map(|kind| kind.lock(&locks, &format!("hung-{}", kind.name())))).await;
    println!("requests to a hung master fail after {took:?}");
    assert!(took.undisturbed() < 2 * NODE_TIMEOUT + SLACK, "{took:?}");
    deployment.allow_failover().await;
    deployment.has_failed_over(0).await;
    println!("replaced after {:?}", start.elapsed());
    let replaced = Stopwatch::start();
    for held in &contended {
        eventually("both clients are served again", || async {
            held.lock.for_rival().try_lock().await.is_ok() && held.rival.try_lock().await.is_ok()
        })
        .await;
    }
    println!("served again {:?} later", replaced.elapsed());
    assert!(replaced.undisturbed() < 4 * NODE_TIMEOUT + SLACK, "{replaced:?}");
    deployment.replicas().iter().for_each(Server::resume);
    ends.are_extended().await; // by the new master
    for held in contended {
        held.assert_held(&deployment).await;
        println!("granted to the waiter after {:?}", held.grant_to_waiter(&deployment).await);
    }
    drop((locks, others));
    deployment.assert_nothing_left().await;
}

/// Connecting beside sentinels that hang or are dead, and with a name that no sentinel knows.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_connect_returns_in_time_whatever_sentinels_do() {
    let mut deployment = Deployment::start(Topology::Sentinel).await;
    let sentinels = urls("127.0.0.1", deployment.sentinels());
    let opens = async |name: &str| {
        let start = Stopwatch::start();
        let opened = Locks::builder().sentinel(&sentinels, name).connect().await;
        let took = start.stop();
        println!("{:?} after {took:?}", opened.as_ref().map(drop));
        assert!(took.undisturbed() < NODE_TIMEOUT + SLACK, "{took:?}");
        opened
    };
    // A sentinel that replies may stand still as well.
    let opened = async || loop {
        if let Ok(locks) = opens(MASTER).await {
            return locks;
        }
    };
    let outcome = opens("unknown").await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    for hung in 0..3 {
        deployment.sentinels()[hung].pause();
        let locks = soon("connected beside a hung sentinel", opened()).await;
        // Reconnecting is not delayed by the hung sentinel either.
        deployment.kill_connections().await;
        let start = Stopwatch::start();
        for kind in KINDS {
            kind.lock(&locks, kind.name()).lock().await.unwrap().release().await.unwrap();
        }
        println!("served again after {:?}", start.elapsed());
        assert!(start.undisturbed() < NODE_TIMEOUT, "{start:?}");
        deployment.sentinels()[hung].resume();
    }
    deployment.sentinels().iter().for_each(Server::pause);
    let error = opens(MASTER).await.unwrap_err();
    assert!(error.source().unwrap().to_string().ends_with("timed out"), "{error:?}");
    deployment.sentinels().iter().for_each(Server::resume);
    deployment.sentinels_mut()[0].kill();
    deployment.sentinels()[1].pause();
    soon("connected through the last sentinel", opened()).await;
    deployment.sentinels_mut()[2].kill();
    let outcome = opens(MASTER).await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    deployment.sentinels_mut()[1].kill();
    let outcome = opens(MASTER).await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
}

/// The master and the sentinel have different passwords, and the locks are in another database.
/// Both settings survive a failover.
#[tokio::test(flavor = "multi_thread")]
async fn sentinel_passwords_and_database_survive_a_failover() {
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
         sentinel down-after-milliseconds {MASTER} 60000\nsentinel failover-timeout {MASTER} 3000\n",
        master.port(),
    );
    let sentinel = loop {
        // Another test may have taken the port.
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
    let start = Stopwatch::start();
    let wrong = [
        (format!("redis://127.0.0.1:{}/", sentinel.port()), format!("redis://:secret@{MASTER}/3")),
        (by_sentinel.clone(), MASTER.to_owned()),
        (by_sentinel.clone(), format!("redis://:other@{MASTER}/3")),
    ];
    for (sentinel, master) in wrong {
        let outcome = Locks::builder().sentinel([sentinel], &master).connect().await;
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    }
    assert!(start.undisturbed() < NODE_TIMEOUT, "{start:?}");
    let name = format!("redis://:secret@{MASTER}/3");
    let options = notified_only().ttl(LONG);
    let locks =
        Locks::builder().sentinel([&by_sentinel], &name).options(options.clone()).connect().await.unwrap();
    let others = Locks::builder().sentinel([&by_sentinel], &name).options(options).connect().await.unwrap();
    let contended = Contention::of_each_kind(&Database(by(&master)), "", &locks, &others).await;
    for held in &contended {
        assert_eq!(ask::<u64>(&by(&master), &["EXISTS", held.lock.key()]).await.unwrap(), 1, "in database 3");
        eventually("the lock is replicated", || async {
            ask::<u64>(&by(&replica), &["EXISTS", held.lock.key()]).await.unwrap() == 1
        })
        .await;
    }
    master.kill();
    let failed = ["SENTINEL", "SET", MASTER, "down-after-milliseconds", "1000"];
    ask::<()>(&by_sentinel, &failed).await.unwrap();
    eventually("the replica takes over", || async {
        // A server that is promoted cuts all connections.
        let role = ask::<Vec<redis::Value>>(&by(&replica), &["ROLE"]).await;
        role.is_ok_and(|role| role[0] == redis::Value::BulkString(b"master".to_vec()))
    })
    .await;
    let promoted = Database(by(&replica));
    for held in contended {
        eventually("the same client is served again", || async {
            held.lock.for_rival().try_lock().await.is_ok()
        })
        .await;
        held.assert_held(&promoted).await;
        held.grant_to_waiter(&promoted).await;
    }
    assert_eq!(
        ask::<u64>(&by(&replica), &["EXISTS", "{lock:mutex}:fence"]).await.unwrap(),
        1,
        "in database 3"
    );
    let lock = Kind::Mutex.lock(&locks, "last");
    lock.lock().await.unwrap().release().await.unwrap();
}

/// The database of a URL.
struct Database(String);

impl Oracle for Database {
    async fn lock_state(&self, name: &Name) -> LockState {
        LockState::on(&mut connect(&self.0).await.unwrap(), name.key()).await
    }
}

async fn ask<T: FromRedisValue>(url: &str, words: &[&str]) -> RedisResult<T> {
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connect(url).await?).await
}
