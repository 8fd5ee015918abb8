//! ACL rights: those that the guide documents suffice, in every topology.

use std::time::Duration;

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, NodeStatus, Options, RestartGuard};

use crate::support::{Deployment, KINDS, Kind, Server, Topology, eventually, renewed_by, soon, ttl};

const TTL: Duration = Duration::from_secs(6);
const GUIDE: &str = include_str!("../../docs/rights.md");

/// The rights of the guide's `ACL SETUSER` line.
pub fn documented_rights() -> &'static str {
    GUIDE.lines().find_map(|line| line.strip_prefix("ACL SETUSER locks on >secret ")).unwrap()
}

/// Starts a deployment, and creates the guide's user on all servers with data. `more` are the
/// further rights that the topology needs.
async fn limited(topology: Topology, more: &[&str]) -> (Deployment, Vec<String>) {
    let deployment = Deployment::start(topology).await;
    let rights = documented_rights();
    for right in more {
        assert!(GUIDE.contains(&format!("`{right}`")), "{right} is documented");
    }
    for server in deployment.masters().iter().chain(deployment.replicas()) {
        let mut words = vec!["ACL", "SETUSER", "locks", "on", ">secret"];
        words.extend(rights.split_whitespace().chain(more.iter().copied()));
        server.run::<()>(&words).await;
    }
    let urls = deployment.entrances().iter().map(|server| server.url());
    let urls = urls.map(|url| url.replace("redis://", "redis://locks:secret@")).collect();
    (deployment, urls)
}

/// Uses every verb of every kind, and checks the nodes.
async fn is_usable(deployment: &Deployment, locks: &Locks, nodes: &[&str]) {
    let statuses = locks.nodes().await;
    let votes = |status: &NodeStatus| (status.node.clone(), status.is_voter());
    let expected: Vec<_> = nodes.iter().map(|node| ((*node).to_owned(), true)).collect();
    assert_eq!(statuses.iter().map(votes).collect::<Vec<_>>(), expected, "{statuses:?}");
    for kind in KINDS {
        let name = format!("limited-{}", kind.name());
        let (lock, rival) = (kind.lock(locks, &name), kind.rival().lock(locks, &name));
        let guard = lock.lock().await.unwrap();
        let waiting = rival.lock_in_task();
        eventually("the waiter queues", || async { deployment.waiters(&lock).await == 1 }).await;
        assert_eq!(lock.inspect().await.unwrap().waiters, 1, "inspect");
        let until = guard.lease().valid_until() + TTL / 6;
        eventually("the lease is renewed", || async { guard.lease().valid_until() > until }).await;
        guard.release().await.unwrap();
        soon("the waiter is granted the lock", waiting).await.unwrap().unwrap().release().await.unwrap();
        let guard = lock.lock().await.unwrap();
        assert!(lock.force_release().await.unwrap());
        drop(guard);
    }
    soon("settled() returns", locks.settled()).await;
}

fn options() -> Options {
    // Rights do not depend on how busy the machine is.
    Options::new().ttl(TTL).node_timeout(Duration::from_secs(10))
}

#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_suffice_for_a_cluster() {
    let (deployment, urls) = limited(Topology::Cluster, &["+cluster|slots"]).await;
    let locks = Locks::builder().cluster(urls).options(options()).connect().await.unwrap();
    is_usable(&deployment, &locks, &["cluster"]).await;
}

