//! Waiters that are dead and still queued. A server takes a waiter to be dead once it was not seen
//! for a claim, but may grant it the lock until then, and keeps the lock for another claim.

use std::time::Duration;

use super::{Case, Hold};
use crate::clock::STEP;
use crate::history::{Mode, Time};
use crate::plan::{Fault, TTL};
use crate::run::Window;
use crate::support::Topology;

/// As `lua/README.md` has it: the TTL, or 3 s if that is less.
const CLAIM: Duration = if TTL.as_millis() < 3_000 { TTL } else { Duration::from_secs(3) };

pub struct Ghost {
    mode: Mode,
    /// From when it wants nothing.
    since: Time,
    /// Until when a server may have seen it.
    seen: Time,
}

/// Of all that ever waited for a lock.
pub fn of(case: &Case<'_>, holds: &[&Hold]) -> Vec<Ghost> {
    let queued: Vec<&&Hold> = holds.iter().filter(|hold| hold.may_queue()).collect();
    let mut ghosts = Vec::new();
    for hold in queued.iter().filter(|hold| hold.asked_until().is_none()) {
        // A server notices that a channel has no subscriber any more; a node of a cluster does not,
        // since PUBLISH does not count the subscribers of other nodes.
        if hold.is_told && case.plan.topology != Topology::Cluster {
            continue;
        }
        ghosts.push(Ghost { mode: hold.mode, since: hold.worker_ended, seen: seen(case, hold) });
    }
    // A server that is set back, and a replica that was behind, has waiters in its queue that were
    // granted the lock since. Notified ones give it back.
    let old = |fault: Fault| matches!(fault, Fault::ServerSetBack | Fault::NodeSetBack | Fault::Failover);
    for window in case.record.windows.iter().filter(|window| old(window.fault)) {
        let back = window.away.map_or(window.end, |(_, to)| to);
        let was_queued = |hold: &&&&Hold| {
            !hold.is_told && hold.wants < back && hold.asked_until().is_some_and(|at| at > window.start)
        };
        let its = queued.iter().filter(was_queued);
        ghosts.extend(its.map(|hold| Ghost { mode: hold.mode, since: back, seen: back }));
    }
    ghosts
}

/// Until when a server may have seen a waiter whose worker died: a request that was held back by
/// another fault arrives when that ends.
fn seen(case: &Case<'_>, hold: &Hold) -> Time {
    let is_its = |window: &&Window| window.fault == Fault::WorkerKilled && window.place == Some(hold.place);
    let kill = case.record.windows.iter().filter(is_its).find(|window| window.end >= hold.worker_ended);
    let died = kill.map_or(hold.worker_ended, |kill| kill.end);
    let concerns = |window: &&Window| window.place.is_none_or(|place| place == hold.place);
    let held_back = case.windows_during(hold.worker_ended, died).filter(concerns).map(|window| window.end);
    held_back.max().map_or(died, |end| end.max(died))
}

/// Until when dead waiters may keep a lock from all others between two times, if any can.
pub fn kept_until(case: &Case<'_>, ghosts: &[Ghost], holds: &[&Hold], from: Time, to: Time) -> Option<Time> {
    let left = ghosts.iter().filter(|ghost| ghost.since < to && !is_past(ghost, holds, from));
    left.map(|ghost| ghost.seen + longest(case, ghost.seen)).max()
}

/// How long a dead waiter that was seen then may keep a lock: granted to it at the end of a claim,
/// for a claim. A server whose clock steps back meanwhile takes it to be alive for longer.
fn longest(case: &Case<'_>, seen: Time) -> Duration {
    let mut windows = case.windows_during(seen - TTL, seen + 2 * CLAIM + STEP);
    if windows.any(|window| window.fault.sets_clock()) { 2 * CLAIM + STEP } else { 2 * CLAIM }
}

/// Whether a later request for the same was granted before: waiters are served in turn.
fn is_past(ghost: &Ghost, holds: &[&Hold], at: Time) -> bool {
    holds.iter().any(|hold| {
        let later = hold.inside.is_none() && hold.mode == ghost.mode && hold.wants > ghost.since;
        later && hold.may_queue() && hold.granted.is_some_and(|grant| grant.at < at)
    })
}
