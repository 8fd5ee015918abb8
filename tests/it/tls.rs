//! TLS: servers with certificates of a private CA that want one of the client, in every topology.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use redlatch::redis::{Client, ClientTlsConfig, TlsCertificates};
use redlatch::{ConfigError, Error, Locks, LocksBuilder};
use tokio::task::JoinHandle;

use crate::support::{Server, eventually, free_port, soon};

/// A private CA with one certificate, for the servers and for clients.
struct Authority {
    ca: String,
    certificate: String,
    key: String,
    directory: tempfile::TempDir,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Another name than that of the certificate, which OpenSSL would take to be its own issuer.
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let authority = Authority {
            ca: issuer.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            directory: tempfile::tempdir().unwrap(),
        };
        for (name, text) in
            [("ca", &authority.ca), ("certificate", &authority.certificate), ("key", &authority.key)]
        {
            std::fs::write(authority.path(name), text).unwrap();
        }
        authority
    }

    fn path(&self, name: &str) -> String {
        Path::new(self.directory.path()).join(format!("{name}.pem")).display().to_string()
    }

    /// What a server needs to speak TLS, and want certificates of its clients.
    fn settings(&self, port: u16) -> Vec<[String; 2]> {
        let setting = |name: &str, value: String| [name.to_owned(), value];
        vec![
            setting("tls-port", port.to_string()),
            setting("tls-ca-cert-file", self.path("ca")),
            setting("tls-cert-file", self.path("certificate")),
            setting("tls-key-file", self.path("key")),
            setting("tls-auth-clients", "yes".to_owned()),
        ]
    }

    /// A server that speaks TLS, and on another port plainly with the test.
    async fn server(&self, more: &[&str]) -> (Server, u16) {
        let port = free_port();
        let mut words = Vec::new();
        for [name, value] in self.settings(port) {
            words.extend([format!("--{name}"), value]);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        (Server::start_with(&words).await, port)
    }

    /// The CA, and a certificate of the client.
    fn certificates(&self) -> TlsCertificates {
        let client_tls = ClientTlsConfig {
            client_cert: self.certificate.clone().into_bytes(),
            client_key: self.key.clone().into_bytes(),
        };
        TlsCertificates { client_tls: Some(client_tls), ..self.root() }
    }

    /// The CA alone.
    fn root(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: Some(self.ca.clone().into_bytes()) }
    }
}

/// Whether the server that is tested against was built with TLS.
async fn can_be_tested() -> bool {
    let server = Server::start().await;
    let known: Vec<String> = server.run(&["CONFIG", "GET", "tls-port"]).await;
    if known.is_empty() {
        eprintln!("not tested: the server is built without TLS");
    }
    !known.is_empty()
}

fn url(port: u16) -> String {
    format!("rediss://127.0.0.1:{port}/")
}

