//! [`LocksBuilder`]: configures and connects a client.

use std::fmt;
use std::sync::Arc;

use super::Locks;
use super::source::Source;
use crate::deployment::NodeSet;
use crate::error::{ConfigError, Error};
use crate::labels::Labels;
use crate::lease::{Client, Servers};
use crate::options::{Options, RestartGuard, Wakeups};
use crate::wire::{Certificates, Endpoint, Membership};

/// Builds a [`Locks`] from one topology and the settings that differ from the defaults.
///
/// [Connecting](crate::guide::connecting) shows every topology, TLS, pools and names.
#[must_use = "a builder connects only when `connect` is called"]
#[derive(Clone, Default)]
pub struct LocksBuilder {
    topologies: Vec<Topology>,
    subscriber: Option<Source>,
    certificates: Option<Certificates>,
    options: Options,
    client_name: Option<String>,
    label: Option<String>,
}

#[derive(Clone)]
enum Topology {
    Server(Source),
    #[cfg(feature = "pool")]
    Pool(deadpool_redis::Pool),
    Sentinel {
        sentinels: Vec<Source>,
        master: Source,
    },
    Cluster(Vec<Source>),
    Quorum(Vec<Source>),
}

impl LocksBuilder {
    /// Sets one server as the topology. See [one server](crate::guide::connecting#one-server).
    #[doc(alias = "url")]
    pub fn server(self, server: impl Into<Source>) -> LocksBuilder {
        self.with(Topology::Server(server.into()))
    }

    /// Sets as the topology the master that sentinels watch under a name. See
    /// [Sentinel](crate::guide::connecting#sentinel).
    #[cfg(feature = "sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
    pub fn sentinel(
        self,
        sentinels: impl IntoIterator<Item = impl Into<Source>>,
        master: impl Into<Source>,
    ) -> LocksBuilder {
        self.with(Topology::Sentinel { sentinels: sources(sentinels), master: master.into() })
    }

    /// Sets a Redis Cluster as the topology, named by some of its nodes. See [Redis
    /// Cluster](crate::guide::connecting#redis-cluster).
    #[cfg(feature = "cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
    pub fn cluster(self, nodes: impl IntoIterator<Item = impl Into<Source>>) -> LocksBuilder {
        self.with(Topology::Cluster(sources(nodes)))
    }

    /// Sets as the topology independent servers, three or five, that decide by majority. See
    /// [quorum](crate::guide::connecting#quorum).
    pub fn quorum(self, servers: impl IntoIterator<Item = impl Into<Source>>) -> LocksBuilder {
        self.with(Topology::Quorum(sources(servers)))
    }

    /// Sets the server of an application's pool as the topology, with the pool's settings. See
    /// [pools](crate::guide::connecting#pools).
    #[cfg(feature = "pool")]
    #[cfg_attr(docsrs, doc(cfg(feature = "pool")))]
    pub fn pool(self, pool: deadpool_redis::Pool) -> LocksBuilder {
        self.with(Topology::Pool(pool))
    }

    /// Sets where a client of a [pool](crate::guide::connecting#pools) subscribes: the pool's
    /// server.
    pub fn subscriber(self, subscriber: impl Into<Source>) -> LocksBuilder {
        LocksBuilder { subscriber: Some(subscriber.into()), ..self }
    }

    /// Sets a private CA, a client certificate, or both, for all sources that are URLs. See
    /// [TLS](crate::guide::connecting#tls).
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn tls(self, certificates: redis::TlsCertificates) -> LocksBuilder {
        LocksBuilder { certificates: Some(certificates), ..self }
    }

    /// Sets how locks behave. Options that are not set have their defaults.
    pub fn options(self, options: Options) -> LocksBuilder {
        LocksBuilder { options, ..self }
    }

    /// Sets the name of the application, visible in `CLIENT LIST` and in `inspect`. See
    /// [names](crate::guide::connecting#names). 1 to 31 bytes: ASCII letters, digits, `-`, `_` and
    /// `.`.
    pub fn client_name(self, name: impl Into<String>) -> LocksBuilder {
        LocksBuilder { client_name: Some(name.into()), ..self }
    }

