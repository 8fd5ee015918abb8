//! [`Options`]: the settings of locks.

mod check;
mod choices;
mod partial;

use std::time::Duration;

use partial::{Field, SetFields};

pub use choices::{Fencing, Nesting, Renewal, RestartGuard, Wakeups};

/// The settings of locks: for a whole client, or for some of its locks.
///
/// A plain value: set only what differs. [`LocksBuilder::options`](crate::LocksBuilder::options)
/// takes the other options from the defaults, [`Locks::with_options`](crate::Locks::with_options)
/// from that client; both check the result once.
///
/// With serde, a duration is a text with its unit (`10s`, `500ms`, `1m 30s`), missing options are
/// not set, and an unknown name is refused. Serialized options have all values, and set all of
/// them when they are read again.
///
/// | option, in a file | values | default |
/// |---|---|---|
/// | `ttl` | 100 ms to 1 day | 30 s |
/// | `read_ttl`, `write_ttl` | as `ttl` | `ttl` |
/// | `renewal` | `automatic`, `never` | `automatic` |
/// | `max_hold` | at least the longest TTL | none |
/// | `hold_at_least` | up to 1 day, and to `max_hold` | none |
/// | `fencing` | `on`, `off` | `on` |
/// | `token_ttl` | 1 s to 1 day | 1 h |
/// | `nesting` | `counted`, `local` | `counted` |
/// | `max_depth` | 1 to 1,024 | 255 |
/// | `max_readers` | 1 to 100,000 | 10,000 |
/// | `wakeups` | `push`, `verify`, `poll` | `push` |
/// | `poll_cap` | 10 ms to 10 s | 2.5 s |
/// | `node_timeout` | 10 ms to 60 s | 1 s |
/// | `outage_limit` | up to 1 day | none |
/// | `local_turn` | up to 10 s | 1 ms |
/// | `grant_within` | 100 ms to 1 day | none |
/// | `drift` | 0 to 0.5 | 0.01 |
/// | `prefix` | up to 128 bytes | `lock:` |
/// | `restart_guard` | `on`, `off` | `off` |
/// | `replicas`, `replica_timeout` | see [`replicas`](Options::replicas) | 0, 100 ms |
///
/// ```
/// use std::time::Duration;
/// use redlatch::{Options, Renewal};
/// let batch = Options::new().ttl(Duration::from_secs(120)).renewal(Renewal::Never);
///
/// let from_file: Options = serde_json::from_str(r#"{"ttl": "2m", "renewal": "never"}"#)?;
/// assert_eq!(batch, from_file);
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// A setter returns the changed options, so the compiler warns if the result is dropped:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// let options = redlatch::Options::new();
/// options.max_depth(2);
/// ```
#[must_use = "a setter returns the options that it has changed"]
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub(crate) ttl: Duration,
    pub(crate) read_ttl: Option<Duration>,
    pub(crate) write_ttl: Option<Duration>,
    pub(crate) renewal: Renewal,
    pub(crate) max_hold: Option<Duration>,
    hold_at_least: Option<Duration>,
    pub(crate) fencing: Fencing,
    pub(crate) nesting: Nesting,
    pub(crate) max_depth: u32,
    pub(crate) max_readers: u32,
    pub(crate) poll_cap: Duration,
    pub(crate) node_timeout: Duration,
    pub(crate) drift: f64,
    pub(crate) prefix: String,
    pub(crate) wakeups: Wakeups,
    pub(crate) restart_guard: RestartGuard,
    pub(crate) token_ttl: Duration,
    pub(crate) grant_within: Option<Duration>,
    pub(crate) outage_limit: Option<Duration>,
    pub(crate) local_turn: Duration,
    replicas: u32,
    replica_timeout: Duration,
    set_fields: SetFields,
}

impl Options {
    /// Returns the defaults.
    pub fn new() -> Options {
        Options::default()
    }

    /// Sets how long a lease lasts without renewal, and so how long a crashed holder keeps the
    /// lock. From 100 ms to 24 hours; 30 s by default.
    ///
    /// A renewal waits for its reply for at most a quarter of this: where replies take longer, each
    /// lease is lost.
    pub fn ttl(self, ttl: Duration) -> Options {
        Options { ttl, ..self.mark_set(Field::Ttl) }
    }

