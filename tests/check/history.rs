//! What workers write down, each line before the next thing is done, on one clock for all processes of the machine.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's monotonic clock: the same in all processes, and no fault moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time(u64);

impl Time {
    pub fn now() -> Time {
        let clock = clock_gettime(ClockId::Monotonic);
        Time(clock.tv_sec.unsigned_abs() * 1_000_000_000 + clock.tv_nsec.unsigned_abs())
    }

    /// What `Instant` counts is this clock, which it does not show. Never later than it is.
    pub fn of(instant: Instant) -> Time {
        let (now, here) = Time::pair();
        match instant.checked_duration_since(here) {
            Some(left) => now + left,
            None => now - (here - instant),
        }
    }

    /// The same instant on both clocks; again, if something else was done in between.
    fn pair() -> (Time, Instant) {
        loop {
            let (now, here) = (Time::now(), Instant::now());
            if Time::now().since(now) < Duration::from_micros(200) {
                return (now, here);
            }
        }
    }

    /// Zero, if the other is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Time {
    type Output = Time;
    fn add(self, span: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl std::ops::Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, span: Duration) -> Time {
        Time(self.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// One line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    pub at: Time,
    /// The hold it is about.
    pub hold: u64,
    pub what: What,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Begins to ask for it.
    Wants {
        lock: String,
        mode: Mode,
        owner: String,
        verb: Verb,
        /// The hold of the same owner that this one is nested in.
        inside: Option<u64>,
        /// Whether its lease is renewed.
        renewed: bool,
    },
    Granted {
        token: u64,
        until: Time,
    },
    NotGranted(Why),
    /// The lease says that it may be trusted, and until when.
    Trusts {
        until: Time,
    },
    /// The lease says so after that time.
    TrustsTooLong {
        until: Time,
    },
    /// The lease says that it is lost; until when it was to be trusted before.
    Lost {
        until: Time,
    },
    /// Begins to give it back.
    Ends(End),
    /// What came of a release.
    Released(Result<(), String>),
    /// Wrote to the resource that compares tokens.
    Wrote {
        since: Time,
        accepted: bool,
    },
    /// Added one to a number of the resource that compares nothing.
    Added {
        since: Time,
    },
    /// How often the server says that the owner holds it, while it is trusted.
    Counted {
        expected: u64,
        seen: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Exclusive,
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    Lock,
    Timeout,
    Try,
    /// The same hold as another kind; nobody gets in between.
    Downgrade,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// Somebody else has it.
    Busy,
    TimedOut,
    /// The future was dropped.
    Cancelled,
    /// Its owner would wait for itself.
    WouldDeadlock,
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Release,
    Drop,
    Leak,
    Downgrade,
}

/// What came of a release that found nothing, though nobody had said that the lease was lost.
pub const NOT_HELD: &str = "not held";

/// Writes a file, a line for each event, before it returns.
pub struct Recorder(Mutex<File>);

impl Recorder {
    pub fn new(path: &Path) -> Recorder {
        Recorder(Mutex::new(File::create(path).unwrap()))
    }

    pub fn note(&self, hold: u64, what: What) {
        self.note_at(Time::now(), hold, what);
    }

    pub fn note_at(&self, at: Time, hold: u64, what: What) {
        let mut line = serde_json::to_string(&Event { at, hold, what }).unwrap();
        line.push('\n');
        self.0.lock().unwrap().write_all(line.as_bytes()).unwrap();
    }
}

/// All events of one file. A worker that was killed may have left half a line at its end.
pub fn read(path: &PathBuf) -> Vec<Event> {
    let text = std::fs::read_to_string(path).unwrap();
    let (whole, _) = text.rsplit_once('\n').unwrap_or_default();
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}
