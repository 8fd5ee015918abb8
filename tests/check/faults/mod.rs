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

/// What an injector works with, and where it records its faults.
pub struct Scene<'a> {
    pub faults: Vec<Fault>,
    pub random: Random,
    pub rests: &'a Rests,
    /// The number of pauses so far.
    pub rested: usize,
    pub end: Instant,
    pub windows: &'a Mutex<Vec<Window>>,
}

/// No fault begins later than this before the end of a run, so that each fault ends within the run.
const LAST: Duration = Duration::from_secs(4);

/// The time with faults between two common pauses.
const SPELL: Duration = Duration::from_secs(15);

/// The duration of a common pause. Each waiter must be served within it, and the judge sees those
/// that were not. Dead waiters may hold a lock for two claims, each of a TTL.
const REST: Duration = TTL
    .saturating_mul(2)
    .saturating_add(POLL_CAP)
    .saturating_add(SLACK)
    .saturating_add(Duration::from_secs(1));

/// The common pauses of all injectors. A pause begins once the last of them has undone its fault.
pub struct Rests {
    due: Vec<Instant>,
    barrier: Barrier,
}

impl Rests {
    /// Schedules the pauses of a run with this many injectors.
    pub fn until(end: Instant, lanes: usize) -> Rests {
        let mut due = Vec::new();
        let mut next = Instant::now() + SPELL;
        // No pause shortly before the end of the run: the end is a pause as well.
        while next + REST + SPELL / 3 + LAST < end {
            due.push(next);
            next += REST + SPELL;
        }
        Rests { due, barrier: Barrier::new(lanes) }
    }
}

impl Scene<'_> {
    /// Waits a while, then returns the next fault: each fault once, in random order, then all
    /// again. `None`: the run ends.
    pub async fn next(&mut self, left: &mut Vec<Fault>) -> Option<Fault> {
        let pause = self.millis(400, 1_600);
        sleep(pause).await;
        // Every injector takes part in every pause, even without faults or late: the others wait at
        // the barrier for it.
        while let Some(due) = self.rests.due.get(self.rested)
            && (self.faults.is_empty() || *due <= Instant::now())
        {
            self.rested += 1;
            self.rests.barrier.wait().await;
            sleep(REST).await;
        }
        if self.faults.is_empty() || Instant::now() + LAST > self.end {
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
