//! Rule "waiting": a lock with a waiter is not free for long, and a dead holder's lease expires in
//! time.

use std::time::Duration;

use super::{Case, Hold, PROMPT, Verdict, dead_waiters};
use crate::clock::STEP;
use crate::history::{End, FailureReason, Time, Verb};
use crate::plan::{Fault, Lane, NODE_TIMEOUT, POLL_CAP, SLACK, TTL};
use crate::run::Window;

/// The longest time that a lock may be free after a fault, once the leases that it hit have
/// expired: until each waiter has polled.
const AFTER_FAULTS: Duration = POLL_CAP.saturating_add(SLACK);

/// The longest time that a lock may be free without a fault.
const WITHOUT_FAULT: Duration = POLL_CAP.saturating_add(Duration::from_millis(1_400));

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut locks: Vec<&str> = case.holds.iter().map(|hold| hold.lock.as_str()).collect();
    locks.sort_unstable();
    locks.dedup();
    for lock in locks {
        let holds: Vec<&Hold> = case.holds.iter().filter(|hold| hold.lock == lock).collect();
        // All holds count, also those without a reply: the server's queue may have granted them.
        let busy: Vec<(Time, Time, &Hold)> = holds
            .iter()
            .filter_map(|hold| {
                let (from, to) = busy(case, hold)?;
                Some((from, to, *hold))
            })
            .collect();
        let dead_waiters = dead_waiters::of(case, &holds);
        let mut worst: Option<(Duration, &Hold, Time, bool)> = None;
        for waiter in holds.iter().filter(|hold| hold.may_queue()) {
            for (idle, from) in idle(case, waiter, &busy) {
                let no_fault = case.windows_during(from - 2 * TTL, from + idle).next().is_none();
                let dead = dead_waiters::kept_until(case, &dead_waiters, &holds, from, from + idle);
                let dead = dead.map_or(Duration::ZERO, |until| until.since(from));
                let bound =
                    if no_fault { dead + WITHOUT_FAULT } else { dead.max(ending(case, from)) + AFTER_FAULTS };
                if idle > bound && worst.is_none_or(|(longest, ..)| idle > longest) {
                    worst = Some((idle, waiter, from, no_fault));
                }
            }
        }
        if let Some((idle, waiter, from, no_fault)) = worst {
            let text = format!(
                "{} waited while the lock was free for {idle:?} from {:.3}{}",
                case.describe(waiter),
                case.when(from),
                if no_fault { ", without a fault" } else { "" }
            );
            verdict.violates("waiting", text);
        }
    }
}

/// The time during which the servers may have excluded others for this hold. `None`: they never
/// did.
fn busy(case: &Case<'_>, hold: &Hold) -> Option<(Time, Time)> {
    let Some(grant) = hold.granted else { return ungranted(case, hold) };
    // A queued waiter may have been granted the lock before its worker received the grant; and one
    // of several long before, while the call waited for another.
    let from = if hold.verb == Verb::All { hold.wants } else { grant.at - Duration::from_millis(50) };
    let hit = |from: Time, to: Time| case.is_hit(hold, from, to);
    let last = hold.trusts.last().map_or(grant.at, |(at, _)| *at);
    let to = match (hold.ends, &hold.released) {
        (Some((_, End::Release)), Some((at, Ok(())))) => *at,
        (Some((at, End::Drop | End::Release)), _) if !hit(last, at + TTL) => at,
        (Some((at, _)), _) => at + kept(case, hold, at),
        // The worker was killed, or hangs.
        (None, _) => {
            let end = hold.worker_ended.max(hold.lost.map_or(last, |(at, _)| at));
            end + kept(case, hold, end)
        }
    };
    Some((from, to))
}

/// The time during which a request without a grant may have held the lock: from the first fault of
/// its worker or of servers; from its beginning if it was for several locks, of which it may have
/// held this one. On one server, a refusal proves that it never held the lock.
fn ungranted(case: &Case<'_>, hold: &Hold) -> Option<(Time, Time)> {
    let end = match &hold.not_granted {
        Some((_, FailureReason::Busy | FailureReason::WouldDeadlock)) if case.plan.topology.nodes() == 1 => {
            return None;
        }
        Some((at, _)) => *at,
        None => hold.worker_ended,
    };
    if hold.verb == Verb::All {
        let is_hit = case.is_hit(hold, hold.wants, end + PROMPT);
        return Some((hold.wants, end + if is_hit { kept(case, hold, end) } else { PROMPT }));
    }
    // A request that is in flight when the call ends is released soon after, unless a fault delays
    // the release.
    let concerns = |window: &&Window| window.place.is_none_or(|place| place == hold.place);
    let windows = case.windows_during(hold.wants, end + PROMPT).filter(concerns);
    let first = windows.map(|window| window.start).min()?;
    Some((hold.wants.max(first - PROMPT), end + kept(case, hold, end)))
}

/// How long a server keeps a hold that is not released. A hold that was granted or renewed while
/// the clock was ahead expires once the clock reaches that time.
fn kept(case: &Case<'_>, hold: &Hold, end: Time) -> Duration {
    let mut windows = case.windows_during(hold.wants, end + TTL);
    if windows.any(|window| window.fault == Fault::ClockForward) { TTL + STEP } else { TTL }
}

/// How long after `from` the servers may keep holds that no worker knows of: up to a TTL after the
/// last fault before `from`.
fn ending(case: &Case<'_>, from: Time) -> Duration {
    let over = case.record.windows.iter().map(|window| window.end).filter(|end| *end <= from);
    over.max().map_or(Duration::ZERO, |end| (end + TTL).since(from))
}

/// The parts of a wait in which the lock was free and no fault concerned the waiter or a holder:
/// duration and start of each.
fn idle(case: &Case<'_>, waiter: &Hold, busy: &[(Time, Time, &Hold)]) -> Vec<(Duration, Time)> {
    // A request without an answer waited until the last line of its worker.
    let end = waiter.asked_until().unwrap_or(waiter.worker_ended);
    let mut covers: Vec<(Time, Time)> = Vec::new();
    for (from, to, hold) in busy {
        // Readers delay a reader as well, if a writer waits for them.
        if hold.owner != waiter.owner && *from < end && *to > waiter.wants {
            covers.push((*from, *to));
        }
    }
    for window in case.windows_during(waiter.wants, end) {
        let concerns = window.fault.lane() == Lane::Servers || window.place == Some(waiter.place);
        // A worker that was stopped during a grant does not record that it holds the lock.
        let stopped =
            matches!(window.fault, Fault::WorkerStopped | Fault::WorkerBlocked | Fault::WorkerKilled);
        if concerns || stopped || window.fault.lane() == Lane::Connections {
            covers.push((window.start, window.end));
        }
    }
    // Requests that timed out during a stall are sent again.
    covers.extend(case.silences().map(|(from, to)| (from, to + NODE_TIMEOUT)));
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
