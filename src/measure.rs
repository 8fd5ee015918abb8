//! Metrics, with the feature `metrics`: what happens to locks, for the recorder that the
//! application has installed. The names follow the conventions of OpenTelemetry: docs/metrics.md
//! has all of them.
//!
//! None of this is called under one of our locks: a recorder is code of the application. A panic is
//! caught, so that it does not end the task that renews all leases.

use std::time::Duration;

use crate::events::LossReason;

/// What made an attempt send the request that was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// It did not wait.
    #[default]
    AtOnce,
    /// A notification, or a new subscription.
    Notified,
    /// Its next poll was due, or the holder's lease expired.
    Polled,
    /// It was its turn among the tasks of this client.
    Local,
}

impl WakeReason {
    pub(crate) fn word(self) -> &'static str {
        match self {
            WakeReason::AtOnce => "at once",
            WakeReason::Notified => "notified",
            WakeReason::Polled => "polled",
            WakeReason::Local => "local",
        }
    }
}

/// Whether durations must be measured.
pub(crate) const ON: bool = cfg!(feature = "metrics");

/// Runs code of a recorder or a subscriber. A panic is caught: it must end no task of the crate.
pub(crate) fn safely(run: impl FnOnce()) {
    let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
}

macro_rules! metric {
    ($($record:tt)+) => {{
        #[cfg(feature = "metrics")]
        safely(|| {
            ::metrics::$($record)+;
        });
    }};
}

/// What an exporter says of the metrics.
const COUNTERS: [(&str, &str); 7] = [
    ("redlatch.lock.acquisitions", "Calls that acquire and have ended."),
    ("redlatch.lock.contentions", "Calls that had to wait."),
    ("redlatch.lease.renewals", "Renewals that have ended."),
    ("redlatch.lease.losses", "Leases that were lost while their guard was alive."),
    ("redlatch.server.outages", "Outages that began."),
    ("redlatch.client.requests", "Requests that were sent; a call for many locks is one."),
    ("redlatch.client.batches", "Pipelines of several requests."),
];
const HISTOGRAMS: [(&str, &str); 3] = [
    ("redlatch.lock.wait.duration", "How long calls that acquire took."),
    ("redlatch.lock.hold.duration", "How long leases were held."),
    ("redlatch.lease.renewal.lag", "How long after they were due renewals were sent."),
];

/// A client was made. What alerts are for begins with 0: Prometheus takes the first value of a
/// series for its beginning, so that the first loss would be no increase.
#[cfg(feature = "metrics")]
pub(crate) fn begin<'a>(
    kinds: impl IntoIterator<Item = &'static str>,
    servers: impl Iterator<Item = &'a str>,
) {
    use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};
    safely(|| {
        COUNTERS.into_iter().for_each(|(name, text)| describe_counter!(name, Unit::Count, text));
        HISTOGRAMS.into_iter().for_each(|(name, text)| describe_histogram!(name, Unit::Seconds, text));
        describe_gauge!("redlatch.lock.waiting", Unit::Count, "Calls of this process that wait now.");
        describe_gauge!("redlatch.server.failing", Unit::Count, "Clients for which the server fails now.");
        for kind in kinds {
            for reason in LossReason::ALL {
                counter!("redlatch.lease.losses", "kind" => kind, "reason" => reason.word()).increment(0);
            }
            for wake in [WakeReason::Notified, WakeReason::Polled] {
                let labels = [("kind", kind), ("outcome", "granted"), ("wake", wake.word())];
                counter!("redlatch.lock.acquisitions", &labels).increment(0);
            }
        }
        for server in servers {
            counter!("redlatch.server.outages", "server" => server.to_owned()).increment(0);
            gauge!("redlatch.server.failing", "server" => server.to_owned()).increment(0.0);
        }
    });
}

/// A call that acquires has ended.
pub(crate) fn acquired(
    _kind: &'static str,
    _outcome: &'static str,
    _woken: Option<WakeReason>,
    _took: Duration,
) {
    metric!(
        counter!(
            "redlatch.lock.acquisitions",
            "kind" => _kind,
            "outcome" => _outcome,
            "wake" => _woken.map_or("none", WakeReason::word)
        )
        .increment(1)
    );
    metric!(histogram!("redlatch.lock.wait.duration", "kind" => _kind, "outcome" => _outcome).record(_took));
}

/// A call waits for a lock, until this is dropped.
pub(crate) struct Waiting(&'static str);

impl Waiting {
    pub(crate) fn new(kind: &'static str) -> Waiting {
        metric!(gauge!("redlatch.lock.waiting", "kind" => kind).increment(1.0));
        metric!(counter!("redlatch.lock.contentions", "kind" => kind).increment(1));
        Waiting(kind)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _kind = self.0;
        metric!(gauge!("redlatch.lock.waiting", "kind" => _kind).decrement(1.0));
    }
}

/// A lease has ended after this time.
pub(crate) fn held(_kind: &'static str, _end: &'static str, _held: Duration) {
    metric!(histogram!("redlatch.lock.hold.duration", "kind" => _kind, "end" => _end).record(_held));
}

/// A renewal was answered; it was sent this long after it was due.
pub(crate) fn renewed(_kind: &'static str, _outcome: &'static str, _lag: Duration) {
    metric!(counter!("redlatch.lease.renewals", "kind" => _kind, "outcome" => _outcome).increment(1));
    metric!(histogram!("redlatch.lease.renewal.lag", "kind" => _kind).record(_lag));
}

/// A lease was lost.
pub(crate) fn lost(_kind: &'static str, _reason: LossReason) {
    metric!(counter!("redlatch.lease.losses", "kind" => _kind, "reason" => _reason.word()).increment(1));
}

/// An outage of a server has begun.
pub(crate) fn outage(_server: &str) {
    metric!(counter!("redlatch.server.outages", "server" => _server.to_owned()).increment(1));
    metric!(gauge!("redlatch.server.failing", "server" => _server.to_owned()).increment(1.0));
}

/// An outage of a server has ended.
pub(crate) fn outage_ended(_server: &str) {
    metric!(gauge!("redlatch.server.failing", "server" => _server.to_owned()).decrement(1.0));
}

/// Requests were sent: one of its own, or several as one batch.
pub(crate) fn sent(_requests: usize) {
    metric!(counter!("redlatch.client.requests").increment(_requests as u64));
    if _requests > 1 {
        metric!(counter!("redlatch.client.batches").increment(1));
    }
}
