//! `LocksBuilder`: refused combinations, lazy clients, sources of connections, names in
//! `CLIENT LIST`, and subscribers of other servers.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Pool, Runtime};
use redlatch::redis::{Client, ErrorKind, IntoConnectionInfo};
use redlatch::{ConfigError, Error, Locks, LocksBuilder, Options, Wakeups};

use crate::support::{Server, eventually, soon, subscribe};

/// No server listens here: an attempt to connect would return another error.
const NOWHERE: &str = "redis://127.0.0.1:1/";

fn pool(url: &str) -> Pool {
    Config::from_url(url).create_pool(Some(Runtime::Tokio1)).unwrap()
}

fn refused(builder: LocksBuilder) -> ConfigError {
    match builder.connect_lazily() {
        Ok(locks) => panic!("accepted: {locks:?}"),
        Err(Error::Config(error)) => error,
        Err(error) => panic!("another error: {error:?}"),
    }
}

#[tokio::test]
async fn builder_refuses_bad_combinations_before_any_io() {
    let error = refused(Locks::builder());
    assert!(matches!(error, ConfigError::NoTopology), "{error:?}");
    let error = refused(Locks::builder().server(NOWHERE).quorum([NOWHERE]));
    let expected = matches!(&error, ConfigError::SeveralTopologies { first: "server", second: "quorum" });
    assert!(expected, "{error:?}");
    let error = refused(Locks::builder().server(NOWHERE).subscriber(NOWHERE));
    assert!(matches!(error, ConfigError::NeedlessSubscriber { topology: "server" }), "{error:?}");
    let error = refused(Locks::builder().pool(pool(NOWHERE)));
    assert!(matches!(error, ConfigError::PoolWithoutSubscriber), "{error:?}");
    let error = refused(Locks::builder().pool(pool(NOWHERE)).subscriber("nonsense"));
    assert!(matches!(error, ConfigError::Url { .. }), "{error:?}");
    let error = refused(Locks::builder().server("nonsense"));
    assert!(matches!(error, ConfigError::Url { .. }), "{error:?}");
    let error = refused(Locks::builder().quorum(Vec::<String>::new()));
    assert!(matches!(error, ConfigError::Nodes { count: 0, .. }), "{error:?}");
    let outcome = Locks::builder().connect().await;
    assert!(matches!(outcome, Err(Error::Config(ConfigError::NoTopology))), "{outcome:?}");
    // A pool without a subscriber is accepted if wake-ups are by polling.
    let polling = Options::new().wakeups(Wakeups::Poll);
    Locks::builder().pool(pool(NOWHERE)).options(polling).connect_lazily().unwrap();
}

#[tokio::test]
async fn builder_refuses_client_names_and_labels_with_special_characters() {
    for word in ["", "two words", "a:b", "a,b", "ä", "line\nbreak"] {
        let error = refused(Locks::builder().server(NOWHERE).client_name(word));
        let what =
            |error: &ConfigError, name| matches!(error, ConfigError::Word { what, .. } if *what == name);
        assert!(what(&error, "client_name"), "{word:?}: {error:?}");
        let error = refused(Locks::builder().server(NOWHERE).label(word));
        assert!(what(&error, "label"), "{word:?}: {error:?}");
    }
    let (name, label) = ("n".repeat(31), "l".repeat(63));
    Locks::builder().server(NOWHERE).client_name(&name).label(&label).connect_lazily().unwrap();
    let error = refused(Locks::builder().server(NOWHERE).client_name(format!("{name}n")));
    assert!(matches!(error, ConfigError::Word { most: 31, .. }), "{error:?}");
    let error = refused(Locks::builder().server(NOWHERE).label(format!("{label}l")));
    assert!(matches!(error, ConfigError::Word { most: 63, .. }), "{error:?}");
}

#[test]
fn builder_refuses_to_build_outside_a_runtime() {
    let error = refused(Locks::builder().server(NOWHERE));
    assert!(matches!(error, ConfigError::NoRuntime), "{error:?}");
}

