//! Masters that others replace: what a client knows of the ones before, and how it finds the new
//! ones.

use std::time::Duration;

use redlatch::{Event, LeaseEnd, Locks};
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::{replace, tag_at};
use crate::support::failover::{NODE_TIMEOUT, caught_up, cut_off, urls};
use crate::support::{Deployment, Proxy, Server, Topology, eventually, notified_only, patient, soon};

/// The others are slow to say which replica has replaced a master. Each try of a call fails at
/// once, so all of them would be used up before the client knows where the slot is. The last one is
/// refused only once it does.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_call_waits_for_the_slots_to_be_learned() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let locks = Locks::builder()
        .cluster(urls("127.0.0.1", deployment.masters()))
        .options(patient().node_timeout(Duration::from_secs(60)))
        .connect()
        .await
        .unwrap();
    let lock = locks.mutex(format!("{here}later")).unwrap();
    lock.lock().await.unwrap().release().await.unwrap();
    deployment.fail_over(0).await;
    let asked = async |deployment: &Deployment| {
        let mut sum = 0;
        for server in deployment.masters().iter().chain(&deployment.replicas()[1..]) {
            sum += server.calls("cmdstat_cluster").await;
        }
        sum
    };
    let before = asked(&deployment).await;
    deployment.masters().iter().chain(&deployment.replicas()[1..]).for_each(Server::pause);
    let old = &mut deployment.replicas_mut()[0];
    old.kill();
    let refusing = TcpListener::bind(("127.0.0.1", old.port())).await.unwrap();
    let mut calling = tokio::spawn(async move { lock.try_lock().await.unwrap() });
    // Each of eight tries connects twice. More than those are made only by a call that waits.
    for _ in 0..24 {
        tokio::select! {
            connection = refusing.accept() => drop(connection.unwrap()),
            outcome = &mut calling => panic!("ended before the slots were learned: {outcome:?}"),
        }
    }
    let last = soon("one more try", refusing.accept()).await.unwrap();
    deployment.masters().iter().chain(&deployment.replicas()[1..]).for_each(Server::resume);
    eventually("the client has asked", || async { asked(&deployment).await > before }).await;
    drop((last, refusing));
    assert!(soon("the replica grants it", calling).await.unwrap().is_some());
}

/// A master of the first slots, to which the client never had a connection, comes back as a replica
/// without the last writes, and is promoted. The connection to it is a new one all the same.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_lease_that_a_returned_master_misses_is_asked_about() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    caught_up(&deployment.masters()[0], 1).await;
    deployment.masters_mut()[0].kill();
    let locks = Locks::builder()
        .cluster(urls("127.0.0.1", &deployment.masters()[1..]))
        .options(patient().ttl(Duration::from_secs(600)))
        .connect()
        .await
        .unwrap();
    replace(&mut deployment, 0).await;
    let other = locks.mutex(format!("{here}other")).unwrap();
    let other = soon("the replica serves", async {
        loop {
            if let Ok(guard) = other.lock().await {
                return guard;
            }
        }
    })
    .await;
    deployment.replicas_mut()[0].restart().await;
    let master = &deployment.masters()[0];
    cut_off(master, &[&deployment.replicas()[0]]).await;
    let missed = locks.mutex(format!("{here}missed")).unwrap().lock().await.unwrap();
    deployment.masters_mut()[0].kill();
    deployment.replicas()[0].resume();
    replace(&mut deployment, 0).await;
    assert_eq!(soon("the client asks about it", missed.lease().lost()).await, LeaseEnd::Revoked);
    assert!(!other.lease().is_lost(), "the replica has this one");
}

/// A master hangs and is replaced. A request that was sent to it still fails after another one was
/// served by the replica: that is no outage of the replica.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_late_failure_of_a_replaced_master_begins_no_outage() {
    let mut deployment = Deployment::start(Topology::Cluster).await;
    let here = tag_at(&deployment, 0).await;
    let hanging = Proxy::start(deployment.masters()[0].port()).await;
    let rest = Proxy::before(deployment.all().skip(1).map(Server::port).collect()).await;
    let locks = Locks::builder()
        .cluster(urls("127.0.0.2", deployment.masters()))
        .options(notified_only().node_timeout(2 * NODE_TIMEOUT))
        .connect()
        .await
        .unwrap();
    let lock = |name: &str| locks.mutex(format!("{here}{name}")).unwrap();
    let (first, late, after) = (lock("first"), lock("late"), lock("after"));
    first.lock().await.unwrap().release().await.unwrap();
    let mut events = locks.events();
    hanging.hold_requests(true);
    deployment.fail_over(0).await;
    let first = tokio::spawn(async move { first.lock().await });
    sleep(NODE_TIMEOUT).await; // it fails so long after the other one
    println!("the late request: {:?}", late.try_lock().await);
    soon("the replica serves it", first).await.unwrap().unwrap().release().await.unwrap();
    let (name, mut outages) = (after.name().clone(), 0);
    after.lock().await.unwrap().release().await.unwrap();
    soon("the last grant is reported", async {
        loop {
            match events.next().await.unwrap() {
                Event::OutageBegan { .. } => outages += 1,
                Event::Granted { lock, .. } if lock == name => return,
                _ => {}
            }
        }
    })
    .await;
    assert!(outages <= 1, "{outages} outages began");
    hanging.hold_requests(false);
    drop((events, late, after, locks));
    hanging.outlive_clients().await;
    rest.outlive_clients().await;
}
