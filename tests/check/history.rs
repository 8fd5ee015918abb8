//! The history of a worker: it writes each step down before the next one, on one clock for all
//! processes of the machine.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's monotonic clock: the same in all processes, and never changed by a
/// fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time(u64);

impl Time {
    pub fn now() -> Time {
        let clock = clock_gettime(ClockId::Monotonic);
        Time(clock.tv_sec.unsigned_abs() * 1_000_000_000 + clock.tv_nsec.unsigned_abs())
    }

    /// Converts an `Instant`, which counts the same clock but does not show it. The result is never
    /// later than the instant.
    pub fn of(instant: Instant) -> Time {
        let (now, here) = Time::pair();
        match instant.checked_duration_since(here) {
            Some(left) => now + left,
            None => now - (here - instant),
        }
    }

    /// The same moment on both clocks. It reads them again if the thread was interrupted in
    /// between.
    fn pair() -> (Time, Instant) {
        loop {
            let (now, here) = (Time::now(), Instant::now());
            if Time::now().since(now) < Duration::from_micros(200) {
                return (now, here);
            }
        }
    }

    /// The time since `earlier`, or zero if that is later.
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

/// One line of a history.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    pub at: Time,
    pub hold: u64,
    pub what: EventKind,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The request begins.
    Wants {
        lock: String,
        mode: Mode,
        owner: String,
        verb: Verb,
        /// The outer hold of the same owner.
        inside: Option<u64>,
        /// Whether the lease is renewed.
        is_renewed: bool,
    },
    Granted {
        token: u64,
        until: Time,
    },
    NotGranted(FailureReason),
    /// The lease reports that it is valid, until this deadline.
    Trusts {
        until: Time,
    },
    /// The lease reports that it is valid, after its deadline.
    TrustsTooLong {
        until: Time,
    },
    /// The lease reports that it is lost; its last deadline before that.
    Lost {
        until: Time,
    },
    /// The release, or another end of the hold, begins.
    Ends(End),
    /// The result of a release.
    Released(Result<(), String>),
    /// A write to the comparing resource ended.
    Wrote {
        since: Time,
        is_accepted: bool,
    },
    /// An addition to the number without comparison ended.
    Added {
        since: Time,
    },
    /// The owner's count on the server, read while the lease was trusted.
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
    /// One of several in one call. It is held while the call waits for later ones.
    All,
    /// A write hold becomes a read hold, and no other client writes in between.
    Downgrade,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureReason {
    /// Another hold excludes it.
    Busy,
    TimedOut,
    /// The future was dropped.
    Cancelled,
    /// The owner would wait for itself.
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

/// The result of a release that found no hold, although the lease had not reported its loss.
pub const NOT_HELD: &str = "not held";

/// Writes one line for each event. A line is in the file when `note` returns, so it survives a
/// kill.
pub struct Recorder(Mutex<File>);

impl Recorder {
    pub fn new(path: &Path) -> Recorder {
        Recorder(Mutex::new(File::create(path).unwrap()))
    }

    pub fn note(&self, hold: u64, what: EventKind) {
        self.note_at(Time::now(), hold, what);
    }

    pub fn note_at(&self, at: Time, hold: u64, what: EventKind) {
        let mut line = serde_json::to_string(&Event { at, hold, what }).unwrap();
        line.push('\n');
        self.0.lock().unwrap().write_all(line.as_bytes()).unwrap();
    }
}

/// Reads all events of one file, without the half line that a killed worker may have left.
pub fn read(path: &PathBuf) -> Vec<Event> {
    let text = std::fs::read_to_string(path).unwrap();
    let (whole, _) = text.rsplit_once('\n').unwrap_or_default();
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}
