//! The stopwatch that excuses stalls of the machine.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::stopwatch::Stalls;
use crate::support::{Stopwatch, Worker, eventually};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn stopwatch_counts_what_exceeds_a_cycle() {
    let start = Instant::now();
    let mut stalls = Stalls::from(start);
    let mut now = start;
    for _ in 0..100 {
        now += Stalls::CYCLE;
        stalls.end_cycle(now);
    }
    assert_eq!(stalls.until(now), Duration::ZERO, "cycles of nominal length");
    // A stall counts while its cycle lasts, and once it has ended.
    now += Stalls::CYCLE + SECOND;
    assert_eq!(stalls.until(now), SECOND);
    stalls.end_cycle(now);
    assert_eq!(stalls.until(now), SECOND);
    now += Stalls::CYCLE + SECOND;
    stalls.end_cycle(now);
    assert_eq!(stalls.until(now), 2 * SECOND);
    assert_eq!(stalls.until(now + Stalls::CYCLE), 2 * SECOND, "the next cycle is nominal");
}

/// A stopped process is stalled for as long as it is stopped.
#[test]
fn stopwatch_excuses_a_stopped_process() {
    let mut worker = Worker::start(&["measure"]);
    worker.expect_line("started");
    worker.stop();
    let stopped = Instant::now();
    std::thread::sleep(SECOND);
    let stopped = stopped.elapsed();
    worker.signal(Signal::CONT);
    worker.send("stop");
    let stalled = Duration::from_micros(worker.expect_line("stalled").parse().unwrap());
    worker.finish();
    assert!(stalled >= stopped - Stalls::CYCLE, "{stalled:?} of {stopped:?}");
}

/// Even on a busy machine there are intervals of which less than three quarters are excused. A
/// stopwatch that takes its own pauses for stalls excuses nine tenths and more of each.
#[tokio::test]
async fn stopwatch_does_not_excuse_its_own_pauses() {
    eventually("an interval that counts", || async {
        let stopwatch = Stopwatch::start();
        tokio::time::sleep(Stalls::CYCLE).await;
        let stopwatch = stopwatch.stop();
        stopwatch.undisturbed() > stopwatch.elapsed() / 4
    })
    .await;
}
