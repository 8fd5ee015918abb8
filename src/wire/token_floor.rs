//! The floor: what new fencing tokens must be larger than, whatever a server has forgotten.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::clock::Moment;

/// How far the floor may lag behind the server's clock, in microseconds. Each raise sends the next
/// grant of every lock through the slower branch once.
const STEP: u64 = 10_000_000;

/// The latest server time known, in microseconds, and never one that went back.
#[derive(Debug, Default)]
pub(super) struct TokenFloor {
    highest: AtomicU64,
    /// By how much the server's clock is ahead of ours, as far as was seen on this connection.
    ahead: AtomicI64,
}

impl TokenFloor {
    /// The latest time that was seen.
    pub(super) fn seen(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// What has passed since the latest time was seen counts as well. So each token starts from the clock: where a replica
    /// may take over unseen, or beside the master before, what one of them grants is then larger than what the other one
    /// has granted before, as far as their clocks agree.
    pub(super) fn advanced(&self) -> u64 {
        let now = self.now();
        self.highest.fetch_max(now, Ordering::Relaxed).max(now)
    }

    /// The server's clock, as far as it is known.
    pub(super) fn now(&self) -> u64 {
        local().saturating_add_signed(self.ahead.load(Ordering::Relaxed))
    }

    /// Takes note of the server's time from one of its answers. Late ones make its clock seem to be behind.
    pub(super) fn observe(&self, server_time: u64) {
        self.ahead.fetch_max(ahead(server_time), Ordering::Relaxed);
        if server_time > self.seen().saturating_add(STEP) {
            self.highest.fetch_max(server_time, Ordering::Relaxed);
        }
    }

    /// The same, on a new connection: what comes next must be larger.
    pub(super) fn raise(&self, server_time: u64) {
        self.ahead.store(ahead(server_time), Ordering::Relaxed);
        self.highest.fetch_max(server_time, Ordering::Relaxed);
    }
}

fn ahead(server_time: u64) -> i64 {
    i64::try_from(i128::from(server_time) - i128::from(local())).unwrap_or(0)
}

fn local() -> u64 {
    Moment::now().as_nanos() / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_rises_in_steps_and_never_falls() {
        let floor = TokenFloor::default();
        floor.raise(1_000_000_000);
        floor.observe(1_000_000_000 + STEP);
        assert_eq!(floor.seen(), 1_000_000_000, "not for every answer");
        floor.observe(1_000_000_001 + STEP);
        assert_eq!(floor.seen(), 1_000_000_001 + STEP);
        floor.raise(5);
        assert_eq!(floor.seen(), 1_000_000_001 + STEP);
        assert!(floor.advanced() >= 1_000_000_001 + STEP);
    }

    #[test]
    fn a_floor_goes_on_with_the_clock() {
        let floor = TokenFloor::default();
        floor.raise(1_000_000_000);
        floor.ahead.fetch_add(50, Ordering::Relaxed); // as if so much had passed
        assert_eq!(floor.seen(), 1_000_000_000);
        assert!(floor.advanced() >= 1_000_000_050);
        assert!(floor.seen() >= 1_000_000_050);
    }

    #[test]
    fn a_late_answer_does_not_set_the_clock_back() {
        let floor = TokenFloor::default();
        floor.raise(1_000_000_000);
        floor.observe(999_000_000);
        assert!(floor.now() >= 1_000_000_000);
        floor.raise(900_000_000); // of another server
        assert!(floor.now() < 1_000_000_000);
    }
}
