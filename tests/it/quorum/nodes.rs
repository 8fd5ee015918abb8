//! Which servers may be nodes of a quorum, and the errors for those that may not.

use std::time::Duration;

use redlatch::{ConfigError, Error, Locks, NodeProblem, RestartGuard};

use super::{KINDS, Quorum, TIMEOUT, named, no_quorum, options};
use crate::support::{Kind, Proxy, Server, Stopwatch, eventually, patient, soon};

/// The refused node and the reason.
fn problem(outcome: Result<Locks, Error>) -> (String, NodeProblem) {
    match outcome {
        Err(Error::Config(ConfigError::Node { node, problem })) => (node, problem),
        other => panic!("expected a refused node: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_the_same_server_twice() {
    let quorum = Quorum::start(3).await;
    let urls = quorum.urls();
    let label = |place: usize, host: &str| format!("{host}:{}", quorum.servers[place].port());
    let hosts = ["127.0.0.1", "localhost"];
    for host in hosts {
        let again = format!("redis://{}/", label(0, host));
        let (node, found) = problem(Locks::builder().quorum([&urls[0], &urls[1], &again]).connect().await);
        // The error names the node that was connected last.
        let NodeProblem::SameServer { other } = &found else { panic!("{found:?}") };
        let mut pair = [node.clone(), other.clone()];
        pair.sort();
        let mut both = [label(0, "127.0.0.1"), label(0, host)];
        both.sort();
        assert_eq!(pair, both);
        let error =
            Locks::builder().quorum([&urls[0], &urls[1], &again]).connect().await.unwrap_err().to_string();
        assert!(error.contains("is the same server as"), "{error}");
    }
    // Another database of the same server is the same server, also as a fourth node.
    let other = format!("{}1", urls[1]);
    let outcome = Locks::builder().quorum([&urls[0], &urls[1], &urls[2], &other]).connect().await;
    assert!(matches!(problem(outcome).1, NodeProblem::SameServer { .. }));
    let client = Locks::builder().quorum(&urls).connect().await.unwrap();
    drop(client.mutex("fine").unwrap().lock().await.unwrap());
    client.settled().await;
    drop(client);
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_refuses_a_replica_as_node() {
    let quorum = Quorum::start(3).await;
    let replica = Server::start().await;
    let port = quorum.servers[0].port().to_string();
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &port]).await;
    eventually("the replica follows its master", || replica.follows()).await;
    let mut urls = quorum.urls();
    urls[2] = replica.url();
    let (node, found) = problem(Locks::builder().quorum(&urls).connect().await);
    assert_eq!((node, found), (format!("127.0.0.1:{}", replica.port()), NodeProblem::Replica));
    let text = Locks::builder().quorum(&urls).connect().await.unwrap_err().to_string();
    assert!(text.contains("it is a replica") && text.contains(&replica.port().to_string()), "{text}");
    // Nor if a majority of the nodes are masters.
    urls.push(quorum.servers[2].url());
    assert_eq!(problem(Locks::builder().quorum(&urls).connect().await).1, NodeProblem::Replica);
    replica.run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    Locks::builder().quorum(&urls).connect().await.unwrap();
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_node_loses_its_vote_when_it_becomes_a_replica() {
    let mut quorum = Quorum::start(3).await;
    let master = Server::start().await;
    let client = quorum.client(patient()).await;
    let locks = KINDS.map(|kind| kind.lock(&client, kind.name()));
    for lock in &locks {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    quorum.servers[0].run::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    eventually("the replica follows its master", || quorum.servers[0].follows()).await;
    // Also if the replica accepts writes.
    for read_only in ["yes", "no"] {
        quorum.servers[0].run::<()>(&["CONFIG", "SET", "replica-read-only", read_only]).await;
        quorum.servers[0].kill_connections().await;
        for lock in &locks {
            // The other two nodes are a majority.
            lock.lock().await.unwrap().release().await.unwrap();
        }
        quorum.kill(0b010);
        for lock in &locks {
            // The first request may report only that its connection broke.
            eventually("the error says that it is a replica", || async {
                let (answered, failures) = no_quorum(lock.try_lock().await);
                assert_eq!((answered, named(&failures)), (1, quorum.labels(0b011)));
                failures.iter().any(|failure| failure.to_string().contains("it is a replica"))
            })
            .await;
        }
        quorum.restart(0b010).await;
    }
    quorum.servers[0].run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    quorum.kill(0b010);
    for lock in &locks {
        let guard = soon("the node votes again", lock.lock()).await.unwrap();
        guard.release().await.unwrap();
    }
    quorum.restart(0b010).await;
    client.settled().await;
    drop((locks, client));
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_error_explains_that_half_is_no_majority() {
    let mut quorum = Quorum::start(4).await;
    let client = quorum.client(options()).await;
    let even = "half of an even number is no majority";
    for hangs in [false, true] {
        if hangs {
            quorum.hang(0b0110)
        } else {
            quorum.kill(0b0110)
        }
        for kind in KINDS {
            let lock = kind.lock(&client, kind.name());
            let error = lock.try_lock().await.unwrap_err();
            let text = error.to_string();
            assert!(text.contains(even) && text.contains("2 silent of 4 nodes; 3 must agree"), "{text}");
            assert!(quorum.labels(0b0110).iter().all(|label| text.contains(label)), "{text}");
            let late = lock.lock_timeout(TIMEOUT / 4).await;
            assert!(matches!(late, Err(Error::NoQuorum { .. })), "the lock is not busy: {late:?}");
        }
        let text = Locks::builder()
            .quorum(quorum.urls())
            .options(options())
            .connect()
            .await
            .unwrap_err()
            .to_string();
        assert!(text.contains(even) && text.contains("connect"), "{text}");
        if hangs { quorum.resume(0b0110) } else { quorum.restart(0b0110).await }
    }
    // If less than half the nodes respond, the error does not mention even numbers.
    quorum.kill(0b0111);
    let text = client.mutex("less").unwrap().try_lock().await.unwrap_err().to_string();
    assert!(text.contains("1 granted, 3 silent of 4 nodes") && !text.contains(even), "{text}");
    quorum.restart(0b0111).await;
    drop(client);
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_accepts_1_to_31_nodes() {
    for count in [0, 32, 100] {
        let urls = (0..count).map(|number| format!("redis://127.0.0.1:{}/", 1 + number));
        let start = Stopwatch::start();
        let outcome = Locks::builder().quorum(urls).connect().await;
        let Err(Error::Config(ConfigError::Nodes { count: said, most: 31 })) = &outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(*said, count);
        assert!(start.undisturbed() < Duration::from_millis(200), "sent before it is refused: {start:?}");
        assert!(outcome.unwrap_err().to_string().contains("from 1 to 31"));
    }
    let quorum = Quorum::start(1).await;
    let client = quorum.client(options()).await;
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let first = lock.lock().await.unwrap();
        let token = first.token();
        first.release().await.unwrap();
        let next = lock.for_rival().lock().await.unwrap();
        assert!(next.token() > token || kind == Kind::Read);
        next.release().await.unwrap();
    }
    drop(client);
    quorum.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long: scripts/test --full"]
async fn quorum_works_with_31_nodes() {
    let quorum = Quorum::start(31).await;
    let client = quorum.client(options().node_timeout(Duration::from_secs(2))).await;
    quorum.hang(0x7fff);
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let guard = lock.lock().await.unwrap();
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
    quorum.resume(0x7fff);
    client.settled().await;
    drop(client);
    quorum.finish().await;
}

/// Nodes that do not report their run id vote, unless the restart guard is on. Returns the error
/// with the guard.
async fn works_without_run_ids(urls: &[String], quorum: &Quorum) -> Error {
    let client = Locks::builder().quorum(urls).options(options()).connect().await.unwrap();
    quorum.hang(0b001);
    for kind in KINDS {
        let lock = kind.lock(&client, kind.name());
        let guard = lock.lock().await.unwrap();
        assert!(lock.for_rival().try_lock().await.unwrap().is_none());
        let token = guard.token();
        guard.release().await.unwrap();
        assert!(lock.for_rival().lock().await.unwrap().token() > token);
    }
    quorum.resume(0b001);
    client.settled().await;
    Locks::builder()
        .quorum(urls)
        .options(options().restart_guard(RestartGuard::On))
        .connect()
        .await
        .unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_works_without_the_right_to_info() {
    let quorum = Quorum::start(3).await;
    let rights = ["ACL", "SETUSER", "shy", "on", ">secret", "~*", "&*", "+@all", "-info"];
    quorum.run::<()>(0b111, &rights).await;
    let shy = |url: &String| url.replace("redis://", "redis://shy:secret@");
    let urls: Vec<String> = quorum.urls().iter().map(shy).collect();
    let refused = works_without_run_ids(&urls, &quorum).await;
    let (answered, failures) = no_quorum::<()>(Err(refused));
    assert_eq!((answered, named(&failures)), (0, quorum.labels(0b111)));
    let text = failures[0].to_string().to_lowercase();
    assert!(text.contains("noperm") || text.contains("no permissions"), "{text}");
    quorum.finish().await;
}

/// Some proxies and managed services do not know `INFO`.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_works_if_info_is_unknown() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    proxies.iter().for_each(Proxy::have_no_info);
    let urls: Vec<String> = proxies.iter().map(Proxy::url).collect();
    let refused = works_without_run_ids(&urls, &quorum).await;
    let (answered, failures) = no_quorum::<()>(Err(refused));
    assert_eq!((answered, failures.len()), (0, 3));
    assert!(failures[0].to_string().contains("unknown command"), "{}", failures[0]);
    quorum.finish_behind(proxies).await;
}

/// A proxy may hide the run id and forward the rest of `INFO`.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_works_if_info_has_no_run_id() {
    let quorum = Quorum::start(3).await;
    let proxies = quorum.proxies().await;
    proxies.iter().for_each(Proxy::hide_runs);
    let urls: Vec<String> = proxies.iter().map(Proxy::url).collect();
    let refused = works_without_run_ids(&urls, &quorum).await;
    let (node, found) = problem(Err(refused));
    assert_eq!(found, NodeProblem::Unidentified);
    assert!(urls.iter().any(|url| url.contains(&node)), "{node}");
    // The rest of `INFO` is still evaluated.
    let master = Server::start().await;
    quorum.servers[2].run::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    eventually("the replica follows its master", || quorum.servers[2].follows()).await;
    assert_eq!(problem(Locks::builder().quorum(&urls).connect().await).1, NodeProblem::Replica);
    quorum.servers[2].run::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    quorum.finish_behind(proxies).await;
}

/// Connecting asks all nodes at the same time: it takes as long as the slowest node, and fails only
/// without a majority.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_connects_if_a_majority_responds() {
    let quorum = Quorum::start(5).await;
    for set in [0b00000, 0b00001, 0b10010, 0b00111, 0b11110, 0b11111_u32] {
        quorum.hang(set);
        let start = Stopwatch::start();
        let outcome = Locks::builder().quorum(quorum.urls()).options(options()).connect().await;
        assert!(start.undisturbed() < TIMEOUT * 3 / 2, "{start:?}");
        if set.count_ones() < 3 {
            let client = outcome.unwrap();
            let guard = client.mutex("opened").unwrap().lock().await.unwrap();
            guard.release().await.unwrap();
            quorum.resume(set);
            client.settled().await;
        } else {
            let (answered, failures) = no_quorum(outcome);
            let down = usize::try_from(set.count_ones()).unwrap();
            assert_eq!((answered, named(&failures)), (5 - down, quorum.labels(set)));
            quorum.resume(set);
        }
    }
    quorum.finish().await;
}
