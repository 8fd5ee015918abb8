//! A lock does not stand idle for long while somebody waits for it, and a dead holder ends at his own time.

use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::clock::STEP;
use crate::history::{End, Time, Verb};
use crate::plan::{Fault, Lane, NODE_TIMEOUT, POLL_CAP, SLACK, TTL};
use crate::support::Topology;

/// After a fault, and after what was held by those it hit has ended: whoever waits looks again.
const AFTER_FAULTS: Duration = POLL_CAP.saturating_add(SLACK);

/// As `lua/README.md` has it.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// Where nothing was done to anybody.
const IN_PEACE: Duration = POLL_CAP.saturating_add(Duration::from_millis(1_400));

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut locks: Vec<&str> = case.holds.iter().map(|hold| hold.lock.as_str()).collect();
    locks.sort_unstable();
    locks.dedup();
    for lock in locks {
        let holds: Vec<&Hold> = case.holds.iter().filter(|hold| hold.lock == lock).collect();
        // The server's queue may give it to anybody, who then may have what others wait for.
        let busy: Vec<(Time, Time, &Hold)> =
            holds.iter().filter_map(|hold| Some((hold.wants, busy_until(case, hold)?, *hold))).collect();
        let mut worst: Option<(Duration, &Hold, Time, bool)> = None;
        for waiter in holds.iter().filter(|hold| matches!(hold.verb, Verb::Lock | Verb::Timeout)) {
            for (idle, from) in idle(case, waiter, &busy) {
                let in_peace = case.windows_during(from - 2 * TTL, from + idle).next().is_none();
                let bound = if in_peace { IN_PEACE } else { ending(case, from) + AFTER_FAULTS };
                let bound = bound + claims_of_the_dead(case, &holds, from + idle);
                if idle > bound && worst.is_none_or(|(longest, ..)| idle > longest) {
                    worst = Some((idle, waiter, from, in_peace));
                }
            }
        }
        if let Some((idle, waiter, from, in_peace)) = worst {
            let text = format!(
                "{}: {idle:?} idle from {:.3}{}",
                case.say(waiter),
                case.when(from),
                if in_peace { ", without a fault" } else { "" }
            );
            verdict.violates("waiting", text);
        }
    }
}

/// How long the servers may keep others out for it. `None`: never granted, as far as anybody knows.
fn busy_until(case: &Case<'_>, hold: &Hold) -> Option<Time> {
    let hit = |from: Time, to: Time| case.is_hit(hold, from, to);
    let Some(grant) = hold.granted else {
        let end = hold.not_granted.as_ref().map_or(hold.worker_ended, |(at, _)| *at);
        return hit(hold.wants, end + TTL).then(|| end + kept(case, hold, end));
    };
    let last = hold.trusts.last().map_or(grant.at, |(at, _)| *at);
    match (hold.ends, &hold.released) {
        (Some((_, End::Release)), Some((at, Ok(())))) => Some(*at),
        (Some((at, End::Drop | End::Release)), _) if !hit(last, at + TTL) => Some(at),
        (Some((at, _)), _) => Some(at + kept(case, hold, at)),
        // Its worker died, or hangs.
        (None, _) => {
            let end = hold.worker_ended.max(hold.lost.map_or(last, |(at, _)| at));
            Some(end + kept(case, hold, end))
        }
    }
}

/// How long a server keeps what is not given back. What it granted or renewed while its clock was ahead ends when the clock
/// is there again.
fn kept(case: &Case<'_>, hold: &Hold, end: Time) -> Duration {
    let mut windows = case.windows_during(hold.wants, end + TTL);
    if windows.any(|window| window.fault == Fault::ClockForward) { TTL + STEP } else { TTL }
}

/// What a fault hit that is over by then may be kept for a ttl, though nobody knows of it.
fn ending(case: &Case<'_>, from: Time) -> Duration {
    let over = case.record.windows.iter().map(|window| window.end).filter(|end| *end <= from);
    over.max().map_or(Duration::ZERO, |end| (end + TTL).since(from))
}

/// In a cluster no server knows who listens to another one: whoever died while he was queued is handed the lock, and found
/// out when his claim is over. One after the other, for as long as the queue lasts.
fn claims_of_the_dead(case: &Case<'_>, holds: &[&Hold], at: Time) -> Duration {
    if case.plan.topology != Topology::Cluster {
        return Duration::ZERO;
    }
    let died = |hold: &&&Hold| hold.asked_until().is_none() && hold.worker_ended < at;
    let lately = |hold: &&&Hold| at.since(hold.worker_ended) < QUEUES_LAST;
    let dead = holds.iter().filter(died).filter(lately).count();
    TTL * u32::try_from(dead).unwrap_or(u32::MAX)
}

/// While it waited, and nobody had the lock, and nothing was done to anybody whom that concerns: how long, and since when.
fn idle(case: &Case<'_>, waiter: &Hold, busy: &[(Time, Time, &Hold)]) -> Vec<(Duration, Time)> {
    // Who was never answered waited for as long as his worker said anything.
    let end = waiter.asked_until().unwrap_or(waiter.worker_ended);
    let mut covers: Vec<(Time, Time)> = Vec::new();
    for (from, to, hold) in busy {
        // Readers too are in the way of a reader, if a writer waits for them.
        if hold.owner != waiter.owner && *from < end && *to > waiter.wants {
            // Queued, it may have been granted at any time before that was known.
            let granted = hold.granted.map_or(*from, |grant| grant.at);
            covers.push((
                if hold.granted.is_some() { granted - Duration::from_millis(50) } else { *from },
                *to,
            ));
        }
    }
    for window in case.windows_during(waiter.wants, end) {
        let concerns = window.fault.lane() == Lane::Servers || window.place == Some(waiter.place);
        // Who was stopped while it was granted the lock does not know that it has it.
        let stopped =
            matches!(window.fault, Fault::WorkerStopped | Fault::WorkerBlocked | Fault::WorkerKilled);
        if concerns || stopped || window.fault.lane() == Lane::Connections {
            covers.push((window.start, window.end));
        }
    }
    // What timed out meanwhile is asked again.
    covers.extend(case.record.stalls.iter().map(|(from, to)| (*from, *to + NODE_TIMEOUT)));
    covers.sort();
    let mut gaps = Vec::new();
    let mut at = waiter.wants;
    for (from, to) in covers {
        if from > at {
            gaps.push((at, from.min(end)));
        }
        at = at.max(to);
        if at >= end {
            break;
        }
    }
    if at < end {
        gaps.push((at, end));
    }
    gaps.into_iter().map(|(from, to)| (to.since(from), from)).collect()
}
