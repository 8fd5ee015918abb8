//! Mistakes that no retry mends end a call at once, whatever `outage_limit` is, and the error says
//! what is wrong. What a server says as it refuses a connection is what the user reads.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use redlatch::{Locks, LocksBuilder, Options};

use super::{KINDS, cause};
use crate::support::tls::{Authority, is_available, url};
use crate::support::{Deployment, Server, Topology, eventually, free_port, patient, soon};

const HOUR: Duration = Duration::from_secs(3600);

fn waits_an_hour() -> Options {
    Options::new().node_timeout(Duration::from_secs(2)).outage_limit(HOUR)
}

/// A call fails although it may wait for an hour, and says why.
async fn fails_at_once(what: &str, builder: LocksBuilder, why: &str) {
    let locks = builder.options(waits_an_hour()).connect_lazily().unwrap();
    for _ in 0..2 {
        let error = soon(what, locks.mutex("x").unwrap().lock()).await.unwrap_err();
        assert!(!error.is_transient() && !error.is_indeterminate(), "{what}: {error:?}");
        assert!(format!("{error:?}").contains(why), "{what}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_topology_is_a_lasting_mistake() {
    let server = Server::start().await;
    let cluster = Deployment::start(Topology::Cluster).await;
    let sentinels = Deployment::start(Topology::Sentinel).await;
    let node = cluster.masters()[0].url();
    let sentinel = sentinels.entrances()[0].url();
    let is_node = "the server is a node of a cluster: call LocksBuilder::cluster";
    for name in ["a", "b", "c"] {
        // One of these names is in a slot of another node.
        let locks = Locks::builder().server(node.clone()).options(waits_an_hour()).connect().await.unwrap();
        if let Err(error) = soon("an answer", locks.mutex(name).unwrap().lock()).await {
            assert!(format!("{error:?}").contains(is_node) && !error.is_transient(), "{error:?}");
        }
    }
    fails_at_once("no cluster", Locks::builder().cluster([server.url()]), "cluster support disabled").await;
    fails_at_once("a sentinel as server", Locks::builder().server(sentinel), "unknown command").await;
    let as_sentinel = Locks::builder().sentinel([server.url()], "mymaster");
    fails_at_once("a server as sentinel", as_sentinel, "unknown command").await;
    let unknown = sentinels.entrances().iter().map(|sentinel| sentinel.url());
    let unknown = Locks::builder().sentinel(unknown, "another");
    fails_at_once("an unknown master", unknown, "no sentinel knows a master of this name").await;
}

/// A wrong entrance beside sentinels that are silent for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn one_wrong_sentinel_beside_silent_ones_is_no_lasting_mistake() {
    let sentinels = Deployment::start(Topology::Sentinel).await;
    let plain = Server::start().await;
    let urls = sentinels.entrances().iter().chain([&plain]).map(|server| server.url());
    let builder = Locks::builder().sentinel(urls, "mymaster");
    let locks = builder.clone().options(waits_an_hour()).connect_lazily().unwrap();
    // It waits for the silent ones.
    let tries = builder.options(Options::new().node_timeout(Duration::from_secs(5))).connect_lazily();
    sentinels.entrances().iter().for_each(|sentinel| sentinel.pause());
    let error = tries.unwrap().mutex("x").unwrap().try_lock().await.unwrap_err();
    assert!(error.is_transient() && format!("{error:?}").contains("unknown command"), "{error:?}");
    sentinels.entrances().iter().for_each(|sentinel| sentinel.resume());
    soon("the master is found", locks.mutex("x").unwrap().lock()).await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_and_wrong_credentials_are_lasting_mistakes() {
    let server = Server::start().await;
    let url = server.url();
    let open = async |url: String| Locks::builder().server(url).options(patient()).connect().await;
    fails_at_once("no database", Locks::builder().server(format!("{url}99")), "DB index").await;
    let error = open(format!("{url}99")).await.unwrap_err();
    assert!(cause(&error).to_string().contains("DB index") && !error.is_transient(), "{error:?}");
    server.run::<()>(&["CONFIG", "SET", "requirepass", "right"]).await;
    fails_at_once("no password", Locks::builder().server(url.clone()), "NOAUTH").await;
    let wrong = url.replace("redis://", "redis://:wrong@");
    let error = open(wrong.clone()).await.unwrap_err();
    assert!(error.to_string().ends_with("the server refused the user name or the password"), "{error}");
    assert!(!error.is_transient(), "{error:?}");
    fails_at_once("a wrong password", Locks::builder().server(wrong), "user name or the password").await;
}

/// A server without the command that begins RESP3. The client library has an error of its own for
/// the answer of Redis 6.2.
#[tokio::test(flavor = "multi_thread")]
async fn a_protocol_that_the_server_refuses_is_a_lasting_mistake() {
    let server = Server::start_with(&["--rename-command", "HELLO", ""]).await;
    let resp3 = format!("{}?protocol=resp3", server.url());
    fails_at_once("no HELLO", Locks::builder().server(resp3), "HELLO").await;
}

/// It passes by itself, so a call that may wait is granted the lock once there is room. A node of a
/// cluster has another text. With a password or a database, that answers `AUTH` or `SELECT`.
#[tokio::test(flavor = "multi_thread")]
async fn too_many_clients_are_named_and_waited_out() {
    for (is_node, before_host, database) in [
        (false, "", ""),
        (false, "", "1"),
        (false, ":right@", ""),
        (false, "default:right@", "1"),
        (true, "", ""),
        (true, ":right@", ""),
    ] {
        let server = Server::start_with(if is_node { &["--cluster-enabled", "yes"] } else { &[] }).await;
        if is_node {
            server.add_slots(0..16_384).await;
        }
        let mut admin = server.connection().await;
        let mut set = async |setting: &str, value: &str| {
            redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).exec_async(&mut admin).await.unwrap();
        };
        if !before_host.is_empty() {
            set("requirepass", "right").await;
        }
        set("maxclients", "1").await;
        let url = server.url().replace("redis://", &format!("redis://{before_host}")) + database;
        let builder =
            || if is_node { Locks::builder().cluster([url.clone()]) } else { Locks::builder().server(&*url) };
        let locks = |options| builder().options(options).connect_lazily().unwrap();
        let error = locks(patient()).mutex("x").unwrap().try_lock().await.unwrap_err();
        assert!(cause(&error).to_string().contains("max number of clients"), "{url}: {error:?}");
        assert!(error.is_transient() && !error.is_indeterminate(), "{url}: {error:?}");
        let patient = locks(waits_an_hour());
        let waiting = tokio::spawn(async move { patient.mutex("x").unwrap().lock().await.map(drop) });
        set("maxclients", "100").await;
        soon("there is room", waiting).await.unwrap().unwrap();
    }
}

/// A server in protected mode says so, in a long line, to clients of other addresses. Where the
/// machine has only a loopback address, there is nothing to see.
#[tokio::test(flavor = "multi_thread")]
async fn protected_mode_is_named() {
    let route = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let Some(address) = route.connect("192.0.2.1:1").and_then(|()| route.local_addr()).ok() else { return };
    let server = Server::start_with(&["--bind", "0.0.0.0", "--protected-mode", "yes"]).await;
    for before_host in ["", "locks:secret@"] {
        let url = format!("redis://{before_host}{}:{}/", address.ip(), server.port());
        fails_at_once(&url, Locks::builder().server(&*url), "protected mode").await;
        let locks = Locks::builder().server(&*url).options(patient()).connect_lazily().unwrap();
        let findings = locks.doctor().await;
        let text = findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        assert!(text.contains("set a password"), "{text}");
    }
}

/// A server that accepts no more clients says so before it reads anything, and a client that is far
/// away has sent its password by then: the reply is not about the password.
#[tokio::test(flavor = "multi_thread")]
async fn too_many_clients_are_no_wrong_password() {
    const TOO_MANY: &[u8] = b"-ERR max number of clients reached\r\n";
    for is_still_full in [true, false] {
        let server = Server::start().await;
        server.run::<()>(&["CONFIG", "SET", "requirepass", "right"]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://:right@127.0.0.1:{}/", listener.local_addr().unwrap().port());
        let (room, port) = (Arc::new(AtomicBool::new(false)), server.port());
        let has_room = Arc::clone(&room);
        tokio::spawn(async move {
            for number in 0.. {
                let (mut client, _) = listener.accept().await.unwrap();
                if has_room.load(SeqCst) || number == 1 && !is_still_full {
                    let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                    tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
                } else {
                    client.readable().await.unwrap();
                    client.write_all(TOO_MANY).await.unwrap();
                    client.shutdown().await.unwrap();
                    let _rest = client.read_to_end(&mut Vec::new()).await;
                }
            }
        });
        let locks = Locks::builder().server(url).options(patient()).connect_lazily().unwrap();
        let error = locks.mutex("x").unwrap().try_lock().await.unwrap_err();
        assert!(error.is_transient() && !error.is_indeterminate(), "{error:?}");
        let why = if is_still_full { "max number of clients" } else { "broken pipe" };
        assert!(cause(&error).to_string().contains(why), "{error:?}");
        room.store(true, SeqCst);
        drop(soon("there is room", locks.mutex("x").unwrap().lock()).await.unwrap());
    }
}

/// Its nodes know no slots at first.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_forms_is_waited_for() {
    let server = Server::start_with(&["--cluster-enabled", "yes"]).await;
    let locks = |options| Locks::builder().cluster([server.url()]).options(options).connect_lazily().unwrap();
    let error = locks(patient()).mutex("x").unwrap().try_lock().await.unwrap_err();
    assert!(cause(&error).to_string().contains("knows no slots"), "{error:?}");
    assert!(error.is_transient() && !error.is_indeterminate(), "{error:?}");
    let patient = locks(waits_an_hour());
    let asked = async || server.calls("cmdstat_cluster").await;
    let before = asked().await;
    let waiting = tokio::spawn(async move { patient.mutex("x").unwrap().lock().await.map(drop) });
    eventually("the call finds no slots", async || asked().await > before + 1).await;
    server.add_slots(0..16_384).await;
    soon("its slots are served", waiting).await.unwrap().unwrap();
}

/// A cluster or a sentinel in a container announces an address that clients outside do not reach.
#[tokio::test(flavor = "multi_thread")]
async fn an_announced_address_that_cannot_be_reached_is_named() {
    let away = free_port().to_string();
    let node = Server::start_with(&["--cluster-enabled", "yes", "--cluster-announce-port", &away]).await;
    node.add_slots(0..16_384).await;
    let sentinels = Deployment::start(Topology::Sentinel).await;
    let urls: Vec<String> = sentinels.entrances().iter().map(|sentinel| sentinel.url()).collect();
    for sentinel in sentinels.entrances() {
        sentinel.run::<()>(&["SENTINEL", "MONITOR", "away", "127.0.0.1", &away, "2"]).await;
    }
    for builder in [Locks::builder().cluster([node.url()]), Locks::builder().sentinel(urls, "away")] {
        let locks = builder.options(patient()).connect_lazily().unwrap();
        let error = soon("it fails", locks.mutex("x").unwrap().try_lock()).await.unwrap_err();
        let cause = cause(&error).to_string();
        assert!(cause.contains(&format!("127.0.0.1:{away}: Connection refused")), "{error:?}");
        assert!(error.is_transient() && !error.is_indeterminate(), "{error:?}");
    }
}

/// Makes the server run a script that ends once it is killed.
async fn keep_busy(server: &Server) -> JoinHandle<redis::RedisResult<()>> {
    server.run::<()>(&["CONFIG", "SET", "lua-time-limit", "1"]).await;
    let mut script = server.connection().await;
    let endless = tokio::spawn(async move {
        redis::cmd("EVAL").arg("while true do end").arg(0).exec_async(&mut script).await
    });
    eventually("the server is busy", || async {
        server.try_run::<()>(&["TIME"]).await.is_err_and(|error| error.code() == Some("BUSY"))
    })
    .await;
    endless
}

/// A call that waits outlasts a script that runs for long; one that tries reports it.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_is_waited_for() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().outage_limit(HOUR)).await;
    for kind in KINDS {
        let (free, used) = (kind.lock(&locks, "free"), kind.rival().lock(&locks, "used"));
        let waiter = kind.lock(&locks, "used");
        let held = used.lock().await.unwrap();
        let queued = tokio::spawn(async move { waiter.lock().await });
        eventually("it queues", || async { server.queued_for(&used).await == 1 }).await;
        let endless = keep_busy(&server).await;
        let (mut waiting, lock) = (Box::pin(free.lock()), locks.mutex("tried").unwrap());
        // The server answers one request after the other: the first one is refused as well.
        let tried = tokio::select! {
            biased;
            outcome = &mut waiting => panic!("{kind:?}: {outcome:?}"),
            outcome = lock.try_lock() => outcome,
        };
        let error = tried.unwrap_err();
        assert_eq!(cause(&error).code(), Some("BUSY"), "{kind:?}: {error:?}");
        server.run::<()>(&["SCRIPT", "KILL"]).await;
        let _killed = endless.await.unwrap();
        soon("it is granted the lock", waiting).await.unwrap().release().await.unwrap();
        held.release().await.unwrap();
        soon("it is granted the lock", queued).await.unwrap().unwrap().release().await.unwrap();
    }
}

