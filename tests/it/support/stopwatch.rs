//! Measures how long something takes, and how long the machine kept the tests waiting meanwhile.
//!
//! Lower bounds compare with [`Stopwatch::elapsed`]. Upper bounds compare with
//! [`Stopwatch::undisturbed`], so that they hold on a busy machine.

use std::fmt::{Debug, Formatter};
use std::hint::black_box;
use std::sync::{Barrier, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two measurements.
const PAUSE: Duration = Duration::from_millis(10);

/// The nominal time of the work of a measurement: four times what it takes on an idle machine.
const WORK: Duration = Duration::from_millis(1);

/// All stalls that the measuring thread has seen. The thread repeats the same cycle of a pause and
/// some work; the time that a cycle takes beyond its nominal time is a stall.
pub struct Stalls {
    ended: Duration,
    began: Instant,
}

impl Stalls {
    /// The nominal time of a cycle.
    pub const CYCLE: Duration = PAUSE.saturating_add(WORK);

    pub fn from(start: Instant) -> Stalls {
        Stalls { ended: Duration::ZERO, began: start }
    }

    /// Ends the current cycle and starts the next one.
    pub fn end_cycle(&mut self, now: Instant) {
        self.ended = self.until(now);
        self.began = now;
    }

    /// The sum of the stalls, with that of the current cycle, which may not have ended because the
    /// measuring thread is stalled now.
    pub fn until(&self, now: Instant) -> Duration {
        self.ended + (now - self.began).saturating_sub(Stalls::CYCLE)
    }
}

/// The measuring thread starts with the first stopwatch and runs until the process ends.
static STALLS: LazyLock<Mutex<Stalls>> = LazyLock::new(|| {
    thread::spawn(measure);
    Mutex::new(Stalls::from(Instant::now()))
});

fn measure() {
    thread::spawn(|| {
        loop {
            meet();
        }
    });
    loop {
        thread::sleep(PAUSE);
        (0..16).for_each(|_| meet());
        let mut stalls = STALLS.lock().unwrap();
        stalls.end_cycle(Instant::now());
    }
}

/// Like a test and its server, two threads compute and wait for each other.
fn meet() {
    static MEETING: Barrier = Barrier::new(2);
    (0..2_000).for_each(|turn| _ = black_box(turn));
    MEETING.wait();
}

#[derive(Clone, Copy)]
pub struct Stopwatch {
    start: Instant,
    stalled_before: Duration,
    /// When it was stopped, and all stalls until then.
    end: Option<(Instant, Duration)>,
}

impl Stopwatch {
    pub fn start() -> Stopwatch {
        let (start, stalled_before) = now();
        Stopwatch { start, stalled_before, end: None }
    }

    pub fn stop(self) -> Stopwatch {
        Stopwatch { end: self.end.or_else(|| Some(now())), ..self }
    }

    pub fn elapsed(&self) -> Duration {
        self.read().0
    }

    /// The elapsed time without the stalls.
    pub fn undisturbed(&self) -> Duration {
        let (elapsed, stalled) = self.read();
        elapsed.saturating_sub(stalled)
    }

    fn read(&self) -> (Duration, Duration) {
        let (end, stalled) = self.end.unwrap_or_else(now);
        (end - self.start, stalled - self.stalled_before)
    }
}

/// For failed assertions: both times.
impl Debug for Stopwatch {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (elapsed, stalled) = self.read();
        write!(f, "{elapsed:.3?}, and {:.3?} without stalls", elapsed.saturating_sub(stalled))
    }
}

fn now() -> (Instant, Duration) {
    // The thread must not end a cycle between the two.
    let stalls = STALLS.lock().unwrap();
    let now = Instant::now();
    (now, stalls.until(now))
}
