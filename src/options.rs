//! [`Options`]: how locks behave.

mod check;
mod partial;

use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use partial::{Field, Named, Partial};

/// What happens to a lease as its deadline comes near.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Renewal {
    /// Extended in the background, every third of the ttl, for as long as the guard lives.
    #[default]
    Automatic,
    /// Never extended: the lease ends one ttl after it was granted.
    Never,
}

/// Whether a lease comes with a [`FencingToken`](crate::FencingToken).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fencing {
    /// One token for every lease granted.
    #[default]
    On,
    /// No token, for about a tenth less work in the server. Use it where a rare double run is
    /// tolerable; all users of a lock should agree.
    Off,
}

/// Where a further hold of an owner is counted.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nesting {
    /// In Redis, where other processes see it: one round trip for each hold.
    #[default]
    Counted,
    /// In this process, if it holds the lock for the same owner already: no round trip. The count in
    /// Redis does not grow, and the inner guard shares the outer one's lease, ttl and options. Only for a
    /// re-entrant lock: holds of a read-write lock are always counted in Redis.
    Local,
}

/// How a client that waits learns that a lock is free.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wakeups {
    /// It is told, through a subscription of its own, and looks once in [`Options::poll_cap`] all the same.
    #[default]
    Push,
    /// It is told, and looks each time before it counts the lock as its own: a message alone gives
    /// it nothing.
    ///
    /// With [`Push`](Wakeups::Push), a message from one server is trusted, since a look takes a
    /// round trip for each lock that is handed over. So a user who may publish to the clients'
    /// channels and read the queues can make a waiter believe that it holds the lock, until its
    /// first renewal: for up to a third of the TTL, and at most a second. Users who may not do
    /// both cannot. In a cluster, behind sentinels and in a quorum, no message is trusted anyway.
    Verify,
    /// It looks every 100 ms.
    Poll,
}

/// Whether a node of a [quorum](crate::LocksBuilder::quorum) that restarts may vote at once.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestartGuard {
    /// It may. Safe if every node keeps all that it has answered: `appendonly yes` and `appendfsync always`.
    #[default]
    Off,
    /// It may not, until [`Locks::rejoin`](crate::Locks::rejoin) has admitted it: for nodes that may forget.
    On,
}