    /// Sets the name of this instance of the application, such as that of its pod, visible in
    /// `CLIENT LIST` and in `inspect`. See [names](crate::guide::connecting#names). 1 to 63 bytes:
    /// ASCII letters, digits, `-`, `_` and `.`.
    pub fn label(self, label: impl Into<String>) -> LocksBuilder {
        LocksBuilder { label: Some(label.into()), ..self }
    }

    /// Connects to the server, or to a majority of a quorum. It fails if that does not reply within
    /// the [node timeout](Options::node_timeout).
    ///
    /// # Errors
    /// - [`Error::Config`]: the builder's settings do not fit together; nothing was sent.
    /// - [`Error::Config`] with [`ConfigError::Node`]: two nodes of a quorum are one server, or a
    ///   node is a replica.
    /// - [`Error::Config`] with [`ConfigError::SubscriberElsewhere`]: the subscriber is another
    ///   server.
    /// - [`Error::Redis`]: the server does not reply, or refuses the connection.
    /// - [`Error::NoQuorum`]: no majority of the nodes of a quorum replies.
    ///
    /// # Cancel safety
    /// Cancel safe: after a drop, nothing remains.
    pub async fn connect(self) -> Result<Locks, Error> {
        let locks = self.connect_lazily()?;
        locks.client.connect().await?;
        Ok(locks)
    }

    /// Makes the client without any I/O: no server need be running. The first call that needs a
    /// server connects. If that fails, the call waits and returns errors as in an outage: see [lazy
    /// or eager](crate::guide::connecting#lazy-or-eager).
    ///
    /// # Errors
    /// - [`Error::Config`]: the builder's settings do not fit together.
    /// - [`Error::Config`] with [`ConfigError::NoRuntime`]: the call was not made on a tokio
    ///   runtime.
    pub fn connect_lazily(self) -> Result<Locks, Error> {
        self.options.check()?;
        let servers = self.servers()?;
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(ConfigError::NoRuntime.into());
        }
        let client = Client::new(servers, &self.options);
        #[cfg(feature = "metrics")]
        crate::measure::begin(
            [&crate::mutex::MUTEX, &crate::reentrant::REENTRANT, &crate::rwlock::READ, &crate::rwlock::WRITE]
                .map(|kind| kind.name),
            client.nodes.labels.iter().map(String::as_str),
        );
        Ok(Locks { client, options: Arc::new(self.options) })
    }

    fn with(mut self, topology: Topology) -> LocksBuilder {
        self.topologies.push(topology);
        self
    }

    /// Checks that the settings fit together, and returns where to connect.
    fn servers(&self) -> Result<Servers, ConfigError> {
        let topology = match self.topologies.as_slice() {
            [] => return Err(ConfigError::NoTopology),
            [only] => only,
            [first, second, ..] => {
                let (first, second) = (first.name(), second.name());
                return Err(ConfigError::SeveralTopologies { first, second });
            }
        };
        let labels = Labels::new(self.client_name.as_deref(), self.label.as_deref())?;
        if topology.name() == "pool" {
            if self.certificates.is_some() {
                return Err(ConfigError::CertificatesOfClient { server: topology.name().to_owned() });
            }
            if self.subscriber.is_none() && self.options.wakeups != Wakeups::Poll {
                return Err(ConfigError::PoolWithoutSubscriber);
            }
        } else if self.subscriber.is_some() {
            return Err(ConfigError::NeedlessSubscriber { topology: topology.name() });
        }
        let nodes = self.nodes(topology)?;
        let subscribers = match &self.subscriber {
            Some(subscriber) => vec![self.endpoint(subscriber)?],
            None => nodes.clone(),
        };
        let membership = matches!(topology, Topology::Quorum(_)).then(|| {
            let labels = nodes.iter().map(Endpoint::label).collect();
            Membership::new(labels, self.options.restart_guard == RestartGuard::On)
        });
        self.options.check_for(nodes.len() == 1, nodes.iter().any(Endpoint::is_cluster))?;
        Ok(Servers {
            nodes,
            subscribers,
            membership,
            must_verify: self.subscriber.is_some(),
            name: labels.joint_name(),
            attempt_suffix: labels.suffix(),
        })
    }

    fn nodes(&self, topology: &Topology) -> Result<Vec<Endpoint>, ConfigError> {
        Ok(vec![match topology {
            Topology::Server(source) => self.endpoint(source)?,
            Topology::Quorum(sources) => {
                if sources.is_empty() || sources.len() > NodeSet::MAX_COUNT {
                    let (count, most) = (sources.len(), NodeSet::MAX_COUNT);
                    return Err(ConfigError::Nodes { count, most });
                }
                return sources.iter().map(|source| self.endpoint(source)).collect();
            }
            Topology::Sentinel { sentinels, master } => self.sentinels(sentinels, master)?,
            Topology::Cluster(sources) => {
                let seeds = sources.iter().map(|source| self.resolve(source)).collect::<Result<_, _>>()?;
                cluster(seeds, self.certificates.as_ref())?
            }
            #[cfg(feature = "pool")]
            Topology::Pool(pool) => Endpoint::Pool(pool.clone()),
        }])
    }

    fn resolve(&self, source: &Source) -> Result<redis::ConnectionInfo, ConfigError> {
        source.resolve(self.certificates.as_ref(), self.options.node_timeout)
    }

    fn endpoint(&self, source: &Source) -> Result<Endpoint, ConfigError> {
        let client = redis::Client::open(self.resolve(source)?);
        client.map(Endpoint::Server).map_err(|cause| ConfigError::Url { cause })
    }

    fn sentinels(&self, sentinels: &[Source], master: &Source) -> Result<Endpoint, ConfigError> {
        let limit = self.options.node_timeout;
        let (speak_tls, master_speaks_tls) = (sentinels.iter().any(Source::is_tls), master.is_tls());
        // Certificates may apply only to the servers or only to the sentinels, but not to some of
        // the sentinels.
        let given = self.certificates.as_ref();
        let for_sentinels = given.filter(|_| speak_tls || !master_speaks_tls);
        let for_master = given.filter(|_| master_speaks_tls || !master.is_url() || !speak_tls);
        let infos = sentinels
            .iter()
            .map(|sentinel| sentinel.resolve(for_sentinels, limit))
            .collect::<Result<_, _>>()?;
        let master = master.resolve_master(speak_tls, for_master, limit)?;
        let url = |cause| ConfigError::Url { cause };
        let sentinel = crate::wire::SentinelMaster::new(infos, master, limit).map_err(url)?;
        Ok(Endpoint::Sentinel(Arc::new(sentinel)))
    }
}