    /// Sets the [`ttl`](Options::ttl) of leases to read, and so how long a crashed reader keeps
    /// writers out; `ttl` by default.
    pub fn read_ttl(self, ttl: Duration) -> Options {
        Options { read_ttl: Some(ttl), ..self.mark_set(Field::ReadTtl) }
    }

    /// Sets the [`ttl`](Options::ttl) of leases to write; `ttl` by default.
    pub fn write_ttl(self, ttl: Duration) -> Options {
        Options { write_ttl: Some(ttl), ..self.mark_set(Field::WriteTtl) }
    }

    /// Sets whether leases are extended while their guards live; [`Renewal::Automatic`] by default.
    pub fn renewal(self, renewal: Renewal) -> Options {
        Options { renewal, ..self.mark_set(Field::Renewal) }
    }

    /// Sets how long after its grant a lease may last, however often it is renewed; at least the
    /// longest TTL, without limit by default. Without it, a task that hangs with a guard holds the
    /// lock for as long as its process lives.
    pub fn max_hold(self, longest: Duration) -> Options {
        Options { max_hold: Some(longest), ..self.mark_set(Field::MaxHold) }
    }

    /// Sets for how long a lock stays held from its grant, even if it is released before; up to 24
    /// hours and to [`max_hold`](Options::max_hold), not at all by default.
    ///
    /// A job that several machines start by their own clocks may end before the slowest of these
    /// clocks shows the time: that machine would find the lock free, and run the job again. With a
    /// minimum longer than the clocks differ, it finds the lock held.
    ///
    /// A release, a dropped guard and [`close`](crate::Locks::close) then leave the lock held for
    /// what is left of the time, and the server ends that hold by itself, also if this process ends
    /// first. The hold belongs to no task or owner; `inspect` shows its holder with `kept-` before
    /// the id of the attempt, and `force_release` ends it.
    ///
    /// It may be longer than the TTL, which is 30 s by default: until the release, the client
    /// renews the lease, and from then on the server holds the lock for the rest of the time.
    ///
    /// **What it does not**:
    /// - Outlast a crash, or a lease that is lost. A lock whose process dies with the guard is free
    ///   after its TTL: choose a longer one than this time, unless another machine is to run a job
    ///   that crashed. With [`Renewal::Never`], a guard that outlives its TTL loses the lock.
    /// - Notify a waiter. It polls when the hold ends; but if the release came shortly before that,
    ///   up to 2.1 s later, or up to [`poll_cap`](Options::poll_cap) if that is shorter.
    /// - Pass or share holds: [`local_turn`](Options::local_turn) has no effect. If an owner holds
    ///   the lock several times, only its last release leaves it held, for as long as the options
    ///   of that guard say.
    /// - End early if a release is late: the server counts what was left when it was sent, from its
    ///   arrival.
    /// - Outlast a majority of restarted nodes, also with the restart guard, if the time is longer
    ///   than the TTL: a node waits for its longest lease only.
    pub fn hold_at_least(self, span: Duration) -> Options {
        Options { hold_at_least: Some(span), ..self.mark_set(Field::HoldAtLeast) }
    }

    /// Sets whether leases have a fencing token; [`Fencing::On`] by default.
    pub fn fencing(self, fencing: Fencing) -> Options {
        Options { fencing, ..self.mark_set(Field::Fencing) }
    }

    /// Sets where further holds of an owner are counted; [`Nesting::Counted`] by default.
    pub fn nesting(self, nesting: Nesting) -> Options {
        Options { nesting, ..self.mark_set(Field::Nesting) }
    }

    /// Sets how many holds an owner may have on one re-entrant lock at a time, or on one side of a
    /// read-write lock, from 1 to 1,024; 255 by default. One hold more returns
    /// [`Error::TooDeep`](crate::Error::TooDeep), which stops an endless recursion. If more readers
    /// of one owner wait, the others get it once these are admitted.
    pub fn max_depth(self, holds: u32) -> Options {
        Options { max_depth: holds, ..self.mark_set(Field::MaxDepth) }
    }

