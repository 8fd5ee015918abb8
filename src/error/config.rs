//! [`ConfigError`]: settings from which no client can be made. [`MembersError`]: locks that cannot
//! be acquired together.

use std::fmt::{self, Display};
use std::time::Duration;

use humantime::format_duration as span;

use super::Chain;
use crate::name::Name;

/// Why a server may not be a node of a quorum.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeProblem {
    /// It is the same server as another node.
    #[error("it is the same server as {other}")]
    SameServer {
        /// The address of the other node.
        other: String,
    },
    /// It is a replica: its vote would repeat that of its master.
    #[error("it is a replica")]
    Replica,
    /// Its `INFO` has no `run_id`, without which a [`RestartGuard`](crate::RestartGuard) cannot
    /// notice a restart.
    #[error("its INFO has no run_id, so a restart could not be noticed")]
    Unidentified,
}

/// The client's settings are invalid or contradict each other. They are checked before anything is
/// sent; only [`ConfigError::Node`] and [`ConfigError::SubscriberElsewhere`] are found while
/// connecting.
#[non_exhaustive]
#[derive(thiserror::Error)]
pub enum ConfigError {
    /// A duration is out of its bounds.
    #[error("{option} is {}; it must be from {} to {}", span(*value), span(*least), span(*most))]
    Span {
        /// The option.
        option: &'static str,
        /// Its value.
        value: Duration,
        /// The least allowed value.
        least: Duration,
        /// The largest allowed value.
        most: Duration,
    },
    /// A duration is longer than another option allows: a TTL or
    /// [`hold_at_least`](crate::Options::hold_at_least) than
    /// [`max_hold`](crate::Options::max_hold), or the wait for replicas than
    /// [`node_timeout`](crate::Options::node_timeout).
    #[error("{option} is {}; it must be at most {limit}, {}", span(*value), span(*most))]
    Longer {
        /// The option.
        option: &'static str,
        /// Its value.
        value: Duration,
        /// The option that limits it.
        limit: &'static str,
        /// The value of that option.
        most: Duration,
    },
    /// The drift is out of its bounds.
    #[error("drift is {drift}; it must be from 0 to 0.5")]
    Drift {
        /// Its value.
        drift: f64,
    },
    /// With a depth of 0, no hold could be granted.
    #[error("max_depth is 0; it must be at least 1")]
    NoDepth,
    /// With 0 readers, no read could be granted.
    #[error("max_readers is 0; it must be at least 1")]
    NoReaders,
    /// An owner may have at most 1,024 holds.
    #[error("max_depth is {depth}: at most 1024")]
    LargeDepth {
        /// The value.
        depth: u32,
    },
    /// At most 100,000 readers may hold one lock.
    #[error("max_readers is {readers}: at most 100000")]
    ManyReaders {
        /// The value.
        readers: u32,
    },
    /// No lock of a cluster waits for replicas: see [topologies](crate::guide::topologies).
    #[error("replicas is not supported in a cluster")]
    ReplicasOfCluster,
    /// A [`RestartGuard`](crate::RestartGuard) needs several nodes: a node is admitted with what
    /// the other nodes know.
    #[error("restart_guard needs a quorum of more than one node")]
    GuardOfOneNode,
    /// The prefix is too long.
    #[error("the prefix has {bytes} bytes; it must have at most 128")]
    LongPrefix {
        /// The number of its bytes.
        bytes: usize,
    },
    /// There are too few nodes for a quorum, or too many.
    #[error("the quorum has {count} nodes; it must have from 1 to {most}")]
    Nodes {
        /// The number of nodes named.
        count: usize,
        /// The largest allowed number.
        most: usize,
    },
    /// A server may not be a node of this quorum.
    #[error("{node} may not be a node of this quorum: {problem}")]
    Node {
        /// The address of the server.
        node: String,
        /// The reason.
        problem: NodeProblem,
    },
    /// No topology was named: see [`LocksBuilder`](crate::LocksBuilder).
    #[error("no topology was named: call server, sentinel, cluster, quorum or pool")]
    NoTopology,
    /// More than one topology was named.
    #[error("both {first} and {second} were called; a client has one topology")]
    SeveralTopologies {
        /// The first one.
        first: &'static str,
        /// The next one.
        second: &'static str,
    },
    /// A pool cannot subscribe, and no subscriber was named.
    #[error("a pool cannot subscribe: call subscriber with its server, or set wakeups to poll every 100 ms")]
    PoolWithoutSubscriber,
    /// A subscriber was named although the client knows where to subscribe.
    #[error("subscriber is only for a pool: a client made with {topology} knows where to subscribe")]
    NeedlessSubscriber {
        /// The topology.
        topology: &'static str,
    },
    /// The subscriber does not receive what the server of the requests publishes. Found while
    /// connecting.
    #[error("the subscriber {subscriber} is not the server of the requests, {server}")]
    SubscriberElsewhere {
        /// The address of the subscriber.
        subscriber: String,
        /// The address of the server of the requests.
        server: String,
    },
    /// Certificates were given for a server that is not named by a URL.
    #[error(
        "tls applies only to URLs: {server} was given as a client, a ConnectionInfo or a pool, \
         which has its own certificates"
    )]
    CertificatesOfClient {
        /// The address of the server.
        server: String,
    },
    /// Certificates were given for a server without TLS.
    #[error("tls applies only to URLs that begin with rediss://: {server} is reached without TLS")]
    CertificatesWithoutTls {
        /// The address of the server.
        server: String,
    },
    /// A node of a cluster was given with certificates of its own, which the other nodes would not
    /// get.
    #[error("{server} has certificates that the other nodes of the cluster would not get: use a URL and tls")]
    CertificatesOfSeed {
        /// The address of the node.
        server: String,
    },
    /// A certificate or a key is invalid.
    #[error("a certificate or a key cannot be used")]
    Certificates {
        /// The client library's error: the source.
        #[source]
        cause: redis::RedisError,
    },
    /// A client name or a label is empty, is too long, or has a character that is not allowed.
    #[error("{what} is {text:?}; it must have 1 to {most} ASCII letters, digits, '-', '_' or '.'")]
    Word {
        /// `client_name` or `label`.
        what: &'static str,
        /// Its value, or the start of a long one.
        text: String,
        /// The maximum number of bytes.
        most: usize,
    },
    /// The client was made outside a tokio runtime, which its tasks need.
    #[error("a client must be made on a tokio runtime; this thread is not on one")]
    NoRuntime,
    /// A call of [`blocking`](crate::blocking) was made on a tokio runtime, whose other tasks would
    /// stand still meanwhile; nothing was sent.
    #[error("a blocking call on a tokio runtime would block its other tasks; use redlatch::Locks there")]
    InsideRuntime,
    /// The thread of a [`blocking`](crate::blocking) client could not be started.
    #[error("the client's thread could not be started")]
    Thread {
        /// The operating system's error: the source.
        #[source]
        cause: std::io::Error,
    },
    /// An option belongs to the connections, which exist already.
    #[error("{option} belongs to the connections, which exist already: set it with LocksBuilder::options")]
    ConnectionOption {
        /// The option.
        option: &'static str,
    },
    /// The URL of the server is invalid, or needs a feature that is off. The URL itself is not
    /// shown: it may contain a password.
    #[error("the URL of the server cannot be used{}", url_form(cause))]
    Url {
        /// The client library's error: the source.
        #[source]
        cause: redis::RedisError,
    },
}

