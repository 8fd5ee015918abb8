//! [`PollBudget`]: how often notifications make a waiter poll.

use std::time::Duration;

use tokio::time::Instant;

/// How many unverified notifications make a waiter poll at once, and how soon another one may:
/// fewer than ten polls a second, however many messages are published.
const POLLS: u32 = 4;
const NEXT_POLL: Duration = Duration::from_millis(200);

/// How often notifications may make a waiter poll: every user with the right to publish can send
/// very many.
pub(super) struct PollBudget {
    left: u32,
    /// From when the next poll accrues.
    since: Instant,
}

impl PollBudget {
    pub(super) fn new() -> PollBudget {
        PollBudget { left: POLLS, since: Instant::now() }
    }

    /// Spends one poll, or returns when the next one accrues.
    pub(super) fn take(&mut self) -> Result<(), Instant> {
        let now = Instant::now();
        while self.left < POLLS && now - self.since >= NEXT_POLL {
            self.left += 1;
            self.since += NEXT_POLL;
        }
        if self.left == POLLS {
            self.since = now; // no more accrue
        }
        if self.left == 0 {
            return Err(self.since + NEXT_POLL);
        }
        self.left -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_minute_without_messages_saves_up_no_polls() {
        let mut budget = PollBudget::new();
        for _ in 0..2 {
            tokio::time::advance(Duration::from_secs(60)).await;
            assert_eq!(iter::repeat_with(|| budget.take()).take_while(Result::is_ok).count(), 4);
        }
    }
}
