//! What is done to workers, connections and servers. Each lane does one fault after the other, until the run ends.

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

/// What a lane needs to know, and where it says what it did.
pub struct Scene<'a> {
    pub faults: Vec<Fault>,
    pub random: Random,
    pub rests: &'a Rests,
    /// How many of the rests it has had.
    pub rested: usize,
    pub end: Instant,
    pub windows: &'a Mutex<Vec<Window>>,
}

/// Faults begin no later than this before a run ends, so that their windows end as well.
const LAST: Duration = Duration::from_secs(4);

/// How long the lanes do something before they rest together.
const SPELL: Duration = Duration::from_secs(15);

/// How long they rest: each waiter must have been served before it is over, and the judge sees
/// those that were not. Dead waiters may hold a lock for two claims, each of a TTL.
const REST: Duration = TTL
    .saturating_mul(2)
    .saturating_add(POLL_CAP)
    .saturating_add(SLACK)
    .saturating_add(Duration::from_secs(1));

/// When all lanes together do nothing for a while: each time, once the last of them has undone its fault.
pub struct Rests {
    due: Vec<Instant>,
    meeting: Barrier,
}

impl Rests {
    /// For so many lanes, over all of a run.
    pub fn until(end: Instant, lanes: usize) -> Rests {
        let mut due = Vec::new();
        let mut next = Instant::now() + SPELL;
        // The end of a run is a rest as well.
        while next + REST + SPELL / 3 + LAST < end {
            due.push(next);
            next += REST + SPELL;
        }
        Rests { due, meeting: Barrier::new(lanes) }
    }
}

impl Scene<'_> {
    /// What to do next, after a pause: all faults in turn, each time in another order. `None`: the run ends.
    pub async fn next(&mut self, left: &mut Vec<Fault>) -> Option<Fault> {
        let pause = self.millis(400, 1_600);
        sleep(pause).await;
        // Each lane has each rest, since the others wait for it: even one that has nothing to do, or is late.
        while let Some(due) = self.rests.due.get(self.rested)
            && (self.faults.is_empty() || *due <= Instant::now())
        {
            self.rested += 1;
            self.rests.meeting.wait().await;
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

    /// To be called once it is undone.
    pub fn done(&self, fault: Fault, place: Option<usize>, start: Time, effect: Option<String>) {
        self.add(Window { fault, place, start, end: Time::now(), effect, lost: None, of: None, away: None });
    }

    /// The same for what was done to servers.
    pub fn came_to(&self, fault: Fault, start: Time, outcome: Outcome) {
        let Outcome { effect, lost, of, away } = outcome;
        // A quorum loses nothing with one of its nodes.
        let lost = lost.filter(|_| !fault.keeps_state());
        self.add(Window { fault, place: None, start, end: Time::now(), effect, lost, of, away });
    }

    fn add(&self, window: Window) {
        self.windows.lock().unwrap().push(window);
    }
}
