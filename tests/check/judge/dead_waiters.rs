//! Dead waiters that are still queued. A server counts a waiter as dead once the waiter was not
//! seen for a claim. Until then the server may grant it the lock, and keeps that grant for another
//! claim.

use std::time::Duration;

use super::{Case, Hold};
use crate::clock::STEP;
use crate::history::{Mode, Time};
use crate::plan::{Fault, TTL};
use crate::run::Window;
use crate::support::Topology;

/// The claim that `lua/README.md` documents: the TTL, or 3 s if that is less.
const CLAIM: Duration = if TTL.as_millis() < 3_000 { TTL } else { Duration::from_secs(3) };

pub struct DeadWaiter {
    mode: Mode,
    /// When the waiter ended.
    since: Time,
    /// The last time at which a server may have seen the waiter.
    seen: Time,
}

/// The dead waiters among all requests for a lock.
pub fn of(case: &Case<'_>, holds: &[&Hold]) -> Vec<DeadWaiter> {
    let queued: Vec<&&Hold> = holds.iter().filter(|hold| hold.may_queue()).collect();
    let mut dead = Vec::new();
    for hold in queued.iter().filter(|hold| hold.asked_until().is_none()) {
        // A server notices that a channel has no subscriber any more. A node of a cluster does not:
        // PUBLISH does not count the subscribers of other nodes.
        if hold.is_notified && case.plan.topology != Topology::Cluster {
            continue;
        }
        dead.push(DeadWaiter { mode: hold.mode, since: hold.worker_ended, seen: seen(case, hold) });
    }
    // A server that was set back, or a replica that was behind, has waiters in its queue that were
    // granted the lock since. A notified waiter releases what the old queue grants it again.
    let sets_back =
        |fault: Fault| matches!(fault, Fault::ServerSetBack | Fault::NodeSetBack | Fault::Failover);
    for window in case.record.windows.iter().filter(|window| sets_back(window.fault)) {
        let back = window.away.map_or(window.end, |(_, to)| to);
        let was_queued = |hold: &&&&Hold| {
            !hold.is_notified && hold.wants < back && hold.asked_until().is_some_and(|at| at > window.start)
        };
        let requeued = queued.iter().filter(was_queued);
        dead.extend(requeued.map(|hold| DeadWaiter { mode: hold.mode, since: back, seen: back }));
    }
    dead
}

/// The last time at which a server may have seen a waiter whose worker died. A request that was
/// held back by another fault arrives when that fault ends.
fn seen(case: &Case<'_>, hold: &Hold) -> Time {
    let is_kill = |window: &&Window| window.fault == Fault::WorkerKilled && window.place == Some(hold.place);
    let kill = case.record.windows.iter().filter(is_kill).find(|window| window.end >= hold.worker_ended);
    let died = kill.map_or(hold.worker_ended, |kill| kill.end);
    let concerns = |window: &&Window| window.place.is_none_or(|place| place == hold.place);
    let held_back = case.windows_during(hold.worker_ended, died).filter(concerns).map(|window| window.end);
    held_back.max().map_or(died, |end| end.max(died))
}

/// The time until which dead waiters may keep a lock from all others between `from` and `to`.
/// `None`: no dead waiter does.
pub fn kept_until(
    case: &Case<'_>,
    dead: &[DeadWaiter],
    holds: &[&Hold],
    from: Time,
    to: Time,
) -> Option<Time> {
    let left = dead.iter().filter(|waiter| waiter.since < to && !is_past(waiter, holds, from));
    left.map(|waiter| waiter.seen + longest(case, waiter.seen)).max()
}

/// The longest time for which a dead waiter may keep a lock after `seen`: it may be granted the
/// lock at the end of one claim, for another claim. If the server's clock steps back meanwhile, the
/// claim ends later.
fn longest(case: &Case<'_>, seen: Time) -> Duration {
    let mut windows = case.windows_during(seen - TTL, seen + 2 * CLAIM + STEP);
    if windows.any(|window| window.fault.sets_clock()) { 2 * CLAIM + STEP } else { 2 * CLAIM }
}

/// Whether a later request in the same mode was granted before `at`. Waiters are served in order,
/// so the dead waiter is not in the queue any more.
fn is_past(dead: &DeadWaiter, holds: &[&Hold], at: Time) -> bool {
    holds.iter().any(|hold| {
        let later = hold.inside.is_none() && hold.mode == dead.mode && hold.wants > dead.since;
        later && hold.may_queue() && hold.granted.is_some_and(|grant| grant.at < at)
    })
}
