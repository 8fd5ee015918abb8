//! [`TokenFloor`]: the minimum token. New fencing tokens must be larger, whatever a server has
//! lost.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::clock::Moment;

/// How far the minimum token may lag behind the server's clock, in microseconds. Each raise sends
/// the next grant of every lock through the slower branch once.
const STEP: u64 = 10_000_000;

/// The latest server time known, in microseconds. It never decreases.
#[derive(Debug, Default)]
pub(super) struct TokenFloor {
    highest: AtomicU64,
    /// How far the server's clock is ahead of ours, as far as this connection has shown.
    ahead: AtomicI64,
}

impl TokenFloor {
    /// The latest server time received.
    pub(super) fn seen(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// The latest server time received, plus the time that has passed since. Each token starts from
    /// the clock: if a replica takes over unseen, or beside the old master, its grants have larger
    /// tokens than the other's earlier ones, as far as their clocks agree.
    pub(super) fn advanced(&self) -> u64 {
        let now = self.now();
        self.highest.fetch_max(now, Ordering::Relaxed).max(now)
    }

    /// The server's clock, as far as it is known.
    pub(super) fn now(&self) -> u64 {
        local().saturating_add_signed(self.ahead.load(Ordering::Relaxed))
    }

    /// Records the server's time from a reply. A late reply makes the clock seem to be behind.
    pub(super) fn observe(&self, server_time: u64) {
        self.ahead.fetch_max(ahead(server_time), Ordering::Relaxed);
        if server_time > self.seen().saturating_add(STEP) {
            self.highest.fetch_max(server_time, Ordering::Relaxed);
        }
    }

    /// Records the server's time on a new connection: the next tokens must be larger.
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
    fn minimum_token_rises_in_steps_and_never_falls() {
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
    fn minimum_token_advances_with_the_clock() {
        let floor = TokenFloor::default();
        floor.raise(1_000_000_000);
        floor.ahead.fetch_add(50, Ordering::Relaxed); // as if this much time had passed
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