/// How locks behave. Given to [`Locks`](crate::Locks) as a whole, or to a view of it for some locks.
///
/// A plain value: set what differs. [`LocksBuilder::options`](crate::LocksBuilder::options) takes
/// the rest from the defaults, [`Locks::with_options`](crate::Locks::with_options) from the options
/// of that client. It is checked once, where it is given to
/// [`LocksBuilder::options`](crate::LocksBuilder::options) or
/// [`Locks::with_options`](crate::Locks::with_options). With serde, durations are in milliseconds;
/// what is not there is not set, and a name that is unknown is refused. What is written with serde
/// has all options, and sets all of them when it is read again.
///
/// ```
/// use std::time::Duration;
/// use redlatch::{Options, Renewal};
/// let batch = Options::new().ttl(Duration::from_secs(120)).renewal(Renewal::Never);
///
/// let everything = r#"{
///     "ttl_ms": 30000, "read_ttl_ms": 5000, "write_ttl_ms": null, "max_hold_ms": 60000, "renewal": "automatic",
///     "fencing": "on", "nesting": "counted", "max_depth": 255, "max_readers": 10000,
///     "poll_cap_ms": 1000, "node_timeout_ms": 1000, "drift": 0.01, "prefix": "lock:",
///     "wakeups": "push", "restart_guard": "off", "replicas": 0, "replica_timeout_ms": 100,
///     "token_ttl_ms": 3600000, "grant_within_ms": null, "outage_limit_ms": 600000
/// }"#;
/// let options: Options = serde_json::from_str(everything)?;
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// A setter changes nothing but what it returns, so the compiler warns of one whose result is
/// dropped:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// let options = redlatch::Options::new();
/// options.max_depth(2);
/// ```
#[must_use = "a setter returns the options that it has changed"]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Partial")]
pub struct Options {
    #[serde(rename = "ttl_ms", serialize_with = "millis")]
    pub(crate) ttl: Duration,
    #[serde(rename = "read_ttl_ms", serialize_with = "optional_millis")]
    pub(crate) read_ttl: Option<Duration>,
    #[serde(rename = "write_ttl_ms", serialize_with = "optional_millis")]
    pub(crate) write_ttl: Option<Duration>,
    pub(crate) renewal: Renewal,
    #[serde(rename = "max_hold_ms", serialize_with = "optional_millis")]
    pub(crate) max_hold: Option<Duration>,
    pub(crate) fencing: Fencing,
    pub(crate) nesting: Nesting,
    pub(crate) max_depth: u32,
    pub(crate) max_readers: u32,
    #[serde(rename = "poll_cap_ms", serialize_with = "millis")]
    pub(crate) poll_cap: Duration,
    #[serde(rename = "node_timeout_ms", serialize_with = "millis")]
    pub(crate) node_timeout: Duration,
    pub(crate) drift: f64,
    pub(crate) prefix: String,
    pub(crate) wakeups: Wakeups,
    pub(crate) restart_guard: RestartGuard,
    #[serde(rename = "token_ttl_ms", serialize_with = "millis")]
    pub(crate) token_ttl: Duration,
    #[serde(rename = "grant_within_ms", serialize_with = "optional_millis")]
    pub(crate) grant_within: Option<Duration>,
    #[serde(rename = "outage_limit_ms", serialize_with = "optional_millis")]
    pub(crate) outage_limit: Option<Duration>,
    replicas: u32,
    #[serde(rename = "replica_timeout_ms", serialize_with = "millis")]
    replica_timeout: Duration,
    #[serde(skip)]
    named: Named,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ttl: Duration::from_secs(30),
            read_ttl: None,
            write_ttl: None,
            renewal: Renewal::Automatic,
            max_hold: None,
            fencing: Fencing::On,
            nesting: Nesting::Counted,
            max_depth: 255,
            max_readers: 10_000,
            poll_cap: Duration::from_secs(1),
            node_timeout: Duration::from_secs(1),
            drift: 0.01,
            prefix: "lock:".to_owned(),
            wakeups: Wakeups::Push,
            restart_guard: RestartGuard::Off,
            token_ttl: Duration::from_secs(3600),
            grant_within: None,
            outage_limit: None,
            replicas: 0,
            replica_timeout: Duration::from_millis(100),
            named: Named::default(),
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Options {
        Options::default()
    }

    /// How long a lease lasts if nothing renews it, and so how long a crashed holder is in the way.
    /// From 100 ms to 24 hours; 30 s unless set.
    pub fn ttl(mut self, ttl: Duration) -> Options {
        self.ttl = ttl;
        self.named(Field::Ttl)
    }

    /// The [`ttl`](Options::ttl) of leases to read, where it differs: how long a crashed reader keeps writers out.
    pub fn read_ttl(mut self, ttl: Duration) -> Options {
        self.read_ttl = Some(ttl);
        self.named(Field::ReadTtl)
    }

    /// The [`ttl`](Options::ttl) of leases to write, where it differs.
    pub fn write_ttl(mut self, ttl: Duration) -> Options {
        self.write_ttl = Some(ttl);
        self.named(Field::WriteTtl)
    }

    /// Whether leases are extended while their guards live; [`Renewal::Automatic`] unless set.
    pub fn renewal(mut self, renewal: Renewal) -> Options {
        self.renewal = renewal;
        self.named(Field::Renewal)
    }