    /// Sets how many readers may hold a read-write lock or be queued for it in Redis, from 1 to
    /// 100,000; 10,000 by default. One reader more gets
    /// [`Error::TooManyReaders`](crate::Error::TooManyReaders). Each reader costs the server
    /// memory, and with more than 10,000 a forced release takes longer than 5 ms.
    ///
    /// Tasks that [share a hold](Options::local_turn) count as one. With a limit of your own they
    /// share only if you set that time too.
    pub fn max_readers(self, readers: u32) -> Options {
        Options { max_readers: readers, ..self.mark_set(Field::MaxReaders) }
    }

    /// Sets the longest pause between two polls of a waiter: the delay if a message is lost. From
    /// 10 ms to 10 s; 2.5 s by default.
    ///
    /// The first pause is 250 ms, each later one twice as long, up to this limit and to 0.7 of a
    /// claim (2.1 s, or less if the TTL is below 3 s). A client without a subscriber polls every
    /// 100 ms, or at this interval if it is shorter.
    pub fn poll_cap(self, cap: Duration) -> Options {
        Options { poll_cap: cap, ..self.mark_set(Field::PollCap) }
    }

    /// Sets the longest time for one request to Redis, and for connecting. From 10 ms to 60 s; 1 s
    /// by default.
    ///
    /// It counts from when the request is written, and starts again with each reply on its
    /// connection: a server that replies to other requests is not silent. Before that, a request
    /// waits inside the client while 960 others are in flight on the connection, for as long as the
    /// server replies and the caller waits. It belongs to the connections, so only
    /// [`LocksBuilder::options`](crate::LocksBuilder::options) can set it.
    pub fn node_timeout(self, timeout: Duration) -> Options {
        Options { node_timeout: timeout, ..self.mark_set(Field::NodeTimeout) }
    }

    /// Sets by which fraction the speeds of this machine's clock and the server's may differ, from
    /// 0 to 0.5; 0.01 by default. A lease of `ttl` is trusted for `ttl * (1 - drift) - 2 ms`.
    pub fn drift(self, part: f64) -> Options {
        Options { drift: part, ..self.mark_set(Field::Drift) }
    }

    /// Sets the prefix of all keys, at most 128 bytes; `lock:` by default. With the empty prefix a
    /// lock's key is its name. White space in the prefix becomes `_` in the name of the channel for
    /// wake-ups.
    pub fn prefix(self, prefix: impl Into<String>) -> Options {
        Options { prefix: prefix.into(), ..self.mark_set(Field::Prefix) }
    }

    /// Sets how a waiting client learns that a lock is free; [`Wakeups::Push`] by default. It
    /// belongs to the connections, like [`node_timeout`](Options::node_timeout). Untrusted messages
    /// cause at most ten polls per second and waiter, however many are published.
    pub fn wakeups(self, wakeups: Wakeups) -> Options {
        Options { wakeups, ..self.mark_set(Field::Wakeups) }
    }

    /// Sets whether nodes of a quorum that restart must be admitted again; [`RestartGuard::Off`] by
    /// default. All clients of a quorum must use the same setting. It belongs to the connections,
    /// like [`node_timeout`](Options::node_timeout).
    ///
    /// Only a quorum of more than one node can have the guard; otherwise the client is refused with
    /// [`ConfigError::GuardOfOneNode`](crate::ConfigError::GuardOfOneNode).
    pub fn restart_guard(self, guard: RestartGuard) -> Options {
        Options { restart_guard: guard, ..self.mark_set(Field::RestartGuard) }
    }

    /// Sets how many replicas must confirm a grant before it counts, and how long to wait for them,
    /// up to the [node timeout](Options::node_timeout); none by default. A server may take 100 ms
    /// more to report a failure.
    ///
    /// If fewer confirm in time, the call returns
    /// [`Error::TooFewReplicas`](crate::Error::TooFewReplicas) and the grant is released. **What it
    /// promises**: when a lock is granted, this number of replicas of the granting server has the
    /// grant and all earlier writes, such as the outer hold. That holds for every way to acquire
    /// one: at once, from the queue, nested and counted in Redis, or by a request that was sent
    /// twice.
    ///
    /// **What it does not**: prevent every loss of a lock in a failover. A confirming replica need
    /// not be the one that is promoted ([`WAIT`](https://redis.io/docs/latest/commands/wait/)).
    ///
    /// Renewals, releases and downgrades do not wait. A hold with [`Nesting::Local`] has the
    /// confirmations of the hold that it shares.
    ///
    /// It needs a second connection, made and replaced together with the first: at the start if
    /// these are the builder's options, otherwise when it is first needed. Requests that wait for
    /// replicas do so one after another; if many wait while replicas are missing, some time out
    /// instead. Not available in a cluster.
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Options {
        (self.replicas, self.replica_timeout) = (count, timeout);
        self.mark_set(Field::Replicas).mark_set(Field::ReplicaTimeout)
    }

