//! [`Event`]: what happens to the locks of a client. [`Events`]: a stream of them, for programs
//! without `tracing` and `metrics`. [`Observer`]: where the crate says what happened.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::broadcast::{self, error::RecvError};

use crate::fencing::FencingToken;
use crate::name::Name;

/// How many events a receiver may fall behind.
const CAPACITY: usize = 1024;

/// What happened to a lock or to a server, in about the order in which a client noticed it: what it
/// noticed in the background may come a moment after what a call noticed later.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Event {
    /// A call was granted a lock.
    #[non_exhaustive]
    Granted {
        /// The name of the lock.
        lock: Name,
        /// The kind of the lock: `mutex`, `reentrant`, `read` or `write`.
        kind: &'static str,
        /// The fencing token, if fencing is on.
        token: Option<FencingToken>,
        /// How long the call took.
        waited: Duration,
    },
    /// A lease was renewed.
    #[non_exhaustive]
    Renewed {
        /// The name of the lock.
        lock: Name,
        /// The kind of the lock.
        kind: &'static str,
        /// For how long the lease is valid from now on.
        valid_for: Duration,
    },
    /// A lease was lost although its guard is alive: another client may hold the lock.
    #[non_exhaustive]
    Lost {
        /// The name of the lock.
        lock: Name,
        /// The kind of the lock.
        kind: &'static str,
        /// Why.
        reason: LossReason,
    },
    /// A guard has released its lock: on the servers, or to other tasks of this client that pass or
    /// share the hold.
    #[non_exhaustive]
    Released {
        /// The name of the lock.
        lock: Name,
        /// The kind of the lock.
        kind: &'static str,
    },
    /// A server fails: its leases expire unless it answers again.
    #[non_exhaustive]
    OutageBegan {
        /// Its address, without credentials.
        server: Arc<str>,
        /// How many locks the client holds.
        holds: usize,
    },
    /// A server answers again: a request has shown that those which failed would work now.
    #[non_exhaustive]
    OutageEnded {
        /// Its address, without credentials.
        server: Arc<str>,
        /// How long it failed.
        after: Duration,
    },
    /// The receiver was too slow: this many events are missing here.
    Missed(u64),
}

/// Why a lease was lost.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossReason {
    /// No renewal was confirmed in time: the server did not answer.
    NotRenewed,
    /// No renewal was sent in time: this process was stopped, suspended or too busy, or its runtime
    /// did not run.
    Stalled,
    /// Its TTL expired, and [renewal](crate::Options::renewal) is off.
    Expired,
    /// It has reached [`Options::max_hold`](crate::Options::max_hold).
    MaxHold,
    /// The server has ended it: a forced release, a deleted key, lost data.
    Revoked,
}

impl LossReason {
    pub(crate) const ALL: [LossReason; 5] = [
        LossReason::NotRenewed,
        LossReason::Stalled,
        LossReason::Expired,
        LossReason::MaxHold,
        LossReason::Revoked,
    ];

    /// One word, for a label.
    pub(crate) fn word(self) -> &'static str {
        match self {
            LossReason::NotRenewed => "not_renewed",
            LossReason::Stalled => "stalled",
            LossReason::Expired => "expired",
            LossReason::MaxHold => "max_hold",
            LossReason::Revoked => "revoked",
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            LossReason::NotRenewed => "it was not renewed in time",
            LossReason::Stalled => "this process did not run in time to renew it",
            LossReason::Expired => "its TTL expired; renewal is off",
            LossReason::MaxHold => "it has reached max_hold",
            LossReason::Revoked => "the server has ended it",
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The events of a client from [`Locks::events`](crate::Locks::events) on.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    /// Waits for the next event. `None`: the client and all its leases are gone.
    ///
    /// A receiver that falls 1,024 events behind loses the oldest, and gets
    /// [`Event::Missed`] with their number. No call of the client waits for a receiver.
    ///
    /// # Cancel safety
    /// Cancel safe: no event is lost.
    pub async fn next(&mut self) -> Option<Event> {
        match self.0.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(count)) => Some(Event::Missed(count)),
            Err(RecvError::Closed) => None,
        }
    }
}

/// Where the crate says what happened. It costs nothing until a program asks for events.
#[derive(Debug, Default)]
pub(crate) struct Observer(OnceLock<broadcast::Sender<Event>>);

impl Observer {
    pub(crate) fn events(&self) -> Events {
        Events(self.0.get_or_init(|| broadcast::Sender::new(CAPACITY)).subscribe())
    }

    /// Whether a program has asked for events.
    pub(crate) fn is_observed(&self) -> bool {
        self.0.get().is_some()
    }

    /// Sends an event, if a program has asked for them. To be called under no lock: it wakes tasks
    /// of the application.
    pub(crate) fn emit(&self, event: impl FnOnce() -> Event) {
        if let Some(sender) = self.0.get() {
            let _no_receiver = sender.send(event());
        }
    }
}
