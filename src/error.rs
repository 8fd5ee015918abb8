//! What can go wrong, told apart: somebody else has it, it was lost, the caller gave up, the server failed.

use std::time::Duration;

use crate::name::{Name, NameError};

/// How many locks an error names.
pub(crate) const MOST_NAMES: usize = 32;

/// Why a call on a lock did not do what its name says.
///
/// That somebody else holds the lock is not among them: it is the answer `None` of a `try_` call.
///
/// The text says what failed and why, to the end: there is no [source](std::error::Error::source) that would say it
/// again. What the client library said is in the field `cause`.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller's time was over before the lock was free.
    #[error("gave up waiting for lock {name:?} after {limit:?}", name = .name.as_str())]
    TimedOut {
        /// The lock.
        name: Name,
        /// The limit that the caller set.
        limit: Duration,
    },
    /// The lease ended while its guard was held: somebody else may hold the lock by now.
    #[error("the lease on lock {name:?} was lost", name = .name.as_str())]
    Lost {
        /// The lock.
        name: Name,
    },
    /// The guard was released or leaked while the work of [`while_held`](crate::Lease::while_held)
    /// ran under its lease: the work was dropped. [`Lease::ended`](crate::Lease::ended) tells the
    /// two apart.
    #[error("lock {name:?} was released while work ran under its lease", name = .name.as_str())]
    Released {
        /// The lock.
        name: Name,
    },
    /// The client was [closed](crate::Locks::close): it acquires no locks any more, and has
    /// released what it held.
    #[error("lock {name:?} is not available: its client was closed", name = .name.as_str())]
    Closed {
        /// The lock.
        name: Name,
    },
    /// [`Locks::close`](crate::Locks::close) could not release everything within its limit: the
    /// servers may have these locks until their TTLs expire. Releases go on in the background while
    /// the client lives.
    #[error("{}", unreleased(*.count, .names, *.limit))]
    Unreleased {
        /// How many holds and places in queues.
        count: usize,
        /// Their locks, each once; the first 32.
        names: Vec<Name>,
        /// The limit that the caller set.
        limit: Duration,
    },
    /// There was nothing to release: the server had already ended this hold.
    #[error("lock {name:?} was not held any more when it was released", name = .name.as_str())]
    NotHeld {
        /// The lock.
        name: Name,
    },
    /// The answer to a release was lost, and the lock has had another holder since, so that it is
    /// not known whether the lease had lasted until then. Nothing is held any more.
    #[error("lock {name:?} was released, or lost before: the answer is not known ({cause})", name = .name.as_str())]
    Unconfirmed {
        /// The lock.
        name: Name,
        /// How the answer was lost.
        cause: Box<Error>,
    },
    /// The owner has as many holds as [`Options::max_depth`](crate::Options::max_depth) allows.
    #[error("lock {name:?} is held {depth} times by its owner already", name = .name.as_str())]
    TooDeep {
        /// The lock.
        name: Name,
        /// How many holds the owner has.
        depth: u32,
    },
    /// The owner reads and wants to write, and so does another reader: each would wait for the other to
    /// stop reading. Release all holds of this owner, and begin anew; if a caller has one, the error is for the caller.
    #[error("another reader of lock {name:?} waits to write: release all holds of this owner, and begin anew", name = .name.as_str())]
    WouldDeadlock {
        /// The lock.
        name: Name,
    },
    /// As many hold the lock or are queued for it as [`Options::max_readers`](crate::Options::max_readers) allows. Told
    /// at once: try again later, or allow for more. Who holds it already, is not refused.
    #[error("lock {name:?} is held or waited for by {limit} already, which is all that max_readers allows", name = .name.as_str())]
    Crowded {
        /// The lock.
        name: Name,
        /// The limit.
        limit: u32,
    },
    /// The key holds something else than such a lock. It is left as it is: delete it by hand if nobody
    /// needs it.
    #[error("the key {key:?} holds {found}", key = .name.key())]
    WrongType {
        /// The lock.
        name: Name,
        /// What was found there.
        found: &'static str,
    },
    /// The server could not be reached, did not answer in time, or refused the request.
    #[error("redis failed during {script}: {cause}")]
    Redis {
        /// What was asked of it.
        script: &'static str,
        /// What the client library says.
        cause: redis::RedisError,
    },
    /// The runtime that the client was made on has ended, and with it the client's connections and renewals. Make another
    /// client, on a runtime that lasts for as long.
    #[error("the runtime that this client was made on has ended: make another client, on one that lasts")]
    RuntimeEnded,
    /// The server answered a script with something that the script never answers.
    #[error("{script} was answered with {reply}, which is not in its contract")]
    Reply {
        /// The script.
        script: &'static str,
        /// The answer.
        reply: String,
    },
    /// Fewer replicas than [`Options::replicas`](crate::Options::replicas) asks for have what was granted: it was not taken, and is given back.
    #[error("{have} replicas have what was granted, and it takes {want}")]
    TooFewReplicas {
        /// How many have it.
        have: u64,
        /// How many must.
        want: u32,
    },
    /// This node of a [guarded](crate::RestartGuard) quorum has no vote: it has started, or lost its data, since it was admitted.
    /// See [`Locks::rejoin`](crate::Locks::rejoin).
    #[error("the node has no vote since it started or lost its data: call Locks::rejoin")]
    NotAdmitted,
    /// Of the nodes of a quorum, no more than half have answered and may vote, or those who have do not agree.
    #[error("{}", no_quorum(.script, *.of, *.answered, .nodes))]
    NoQuorum {
        /// What was asked of them.
        script: &'static str,
        /// How many nodes there are.
        of: usize,
        /// How many have answered.
        answered: usize,
        /// Why the others have not.
        nodes: Vec<NodeError>,
    },
    /// Not a lock's name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Not a way to set up a client.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

