//! TLS in every topology, with a private CA and client certificates.

use std::time::Duration;

use redlatch::redis::{Client, ClientTlsConfig, TlsCertificates};
use redlatch::{ConfigError, Error, Locks, LocksBuilder, Options};

use crate::support::tls::{Authority, is_available, url};
use crate::support::{Server, subscribe};

/// Many handshakes at a time take long on a busy machine.
fn options() -> Options {
    Options::new().node_timeout(Duration::from_secs(10))
}

/// Requests and messages both pass.
async fn is_usable(builder: LocksBuilder, servers: &[&Server]) {
    subscribe(&builder.options(options()).connect().await.unwrap(), servers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_one_server_takes_a_private_ca_and_a_client_certificate() {
    if !is_available().await {
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
    if !is_available().await {
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
    if !is_available().await {
        return;
    }
    let authority = Authority::new();
    let [one, other] = authority.cluster().await;
    let builder = || Locks::builder().cluster([url(one.1)]);
    is_usable(builder().tls(authority.certificates()), &[&one.0, &other.0]).await;
    // Of two names at least one is at the node that was not named.
    let locks = builder().tls(authority.certificates()).options(options()).connect().await.unwrap();
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
    if !is_available().await {
        return;
    }
    let authority = Authority::new();
    let (master, port) = authority.server(&[]).await;
    let (sentinel, sentinel_port) = authority.sentinel(port).await;
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
    assert!(matches!(outcome, Err(Error::Config(ConfigError::CertificatesWithoutTls { .. }))), "{outcome:?}");
    let own = Client::build_with_tls(url(sentinel_port), authority.certificates()).unwrap();
    let mastered = Client::build_with_tls("rediss://mymaster/", authority.certificates()).unwrap();
    is_usable(Locks::builder().sentinel([own], mastered), &[&master]).await;
}

#[tokio::test]
async fn tls_certificates_are_refused_where_they_would_have_no_effect() {
    let authority = Authority::new();
    let nowhere = "rediss://127.0.0.1:1/";
    let refused = |builder: LocksBuilder| match builder.connect_lazily() {
        Err(Error::Config(error)) => error,
        other => panic!("{other:?}"),
    };
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