#[cfg(feature = "sentinel")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_suffice_for_a_sentinel_group() {
    let (deployment, _) = limited(Topology::Sentinel, &["+role", "+wait"]).await;
    let rights = "on >other -@all +sentinel|get-master-addr-by-name +sentinel|master";
    for sentinel in deployment.sentinels() {
        let words = ["ACL", "SETUSER", "asks"].into_iter().chain(rights.split(' '));
        sentinel.run::<()>(&words.collect::<Vec<_>>()).await;
    }
    let sentinels = deployment
        .sentinels()
        .iter()
        .map(|sentinel| format!("redis://asks:other@127.0.0.1:{}/", sentinel.port()));
    let master = "redis://locks:secret@mymaster/";
    let locks = Locks::builder()
        .sentinel(sentinels, master)
        .options(options().replicas(1, Duration::from_millis(900)))
        .connect();
    is_usable(&deployment, &locks.await.unwrap(), &["mymaster"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_suffice_for_a_quorum() {
    let (deployment, urls) = limited(Topology::Quorum3, &["+info"]).await;
    let locks = Locks::builder()
        .quorum(urls)
        .options(options().restart_guard(RestartGuard::On))
        .connect()
        .await
        .unwrap();
    assert_eq!(locks.rejoin().await.unwrap().len(), 3);
    let nodes: Vec<_> =
        deployment.masters().iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    is_usable(&deployment, &locks, &nodes.iter().map(String::as_str).collect::<Vec<_>>()).await;
}

/// Monitoring needs no right to write, except on Redis 6.2, which runs no script without that
/// right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_rights_suffice_to_inspect_since_redis_7() {
    const PAGE: &str = include_str!("../../lua/README.md");
    let server = Server::start().await;
    let version: String = server.run(&["INFO", "server"]).await;
    let is_old = version.contains("redis_version:6.");
    let rights = PAGE.lines().find_map(|line| line.strip_prefix("ACL SETUSER sees on >secret ")).unwrap();
    let mut words = vec!["ACL", "SETUSER", "sees", "on", ">secret"];
    if is_old {
        // Redis 6.2 has neither read-only script commands nor read-only key patterns.
        words.extend(["~*", "+@read", "+time"]);
    } else {
        words.extend(rights.split_whitespace());
    }
    server.run::<()>(&words).await;
    let locks = server.locks().await;
    let url = server.url().replace("redis://", "redis://sees:secret@");
    let reader = Locks::open(&url).await.unwrap();
    for kind in KINDS {
        let name = format!("seen-{}", kind.name());
        let (lock, seen) = (kind.lock(&locks, &name), kind.lock(&reader, &name));
        let guard = lock.lock().await.unwrap();
        for known in [false, true] {
            if !known {
                server.run::<()>(&["SCRIPT", "FLUSH"]).await;
            }
            let outcome = seen.inspect().await;
            assert_eq!(outcome.is_err(), is_old, "{outcome:?}");
        }
        if !is_old {
            assert!(seen.is_locked().await);
            assert!(seen.is_held_by(&guard).await);
        }
        // This user cannot acquire a lock, and its tries change nothing.
        assert!(seen.try_lock().await.is_err());
        assert!(seen.force_release().await.is_err());
        guard.release().await.unwrap();
        drop((lock, seen));
    }
    drop((locks, reader));
    server.assert_nothing_left().await;
}

/// A user that may write inspects with one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inspect_with_all_rights_is_one_request() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mutex = locks.mutex("x").unwrap();
    mutex.inspect().await.unwrap();
    let stats: String = server.run(&["INFO", "commandstats"]).await;
    assert!(stats.contains("cmdstat_evalsha:") && !stats.contains("_ro:"), "{stats}");
    drop((mutex, locks));
    server.assert_nothing_left().await;
}