fn unreleased(count: usize, names: &[Name], limit: Duration) -> String {
    let listed: Vec<_> = names.iter().map(|name| format!("{:?}", name.as_str())).collect();
    let more = if names.len() == MOST_NAMES { " and possibly others" } else { "" };
    let listed = listed.join(", ");
    format!(
        "{count} holds or waiters were not released within {limit:?}: locks {listed}{more}; \
         the servers may have them until their TTLs expire"
    )
}

fn no_quorum(script: &str, of: usize, answered: usize, nodes: &[NodeError]) -> String {
    let (needed, text) = (of / 2 + 1, texts(nodes));
    if answered >= needed {
        return format!("{answered} of {of} nodes answered {script}, and did not agree: {text}");
    }
    let split =
        if answered * 2 == of { " (half of an even number is no majority: use an odd one)" } else { "" };
    format!("only {answered} of {of} nodes took part in {script}, and it takes {needed}{split}: {text}")
}

fn texts(nodes: &[NodeError]) -> String {
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// What went wrong on one node of a quorum.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[error("{node}: {error}")]
pub struct NodeError {
    /// Its address.
    pub node: String,
    /// What went wrong.
    pub error: Error,
}

/// Why a server may not be a node of a quorum.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeProblem {
    /// It is another one of the nodes as well.
    #[error("it is the same server as {other}")]
    SameServer {
        /// The address of the other one.
        other: String,
    },
    /// It repeats what another server says.
    #[error("it is a replica")]
    Replica,
    /// Its `INFO` has no `run_id`, by which a [`RestartGuard`](crate::RestartGuard) notices that it has started again.
    #[error("it does not say who it is: its INFO has no run_id")]
    Unidentified,
}

