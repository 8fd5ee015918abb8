//! [`ServerClock`]: the clock of a node's servers, and the minimum token that follows from it. New
//! fencing tokens must be larger, whatever a server has lost.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::clock::Moment;

/// How far the minimum token may lag behind the server's clock, in microseconds. Each raise sends
/// the next grant of every lock through the slower branch once.
const STEP: u64 = 10_000_000;

/// How far a minimum token may be ahead of the server's clock, in microseconds: a day, less what
/// clocks may drift meanwhile.
const MAX_AHEAD: u64 = 86_000_000_000;

/// The latest server time known, in microseconds, and the minimum token that follows from it.
#[derive(Debug, Default)]
pub(super) struct ServerClock {
    /// Whether one server grants all locks. If not, another one may grant beside it, or take over
    /// unseen.
    is_of_one_server: bool,
    /// It never decreases.
    highest: AtomicU64,
    /// How far the server's clock is ahead of ours, as far as this connection has shown.
    ahead: AtomicI64,
    /// Up to here, a minimum token is less than [`MAX_AHEAD`] ahead of the server's clock, so that
    /// no request reads our clock for it.
    unquestioned: AtomicU64,
}

impl ServerClock {
    pub(super) fn new(is_of_one_server: bool) -> ServerClock {
        ServerClock { is_of_one_server, ..ServerClock::default() }
    }

    /// The minimum token: new fencing tokens must be larger, whatever the server has lost.
    pub(super) fn minimum_token(&self) -> u64 {
        let minimum_token = if self.is_of_one_server { self.latest() } else { self.advance() };
        // A server refuses a minimum token that is more than a day ahead of its clock. If the clock
        // was set back by more than that, tokens are in no order across that step, but the locks
        // work.
        if minimum_token > self.unquestioned.load(Ordering::Relaxed) {
            minimum_token.min(self.now().saturating_add(MAX_AHEAD))
        } else {
            minimum_token
        }
    }

    /// The latest server time received.
    pub(super) fn latest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// The latest server time received, plus the time that has passed since. Each token starts from
    /// the clock: if a replica takes over unseen, or beside the old master, its grants have larger
    /// tokens than the other's earlier ones, as far as their clocks agree.
    fn advance(&self) -> u64 {
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
        if server_time > self.latest().saturating_add(STEP) {
            self.highest.fetch_max(server_time, Ordering::Relaxed);
        }
    }

    /// Records the server's time on a new connection: the next tokens must be larger.
    pub(super) fn raise(&self, server_time: u64) {
        self.ahead.store(ahead(server_time), Ordering::Relaxed);
        self.highest.fetch_max(server_time, Ordering::Relaxed);
        self.unquestioned.store(server_time.saturating_add(MAX_AHEAD), Ordering::Relaxed);
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
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.observe(1_000_000_000 + STEP);
        assert_eq!(clock.latest(), 1_000_000_000, "not for every answer");
        clock.observe(1_000_000_001 + STEP);
        assert_eq!(clock.latest(), 1_000_000_001 + STEP);
        clock.raise(5);
        assert_eq!(clock.latest(), 1_000_000_001 + STEP);
        assert!(clock.advance() >= 1_000_000_001 + STEP);
    }

    #[test]
    fn minimum_token_advances_with_the_clock() {
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.ahead.fetch_add(50, Ordering::Relaxed); // as if this much time had passed
        assert_eq!(clock.latest(), 1_000_000_000);
        assert!(clock.advance() >= 1_000_000_050);
        assert!(clock.latest() >= 1_000_000_050);
    }

    #[test]
    fn a_late_answer_does_not_set_the_clock_back() {
        let clock = ServerClock::default();
        clock.raise(1_000_000_000);
        clock.observe(999_000_000);
        assert!(clock.now() >= 1_000_000_000);
        clock.raise(900_000_000); // of another server
        assert!(clock.now() < 1_000_000_000);
    }
}
