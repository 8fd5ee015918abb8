//! What is done to workers, connections and servers. Each lane does one fault after the other, until the run ends.

pub mod connections;
pub mod servers;
pub mod workers;

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::arena::Window;
use crate::history::Time;
use crate::plan::Fault;
use crate::support::Random;

/// What a lane needs to know, and where it says what it did.
pub struct Scene<'a> {
    pub faults: Vec<Fault>,
    pub random: Random,
    pub end: Instant,
    pub windows: &'a Mutex<Vec<Window>>,
}

/// Faults begin no later than this before a run ends, so that their windows end as well.
const LAST: Duration = Duration::from_secs(4);

impl Scene<'_> {
    /// What to do next, after a pause: all faults in turn, each time in another order. `None`: the run ends.
    pub async fn next(&mut self, left: &mut Vec<Fault>) -> Option<Fault> {
        let pause = self.millis(400, 1_600);
        sleep(pause).await;
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
        self.windows.lock().unwrap().push(Window { fault, place, start, end: Time::now(), effect });
    }
}
