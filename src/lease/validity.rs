//! [`Deadline`]: until when a lease is valid. [`trusted_span`]: for how long. [`ClockSample`]: when
//! a message of the server was made, on this machine's clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Moment;

/// A sample of the server's clock: at some time after `sent` it showed `server` µs.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockSample {
    pub(super) sent: Moment,
    pub(super) server: u64,
}

impl ClockSample {
    /// The earliest local time at which the server's clock can have shown `time`. The reply was
    /// made after `sent`, so that is at least `time - server` later, less drift. `None` for a time
    /// before the sample (the clock stepped back) or in the local future (another clock): such a
    /// time proves nothing.
    pub(super) fn earliest(&self, time: u64, drift: f64, now: Moment) -> Option<Moment> {
        let elapsed = Duration::from_micros(time.checked_sub(self.server)?);
        let earliest = self.sent + elapsed.mul_f64(1.0 - drift);
        (earliest <= now).then_some(earliest)
    }
}

/// A deadline that may move ahead until it has passed, and never again afterwards.
#[derive(Debug)]
pub(super) struct Deadline(AtomicU64);

/// Passed or ended: no [`Moment`] is zero.
const PASSED: u64 = 0;

impl Deadline {
    pub(super) fn new(until: Moment) -> Deadline {
        Deadline(AtomicU64::new(until.as_nanos()))
    }

    /// The deadline; `None` if it was ended or was observed to have passed.
    pub(super) fn get(&self) -> Option<Moment> {
        match self.0.load(Ordering::SeqCst) {
            PASSED => None,
            until => Some(Moment::from_nanos(until)),
        }
    }

    /// Whether it has passed. The first call that observes this ends it, so that a later renewal
    /// does not revive it.
    pub(super) fn has_passed(&self) -> bool {
        !self.update(|_| None)
    }

    /// Moves the deadline ahead, never back. False if it has passed.
    pub(super) fn extend(&self, until: Moment) -> bool {
        self.update(|current| Some(current.max(until)))
    }

    pub(super) fn end(&self) {
        self.0.store(PASSED, Ordering::SeqCst);
    }

    /// Whether it has not passed, and what it becomes then, if it changes.
    fn update(&self, change: impl Fn(Moment) -> Option<Moment>) -> bool {
        let mut is_alive = false;
        let _before = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |current| {
            let until = Moment::from_nanos(current);
            is_alive = current != PASSED && Moment::now() < until;
            if is_alive { change(until).map(Moment::as_nanos) } else { (current != PASSED).then_some(PASSED) }
        });
        is_alive
    }
}

/// Always subtracted from a lease: the server counts in whole milliseconds, and expires keys up to
/// one late.
const EXPIRY_GRANULARITY: Duration = Duration::from_millis(2);

/// How long a lease of `ttl` may be trusted, counted from before its request was sent
/// ([Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/): TTL less
/// drift).
pub(super) fn trusted_span(ttl: Duration, drift: f64) -> Duration {
    // Rounded up, the longest span that there is would be too long.
    let span = Duration::try_from_secs_f64(ttl.as_secs_f64() * (1.0 - drift)).unwrap_or(ttl);
    span.saturating_sub(EXPIRY_GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_longest_span_is_trusted_without_drift() {
        assert_eq!(trusted_span(Duration::MAX, 0.0), Duration::MAX - EXPIRY_GRANULARITY);
        assert_eq!(trusted_span(10 * SECOND, 0.5), 5 * SECOND - EXPIRY_GRANULARITY);
    }

    #[test]
    fn a_deadline_that_has_passed_never_moves_again() {
        let deadline = Deadline::new(Moment::now() + 60 * SECOND);
        assert!(!deadline.has_passed());
        assert!(deadline.extend(Moment::now() + 30 * SECOND), "never back");
        assert!(deadline.get().unwrap() > Moment::now() + 50 * SECOND);
        let past = Deadline::new(Moment::now());
        assert!(!past.extend(Moment::now() + SECOND));
        assert!(past.has_passed());
        assert_eq!(past.get(), None);
        deadline.end();
        assert!(deadline.has_passed() && !deadline.extend(Moment::now() + SECOND));
    }

    #[test]
    fn a_grant_is_dated_by_the_servers_clock_not_by_its_arrival() {
        let now = Moment::now();
        let sample = ClockSample { sent: now - 10 * SECOND, server: 1_000_000 };
        // The server granted 4 s after the sample: 6 s ago, although the message arrives only now.
        let granted = sample.earliest(5_000_000, 0.0, now).unwrap();
        assert_eq!(now.since(granted), 6 * SECOND);
        // Drift makes it earlier, which is the safe side.
        assert!(sample.earliest(5_000_000, 0.01, now).unwrap() < granted);
        assert_eq!(sample.earliest(999_999, 0.0, now), None, "the clock stepped back");
        assert_eq!(sample.earliest(12_000_001, 0.0, now), None, "granted in the future");
    }

    #[test]
    fn drift_and_expiry_granularity_are_subtracted() {
        assert_eq!(trusted_span(Duration::from_secs(10), 0.01), Duration::from_millis(9_898));
        assert_eq!(trusted_span(Duration::from_millis(1), 0.5), Duration::ZERO);
    }
}
