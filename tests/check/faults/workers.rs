//! Worker processes that die, stand still, or do nothing for a while.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use super::Scene;
use crate::crew::{Crew, WORKERS};
use crate::history::Time;
use crate::plan::{Fault, TTL};

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
                crew.kill(place);
                sleep(scene.millis(50, 500)).await;
                crew.replace(place);
                "died".to_owned()
            }
            Fault::WorkerStopped => {
                crew.signal(place, Signal::STOP);
                sleep(span).await;
                crew.signal(place, Signal::CONT);
                format!("stood still for {span:?}")
            }
            _ => {
                crew.block(place, span);
                sleep(span + Duration::from_millis(20)).await;
                format!("did nothing for {span:?}")
            }
        };
        scene.done(fault, Some(place), start, Some(effect));
    }
}