/// Takes a lock, waits for it, and is notified: requests and messages both pass.
async fn is_usable(builder: LocksBuilder, servers: &[&Server]) {
    let locks = builder.connect().await.unwrap();
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting: JoinHandle<_> = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    eventually("it subscribes", || async {
        for server in servers {
            if !server.subscribers().await.is_empty() {
                return true;
            }
        }
        false
    })
    .await;
    guard.release().await.unwrap();
    soon("granted", waiting).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_one_server_takes_a_private_ca_and_a_client_certificate() {
    if !can_be_tested().await {
        return;
    }
    let authority = Authority::new();
    let (server, port) = authority.server(&[]).await;
    is_usable(Locks::builder().server(url(port)).tls(authority.certificates()), &[&server]).await;
    let own = Client::build_with_tls(url(port), authority.certificates()).unwrap();
    is_usable(Locks::builder().server(own.clone()), &[&server]).await;
    // Without the client's certificate, with that of another CA, and without the CA, it is refused.
    let stranger = Authority::new();
    for certificates in [Some(authority.root()), Some(stranger.certificates()), None] {
        let builder = Locks::builder().server(url(port));
        let builder = match certificates {
            Some(certificates) => builder.tls(certificates),
            None => builder,
        };
        let outcome = builder.connect().await;
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    }
    let pool = redlatch::deadpool_redis::Config::from_url(server.url());
    let pool = pool.create_pool(Some(redlatch::deadpool_redis::Runtime::Tokio1)).unwrap();
    is_usable(Locks::builder().pool(pool).subscriber(own), &[&server]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_quorum_takes_a_private_ca_and_a_client_certificate() {
    if !can_be_tested().await {
        return;
    }
    let authority = Authority::new();
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(authority.server(&[]).await);
    }
    let urls = || servers.iter().map(|(_, port)| url(*port));
    let all: Vec<&Server> = servers.iter().map(|(server, _)| server).collect();
    is_usable(Locks::builder().quorum(urls()).tls(authority.certificates()), &all).await;
    let outcome = Locks::builder().quorum(urls()).tls(authority.root()).connect().await;
    assert!(matches!(outcome, Err(Error::NoQuorum { .. })), "{outcome:?}");
}

/// The nodes that a seed names are reached with its certificates as well.
#[tokio::test(flavor = "multi_thread")]
async fn tls_cluster_takes_a_private_ca_and_a_client_certificate() {
    if !can_be_tested().await {
        return;
    }
    let authority = Authority::new();
    let member = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
    let member = [&member[..], &["--tls-cluster", "yes", "--cluster-announce-ip", "127.0.0.1"]].concat();
    let (one, other) = (authority.server(&member).await, authority.server(&member).await);
    for (place, (server, _)) in [&one, &other].into_iter().enumerate() {
        server.run::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(place + 1).to_string()]).await;
        let slots: Vec<String> =
            (0..16_384).filter(|slot| slot / 8_192 == place).map(|slot| slot.to_string()).collect();
        let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
        server.run::<()>(&words.collect::<Vec<_>>()).await;
    }
    one.0.run::<()>(&["CLUSTER", "MEET", "127.0.0.1", &other.1.to_string()]).await;
    for (server, _) in [&one, &other] {
        eventually("the cluster is ok", || async {
            let info: String = server.run(&["CLUSTER", "INFO"]).await;
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:2\r")
        })
        .await;
    }
    let builder = || Locks::builder().cluster([url(one.1)]);
    is_usable(builder().tls(authority.certificates()), &[&one.0, &other.0]).await;
    // Of two names at least one is at the node that was not named.
    let locks = builder().tls(authority.certificates()).connect().await.unwrap();
    for name in ["x", "y", "z", "a", "b", "c"] {
        locks.mutex(name).unwrap().lock().await.unwrap().release().await.unwrap();
    }
    let outcome = builder().tls(authority.root()).connect().await;
    assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    // The library would connect to the other node without the certificates of a client.
    let own = Client::build_with_tls(url(one.1), authority.certificates()).unwrap();
    let outcome = Locks::builder().cluster([own]).connect().await;
    let expected = matches!(&outcome, Err(Error::Config(ConfigError::CertificatesOfSeed { .. })));
    assert!(expected, "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_sentinel_takes_a_private_ca_and_a_client_certificate() {
    if !can_be_tested().await {
        return;
    }
    let authority = Authority::new();
    let (master, port) = authority.server(&[]).await;
    let (sentinel, sentinel_port) = sentinel(&authority, port).await;
    let builder = |master: &str| Locks::builder().sentinel([url(sentinel_port)], master);
    // A name alone is reached as its sentinels are.
    for name in ["mymaster", "rediss://mymaster/"] {
        is_usable(builder(name).tls(authority.certificates()), &[&master]).await;
        let outcome = builder(name).tls(authority.root()).connect().await;
        assert!(matches!(outcome, Err(Error::Redis { .. })), "{outcome:?}");
    }
    // With sentinels that are asked plainly, the certificates are for the master alone.
    let plain = Locks::builder().sentinel([sentinel.url()], "rediss://mymaster/");
    is_usable(plain.tls(authority.certificates()), &[&master]).await;
    let outcome = Locks::builder().sentinel([sentinel.url()], "mymaster").tls(authority.certificates());
    let outcome = outcome.connect_lazily();
    assert!(matches!(outcome, Err(ConfigError::CertificatesWithoutTls { .. })), "{outcome:?}");
    let own = Client::build_with_tls(url(sentinel_port), authority.certificates()).unwrap();
    let mastered = Client::build_with_tls("rediss://mymaster/", authority.certificates()).unwrap();
    is_usable(Locks::builder().sentinel([own], mastered), &[&master]).await;
}

/// A sentinel that watches the TLS port of a master, and speaks TLS itself.
async fn sentinel(authority: &Authority, master: u16) -> (Server, u16) {
    for _ in 0..20 {
        let port = free_port();
        let mut configuration =
            format!("sentinel monitor mymaster 127.0.0.1 {master} 1\ntls-replication yes\n");
        for [name, value] in authority.settings(port) {
            configuration += &format!("{name} {value}\n");
        }
        if let Some(sentinel) = Server::start_sentinel(free_port(), &configuration).await {
            return (sentinel, port);
        }
    }
    panic!("no sentinel starts")
}

#[tokio::test]
async fn tls_certificates_are_refused_where_they_would_have_no_effect() {
    let authority = Authority::new();
    let nowhere = "rediss://127.0.0.1:1/";
    let refused = |builder: LocksBuilder| builder.connect_lazily().unwrap_err();
    let own = Client::open(nowhere).unwrap();
    let error = refused(Locks::builder().server(own.clone()).tls(authority.root()));
    assert!(matches!(error, ConfigError::CertificatesOfClient { .. }), "{error:?}");
    let error = refused(Locks::builder().sentinel([nowhere], own).tls(authority.root()));
    assert!(matches!(error, ConfigError::CertificatesOfClient { .. }), "{error:?}");
    let pool = redlatch::deadpool_redis::Config::from_url(nowhere);
    let pool = pool.create_pool(Some(redlatch::deadpool_redis::Runtime::Tokio1)).unwrap();
    let error = refused(Locks::builder().pool(pool).subscriber(nowhere).tls(authority.root()));
    assert!(matches!(error, ConfigError::CertificatesOfClient { .. }), "{error:?}");
    let plain = "redis://127.0.0.1:1/";
    for builder in [
        Locks::builder().server(plain),
        Locks::builder().quorum([nowhere, nowhere, plain]),
        Locks::builder().cluster([nowhere, plain]),
        Locks::builder().sentinel([nowhere, plain], "mymaster"),
    ] {
        let error = refused(builder.tls(authority.root()));
        assert!(matches!(error, ConfigError::CertificatesWithoutTls { .. }), "{error:?}");
    }
    let garbage = TlsCertificates {
        client_tls: Some(ClientTlsConfig {
            client_cert: b"garbage".to_vec(),
            client_key: b"s3cret".to_vec(),
        }),
        root_cert: None,
    };
    let error = refused(Locks::builder().server(nowhere).tls(garbage));
    assert!(matches!(error, ConfigError::Certificates { .. }), "{error:?}");
    assert!(!format!("{error:?} {error}").contains("s3cret"), "{error:?}");
}
