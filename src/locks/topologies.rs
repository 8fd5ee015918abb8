//! Locks on more than one server.

use super::Locks;
#[cfg(any(feature = "cluster", feature = "sentinel"))]
use crate::error::ConfigError;
use crate::error::Error;
use crate::lease::Client;
use crate::options::Options;
use crate::wire::NodeSet;
#[cfg(any(feature = "cluster", feature = "sentinel"))]
use crate::wire::{self, Dial, Ear};

impl Locks {
    /// Connects to a Redis Cluster, named by some of its nodes. All keys of a lock are in one slot.
    ///
    /// **What it promises**: what a lock on one server does, on the master of the lock's slot. Slots that move, and
    /// replicas that take over, are followed.
    ///
    /// **What it does not**: outlast a failover that loses writes, which replicas get late. Then two may believe
    /// that they hold the lock, until the first one's next renewal; the later one's fencing token is larger.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let nodes = ["redis://10.0.0.1:7000/", "redis://10.0.0.2:7000/"];
    /// let locks = redlatch::Locks::cluster(nodes).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Url`] for URLs that cannot be read, or differ in their credentials; [`Error::Redis`] if no node
    /// answers within the [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
    pub async fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Locks, Error> {
        Locks::cluster_with(urls, Options::default()).await
    }

    /// [`cluster`](Locks::cluster) with options of one's own.
    ///
    /// # Errors
    /// Those of [`cluster`](Locks::cluster), and [`Error::Config`] for options out of their bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
    pub async fn cluster_with(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        options: Options,
    ) -> Result<Locks, Error> {
        options.check()?;
        let built = wire::cluster(urls, options.node_timeout);
        let (client, seeds) = built.map_err(|cause| ConfigError::Url { cause })?;
        let ear = Ear::Cluster(std::sync::Arc::new(seeds));
        Locks::start(Dial::Cluster(std::sync::Arc::new(client)), Some(ear), options).await
    }

    /// Connects to a Redis Cluster as an application's pool does: with its addresses, credentials and protocol.
    ///
    /// The connection is made beside the pool and takes no place in it. A pool cannot subscribe: without
    /// [`with_subscriber`](Locks::with_subscriber), whoever waits looks every 100 ms instead of being told.
    ///
    /// **Timeouts**: the [node timeout](Options::node_timeout) covers every request, with all that the client library does
    /// for it, and every connection to the cluster as a whole. What it consists of is the pool's, which is to say the
    /// library's defaults, since a pool takes no others: a second to connect to each server, no limit for the answer of
    /// one server, pauses of its own between retries, plain sockets. A server that hangs while a connection is made is
    /// waited for twice: to open beside one, or to replace a connection, takes a node timeout of 3 s. [`cluster`](Locks::cluster) divides the node timeout among them, and
    /// finds out sooner that a server is gone.
    ///
    /// # Errors
    /// [`Error::Redis`] if no node answers within the [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(all(feature = "cluster", feature = "pool"))]
    #[cfg_attr(docsrs, doc(cfg(all(feature = "cluster", feature = "pool"))))]
    pub async fn from_cluster_pool(pool: deadpool_redis::cluster::Pool) -> Result<Locks, Error> {
        Locks::from_cluster_pool_with(pool, Options::default()).await
    }

    /// [`from_cluster_pool`](Locks::from_cluster_pool) with options of one's own.
    ///
    /// # Errors
    /// Those of [`from_cluster_pool`](Locks::from_cluster_pool), and [`Error::Config`] for options out of their
    /// bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(all(feature = "cluster", feature = "pool"))]
    #[cfg_attr(docsrs, doc(cfg(all(feature = "cluster", feature = "pool"))))]
    pub async fn from_cluster_pool_with(
        pool: deadpool_redis::cluster::Pool,
        options: Options,
    ) -> Result<Locks, Error> {
        options.check()?;
        Locks::start(Dial::ClusterPool(pool), None, options).await
    }

