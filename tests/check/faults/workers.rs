//! Faults of worker processes: killed, stopped, or with a blocked thread.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::worker_processes::{WORKERS, Workers};

pub async fn disturb(mut scene: Scene<'_>, workers: &mut Workers) {
    let mut left = Vec::new();
    while let Some(fault) = scene.next(&mut left).await {
        let place = scene.place(WORKERS);
        // Half of the pauses are longer than a lease, which has then expired when the worker
        // continues.
        let span =
            if scene.random.below(2) == 0 { scene.millis(100, 900) } else { TTL + scene.millis(200, 900) };
        let start = Time::now();
        let effect = match fault {
            Fault::WorkerKilled => {
                let before = workers.written(place);
                let killed = workers.kill(place);
                sleep(scene.millis(50, 500)).await;
                workers.replace(place);
                (killed && before > 0).then(|| "killed while it worked".to_owned())
            }
            Fault::WorkerStopped => {
                workers.signal(place, Signal::STOP);
                let is_still = is_still_for(workers, place, span).await;
                workers.signal(place, Signal::CONT);
                is_still.then(|| format!("stopped for {span:?}"))
            }
            _ => {
                workers.block(place, span);
                let is_still = is_still_for(workers, place, span).await;
                sleep(Duration::from_millis(20)).await;
                is_still.then(|| format!("blocked for {span:?}"))
            }
        };
        scene.done(fault, Some(place), start, effect);
    }
}

/// Sleeps for `span`. Returns whether the worker's history, not empty before, did not grow
/// meanwhile.
async fn is_still_for(workers: &Workers, place: usize, span: Duration) -> bool {
    // The worker obeys the signal or the command a little later.
    let delay = Duration::from_millis(30);
    sleep(delay).await;
    let before = workers.written(place);
    sleep(span.saturating_sub(2 * delay)).await;
    let is_still = before > 0 && workers.written(place) == before;
    sleep(delay).await;
    is_still
}