    /// Sets how long the server keeps a lock's fencing counter after it was started; from 1 second
    /// to 24 hours, one hour by default. Further tokens do not extend that time.
    ///
    /// The counter is what a released lock leaves behind: about 160 bytes of the server's memory;
    /// and for a minute, if clients waited, marks in its queue. (`MEMORY USAGE` does not count the
    /// server's tables: on Redis 7.0 it says 72 for `lock:orders:42`.)
    ///
    /// After it expires, the next token starts from the server's clock, which is larger than all
    /// earlier tokens unless that clock was set back. A shorter time saves memory if names are many
    /// and used once; a longer one outlasts larger steps of the clock.
    pub fn token_ttl(self, ttl: Duration) -> Options {
        Options { token_ttl: ttl, ..self.mark_set(Field::TokenTtl) }
    }

    /// Sets how long `lock`, `read` and `write` outlast an outage: they return its error once the
    /// server, or a majority of a quorum, has failed for this long since the call began. At most 24
    /// hours. By default they return it after two [node timeouts](Options::node_timeout), counted
    /// from the beginning of the outage; a queued call returns it after one TTL if that is longer.
    ///
    /// A nightly job sets it to the longest outage that it can wait for, and needs no retry loop of
    /// its own. Errors that a retry cannot change are still returned at once.
    ///
    /// **What it does not**: extend `try_lock`, a limit such as that of `lock_timeout`, or a lease
    /// that is held.
    pub fn outage_limit(self, limit: Duration) -> Options {
        Options { outage_limit: Some(limit), ..self.mark_set(Field::OutageLimit) }
    }

    /// Sets for how long tasks of this client may pass a lock to each other, or read together,
    /// without a request, before the next client has its turn; up to 10 seconds, 1 ms by default.
    /// Zero switches it off. The guide [waiting](crate::guide::waiting) has pictures.
    ///
    /// It counts from when the client learns of the grant by the server. It ends after a quarter of
    /// the time for which the lease is valid then: of at most 3 s if a message granted it.
    ///
    /// Within it, the release of a mutex or of a write hands the lock to the task that has waited
    /// longest, if its options are the same; tasks that read join the hold. Each has a lease of its
    /// own.
    ///
    /// A grant reserves up to 1,000 fencing tokens for that, if tasks compete for the lock, or did
    /// so lately: once they are used, the turn is over.
    ///
    /// Other clients wait longer for a lock by up to this time for each client before them.
    ///
    /// **What it does not**: pass or share a hold that has an owner, since other processes may
    /// enter it with that owner; nor one with [`Renewal::Never`] or
    /// [`hold_at_least`](Options::hold_at_least).
    pub fn local_turn(self, longest: Duration) -> Options {
        Options { local_turn: longest, ..self.mark_set(Field::LocalTurn) }
    }

    /// Makes the server refuse an acquire request that arrives later than this after it was sent;
    /// never by default. Beyond 50 seconds it leaves a gap, because the mark described below lasts
    /// at least 59.
    ///
    /// An abandoned attempt leaves a mark on the server, which then refuses those of its requests
    /// that are still in flight. Without this option, if the network delays a request for longer
    /// than the mark lasts, the server grants the lock to an attempt that has ended, for one TTL.
    /// With it, the request is refused, however late it arrives, unless its mark was removed
    /// earlier: the server keeps the newest 19,000 marks of a lock.
    ///
    /// Each acquire costs the server one more command (0.8 µs on Redis 7.0). It relies on the
    /// server's clock, as far as this client has seen it.
    pub fn grant_within(self, span: Duration) -> Options {
        Options { grant_within: Some(span), ..self.mark_set(Field::GrantWithin) }
    }
}