/// A user with the documented rights, and no more.
#[tokio::test(flavor = "multi_thread")]
async fn rights_suffice_for_one_server() {
    let server = Server::start().await;
    let rights = documented_rights();
    let mut words = vec!["ACL", "SETUSER", "locks", "on", ">secret"];
    words.extend(rights.split_whitespace());
    server.run::<()>(&words).await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    for protocol in ["resp2", "resp3"] {
        let locks = Locks::builder()
            .server(format!("{url}?protocol={protocol}"))
            .options(ttl(3_000))
            .connect()
            .await
            .unwrap();
        for kind in [Kind::Mutex, Kind::Reentrant] {
            let lock = kind.lock(&locks, &format!("limited-{}-{protocol}", kind.name()));
            let guard = lock.lock().await.unwrap();
            let waiting = lock.for_another().lock_in_task();
            server.all_notified(lock.key()).await;
            let channels: Vec<String> = server.run(&["PUBSUB", "CHANNELS", "lock:wake:*"]).await;
            assert_eq!(channels.len(), 1, "the client is subscribed");
            renewed_by(guard.lease(), Duration::from_millis(600)).await;
            let before = server.published().await;
            guard.release().await.unwrap();
            drop(soon("the waiter is granted the lock", waiting).await.unwrap().unwrap());
            assert!(server.published().await > before, "no message was published");
            eventually("the lock is free", || async { !server.is_locked(&lock).await }).await;
            assert!(!lock.force_release().await.unwrap());
        }
    }
    // Without the right to publish no call fails: the waiter polls.
    server.run::<()>(&["ACL", "SETUSER", "locks", "-publish"]).await;
    let locks = Locks::open(&url).await.unwrap();
    let lock = Kind::Mutex.lock(&locks, "unpublished");
    let guard = lock.lock().await.unwrap();
    let waiting = lock.for_another().lock_in_task();
    eventually("the waiter queues", || async { server.queued_for(&lock).await == 1 }).await;
    guard.release().await.unwrap();
    soon("the waiter is granted the lock", waiting).await.unwrap().unwrap().release().await.unwrap();
    // Another application's locks are not accessible.
    let foreign = locks.with_options(Options::new().prefix("other:")).unwrap();
    assert!(matches!(foreign.mutex("x").unwrap().try_lock().await, Err(Error::Redis { .. })));
}

/// With the documented rights, a subscriber of another server is found out and refused. Without the
/// right to publish, it cannot be found out.
#[tokio::test(flavor = "multi_thread")]
async fn rights_suffice_to_verify_a_subscriber() {
    let (server, other) = (Server::start().await, Server::start().await);
    let rights = documented_rights();
    for (user, less) in [("locks", "+ping"), ("silent", "-publish")] {
        for server in [&server, &other] {
            let mut words = vec!["ACL", "SETUSER", user, "on", ">secret"];
            words.extend(rights.split(' ').chain([less]));
            server.run::<()>(&words).await;
        }
        let url = |server: &Server| server.url().replace("redis://", &format!("redis://{user}:secret@"));
        let builder = || {
            Locks::builder().pool(Config::from_url(url(&server)).create_pool(Some(Runtime::Tokio1)).unwrap())
        };
        let locks = builder().subscriber(url(&server)).connect().await.unwrap();
        locks.mutex("x").unwrap().lock().await.unwrap().release().await.unwrap();
        let outcome = builder().subscriber(url(&other)).connect().await;
        assert_eq!(outcome.is_err(), user == "locks", "{user}: {outcome:?}");
    }
}

/// A server does not say which command it refused inside a script: the client finds out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_one_server_refuses_are_named() {
    each_missing_right_is_named(Topology::Standalone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_a_quorum_refuses_are_named() {
    each_missing_right_is_named(Topology::Quorum3).await;
}

#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_a_cluster_refuses_are_named() {
    each_missing_right_is_named(Topology::Cluster).await;
}

/// Of a user that only inspects, no right to write is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_to_read_are_named_without_a_right_to_write() {
    let server = Server::start().await;
    let rights = "ACL SETUSER sees on >secret ~* -@all +eval +evalsha +get +pttl +time";
    server.run::<()>(&rights.split(' ').collect::<Vec<_>>()).await;
    let url = server.url().replace("redis://", "redis://sees:secret@");
    let locks = Locks::builder().server(url).options(options()).connect().await.unwrap();
    let (lock, holder) = (Kind::Reentrant.lock(&locks, "seen"), server.locks().await);
    let held = Kind::Reentrant.lock(&holder, "seen").lock().await.unwrap();
    let error = format!("{:?}", lock.inspect().await.unwrap_err());
    assert!(error.contains("+hgetall") || error.contains("'hgetall'"), "{error}");
    assert!(!error.contains("+set") && !error.contains("+hset"), "{error}");
    held.release().await.unwrap();
}

