//! What ends an outage: a request that shows that those which failed would work now.

use std::sync::{Arc, Mutex as Guarded};
use std::time::Duration;

use redlatch::{Context, Error, Event, Events, Fencing, Locks, Mutex, Options, Wakeups};
use tokio::task::JoinSet;

use crate::cluster::{open, tag_at};
use crate::support::{
    Deployment, KINDS, Proxy, Server, Topology, eventually, patient, renewed_by, soon, ttl,
};

/// What a stream of events has reported so far. A task reads it: one that nobody reads misses some.
#[derive(Clone)]
struct Reported(Arc<Guarded<(usize, usize, Vec<String>)>>);

impl Reported {
    fn by(mut events: Events) -> Reported {
        let reported = Reported(Arc::default());
        let Reported(counts) = reported.clone();
        tokio::spawn(async move {
            while let Some(event) = events.next().await {
                let mut counts = counts.lock().unwrap();
                match event {
                    Event::OutageBegan { .. } => counts.0 += 1,
                    Event::OutageEnded { .. } => counts.1 += 1,
                    Event::Granted { lock, .. } => counts.2.push(lock.to_string()),
                    Event::Missed(_) => panic!("an event is missing"),
                    _ => {}
                }
            }
        });
        reported
    }

    /// How many outages began and ended until this lock was granted.
    async fn outages_until_granted(&self, name: &str) -> (usize, usize) {
        let is_granted = async || self.0.lock().unwrap().2.iter().any(|granted| granted == name);
        eventually("the grant is reported", is_granted).await;
        self.outages()
    }

    /// How many outages began and ended until one has ended.
    async fn outages_until_ended(&self) -> (usize, usize) {
        eventually("the end of an outage is reported", async || self.outages().1 > 0).await;
        self.outages()
    }

    fn outages(&self) -> (usize, usize) {
        let counts = self.0.lock().unwrap();
        (counts.0, counts.1)
    }
}

/// Tasks of one client have their turns without a request for each.
async fn is_passed_on(lock: &Mutex, server: &Server) {
    let before = server.scripts_run().await;
    let mut passing = JoinSet::new();
    // Fewer events than are kept: the task that reads them may stand still.
    for _ in 0..16 {
        let lock = lock.clone();
        passing.spawn(async move {
            for _ in 0..16 {
                lock.lock().await.unwrap().release().await.unwrap();
            }
        });
    }
    soon("all have had their turns", passing.join_all()).await;
    let scripts = server.scripts_run().await - before;
    assert!(scripts < 16 * 16, "{scripts} scripts for {} turns", 16 * 16);
}

