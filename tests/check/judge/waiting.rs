//! A lock does not stand idle for long while somebody waits for it, and a dead holder ends at his own time.

use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict, dead_waiters};
use crate::clock::STEP;
use crate::history::{End, Time, Why};
use crate::plan::{Fault, Lane, NODE_TIMEOUT, POLL_CAP, SLACK, TTL};
use crate::run::Window;

/// After a fault, and after what was held by those it hit has ended: whoever waits looks again.
const AFTER_FAULTS: Duration = POLL_CAP.saturating_add(SLACK);

/// Where nothing was done to anybody.
const IN_PEACE: Duration = POLL_CAP.saturating_add(Duration::from_millis(1_400));

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut locks: Vec<&str> = case.holds.iter().map(|hold| hold.lock.as_str()).collect();
    locks.sort_unstable();
    locks.dedup();
    for lock in locks {
        let holds: Vec<&Hold> = case.holds.iter().filter(|hold| hold.lock == lock).collect();
        // The server's queue may give it to anybody, who then may have what others wait for.
        let busy: Vec<(Time, Time, &Hold)> = holds
            .iter()
            .filter_map(|hold| {
                let (from, to) = busy(case, hold)?;
                Some((from, to, *hold))
            })
            .collect();
        let ghosts = dead_waiters::of(case, &holds);
        let mut worst: Option<(Duration, &Hold, Time, bool)> = None;
        for waiter in holds.iter().filter(|hold| hold.may_queue()) {
            for (idle, from) in idle(case, waiter, &busy) {
                let in_peace = case.windows_during(from - 2 * TTL, from + idle).next().is_none();
                let dead = dead_waiters::kept_until(case, &ghosts, &holds, from, from + idle);
                let dead = dead.map_or(Duration::ZERO, |until| until.since(from));
                let bound =
                    if in_peace { dead + IN_PEACE } else { dead.max(ending(case, from)) + AFTER_FAULTS };
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

/// When the servers may keep others out for it. `None`: never, as far as anybody knows.
fn busy(case: &Case<'_>, hold: &Hold) -> Option<(Time, Time)> {
    let Some(grant) = hold.granted else { return unknown(case, hold) };
    // Queued, it may have been granted before that was known.
    let from = grant.at - Duration::from_millis(50);
    let hit = |from: Time, to: Time| case.is_hit(hold, from, to);
    let last = hold.trusts.last().map_or(grant.at, |(at, _)| *at);
    let to = match (hold.ends, &hold.released) {
        (Some((_, End::Release)), Some((at, Ok(())))) => *at,
        (Some((at, End::Drop | End::Release)), _) if !hit(last, at + TTL) => at,
        (Some((at, _)), _) => at + kept(case, hold, at),
        // Its worker died, or hangs.
        (None, _) => {
            let end = hold.worker_ended.max(hold.lost.map_or(last, |(at, _)| at));
            end + kept(case, hold, end)
        }
    };
    Some((from, to))
}

/// Who was never told may have it all the same, from the first fault that concerned him. A refusal says that he has not.
fn unknown(case: &Case<'_>, hold: &Hold) -> Option<(Time, Time)> {
    let end = match &hold.not_granted {
        Some((_, Why::Busy | Why::WouldDeadlock)) if case.plan.topology.nodes() == 1 => return None,
        Some((at, _)) => *at,
        None => hold.worker_ended,
    };
    // What was under way when he gave up is given back soon after, if nothing is done then.
    let concerns = |window: &&Window| window.place.is_none_or(|place| place == hold.place);
    let windows = case.windows_during(hold.wants, end + PROMPT).filter(concerns);
    let first = windows.map(|window| window.start).min()?;
    Some((hold.wants.max(first - PROMPT), end + kept(case, hold, end)))
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

/// While it waited, and nobody had the lock, and nothing was done to anybody whom that concerns: how long, and since when.
fn idle(case: &Case<'_>, waiter: &Hold, busy: &[(Time, Time, &Hold)]) -> Vec<(Duration, Time)> {
    // Who was never answered waited for as long as his worker said anything.
    let end = waiter.asked_until().unwrap_or(waiter.worker_ended);
    let mut covers: Vec<(Time, Time)> = Vec::new();
    for (from, to, hold) in busy {
        // Readers too are in the way of a reader, if a writer waits for them.
        if hold.owner != waiter.owner && *from < end && *to > waiter.wants {
            covers.push((*from, *to));
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