    /// The longest that a lease is extended to, counted from its grant; at least the ttl, of either side. Without it a
    /// task that hangs with a guard keeps the lock for as long as its process lives.
    pub fn max_hold(mut self, longest: Duration) -> Options {
        self.max_hold = Some(longest);
        self.named(Field::MaxHold)
    }

    /// Whether leases come with a fencing token; [`Fencing::On`] unless set.
    pub fn fencing(mut self, fencing: Fencing) -> Options {
        self.fencing = fencing;
        self.named(Field::Fencing)
    }

    /// Where further holds of an owner are counted; [`Nesting::Counted`] unless set.
    pub fn nesting(mut self, nesting: Nesting) -> Options {
        self.nesting = nesting;
        self.named(Field::Nesting)
    }

    /// How many holds an owner may have on one re-entrant lock at a time, or on one side of a
    /// read-write lock, from 1 to 1,024; 255 unless set. Readers of one owner who wait are let in
    /// together, however many they are. One more is [`Error::TooDeep`](crate::Error::TooDeep): a
    /// recursion without an end.
    pub fn max_depth(mut self, holds: u32) -> Options {
        self.max_depth = holds;
        self.named(Field::MaxDepth)
    }

    /// How many may hold a read-write lock to read, together with all who are queued for it in
    /// Redis, from 1 to 100,000; 10,000 unless set. One reader more is
    /// [`Error::Crowded`](crate::Error::Crowded): each costs the server memory, and with more than
    /// 10,000 a forced release takes it longer than 5 ms.
    pub fn max_readers(mut self, readers: u32) -> Options {
        self.max_readers = readers;
        self.named(Field::MaxReaders)
    }

    /// The longest that a waiter goes without looking, should every message be lost. From 10 ms to
    /// 10 s; 1 s unless set. A client without a subscriber looks every 100 ms, or at this if it is less.
    pub fn poll_cap(mut self, cap: Duration) -> Options {
        self.poll_cap = cap;
        self.named(Field::PollCap)
    }

    /// The longest that one request to Redis may take, and connecting to it. From 10 ms to 60 s; 1 s
    /// unless set. It counts from when the request is written, and again from each answer that its
    /// connection delivers: a server that answers others is not silent. Before that, a request
    /// waits inside the client while 320 others are under way on the connection, for as long as
    /// the server answers and the caller waits. It belongs to the connections: only
    /// [`LocksBuilder::options`](crate::LocksBuilder::options)
    /// and its like read it.
    pub fn node_timeout(mut self, timeout: Duration) -> Options {
        self.node_timeout = timeout;
        self.named(Field::NodeTimeout)
    }

    /// By what part of a span this machine's clock and the server's may differ, from 0 to 0.5. A lease
    /// of `ttl` is trusted for `ttl * (1 - drift) - 2 ms`. 0.01 unless set.
    pub fn drift(mut self, part: f64) -> Options {
        self.drift = part;
        self.named(Field::Drift)
    }