#[test]
fn builder_debug_output_has_no_password() {
    let url = "redis://user:s3cret@127.0.0.1:1/";
    let client = Client::open(url).unwrap();
    for builder in [Locks::builder().server(url), Locks::builder().pool(pool(url)).subscriber(client)] {
        let shown = format!("{builder:?}");
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn builder_accepts_urls_clients_and_connection_infos() {
    let server = Server::start().await;
    let url = server.url();
    let info = url.as_str().into_connection_info().unwrap();
    for builder in [
        Locks::builder().server(&url),
        Locks::builder().server(url.clone()),
        Locks::builder().server(Client::open(url.as_str()).unwrap()),
        Locks::builder().server(info),
        Locks::builder().quorum([Client::open(url.as_str()).unwrap()]),
        Locks::builder().pool(pool(&url)).subscriber(Client::open(url.as_str()).unwrap()),
    ] {
        let locks = builder.connect().await.unwrap();
        locks.mutex("x").unwrap().lock().await.unwrap().release().await.unwrap();
    }
    server.assert_nothing_left().await;
}

/// A service may start before its server does.
#[tokio::test(flavor = "multi_thread")]
async fn lazy_client_acquires_once_its_server_starts() {
    let mut server = Server::start().await;
    server.kill();
    let patient = || Options::new().node_timeout(Duration::from_secs(10));
    let locks = Locks::builder().server(server.url()).options(patient()).connect_lazily().unwrap();
    let outcome = locks.mutex("x").unwrap().try_lock().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    let mutex = locks.mutex("x").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    server.restart().await;
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    drop(locks);
    server.assert_nothing_left().await;
}

/// A wrong password is not an outage that may end: a lazy client reports it with its first call.
#[tokio::test(flavor = "multi_thread")]
async fn lazy_client_reports_a_wrong_password_with_its_first_call() {
    let server = Server::start().await;
    let user = ["ACL", "SETUSER", "app", "on", "~*", "&*", "+@all", ">right"];
    server.run::<()>(&user).await;
    let url = server.url().replace("redis://", "redis://app:wrong@");
    let patient = Options::new().node_timeout(Duration::from_secs(60));
    let locks = Locks::builder().server(url.as_str()).options(patient).connect_lazily().unwrap();
    let mutex = locks.mutex("x").unwrap();
    let is_refused = |error: &Error| {
        let Error::Redis { cause, .. } = error else { panic!("{error:?}") };
        cause.kind() == ErrorKind::AuthenticationFailed
    };
    for error in [
        mutex.try_lock().await.unwrap_err(),
        soon("lock() returns", mutex.lock()).await.unwrap_err(),
        mutex.inspect().await.unwrap_err(),
        Locks::open(&url).await.unwrap_err(),
    ] {
        assert!(is_refused(&error), "{error:?}");
    }
    // In an outage, the calls would have retried for two node timeouts of a minute. The same client
    // works once the password is right.
    server.run::<()>(&["ACL", "SETUSER", "app", ">wrong"]).await;
    mutex.lock().await.unwrap().release().await.unwrap();
}

/// A quorum's tokens are proposed from the nodes' clocks. Without the clocks, the first token could
/// be smaller than tokens that the nodes have forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn lazy_quorum_grants_tokens_from_the_clocks_of_its_nodes() {
    let servers = [Server::start().await, Server::start().await, Server::start().await];
    let before = servers[0].time().await;
    let locks = Locks::builder().quorum(servers.iter().map(Server::url)).connect_lazily().unwrap();
    for server in &servers {
        // The connection of `Server::time` may close a little later.
        eventually("only the test's connection is open", || async {
            server.run::<String>(&["CLIENT", "LIST", "TYPE", "normal"]).await.lines().count() == 1
        })
        .await;
    }
    let guard = locks.mutex("x").unwrap().lock().await.unwrap();
    let token = guard.lease().fencing_token().unwrap().get();
    assert!(token >= before as u64, "{token} is before {before}");
    guard.release().await.unwrap();
}

async fn names(server: &Server) -> Vec<String> {
    let list: String = server.run(&["CLIENT", "LIST"]).await;
    let name = |line: &str| line.split(' ').find_map(|word| word.strip_prefix("name=")).map(str::to_owned);
    let mut names: Vec<String> = list.lines().filter_map(name).filter(|name| !name.is_empty()).collect();
    names.sort();
    names.dedup();
    names.retain(|name| !name.starts_with("sentinel-"));
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn every_connection_is_named_in_client_list() {
    let server = Server::start().await;
    for (builder, name) in [
        (Locks::builder().client_name("billing"), "billing"),
        (Locks::builder().label("pod-7"), "pod-7"),
        (Locks::builder().client_name("billing").label("pod-7"), "billing:pod-7"),
    ] {
        // The second connection is for WAIT.
        let confirmed = Options::new().replicas(1, Duration::from_millis(1));
        let locks = builder.server(server.url()).options(confirmed).connect().await.unwrap();
        let list: String = server.run(&["CLIENT", "LIST"]).await;
        assert_eq!(list.matches(&format!(" name={name} ")).count(), 2, "{list}");
        let plain = locks.with_options(Options::new().replicas(0, Duration::from_millis(1))).unwrap();
        subscribe(&plain, &[&server]).await;
        assert_eq!(names(&server).await, [name.to_owned(), format!("{name}:wakeups")]);
        drop((locks, plain));
        eventually("the client's connections are closed", || async { names(&server).await.is_empty() }).await;
    }
}

#[cfg(all(feature = "cluster", feature = "sentinel"))]
#[tokio::test(flavor = "multi_thread")]
async fn every_connection_is_named_in_every_topology() {
    use crate::support::{Deployment, Topology};
    for topology in [Topology::Cluster, Topology::Sentinel, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        let urls = || deployment.entrances().iter().map(Server::url);
        let builder = Locks::builder().client_name("billing");
        let builder = match topology {
            Topology::Cluster => builder.cluster(urls()),
            Topology::Sentinel => builder.sentinel(urls(), "mymaster"),
            _ => builder.quorum(urls()),
        };
        let locks = builder.connect().await.unwrap();
        let masters: Vec<&Server> = deployment.masters().iter().collect();
        subscribe(&locks, &masters).await;
        let mut all = Vec::new();
        for server in masters {
            let names = names(server).await;
            // In a cluster, a client subscribes to one server only.
            assert!(names.contains(&"billing".to_owned()), "{topology:?}: {names:?}");
            all.extend(names);
        }
        assert!(all.contains(&"billing:wakeups".to_owned()), "{topology:?}: {all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_of_another_server_is_refused() {
    let (server, other) = (Server::start().await, Server::start().await);
    let builder = || Locks::builder().pool(pool(&server.url())).subscriber(other.url());
    let outcome = builder().connect().await;
    let Err(Error::Config(ConfigError::SubscriberElsewhere { subscriber, .. })) = &outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(*subscriber, format!("127.0.0.1:{}", other.port()));
    eventually("the subscription has ended", || async { other.subscribers().await.is_empty() }).await;
    // A lazy client does not use that subscriber either: it polls.
    let locks = builder().connect_lazily().unwrap();
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    let queue = "{lock:x}:waiters";
    eventually("the waiter queues", || async { server.waiters(queue).await == 1 }).await;
    let entry: Vec<String> = server.run(&["ZRANGE", queue, "0", "0"]).await;
    assert!(!entry[0].contains("lock:wake:"), "the waiter has no channel: {entry:?}");
    guard.release().await.unwrap();
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
}

/// A replica forwards messages that clients publish at its master, but not those of scripts.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_of_a_replica_is_refused() {
    let (master, replica) = (Server::start().await, Server::start().await);
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    eventually("the replica follows its master", || replica.follows()).await;
    let outcome = Locks::builder().pool(pool(&master.url())).subscriber(replica.url()).connect().await;
    let expected = matches!(&outcome, Err(Error::Config(ConfigError::SubscriberElsewhere { .. })));
    assert!(expected, "{outcome:?}");
}