/// One of three masters hangs, and the two others serve their locks. That they do so ends no outage
/// of the first, and what waits for its locks fails once, not one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_answers_ends_no_outage_of_another_one() {
    let deployment = Deployment::start(Topology::Cluster).await;
    let (here, there) = (tag_at(&deployment, 0).await, tag_at(&deployment, 1).await);
    let locks = open(&deployment, Options::new().node_timeout(Duration::from_secs(3))).await;
    let (dead, live) =
        (locks.mutex(format!("{here}dead")).unwrap(), locks.mutex(format!("{there}live")).unwrap());
    dead.lock().await.unwrap().release().await.unwrap();
    let reported = Reported::by(locks.events());
    deployment.masters()[0].pause();
    assert!(dead.try_lock().await.is_err());
    is_passed_on(&live, &deployment.masters()[1]).await;
    let busy = tokio::spawn(async move {
        loop {
            live.lock().await.unwrap().release().await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    // Of several locks, the one that cannot be had is named, and holds of others are passed on.
    let both = locks.all([locks.mutex(format!("{there}both")).unwrap(), dead.clone()]).unwrap();
    let mut limit = Duration::from_millis(500);
    let until_asked = async {
        loop {
            let error = both.lock_timeout(limit).await.unwrap_err();
            let waited_for = error.context().and_then(Context::lock);
            if !matches!(error, Error::TimedOut { .. }) || waited_for == Some(dead.name()) {
                return error;
            }
            limit *= 2; // it was over before the call had the first lock
        }
    };
    let error = soon("the call asks for both", until_asked).await;
    assert_eq!(error.context().and_then(Context::lock), Some(dead.name()), "{error:?}");
    assert!(!matches!(error, Error::TimedOut { .. }), "{error:?}");
    let mut waiting = JoinSet::new();
    for _ in 0..8 {
        let dead = dead.clone();
        waiting.spawn(async move { dead.lock().await.unwrap_err() });
    }
    let (mut failed, mut last) = (0, String::new());
    while let Some(error) = waiting.join_next().await {
        last = error.unwrap().to_string();
        failed += 1;
    }
    assert_eq!(failed, 8, "{last}");
    busy.abort();
    let _aborted = busy.await;
    deployment.masters()[0].resume();
    eventually("it answers", async || dead.try_lock().await.is_ok()).await;
    assert_eq!(reported.outages_until_ended().await, (1, 1));
}

/// Slots that no master serves fail together, and no lock of another slot with them.
#[tokio::test(flavor = "multi_thread")]
async fn slots_without_a_master_are_one_outage() {
    let deployment = Deployment::start(Topology::Cluster).await;
    for server in deployment.all() {
        server.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await;
    }
    let master = &deployment.masters()[0];
    let (mut tags, mut slots) = (Vec::new(), Vec::new());
    for tag in (0..).map(|number| format!("{{{number}}}")) {
        if deployment.owner(&tag).await == Some(0) {
            slots.push(master.run::<u16>(&["CLUSTER", "KEYSLOT", &tag]).await.to_string());
            tags.push(tag);
        }
        if tags.len() == 3 {
            break;
        }
    }
    for server in deployment.masters() {
        server.run::<()>(&["CLUSTER", "DELSLOTS", &slots[0], &slots[1]]).await;
    }
    let locks = open(&deployment, patient()).await;
    let locks_at: Vec<_> = tags.iter().map(|tag| locks.mutex(format!("{tag}lock")).unwrap()).collect();
    let reported = Reported::by(locks.events());
    for unserved in &locks_at[..2] {
        assert!(unserved.try_lock().await.is_err());
        is_passed_on(&locks_at[2], master).await;
    }
    master.run::<()>(&["CLUSTER", "ADDSLOTS", &slots[0], &slots[1]]).await;
    for lock in &locks_at {
        eventually("it is served", async || lock.try_lock().await.is_ok()).await;
    }
    let after = locks.mutex(format!("{}after", tags[0])).unwrap().lock().await.unwrap();
    assert_eq!(reported.outages_until_granted(after.lease().name().as_str()).await, (1, 1));
}

/// A full server refuses what needs memory, and still renews and releases.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_full_server_still_does_ends_no_outage() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for kind in KINDS {
        let (held, other) = (kind.lock(&locks, "held"), kind.lock(&locks, "other"));
        let (guard, again) = (held.lock().await.unwrap(), kind.lock(&locks, "again").lock().await.unwrap());
        let reported = Reported::by(locks.events());
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        assert!(other.try_lock().await.is_err(), "{kind:?}");
        // On a new connection, the client renews all leases at once.
        server.kill_connections().await;
        renewed_by(guard.lease(), Duration::from_millis(1)).await;
        again.release().await.unwrap();
        assert!(other.try_lock().await.is_err(), "{kind:?}");
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
        let granted = other.lock().await.unwrap();
        assert_eq!(reported.outages_until_ended().await, (1, 1), "{kind:?}");
        guard.release().await.unwrap();
        granted.release().await.unwrap();
    }
}

/// Grants without fencing tokens, and those of several locks in one call.
#[tokio::test(flavor = "multi_thread")]
async fn every_grant_ends_an_outage() {
    let server = Server::start().await;
    for fencing in [Fencing::On, Fencing::Off] {
        let locks = server.locks_with(ttl(60_000).fencing(fencing)).await;
        for kind in KINDS {
            let lock = kind.lock(&locks, "one");
            let reported = Reported::by(locks.events());
            server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
            assert!(lock.try_lock().await.is_err(), "{kind:?}");
            server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
            lock.lock().await.unwrap().release().await.unwrap();
            assert_eq!(reported.outages_until_ended().await, (1, 1), "{kind:?}, {fencing:?}");
        }
        let both = locks.all([locks.mutex("a").unwrap(), locks.mutex("b").unwrap()]).unwrap();
        let reported = Reported::by(locks.events());
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
        assert!(both.try_lock().await.is_err());
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
        both.try_lock().await.unwrap().unwrap().release().await.unwrap();
        assert_eq!(reported.outages_until_ended().await, (1, 1), "{fencing:?}");
    }
}