    /// What the keys of all locks begin with; `lock:` unless set. At most 128 bytes. With the empty
    /// prefix a lock lives at its bare name. White space in it is `_` in the name of the channel for wake-ups.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Options {
        self.prefix = prefix.into();
        self.named(Field::Prefix)
    }

    /// How a client learns that a lock is free; [`Wakeups::Push`] unless set. It belongs to the
    /// connections, as [`node_timeout`](Options::node_timeout) does. Messages that are not trusted
    /// cause at most ten polls per second and waiter, however many are published.
    pub fn wakeups(mut self, wakeups: Wakeups) -> Options {
        self.wakeups = wakeups;
        self.named(Field::Wakeups)
    }

    /// Whether nodes of a quorum that restart must be admitted again; [`RestartGuard::Off`] unless set. All clients
    /// of a quorum must agree. It belongs to the connections, as [`node_timeout`](Options::node_timeout) does. Not for
    /// anything else than a quorum, nor for one of a single node: that is
    /// [`ConfigError::GuardOfOneNode`](crate::ConfigError::GuardOfOneNode).
    pub fn restart_guard(mut self, guard: RestartGuard) -> Options {
        self.restart_guard = guard;
        self.named(Field::RestartGuard)
    }

    /// How many replicas must have a grant before it counts, and for how long to wait for them, up to the
    /// [node timeout](Options::node_timeout); none unless set. A server may take 100 ms more to tell that it was in vain.
    ///
    /// Fewer within that time is [`Error::TooFewReplicas`](crate::Error::TooFewReplicas), and what was granted is given
    /// back. **What it promises**: when a lock is granted, so many replicas of the server that granted it have the
    /// grant, and all that was written there before, such as the hold that it is nested in. So it is for every way to
    /// get one: at once, from the queue, nested and counted in Redis, or by a request that was sent twice.
    ///
    /// **What it does not**: make a failover that loses a lock impossible. A replica that has it may not be the one that
    /// takes over ([`WAIT`](https://redis.io/docs/latest/commands/wait/)). Renewals, releases and downgrades do not wait. A hold
    /// of [`Nesting::Local`] is as well confirmed as the one that it shares.
    ///
    /// It takes a second connection, made and replaced together with the first: at the start if these are the options
    /// of the builder, else when it is first needed. Those who wait for replicas wait one behind
    /// the other; where many
    /// do, and replicas are missing, some hear of a timeout instead. Not for a cluster.
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Options {
        (self.replicas, self.replica_timeout) = (count, timeout);
        self.named(Field::Replicas).named(Field::ReplicaTimeout)
    }

    /// How long the server keeps a lock's fencing counter after it has started one. Default: one
    /// hour.
    ///
    /// The counter is the only key that a released lock leaves behind: about 60 bytes and the
    /// length of the lock's name (`MEMORY USAGE` on Redis 7.0: 72 for `lock:orders:42`). When it is
    /// gone, the next token starts from the server's clock, which is larger than all tokens before
    /// unless that clock was set back meanwhile. A shorter time saves memory where names are many
    /// and used once; a longer one outlasts larger steps of the clock.
    pub fn token_ttl(mut self, ttl: Duration) -> Options {
        self.token_ttl = ttl;
        self.named(Field::TokenTtl)
    }

    /// How long `lock`, `read` and `write` outlast an outage: they return its error once the
    /// server, or so many nodes of a quorum that no majority is left, has failed for this long
    /// since the call began. At most 24 hours. Unless set, they return it after two
    /// [node timeouts](Options::node_timeout), counted from the beginning of the outage, and once
    /// queued after one TTL if that is longer.
    ///
    /// A nightly job sets it to the longest outage that it can wait for, and needs no loop of its
    /// own. Errors that another try cannot change are returned at once all the same.
    ///
    /// **What it does not**: prolong `try_lock`, a limit such as that of `lock_timeout`, or a lease
    /// that is held.
    pub fn outage_limit(mut self, limit: Duration) -> Options {
        self.outage_limit = Some(limit);
        self.named(Field::OutageLimit)
    }

    /// The server refuses a request to acquire that reaches it later than this after it was sent.
    /// Default: never. Beyond 50 seconds it leaves a gap: the mark below lasts at least 59.
    ///
    /// An attempt that was given up leaves a mark on the server, which refuses what is still under
    /// way of it. Without this option, a network that holds a request back for longer than the mark
    /// lasts has the lock granted to an attempt that has ended, for one ttl. With it, the request
    /// is refused, however late it arrives, unless the mark is gone: of one lock, the server keeps
    /// the newest 20,000. Each acquire costs the server one more command (0.8 µs on Redis 7.0). It
    /// relies on the server's clock, as far as this client has seen it.
    pub fn grant_within(mut self, span: Duration) -> Options {
        self.grant_within = Some(span);
        self.named(Field::GrantWithin)
    }
}

fn millis<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

fn optional_millis<S: Serializer>(span: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)).serialize(to)
}
