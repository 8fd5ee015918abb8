//! A monotonic clock that keeps counting while the machine sleeps.

use std::time::{Duration, Instant};

/// A point on this process's clock, in nanoseconds. Never zero.
///
/// On Linux this is `CLOCK_BOOTTIME`: `Instant` (`CLOCK_MONOTONIC`) stands still while a machine is
/// suspended, so a lease measured with it would still look valid after it has expired on the
/// server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    pub(crate) fn now() -> Moment {
        let now = Moment::from_nanos(nanoseconds());
        #[cfg(feature = "simulation")]
        let now = now + crate::simulation::skipped_time();
        now
    }

    pub(crate) fn from_nanos(nanos: u64) -> Moment {
        Moment(nanos.max(1))
    }

    pub(crate) fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The same point on the standard library's clock, if that can express it. Never later: if the
    /// thread is interrupted between reading the two clocks, less time seems to be left.
    pub(crate) fn to_instant(self) -> Instant {
        let instant = Instant::now();
        let now = Moment::now();
        if self >= now {
            instant.checked_add(self.since(now)).unwrap_or(instant)
        } else {
            instant.checked_sub(now.since(self)).unwrap_or(instant)
        }
    }
}

impl std::ops::Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl std::ops::Sub<Duration> for Moment {
    type Output = Moment;

    fn sub(self, span: Duration) -> Moment {
        Moment(self.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)).max(1))
    }
}

#[cfg(all(target_os = "linux", feature = "suspend"))]
fn nanoseconds() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Both are positive: the clock starts at boot.
    (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(not(all(target_os = "linux", feature = "suspend")))]
fn nanoseconds() -> u64 {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_add_subtract_and_never_reach_zero() {
        let now = Moment::now();
        let later = now + Duration::from_secs(2);
        assert_eq!(later.since(now), Duration::from_secs(2));
        assert_eq!(now.since(later), Duration::ZERO);
        assert_eq!(later - Duration::from_secs(2), now);
        assert_eq!((now - Duration::MAX).as_nanos(), 1);
        assert!((now + Duration::MAX) > later);
    }

    #[test]
    fn instants_keep_the_distance() {
        let ahead = (Moment::now() + Duration::from_secs(60)).to_instant();
        let left = ahead.saturating_duration_since(Instant::now());
        assert!(left > Duration::from_secs(59) && left <= Duration::from_secs(60), "{left:?}");
    }
}