/// A server without replicas still releases what it could not grant, and grants what needs none.
#[tokio::test(flavor = "multi_thread")]
async fn what_needs_no_replica_ends_no_outage_of_replicas() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let safe = locks.with_options(patient().replicas(1, Duration::from_millis(50))).unwrap();
    let reported = Reported::by(locks.events());
    assert!(safe.mutex("safe").unwrap().try_lock().await.is_err());
    soon("what was granted is released", safe.settled()).await;
    locks.mutex("plain").unwrap().lock().await.unwrap().release().await.unwrap();
    assert!(safe.mutex("safe").unwrap().try_lock().await.is_err());
    soon("what was granted is released", safe.settled()).await;
    locks.mutex("last").unwrap().lock().await.unwrap().release().await.unwrap();
    assert_eq!(reported.outages_until_granted("last").await, (1, 0));
    // What waits for a lock that another client has lacks no replica.
    let (other, safe_too) = (server.locks_with(ttl(60_000)).await, safe.mutex("held").unwrap());
    let held = other.mutex("held").unwrap().lock().await.unwrap();
    let waiting = [safe_too.clone(), safe_too].map(|lock| {
        tokio::spawn(async move {
            let mut limit = Duration::from_millis(500);
            loop {
                match lock.lock_timeout(limit).await.unwrap_err() {
                    Error::TimedOut { was_busy: true, .. } => break,
                    Error::TimedOut { .. } => limit *= 2, // too short to learn that it is busy
                    error => panic!("{error:?}"),
                }
            }
        })
    });
    for waiting in waiting {
        soon("it is found busy", waiting).await.unwrap();
    }
    held.release().await.unwrap();
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &server.port().to_string()]).await;
    eventually("the replica is online", || async { server.replicas_online().await == 1 }).await;
    eventually("a replica confirms", async || safe.mutex("safe").unwrap().try_lock().await.is_ok()).await;
    assert_eq!(reported.outages_until_ended().await, (1, 1));
    drop(replica);
}

/// A server that refuses writes still finds a lock busy, and reads who holds it.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_lock_ends_no_outage_of_writes() {
    let server = Server::start().await;
    let (locks, other) = (server.locks_with(ttl(60_000)).await, server.locks_with(ttl(60_000)).await);
    let _held = other.mutex("held").unwrap().lock().await.unwrap();
    let reported = Reported::by(locks.events());
    let refusing = ["CONFIG", "SET", "min-replicas-to-write"];
    let (lacks_replicas, has_them) = ([&refusing[..], &["1"]].concat(), [&refusing[..], &["0"]].concat());
    for (number, (begin, end)) in
        [(lacks_replicas, has_them), (vec!["REPLICAOF", "127.0.0.1", "1"], vec!["REPLICAOF", "NO", "ONE"])]
            .into_iter()
            .enumerate()
    {
        server.run::<()>(&begin).await;
        for _ in 0..2 {
            assert!(locks.mutex("free").unwrap().try_lock().await.is_err());
            assert!(locks.mutex("held").unwrap().try_lock().await.unwrap().is_none());
            assert!(locks.mutex("held").unwrap().is_locked().await.unwrap());
        }
        server.run::<()>(&end).await;
        locks.mutex("free").unwrap().lock().await.unwrap().release().await.unwrap();
        let ended = number + 1;
        eventually("the end is reported", async || reported.outages().1 == ended).await;
        assert_eq!(reported.outages(), (ended, ended), "{begin:?}");
    }
}

/// A server that refuses what comes too late is well.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_comes_too_late_begins_no_outage() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.port()).await;
    let options = patient().grant_within(Duration::from_millis(100)).wakeups(Wakeups::Poll);
    let locks = Locks::builder().server(proxy.url()).options(options).connect().await.unwrap();
    let (lock, last) = (locks.mutex("late").unwrap(), locks.mutex("last").unwrap());
    lock.lock().await.unwrap().release().await.unwrap(); // the server knows the script
    let reported = Reported::by(locks.events());
    proxy.slow_down(Some(Duration::from_millis(150)));
    assert!(lock.try_lock().await.unwrap_err().is_transient());
    // The call knows that its requests came too late, not that the lock was in use.
    let mut limit = Duration::from_millis(600);
    let until_late = async {
        loop {
            match lock.lock_timeout(limit).await.unwrap_err() {
                Error::TimedOut { was_busy: false, .. } => limit *= 2, // no reply came within it
                error => return error,
            }
        }
    };
    let error = soon("a request comes too late", until_late).await;
    assert!(matches!(error, Error::Redis { .. }), "{error:?}");
    proxy.slow_down(None);
    last.lock().await.unwrap().release().await.unwrap();
    assert_eq!(reported.outages_until_granted("last").await, (0, 0));
}
