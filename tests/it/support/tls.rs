//! TLS: servers with certificates of a private CA that require a certificate of the client.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use redlatch::redis::{ClientTlsConfig, TlsCertificates};

use super::{Server, eventually, free_port};

/// A private CA with one certificate, for the servers and for clients.
pub struct Authority {
    ca: String,
    certificate: String,
    key: String,
    directory: tempfile::TempDir,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Not the name of the certificate, which OpenSSL would take for self-signed otherwise.
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

    pub fn path(&self, name: &str) -> String {
        Path::new(self.directory.path()).join(format!("{name}.pem")).display().to_string()
    }

    /// Arguments of a server that speaks TLS and requires certificates of its clients.
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

    fn words(&self, port: u16) -> Vec<String> {
        self.settings(port).into_iter().flat_map(|[name, value]| [format!("--{name}"), value]).collect()
    }

    /// Starts a server that speaks TLS on the returned port, and plain TCP with the test on another
    /// one. The arguments given here override those of the authority.
    pub async fn server(&self, more: &[&str]) -> (Server, u16) {
        let port = free_port();
        let words = self.words(port);
        let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        (Server::start_with(&words).await, port)
    }

    /// The CA, and a certificate of the client.
    pub fn certificates(&self) -> TlsCertificates {
        let client_tls = ClientTlsConfig {
            client_cert: self.certificate.clone().into_bytes(),
            client_key: self.key.clone().into_bytes(),
        };
        TlsCertificates { client_tls: Some(client_tls), ..self.root() }
    }

    /// The CA alone.
    pub fn root(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: Some(self.ca.clone().into_bytes()) }
    }

    /// A cluster of two masters that speak TLS with clients and with each other.
    pub async fn cluster(&self) -> [(Server, u16); 2] {
        let member = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
        let member = [&member[..], &["--tls-cluster", "yes", "--cluster-announce-ip", "127.0.0.1"]].concat();
        let (one, other) = (self.server(&member).await, self.server(&member).await);
        for (place, (server, _)) in [&one, &other].into_iter().enumerate() {
            server.run::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(place + 1).to_string()]).await;
            server.add_slots(place * 8_192..(place + 1) * 8_192).await;
        }
        one.0.run::<()>(&["CLUSTER", "MEET", "127.0.0.1", &other.1.to_string()]).await;
        for (server, _) in [&one, &other] {
            eventually("the cluster is ok", || async {
                let info: String = server.run(&["CLUSTER", "INFO"]).await;
                info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:2\r")
            })
            .await;
        }
        [one, other]
    }

    /// A sentinel that monitors the TLS port of a master, and speaks TLS itself.
    pub async fn sentinel(&self, master: u16) -> (Server, u16) {
        for _ in 0..20 {
            let port = free_port();
            let mut configuration =
                format!("sentinel monitor mymaster 127.0.0.1 {master} 1\ntls-replication yes\n");
            for [name, value] in self.settings(port) {
                configuration += &format!("{name} {value}\n");
            }
            if let Some(sentinel) = Server::start_sentinel(free_port(), &configuration).await {
                return (sentinel, port);
            }
        }
        panic!("no sentinel starts")
    }
}

/// Whether the tested server was built with TLS. Otherwise Redis does not know the settings, and
/// Valkey, which knows them, does not start with them.
pub async fn is_available() -> bool {
    let authority = Authority::new();
    let words = authority.words(free_port());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let is_available = Server::try_start_in(&words, &Vec::new()).await.is_some();
    if !is_available {
        eprintln!("not tested: the server is built without TLS");
    }
    is_available
}

/// The URL of a port that speaks TLS.
pub fn url(port: u16) -> String {
    format!("rediss://127.0.0.1:{port}/")
}
