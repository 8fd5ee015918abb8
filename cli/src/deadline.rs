//! [`Deadline`]: when a command is ended whose lease cannot be renewed.

use std::time::{Duration, Instant};

use crate::exit::Failure;

/// The longest time that KILL may need to take effect on a few processes.
const MARGIN: Duration = Duration::from_millis(200);

/// How many times as long as it takes to find all processes it may take to end them. Each of them
/// is looked at, killed and looked at again, while all of them end on the same cores.
const FACTOR: u32 = 5;

/// How long before the end of a lease the command gets TERM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grace {
    pub(crate) span: Duration,
    /// How long a renewal makes the lease valid.
    pub(crate) ttl: Duration,
}

impl Grace {
    /// The grace is at most half of the TTL. Else no renewal could come before TERM: the first one
    /// is sent after a third of the TTL.
    pub(crate) fn new(ttl: Duration, grace: Option<Duration>) -> Result<Grace, Failure> {
        match grace {
            Some(grace) if grace > ttl / 2 => Err(Failure::Usage(format!(
                "--grace is {grace:?}; it must be at most half of --ttl, {:?}: renewals begin after a third",
                ttl / 2
            ))),
            grace => Ok(Grace { span: grace.unwrap_or(Duration::from_secs(5).min(ttl / 3)), ttl }),
        }
    }
}

/// How long the command may run.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) grace: Grace,
    pub(crate) max_hold: Option<Duration>,
    /// A process that left the group and its environment is none of the command's.
    pub(crate) allows_daemons: bool,
}

/// The end of a lease, as far as it has been renewed, and how long before it the signals are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deadline {
    valid_until: Instant,
    term_before: Duration,
    kill_before: Duration,
}

impl Deadline {
    /// A lease that was granted to a waiter lasts for three seconds at first, however long the TTL,
    /// and is renewed within one. So the grace is no larger part of the time that is left than of
    /// the TTL, or than a sixth: of ten minutes, five seconds are hardly a part.
    ///
    /// `scan`: how long it takes to find the command's processes.
    pub(crate) fn new(valid_until: Instant, grace: Grace, scan: Duration) -> Deadline {
        let left = valid_until.saturating_duration_since(Instant::now());
        let part = (grace.span.as_secs_f64() / grace.ttl.as_secs_f64()).max(1.0 / 6.0);
        let term_before = grace.span.min(left.mul_f64(part));
        let kill_before = MARGIN.min(left / 10) + (scan * FACTOR).min(left / 5);
        Deadline { valid_until, term_before: term_before.max(kill_before), kill_before }
    }

    /// Moves with the end of the lease. After the machine has slept that is earlier on the clock of
    /// `Instant`, and two readings of the same end differ a little.
    pub(crate) fn follow(&mut self, valid_until: Instant, grace: Grace, scan: impl FnOnce() -> Duration) {
        let is_renewed = valid_until.saturating_duration_since(self.valid_until) > grace.ttl / 20;
        if is_renewed {
            *self = Deadline::new(valid_until, grace, scan());
        } else {
            self.valid_until = valid_until;
        }
    }

    pub(crate) fn term_at(self) -> Instant {
        self.valid_until.checked_sub(self.term_before).unwrap_or(self.valid_until)
    }

    pub(crate) fn kill_at(self) -> Instant {
        self.valid_until.checked_sub(self.kill_before).unwrap_or(self.valid_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_command_gets_term_then_kill_before_the_lease_ends() {
        for (ttl, grace, left) in [(30, 5, 30), (30, 5, 3), (30, 0, 30), (1, 0, 1), (30, 15, 1), (30, 5, 0)] {
            let grace = Grace::new(ttl * SECOND, Some(grace * SECOND)).unwrap();
            let (now, end) = (Instant::now(), Instant::now() + left * SECOND);
            let deadline = Deadline::new(end, grace, Duration::ZERO);
            assert!(deadline.term_at() <= deadline.kill_at() && deadline.kill_at() <= end, "{deadline:?}");
            // Half of the remaining time is for renewals, and more unless the grace is the longest.
            assert!(deadline.term_at() >= now + left * SECOND / 2 - SECOND / 100, "{deadline:?}");
            assert!(end - deadline.kill_at() >= (left * SECOND / 11).min(MARGIN), "{deadline:?}");
            // With thousands of processes, KILL comes earlier, but not without bounds.
            for scan in [SECOND / 10, SECOND * 100] {
                let slow = Deadline::new(end, grace, scan);
                assert!(slow.term_at() <= slow.kill_at() && slow.kill_at() <= deadline.kill_at(), "{slow:?}");
                let least = (left * SECOND / 6).min(scan * FACTOR);
                assert!(end - slow.kill_at() >= least, "{slow:?}");
                assert!(end - slow.kill_at() <= left * SECOND * 3 / 10 + SECOND / 100, "{slow:?}");
            }
        }
        // The first lease of a waiter has a grace, however long the TTL.
        let deadline =
            Deadline::new(Instant::now() + 3 * SECOND, Grace::new(600 * SECOND, None).unwrap(), SECOND / 50);
        assert!(deadline.kill_at() - deadline.term_at() >= SECOND / 10, "{deadline:?}");
        // Following the same end changes nothing, however little of the lease is left.
        let grace = Grace::new(30 * SECOND, None).unwrap();
        let mut deadline = Deadline::new(Instant::now() + 30 * SECOND, grace, Duration::ZERO);
        let earlier = Instant::now() + 6 * SECOND;
        deadline.follow(earlier, grace, || SECOND);
        deadline.follow(earlier + SECOND / 1000, grace, || SECOND);
        let before = earlier + SECOND / 1000 - deadline.term_at();
        assert!(before > 4 * SECOND && before <= 5 * SECOND, "{before:?}");
        assert!(Grace::new(10 * SECOND, Some(6 * SECOND)).is_err());
        assert_eq!(Grace::new(3 * SECOND, None).unwrap().span, SECOND);
    }
}