/// What a URL looks like, unless something else was wrong with it.
fn url_form(cause: &redis::RedisError) -> &'static str {
    let text = cause.to_string();
    if text.contains("URL did not parse") || text.contains("Invalid database number") {
        return ": it must be like redis://HOST:PORT/, or rediss:// for TLS, without quotes; \
                write / ? @ # % of a password as %2F %3F %40 %23 %25";
    }
    if text.contains("can't connect with TLS") {
        return ": enable the feature `tls` of redlatch";
    }
    ""
}

/// The sentence with its sources: what `main` prints if it returns an error.
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Chain(self).fmt(f)
    }
}

/// Why [`Locks::all`](crate::Locks::all) cannot have these locks together.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// There is no lock.
    #[error("there is no lock to acquire")]
    None,
    /// There are more than 128 locks.
    #[error("{0} locks are too many to acquire together; at most 128 are allowed")]
    TooMany(usize),
    /// A name stands twice: the second hold would wait for the first one, or its lease could not be
    /// found by its name if the prefixes differ.
    #[error("{:?} stands twice among the locks to acquire together", .0.as_str())]
    Twice(Name),
    /// The lock has [`hold_at_least`](crate::Options::hold_at_least): acquired in vain, since
    /// another one is busy, it could not be given back.
    #[error("{:?} has hold_at_least, and is acquired alone", .0.as_str())]
    HoldAtLeast(Name),
    /// The lock is of another client.
    #[error("{:?} is a lock of another client than the one that is to acquire it", .0.as_str())]
    OtherClient(Name),
}