/// A client cannot be set up like this. Found before anything is sent, but for
/// [`ConfigError::Node`] and [`ConfigError::SubscriberElsewhere`].
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A span of time is out of its bounds.
    #[error("{option} is {value:?}; it must be from {least:?} to {most:?}")]
    Span {
        /// The option.
        option: &'static str,
        /// What it was set to.
        value: Duration,
        /// The least that it may be.
        least: Duration,
        /// The most that it may be.
        most: Duration,
    },
    /// The longest hold is shorter than a lease.
    #[error("max_hold is {longest:?}; it must be at least the longest ttl, {ttl:?}")]
    ShortHold {
        /// The longest hold.
        longest: Duration,
        /// The ttl.
        ttl: Duration,
    },
    /// The drift is out of its bounds.
    #[error("drift is {drift}; it must be from 0 to 0.5")]
    Drift {
        /// What it was set to.
        drift: f64,
    },
    /// No hold at all is allowed.
    #[error("max_depth is 0; it must be at least 1")]
    NoDepth,
    /// Nobody at all may read.
    #[error("max_readers is 0; it must be at least 1")]
    NoReaders,
    /// An owner may have at most 1,024 holds.
    #[error("max_depth is {depth}: at most 1024")]
    LargeDepth {
        /// What was asked for.
        depth: u32,
    },
    /// At most 100,000 readers may hold one lock.
    #[error("max_readers is {readers}: at most 100000")]
    ManyReaders {
        /// What was asked for.
        readers: u32,
    },
    /// To wait for replicas, a request must know its server, which a cluster's client does not tell.
    #[error("replicas cannot be waited for in a cluster")]
    ReplicasOfCluster,
    /// Only other nodes can admit one: who is alone cannot have a [`RestartGuard`](crate::RestartGuard).
    #[error("restart_guard is for the nodes of a quorum, which must be more than one")]
    GuardOfOneNode,
    /// The prefix is too long.
    #[error("the prefix has {bytes} bytes; it must have at most 128")]
    LongPrefix {
        /// How many it has.
        bytes: usize,
    },
    /// There are too few nodes for a quorum, or too many.
    #[error("a quorum of {count} nodes; it must have from 1 to {most}")]
    Nodes {
        /// How many were named.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// A server may not be a node of this quorum.
    #[error("{node} may not be a node of this quorum: {problem}")]
    Node {
        /// The address of the server.
        node: String,
        /// Why not.
        problem: NodeProblem,
    },
    /// No topology was named: see [`LocksBuilder`](crate::LocksBuilder).
    #[error("no topology was named: call server, sentinel, cluster, quorum, pool or cluster_pool")]
    NoTopology,
    /// More than one topology was named.
    #[error("both {first} and {second} were called; a client has one topology")]
    SeveralTopologies {
        /// The one that was named first.
        first: &'static str,
        /// The next one.
        second: &'static str,
    },
    /// A pool cannot subscribe.
    #[error("a pool cannot subscribe: call subscriber with its server, or set wakeups to poll every 100 ms")]
    PoolWithoutSubscriber,
    /// A subscriber was named where the client knows by itself where to subscribe.
    #[error("subscriber is for a pool: a client made with {topology} subscribes where its requests go")]
    NeedlessSubscriber {
        /// The topology.
        topology: &'static str,
    },
    /// What is published where requests go is not heard where the client subscribes. Found on
    /// connecting.
    #[error("the subscriber {subscriber} is another server than {server}, where requests go")]
    SubscriberElsewhere {
        /// The address of the subscriber.
        subscriber: String,
        /// Where requests go.
        server: String,
    },
    /// Certificates were given for a server that is not named by a URL.
    #[error("tls is for URLs: {server} was given as a client, a description or a pool, which brings its own")]
    CertificatesOfClient {
        /// The address of the server.
        server: String,
    },
    /// Certificates were given for a server that is reached without TLS.
    #[error("tls is for servers whose URL begins with rediss://: {server} is reached without TLS")]
    CertificatesWithoutTls {
        /// The address of the server.
        server: String,
    },
    /// A node of a cluster was described with certificates, which the other nodes would not get.
    #[error(
        "{server} brings certificates that the other nodes of the cluster would not get: use a URL and tls"
    )]
    CertificatesOfSeed {
        /// The address of the node.
        server: String,
    },
    /// A certificate or a key cannot be read.
    #[error("a certificate or a key cannot be used: {cause}")]
    Certificates {
        /// What the client library says.
        cause: redis::RedisError,
    },
    /// A client name or a label has other than the allowed characters, or too many, or none.
    #[error("{what} is {text:?}; it must have 1 to {most} ASCII letters, digits, '-', '_' or '.'")]
    Word {
        /// `client_name` or `label`.
        what: &'static str,
        /// What it was set to; of a long one the beginning.
        text: String,
        /// The most bytes that it may have.
        most: usize,
    },
    /// A client was to be made outside of a tokio runtime, on which its tasks would live.
    #[error("a client is made on a tokio runtime: this thread is not on one")]
    NoRuntime,
    /// An option that belongs to the connections was to be changed where they are there already.
    #[error("{option} belongs to the connections: give it to the builder, not to with_options")]
    ConnectionOption {
        /// The option.
        option: &'static str,
    },
    /// The URL of the server cannot be read, or needs a feature that is off. The URL itself is not shown: it may hold a password.
    #[error("the URL of the server cannot be used: {cause}")]
    Url {
        /// What the client library says.
        cause: redis::RedisError,
    },
}