/// A new connection to a database other than the first selects it, and a server that runs a script
/// for long refuses that.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_is_waited_for_with_any_database() {
    let server = Server::start().await;
    let endless = keep_busy(&server).await;
    for database in ["0", "1"] {
        let url = server.url() + database;
        let locks = Locks::builder().server(url).options(patient()).connect_lazily().unwrap();
        let error = locks.mutex("x").unwrap().try_lock().await.unwrap_err();
        assert!(cause(&error).to_string().contains("busy running a script"), "{database}: {error:?}");
        assert!(error.is_transient() && !error.is_indeterminate(), "{database}: {error:?}");
    }
    server.run::<()>(&["SCRIPT", "KILL"]).await;
    let _killed = endless.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_on_one_side_only_is_named() {
    if !is_available().await {
        return;
    }
    let authority = Authority::new();
    let (server, port) = authority.server(&[]).await;
    let plain = format!("redis://127.0.0.1:{port}/");
    fails_at_once("no TLS", Locks::builder().server(plain), "the server expects TLS").await;
    let tls = || Locks::builder().server(url(server.port())).tls(authority.certificates());
    fails_at_once("TLS", tls(), "the server does not speak TLS").await;
    let stranger = Locks::builder().server(url(port)).tls(Authority::new().certificates());
    fails_at_once("an unknown authority", stranger, "invalid peer certificate").await;
    let plain = Locks::builder().sentinel([format!("redis://127.0.0.1:{port}/")], "mymaster");
    fails_at_once("a sentinel without TLS", plain, "the server expects TLS").await;
    let tls = Locks::builder().sentinel([url(server.port())], "mymaster").tls(authority.certificates());
    fails_at_once("a sentinel with TLS", tls, "the server does not speak TLS").await;
}
