//! Tasks of one client, and of the same program in other processes, that share fewer names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;

use crate::libraries::{Client, Kind, Library, Lock};
use crate::{Commands, Outcome};

#[derive(Debug, Serialize)]
pub(crate) struct Shared {
    seconds: f64,
    pairs: u64,
    longest_ms: f64,
    overlaps: u64,
}

/// A name, as all tasks of this process see it.
struct Name {
    lock: Lock,
    held: AtomicBool,
}

pub(crate) async fn measure(
    url: &str,
    library: Library,
    kind: Kind,
    (tasks, names): (usize, usize),
    span: Duration,
    poll: Duration,
    commands: &mut Commands,
) -> Outcome<Shared> {
    let client = Client::connect(library, url, poll).await?;
    // Without shared names, each task has one that no other process has.
    let (count, own) = if names == 0 { (tasks, std::process::id()) } else { (names, 0) };
    let all: Outcome<Vec<Name>> = (0..count)
        .map(|number| {
            let lock = client.lock(kind, &format!("shared-{own}-{number}"))?;
            Ok(Name { lock, held: AtomicBool::new(false) })
        })
        .collect();
    let all = Arc::new(all?);
    run(&all, tasks, names > 0, span / 5).await?;
    commands.go().await?;
    run(&all, tasks, names > 0, span).await
}

async fn run(names: &Arc<Vec<Name>>, tasks: usize, are_shared: bool, span: Duration) -> Outcome<Shared> {
    let (overlaps, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut running = JoinSet::new();
    // Odd, so that tasks which meet at one name do not meet at the next.
    let step_of = |task: usize| if are_shared { 2 * task + 1 } else { 0 };
    for task in 0..tasks {
        let step = step_of(task);
        running.spawn(repeat(Arc::clone(names), (task, step), start + span, Arc::clone(&overlaps)));
    }
    let (mut pairs, mut longest) = (0, Duration::ZERO);
    while let Some(done) = running.join_next().await {
        let (own, wait) = done??;
        (pairs, longest) = (pairs + own, longest.max(wait));
    }
    let (seconds, longest_ms) = (start.elapsed().as_secs_f64(), longest.as_secs_f64() * 1e3);
    Ok(Shared { seconds, pairs, longest_ms, overlaps: overlaps.load(Ordering::Relaxed) })
}

/// Takes the names in turn; with a step of 0, always the same one.
async fn repeat(
    names: Arc<Vec<Name>>,
    (task, step): (usize, usize),
    until: Instant,
    overlaps: Arc<AtomicU64>,
) -> Outcome<(u64, Duration)> {
    let (mut pairs, mut longest) = (0_u64, Duration::ZERO);
    while pairs == 0 || Instant::now() < until {
        let Name { lock, held } = &names[(task + pairs as usize * step) % names.len()];
        let asked = Instant::now();
        let guard = lock.acquire().await?;
        longest = longest.max(asked.elapsed());
        overlaps.fetch_add(u64::from(held.swap(true, Ordering::SeqCst)), Ordering::Relaxed);
        held.store(false, Ordering::SeqCst);
        guard.release().await?;
        pairs += 1;
    }
    Ok((pairs, longest))
}
