//! The fault injectors for workers, connections and servers. Each injects one fault after the other
//! until the run ends. A lane is the target of one injector.

pub mod connections;
pub mod servers;
pub mod workers;

use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Barrier;
use tokio::time::{Instant, sleep};

use crate::faults::servers::Outcome;
use crate::history::Time;
use crate::plan::{Fault, POLL_CAP, SLACK, TTL};
use crate::run::Window;
use crate::support::Random;

/// The faults, random choices and pauses of an injector, and where it records what it did.
pub struct Scene<'a> {
    pub faults: Vec<Fault>,
    pub random: Random,
    pub pauses: &'a Pauses,
    /// The number of pauses so far.
    pub pauses_done: usize,
    pub end: Instant,
    pub windows: &'a Mutex<Vec<Window>>,
}

/// No fault begins later than this before the end of a run, so that each fault ends within the run.
const LAST_FAULT: Duration = Duration::from_secs(4);

/// The time with faults between two common pauses.
const BETWEEN_PAUSES: Duration = Duration::from_secs(15);

/// The duration of a common pause. Each waiter must be served within it, and the judge sees those
/// that were not. Dead waiters may hold a lock for two claims, each of a TTL.
const PAUSE: Duration = TTL
    .saturating_mul(2)
    .saturating_add(POLL_CAP)
    .saturating_add(SLACK)
    .saturating_add(Duration::from_secs(1));

/// The common pauses of all injectors. A pause begins once the last of them has undone its fault.
pub struct Pauses {
    due: Vec<Instant>,
    barrier: Barrier,
}

impl Pauses {
    /// Schedules the pauses of a run with this many injectors.
    pub fn until(end: Instant, lanes: usize) -> Pauses {
        let mut due = Vec::new();
        let mut next = Instant::now() + BETWEEN_PAUSES;
        // No pause shortly before the end of the run: the end is a pause as well.
        while next + PAUSE + BETWEEN_PAUSES / 3 + LAST_FAULT < end {
            due.push(next);
            next += PAUSE + BETWEEN_PAUSES;
        }
        Pauses { due, barrier: Barrier::new(lanes) }
    }
}

impl Scene<'_> {
    /// Waits a while, then returns the next fault: each fault once, in random order, then all
    /// again. `None`: the run ends.
    pub async fn next(&mut self, left: &mut Vec<Fault>) -> Option<Fault> {
        let delay = self.millis(400, 1_600);
        sleep(delay).await;
        // Every injector takes part in every pause, even if it is late or has no faults: the others
        // wait for it at the barrier.
        while let Some(due) = self.pauses.due.get(self.pauses_done)
            && (self.faults.is_empty() || *due <= Instant::now())
        {
            self.pauses_done += 1;
            self.pauses.barrier.wait().await;
            sleep(PAUSE).await;
        }
        if self.faults.is_empty() || Instant::now() + LAST_FAULT > self.end {
            return None;
        }
        if left.is_empty() {
            left.clone_from(&self.faults);
        }
        let place = self.random.below(left.len() as u64);
        Some(left.swap_remove(usize::try_from(place).ok()?))
    }

    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.random.below(to - from))
    }

    pub fn place(&mut self, places: usize) -> usize {
        usize::try_from(self.random.below(places as u64)).unwrap()
    }

    /// Records a fault that was undone just now.
    pub fn done(&self, fault: Fault, place: Option<usize>, start: Time, effect: Option<String>) {
        self.add(Window { fault, place, start, end: Time::now(), effect, lost: None, of: None, away: None });
    }

    /// Records a fault of servers that was undone just now.
    pub fn done_to_servers(&self, fault: Fault, start: Time, outcome: Outcome) {
        let Outcome { effect, lost, of, away } = outcome;
        // A quorum that loses one node's data has not lost a lock.
        let lost = lost.filter(|_| !fault.keeps_state());
        self.add(Window { fault, place: None, start, end: Time::now(), effect, lost, of, away });
    }

    fn add(&self, window: Window) {
        self.windows.lock().unwrap().push(window);
    }
}