    /// Connects to the master that sentinels watch under a name, and to another one once they have made it master.
    ///
    /// The name may be a URL with the name in place of the host, with what the master wants to be shown:
    /// `redis://user:password@mymaster/0`. The URLs of the sentinels carry what *they* want to be shown. The user must
    /// have the right to `ROLE`: only a server that says that it is a master is used.
    ///
    /// **What it promises**: what a lock on one server does, on the master. A master that is gone, silent, or demoted is
    /// given up at the next request that it fails. Leases that the new master knows go on; those that it does not
    /// know are lost, and said to be; fencing tokens go on growing.
    ///
    /// **What it does not**: outlast a failover that loses writes, which replicas get late. Then two may believe
    /// that they hold the lock, until the first one's next renewal; see [`Options::replicas`] for fewer of them.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let sentinels = ["redis://10.0.0.1:26379/", "redis://10.0.0.2:26379/", "redis://10.0.0.3:26379/"];
    /// let locks = redlatch::Locks::sentinel(sentinels, "mymaster").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Url`] for URLs that cannot be read; [`Error::Redis`] if no sentinel names a master that answers
    /// within the [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
    pub async fn sentinel(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        master_name: &str,
    ) -> Result<Locks, Error> {
        Locks::sentinel_with(urls, master_name, Options::default()).await
    }

    /// [`sentinel`](Locks::sentinel) with options of one's own.
    ///
    /// # Errors
    /// Those of [`sentinel`](Locks::sentinel), and [`Error::Config`] for options out of their bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    #[cfg(feature = "sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
    pub async fn sentinel_with(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        master_name: &str,
        options: Options,
    ) -> Result<Locks, Error> {
        options.check()?;
        let watched = wire::Watched::new(urls, master_name, options.node_timeout);
        let watched = std::sync::Arc::new(watched.map_err(|cause| ConfigError::Url { cause })?);
        let ear = Ear::Sentinel(std::sync::Arc::clone(&watched));
        Locks::start(Dial::Sentinel(watched), Some(ear), options).await
    }

    /// Connects to independent servers, of which more than half must grant a lock
    /// ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)). Three or five.
    ///
    /// **What it promises**: what a lock on one server does, as long as more than half of the servers answer. Requests
    /// go to all at a time, and nobody waits for those who are slower than the majority: a server that hangs delays
    /// only the opening. Fencing tokens grow whatever the clocks do: a server accepts a token only if it is larger than all
    /// that it has accepted, and one that a majority has accepted is larger than all before it. A lock to *read*
    /// has a token of its own here, no smaller than those of all who wrote before, and smaller than those of all who
    /// write after.
    ///
    /// **What it does not**: outlast a server that forgets. One that restarts without its data may grant what it has
    /// granted before; [the guide](crate::topologies) says which settings keep it from that, and
    /// [`RestartGuard`](crate::RestartGuard) is for the others. Nor is a lock handed over quite in the order of the
    /// queue: each server has a queue of its own.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), redlatch::Error> {
    /// let servers = ["redis://10.0.0.1/", "redis://10.0.0.2/", "redis://10.0.0.3/"];
    /// let locks = redlatch::Locks::quorum(servers).await?;
    /// let guard = locks.mutex("backup")?.lock().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Nodes`](crate::ConfigError::Nodes) for none or more than 31, [`ConfigError::Url`](crate::ConfigError::Url) for URLs that cannot be read;
    /// [`ConfigError::Node`](crate::ConfigError::Node) if two of them are one server, or one is a replica, as far as they tell: it
    /// takes the right to `INFO` and the `run_id` in its answer, without which a server is taken for another one; [`Error::NoQuorum`] if no more than half of them answer within the
    /// [node timeout](Options::node_timeout).
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    pub async fn quorum(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Locks, Error> {
        Locks::quorum_with(urls, Options::default()).await
    }

    /// [`quorum`](Locks::quorum) with options of one's own.
    ///
    /// # Errors
    /// Those of [`quorum`](Locks::quorum), and [`Error::Config`] for options out of their bounds.
    ///
    /// # Cancel safety
    /// Dropped, nothing remains.
    pub async fn quorum_with(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        options: Options,
    ) -> Result<Locks, Error> {
        options.check()?;
        let mut servers = Vec::new();
        for url in urls {
            let server = super::client(url.as_ref(), &options)?;
            let label = server.get_connection_info().addr().to_string();
            servers.push((server, label));
        }
        if servers.is_empty() || servers.len() > NodeSet::MOST {
            let (count, most) = (servers.len(), NodeSet::MOST);
            return Err(crate::error::ConfigError::Nodes { count, most }.into());
        }
        if servers.len() == 1 {
            options.check_for_one_node()?;
        }
        let client = Client::start_quorum(servers, &options).await?;
        Ok(Locks { client, options: std::sync::Arc::new(options) })
    }
}