fn sources(given: impl IntoIterator<Item = impl Into<Source>>) -> Vec<Source> {
    given.into_iter().map(Into::into).collect()
}

fn cluster(
    seeds: Vec<redis::ConnectionInfo>,
    certificates: Option<&Certificates>,
) -> Result<Endpoint, ConfigError> {
    let brings_certificates = |info: &&redis::ConnectionInfo| {
        matches!(info.addr(), redis::ConnectionAddr::TcpTls { tls_params: Some(_), .. })
    };
    if certificates.is_none()
        && let Some(info) = seeds.iter().find(brings_certificates)
    {
        // The library connects to the servers that a seed names without the seed's certificates.
        return Err(ConfigError::CertificatesOfSeed { server: info.addr().to_string() });
    }
    if seeds.is_empty() {
        let text = "no node of the cluster was named";
        let cause = redis::RedisError::from((redis::ErrorKind::InvalidClientConfig, text));
        return Err(ConfigError::Url { cause });
    }
    Ok(Endpoint::Cluster(Arc::new(crate::wire::Seeds::new(seeds))))
}

impl Topology {
    fn name(&self) -> &'static str {
        match self {
            Topology::Server(_) => "server",
            #[cfg(feature = "pool")]
            Topology::Pool(_) => "pool",
            Topology::Sentinel { .. } => "sentinel",
            Topology::Cluster(_) => "cluster",
            Topology::Quorum(_) => "quorum",
        }
    }
}

/// Omits passwords and certificates.
impl fmt::Debug for LocksBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocksBuilder")
            .field("topologies", &self.topologies.iter().map(Topology::name).collect::<Vec<_>>())
            .field("subscriber", &self.subscriber)
            .field("has_certificates", &self.certificates.is_some())
            .field("options", &self.options)
            .field("client_name", &self.client_name)
            .field("label", &self.label)
            .finish()
    }
}