/// A refused `PING` is an answer: the subscription lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_outlives_the_lack_of_the_right_to_test_it() {
    let server = Server::start().await;
    let mut words = vec!["ACL", "SETUSER", "locks", "on", ">secret"];
    words.extend(documented_rights().split(' ').chain(["-ping"]));
    server.run::<()>(&words).await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    let locks = Locks::builder().server(url).options(options()).connect().await.unwrap();
    let (lock, holder) = (locks.mutex("x").unwrap(), server.locks().await);
    let held = holder.mutex("x").unwrap().lock().await.unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await });
    let stats = async |command: &str, field: &str| {
        let stats: String = server.run(&["INFO", "commandstats"]).await;
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
        let number = line.and_then(|line| line.split([':', ',']).find_map(|part| part.strip_prefix(field)));
        number.map_or(0, |number| number.parse::<u64>().unwrap())
    };
    eventually("it was tested twice", || async { stats("ping", "rejected_calls=").await >= 2 }).await;
    assert_eq!(stats("subscribe", "calls=").await, 1);
    held.release().await.unwrap();
    soon("it is granted the lock", waiting).await.unwrap().unwrap().release().await.unwrap();
}

/// Without one right after the other, each verb of each kind works or fails with an error that
/// names the right.
async fn each_missing_right_is_named(topology: Topology) {
    let (deployment, urls) = limited(topology, &["+info", "+cluster|slots"]).await;
    let builder = match topology {
        Topology::Standalone => Locks::builder().server(urls[0].as_str()),
        Topology::Quorum3 => Locks::builder().quorum(urls),
        #[cfg(feature = "cluster")]
        _ => Locks::builder().cluster(urls),
        #[cfg(not(feature = "cluster"))]
        _ => unreachable!("{topology:?}"),
    };
    let locks = builder.options(options().ttl(Duration::from_secs(60))).connect().await.unwrap();
    let commands = documented_rights().split_whitespace().filter_map(|right| right.strip_prefix('+'));
    let mut named = 0;
    // Nothing sends a text, publishes or greets in these calls.
    for command in commands.filter(|command| !["eval", "publish", "ping", "hello"].contains(command)) {
        for kind in KINDS {
            let lock = |verb: &str| kind.lock(&locks, &format!("{command}-{verb}-{}", kind.name()));
            let [free, used, renewed, released] = ["free", "used", "renewed", "released"].map(lock);
            let [adopted, seen, revoked] = ["adopted", "seen", "revoked"].map(lock);
            let rival = kind.rival().lock(&locks, &format!("{command}-used-{}", kind.name()));
            let before = (
                rival.lock().await.unwrap(),
                renewed.lock().await.unwrap(),
                released.lock().await.unwrap(),
                adopted.lock().await.unwrap().into_ticket().unwrap(),
                seen.lock().await.unwrap(),
                revoked.lock().await.unwrap(),
            );
            let (other, renewing, releasing, ticket, shown, taken) = before;
            deployment.run::<()>(&["ACL", "SETUSER", "locks", &format!("-{command}")]).await;
            let outcomes = [
                ("try_lock", free.try_lock().await.map(drop)),
                ("lock", used.lock_timeout(Duration::from_millis(1)).await.map(drop)),
                ("renew", renewing.lease().renew().await.map(drop)),
                ("release", releasing.release().await),
                ("adopt", adopted.adopt(&ticket).await.map(drop)),
                ("inspect", seen.inspect().await.map(drop)),
                ("force_release", revoked.force_release().await.map(drop)),
            ];
            deployment.run::<()>(&["ACL", "SETUSER", "locks", &format!("+{command}")]).await;
            for (verb, outcome) in outcomes {
                let Err(error) = outcome else { continue };
                let text = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source())
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(": ");
                if matches!(error, Error::TimedOut { .. }) {
                    continue;
                }
                let right = format!("+{command}");
                let is_named = text.contains(&right) || text.contains(&format!("'{command}'"));
                assert!(is_named && !error.is_transient(), "{verb} of {kind:?} without {right}: {text}");
                named += 1;
            }
            drop((other, renewing, shown, taken));
        }
    }
    assert!(named > 100, "{named} refusals");
}
