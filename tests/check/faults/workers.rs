//! Worker processes that die, stand still, or do nothing for a while.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::workers::{Crew, WORKERS};

pub async fn disturb(mut scene: Scene<'_>, crew: &mut Crew) {
    let mut left = Vec::new();
    while let Some(fault) = scene.next(&mut left).await {
        let place = scene.place(WORKERS);
        // Sometimes shorter than a lease, sometimes longer: then it is over when they go on.
        let span =
            if scene.random.below(2) == 0 { scene.millis(100, 900) } else { TTL + scene.millis(200, 900) };
        let start = Time::now();
        let effect = match fault {
            Fault::WorkerKilled => {
                let before = crew.written(place);
                let killed = crew.kill(place);
                sleep(scene.millis(50, 500)).await;
                crew.replace(place);
                (killed && before > 0).then(|| "died in the middle of its work".to_owned())
            }
            Fault::WorkerStopped => {
                crew.signal(place, Signal::STOP);
                let still = stands_still(crew, place, span).await;
                crew.signal(place, Signal::CONT);
                still.then(|| format!("stood still for {span:?}"))
            }
            _ => {
                crew.block(place, span);
                let still = stands_still(crew, place, span).await;
                sleep(Duration::from_millis(20)).await;
                still.then(|| format!("did nothing for {span:?}"))
            }
        };
        scene.done(fault, Some(place), start, effect);
    }
}

/// Lets that time pass. Whether a worker that wrote something down before wrote nothing down meanwhile.
async fn stands_still(crew: &Crew, place: usize, span: Duration) -> bool {
    // It is told to, and does so a little later.
    let soon = Duration::from_millis(30);
    sleep(soon).await;
    let before = crew.written(place);
    sleep(span.saturating_sub(2 * soon)).await;
    let still = before > 0 && crew.written(place) == before;
    sleep(soon).await;
    still
}
